"""terraform/policies against recorded S3 requests: each is allowed, and no other is.

The requests are those of brokers and maintenance.
"""

import functools
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from terraform import hcl
from tests.support.broker import Broker, environment, until
from tests.support.iam import allowing, is_denied, permissions
from tests.support.moto import Moto, running_moto
from tests.support.s3_calls import ARN, Call, calls
from tests.support.seaweed import ACCESS_KEY, REGION, SECRET_KEY

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

pytestmark = pytest.mark.xdist_group("rights")  # what is looked at takes half a minute to make

JSON = {"content-type": "application/vnd.kafka.json.v2+json"}
WAL_RETENTION_MS = 4000
QUICK = {
    "broker_heartbeat_interval_ms": 500,
    "broker_timeout_ms": 3000,
    "wal_view_age_max_ms": 1000,
    "file_grace_ms": 0,
    "test_bounds": True,
    "sequencer_upload_bytes": 512 * 1024,
    "wal_retention_ms": WAL_RETENTION_MS,
    "poll_interval_ms": 500,
    "retention_check_interval_ms": 0,
}
"""As terraform/main.tf has it: brokers leave collection to maintenance."""
OFTEN = {
    "wal": {"checkpoint_entries": 3, "checkpoint_interval_s": 0.0},
    "sealer": {"check_interval_s": 0.05},
}

EAGER = {"min_cleanable_dirty_ratio": "0"}


class Seen:
    """Calls by who made them."""

    def __init__(self) -> None:
        self.of: dict[str, list[Call]] = {}
        self.who = ""

    def __call__(self, environ: "WSGIEnvironment") -> None:
        self.of.setdefault(self.who, []).extend(calls(environ))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder, seen = tmp_path_factory.mktemp("rights"), Seen()
    with pytest.MonkeyPatch.context() as patch, running_moto(on_request=seen) as moto:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        seen.who = "broker"
        brokers_at_work(folder, moto)
        with broker(folder / "c", moto, security="keys") as secured:
            assert httpx.get(f"{secured.base_url}/topics").status_code == 401
        seen.who = "maintain"
        told = json.loads(tidelog(moto, "maintain", "--yes", "--json", "--file-grace-ms", "0"))
        assert told["retained"], told
        assert told["compacted"], told
        assert told["collected"]["deleted"] > 0, told
        yield seen


def brokers_at_work(folder: Path, moto: Moto) -> None:
    """Two of them, so that one hands over, and uploads what is large before."""
    with broker(folder / "a", moto) as broker_a, broker(folder / "b", moto) as broker_b:
        until(lambda: "tidelog_live_brokers 2.0" in httpx.get(f"{broker_a.base_url}/metrics").text)
        broker_a.create_topic("t", 1, segment_ms="100", retention_ms="1")
        broker_a.create_topic("u", 1, segment_ms="100", cleanup_policy="compact", **EAGER)
        for running_broker in (broker_a, broker_b):
            # Larger than sequencer_upload_bytes when it is packed.
            produce(running_broker, "t", *(secrets.token_hex(500_000) for _ in range(3)))
        both = (broker_a, broker_b)
        until(functools.partial(is_sealed, *both))
        for _ in range(2):
            # Earlier entries are garbage by their age, once a checkpoint covers them that is old
            # and not the newest.
            time.sleep(WAL_RETENTION_MS / 1000 + 0.5)
            for running_broker in both:
                for topic in "tu":
                    produce(running_broker, topic, 1)
            until(functools.partial(is_sealed, *both))
            checkpoints = total("tidelog_wal_checkpoints_total", *both)
            while total("tidelog_wal_checkpoints_total", *both) < checkpoints + 2:
                produce(broker_a, "u", 2)
        records = f"{broker_b.base_url}/topics/u/partitions/0/records?offset=0"
        assert httpx.get(records, headers={"accept": JSON["content-type"]}).json()
        assert (broker_b.stop(), broker_a.stop()) == (0, 0)


@contextmanager
def broker(folder: Path, moto: Moto, **settings: str) -> Iterator[Broker]:
    places = {"s3_endpoint": moto.endpoint_url, "s3_region": REGION, "hot_dir": folder / "hot"}
    store = f"s3://{moto.bucket}/cluster"
    with Broker(
        folder, store, **places, tuning=OFTEN, is_fresh=True, **QUICK, **settings
    ) as started:
        yield started


