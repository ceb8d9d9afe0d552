"""Objects of every format version, read only, and what they must decode to."""
