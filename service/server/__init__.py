"""A running broker."""
