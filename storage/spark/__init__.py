"""The Spark data source `tidelog`. Public names are in `tidelog.spark`.

request       the options of one load; the rows of a task
stream        the data source as a stream
source        the data source: batch, registration, filters
parquet_scan  `read_topic`: sealed records by Spark's own Parquet reader, plus the tail
"""
