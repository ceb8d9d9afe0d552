"""From a partition's tail to a segment of its topic's table."""
