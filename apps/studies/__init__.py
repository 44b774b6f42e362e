"""Studies of quality on the small models: what is measured, how, and what is drawn of it."""
