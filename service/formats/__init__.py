"""Bodies of requests and responses, to and from columns."""
