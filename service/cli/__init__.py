"""The commands of `tidelog`."""
