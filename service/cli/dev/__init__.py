"""`tidelog dev`."""