def produce(running_broker: Broker, topic: str, *values: object) -> None:
    body = {"records": [{"key": "k", "value": value} for value in values]}
    url = f"{running_broker.base_url}/topics/{topic}"
    headers = JSON | {"idempotency-key": secrets.token_hex(8)}
    # On a busy machine, an answer of moto may come too late: then the outcome is unknown.
    until(lambda: httpx.post(url, json=body, headers=headers, timeout=30).status_code == 200)


def total(name: str, *brokers: Broker) -> float:
    """The sum of a metric over its labels and the brokers."""
    texts = (httpx.get(f"{running_broker.base_url}/metrics").text for running_broker in brokers)
    lines = (line for text in texts for line in text.splitlines())
    return sum(float(line.split()[1]) for line in lines if line.startswith(name))


def is_sealed(*brokers: Broker) -> bool:
    return total("tidelog_unsealed_bytes{", *brokers) == 0


def tidelog(moto: Moto, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, "-m", "tidelog.service.cli", *arguments],
        env=environment(
            TIDELOG_STORE=f"s3://{moto.bucket}/cluster",
            TIDELOG_S3_ENDPOINT=moto.endpoint_url,
            TIDELOG_S3_REGION=REGION,
            TIDELOG_WAL_VIEW_AGE_MAX_MS="1000",
            TIDELOG_TEST_BOUNDS="true",
            TIDELOG_WAL_RETENTION_MS=str(WAL_RETENTION_MS),
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def policy(role: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        hcl.template(role, bucket_arn=f"{ARN}tidelog", prefix="cluster", is_wal_write_once=True)
    )
    return loaded


@pytest.mark.parametrize("role", ["broker", "maintain"])
def test_a_role_may_do_what_it_does_and_nothing_else(seen: Seen, role: str) -> None:
    used: set[tuple[str, str, str]] = set()
    for call in seen.of[role]:
        allowed = set(allowing(policy(role), call))
        assert allowed, f"{role} makes {call} and may not"
        assert not is_denied(policy(role), call), f"{role} makes {call} and is kept from it"
        used |= allowed
    unused = permissions(policy(role)) - used
    assert not unused, f"{role} may, and never does"


def test_the_bucket_refuses_none_of_it_but_would_an_overwritten_entry(seen: Seen) -> None:
    bucket = policy("bucket")
    secure = (("aws:SecureTransport", "true"),)
    calls = [call for of in seen.of.values() for call in of]
    assert len(calls) > 200
    for call in calls:
        assert not is_denied(bucket, call._replace(conditions=call.conditions + secure)), call
    overwritten = next(
        call for call in calls if call.resource.startswith(f"{ARN}tidelog/cluster/wal/")
    )
    whole = (*secure, ("s3:ObjectCreationOperation", "true"))
    put = Call("s3:PutObject", overwritten.resource, whole)
    assert is_denied(bucket, put)
    assert not is_denied(bucket, put._replace(conditions=(*whole, ("s3:if-none-match", "*"))))
    assert is_denied(
        bucket, Call("s3:GetObject", put.resource, (("aws:SecureTransport", "false"),))
    )


def test_brokers_cannot_take_anything_from_the_log(seen: Seen) -> None:
    for place in ("wal/00000000000000000001", "data/00/x", "checkpoints/1", "topics/t-0/a.parquet"):
        call = Call("s3:DeleteObject", f"{ARN}tidelog/cluster/{place}")
        assert not list(allowing(policy("broker"), call))
        assert list(allowing(policy("maintain"), call))
        assert not list(allowing(policy("reader"), call))
    elsewhere = Call("s3:GetObject", f"{ARN}tidelog/other/wal/1")
    assert not any(list(allowing(policy(role), elsewhere)) for role in ("broker", "reader"))


@pytest.mark.parametrize("role", ["reader", "maintain"])
@pytest.mark.parametrize("place", ["secret.json", "brokers/abc.json"])
def test_only_brokers_read_what_makes_a_broker(seen: Seen, role: str, place: str) -> None:
    call = Call("s3:GetObject", f"{ARN}tidelog/cluster/{place}")
    assert is_denied(policy(role), call)
    assert list(allowing(policy("broker"), call))
    assert not is_denied(policy("broker"), call)
    assert not is_denied(policy(role), Call("s3:GetObject", f"{ARN}tidelog/cluster/cluster.json"))
