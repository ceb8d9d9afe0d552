"""The Spark data source `tidelog`. Public names are in `tidelog.spark`."""
