"""Object stores: a folder, S3, memory; and what all of them need: retries, metering, a check at the
start."""
