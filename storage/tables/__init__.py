"""One Delta table per topic: the manifest of its Parquet segments."""
