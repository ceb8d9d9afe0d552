"""Every byte of the log's objects and of Kafka's record batches, to and from values. Pure."""
