"""The preparation of a Spark session that reads a log."""

import sys
from weakref import WeakSet

from pyspark.sql import SparkSession

from tidelog.storage.spark import versions

SPARKS_PYTHON = "python3"
"""The Python of pyspark's workers, if neither the environment nor an option names another."""

_registered: WeakSet[SparkSession] = WeakSet()


def register(spark: SparkSession) -> None:
    """Register `format("tidelog")` in the Spark session; workers must have tidelog installed.

    Raises InvalidRequest before Spark 4.0, which has no data sources in Python.
    """
    versions.PYTHON_SOURCES.require()
    from tidelog.storage.spark.source import TidelogSource

    use_this_python(spark)
    if spark not in _registered:  # Spark warns if a source is registered again
        spark.dataSource.register(TidelogSource)
        _registered.add(spark)


def use_this_python(spark: SparkSession) -> None:
    """In local mode, make the workers run this interpreter.

    Without PYSPARK_PYTHON, they run the first `python3` of the PATH, which may belong to another
    environment. A server of Spark Connect chooses by itself.
    """
    if versions.is_connect(spark):
        return
    context = spark.sparkContext
    if (context.master or "").startswith("local") and context.pythonExec == SPARKS_PYTHON:
        context.pythonExec = sys.executable
