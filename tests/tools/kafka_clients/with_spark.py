"""Spark's own source and sink for Kafka: `spark-sql-kafka-0-10` from Maven."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.tools.kafka_clients.conftest import Cluster

PACKAGE = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
RUN_S = 480
PROGRAM = """
import sys
from pyspark.sql import SparkSession, functions as f

address, topic, jars, folder = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.jars", jars).config("spark.driver.host", "127.0.0.1")
    .config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2")
    .config("spark.local.dir", folder).getOrCreate()
)
sent = spark.range(1000).select(
    f.concat(f.lit("k"), f.col("id")).cast("binary").alias("key"),
    f.col("id").cast("string").cast("binary").alias("value"),
)
kafka = {"kafka.bootstrap.servers": address}
sent.write.format("kafka").options(**kafka, topic=topic).save()
source = {**kafka, "subscribe": topic, "startingOffsets": "earliest"}
read = spark.read.format("kafka").options(**source).load()
assert sorted(int(row.value) for row in read.select("value").collect()) == [*range(1000)]
query = (
    spark.readStream.format("kafka").options(**source).load()
    .writeStream.format("kafka").options(**kafka, topic=topic + "-copy")
    .option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start()
)
query.awaitTermination()
copy = spark.read.format("kafka").options(**{**source, "subscribe": topic + "-copy"}).load()
assert sorted(int(row.value) for row in copy.select("value").collect()) == [*range(1000)]
spark.stop()
print("spark passed")
"""


def test_source_and_sink(cluster: Cluster, jars: Callable[..., str], tmp_path: Path) -> None:
    folder = Path(jars("spark", PACKAGE)).parent
    # Spark has its own Scala and SLF4J.
    own = [jar for jar in folder.glob("*.jar") if not jar.name.startswith(("scala-", "slf4j-"))]
    cluster.broker.create_topic("spark", 3)
    cluster.broker.create_topic("spark-copy", 3)
    listed = ",".join(map(str, own))
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, cluster.address, "spark", listed, str(tmp_path)],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert "spark passed" in process.stdout, process.stderr[-4000:]
    assert [int(record["value"]) for record in cluster.broker.records("spark", "--max", "1")] != []
