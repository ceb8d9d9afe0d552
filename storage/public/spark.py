"""The public names for Spark: `from tidelog.spark import batches, read_topic, register`.

`read_topic` returns a topic as a DataFrame, and `batches` its new records since a checkpoint.
`register` adds `spark.read.format("tidelog")` to a session, from Spark 4.0 on. They need
`pip install 'tidelog[spark]'`.
"""

from tidelog.storage.spark.batches import TopicBatch, batches
from tidelog.storage.spark.session import register
from tidelog.storage.spark.topic_frame import read_topic

__all__ = ["TopicBatch", "batches", "read_topic", "register"]
