"""The public names for Spark: `from tidelog.spark import read_topic, register`.

`read_topic` returns a topic as a DataFrame. `register` adds `spark.read.format("tidelog")` to a
session. Both need `pip install 'tidelog[spark]'`.
"""

from tidelog.storage.spark.parquet_scan import read_topic
from tidelog.storage.spark.source import register

__all__ = ["read_topic", "register"]
