"""One module at a time, without servers."""
