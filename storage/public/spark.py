"""The public names for Spark: `from tidelog.spark import read_topic, register`.

`read_topic` returns a topic as a DataFrame. `register` adds `spark.read.format("tidelog")` to a
session. Both need `pip install 'tidelog[spark]'`.
"""

from tidelog.storage.spark.session import register
from tidelog.storage.spark.topic_frame import read_topic

__all__ = ["read_topic", "register"]
