"""One file a command: its options, and which run they start."""
