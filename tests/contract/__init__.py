"""One suite per promise, run on every implementation of it."""
