"""Attention over listed keys: one definition, one implementation a file."""
