"""MinIO, which `make test` does not have: `make test-minio`."""
