"""Nouns of the log: values that many modules share, their names and their checks. Pure."""
