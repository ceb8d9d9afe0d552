"""Object stores (a folder, S3, memory), and their retries, metering and check at the start."""
