"""A flipped bit in a segment fails the read that comes to it, whichever way Spark reads."""

from pathlib import Path

import pytest

from tests.spark.conftest import Read, records_of
from tests.support.broker_log import BrokerLog
from tests.support.views import flip

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


def test_a_value_with_a_flipped_bit_is_not_served(read: Read, tmp_path: Path) -> None:
    """Plain pages: nothing but a checksum can tell the one value from the other."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    broker = BrokerLog(tmp_path)
    broker.create("t", 1, compression_type="uncompressed")
    broker.append("t", {0: [b"value-%04d" % number for number in range(50)]})
    broker.seal("t")
    whole = broker.records("t")
    broker.close()
    assert records_of(read(tmp_path.as_uri(), "t")) == whole
    (segment,) = tmp_path.glob("topics/*/partition=0/*.parquet")
    body = segment.read_bytes()
    segment.write_bytes(flip(body, body.index(b"value-0042") + 9))
    with pytest.raises((PySparkException, Py4JJavaError)):
        records_of(read(tmp_path.as_uri(), "t"))
