"""What every command shares at the terminal: options, errors, progress."""
