"""From a produce request to a committed entry."""
