"""deploy/jobs as operators run it: the wrapper through a real spark-submit, the lines of cron."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import QUICK_JVM
from tests.support.broker_log import BrokerLog

JOBS = Path(__file__).parents[2] / "deploy" / "jobs"
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
KEYS = 7
_CRON = re.compile(r"^([\d*/,-]+ ){4}[\d*/,-]+\s+(?P<user>\w+)\s+(?P<command>.+)$")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`t`, compacted: 5 segments of 20 records of 7 keys, in two partitions."""
    log = BrokerLog(tmp_path / "store")
    log.create("t", 2, cleanup_policy="compact")
    for first in range(0, 100, 20):
        values = [b"%d" % n for n in range(first, first + 20)]
        keys = [b"k%d" % (n % KEYS) for n in range(first, first + 20)]
        log.append("t", {0: values, 1: values}, keys=keys)
        log.seal("t")
    log.close()
    return tmp_path / "store"


def environment(store: Path, **variables: str) -> dict[str, str]:
    inherited_variables = {
        name: os.environ[name] for name in ("HOME", "JAVA_HOME") if name in os.environ
    }
    own_variables = {"PATH": f"{BIN}:{os.environ['PATH']}", "TIDELOG_STORE": store.as_uri()}
    return (
        inherited_variables
        | own_variables
        | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
        | variables
    )


def values(store: Path) -> list[int]:
    log = BrokerLog(store)
    numbers = [int(record.value or b"") for record in log.records("t")]
    log.close()
    return numbers


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.xdist_group("spark")
def test_the_wrapper_compacts_through_spark_submit(folder: Path) -> None:
    submit = shutil.which("spark-submit", path=f"{BIN}:{os.environ['PATH']}")
    home = os.environ.get("JAVA_HOME")
    if submit is None or shutil.which("java", path=f"{home}/bin" if home else None) is None:
        pytest.skip("spark-submit and Java 17 are needed: pip install tidelog[spark]")
    variables = environment(folder, SPARK_MASTER="local[1]", SPARK_LOCAL_IP="127.0.0.1")
    variables["SPARK_OPTIONS"] = (
        "--driver-memory 1g --conf spark.sql.shuffle.partitions=1"
        f" --conf spark.driver.extraJavaOptions={QUICK_JVM}"
    )
    command = [JOBS / "spark-compact.sh", "t", "--json"]
    process = subprocess.run(command, env=variables, capture_output=True, check=False, timeout=300)
    assert process.returncode == 0, process.stderr.decode()
    told = json.loads(process.stdout)
    assert (told["is_dry"], told["engine"]) == (False, "spark")
    assert [row["rows_after"] for row in told["compacted"]] == [KEYS, KEYS]
    assert values(folder) == [*range(93, 100)] * 2


def test_the_wrapper_says_what_it_misses(folder: Path) -> None:
    without_store = environment(folder)
    del without_store["TIDELOG_STORE"]
    nowhere = environment(folder) | {"PATH": "/usr/bin:/bin"}
    for variables, status, word in ((without_store, 2, "TIDELOG_STORE"), (nowhere, 1, "spark-s")):
        process = subprocess.run(
            [JOBS / "spark-compact.sh"], env=variables, capture_output=True, check=False
        )
        assert (process.returncode, word in process.stderr.decode()) == (status, True)
        assert process.stderr.count(b"\n") == 1


def test_the_lines_of_cron_run(folder: Path, tmp_path: Path) -> None:
    lines = (JOBS / "tidelog.cron").read_text().splitlines()
    commands = [match["command"] for line in lines if (match := _CRON.match(line))]
    assert len(commands) == 2
    names = {line.partition("=")[0] for line in lines if re.match(r"^[A-Z_]+=", line)}
    assert names == {"SHELL", "PATH", "TIDELOG_STORE", "LOG"}
    for command in commands:
        assert "%" not in command, "cron takes it for a newline"
        own = command.replace("/tmp/tidelog-", f"{tmp_path}/tidelog-")
        variables = environment(folder, LOG=str(tmp_path))
        process = subprocess.run(
            ["/bin/sh", "-c", own], env=variables, capture_output=True, check=False, timeout=60
        )
        assert (process.returncode, process.stdout, process.stderr) == (0, b"", b"")
    (told,) = [json.loads(line) for line in (tmp_path / "maintain.jsonl").read_text().splitlines()]
    assert [row["rows_after"] for row in told["compacted"]] == [KEYS, KEYS]
    (scrubbed,) = [json.loads(line) for line in (tmp_path / "scrub.jsonl").read_text().splitlines()]
    assert scrubbed["is_whole"]
    assert values(folder) == [*range(93, 100)] * 2
