"""The console at /ui."""
