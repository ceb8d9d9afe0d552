"""Three brokers whose clients live on when the store is restored from a backup.

Copies of a broker's directory run beside it, too. Acked records are there, and groups pass over
none.

A restore cuts the log: what was acked after the backup is gone, by right. A private broker reads
the old log and the restored one before clients can reach it, so this is known to the record.
`make torture-restores MINUTES=10` runs it for longer.
"""

import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.broker import Broker, tidelog
from tests.support.history import Log, Read, Request, cut, violations
from tests.support.ports import free_port
from tests.system.checks import new_topic, the_log, wait_for_commits
from tests.system.client import AnswerLost, Client, NotSent, NotServed, wait_until
from tests.system.kafka_load import KafkaGroup, KafkaProducer
from tests.system.load import Load, Mix
from tests.system.nemesis import OFTEN, VIEW_AGE_S, YOUNG, Nemesis
from tests.system.rest import JSON
from tests.system.rest_group import RestGroup
from tests.system.several import QUICK, brokers, stopped

PARTITIONS = 3
PAUSE_S = 0.03
"""Of each producer after a request, so that a run of minutes can still be checked."""
SECONDS_MIN = 60.0
"""Shorter runs, as in `make test`, skip the test: each deed takes up to half a minute."""
LIFE_S = 5.0
"""Of a Kafka producer that is replaced by a new one, with a new producer id."""
PROBES = "probes"
"""A topic that nothing is checked of."""
SETTINGS: dict[str, Any] = {**QUICK, **YOUNG, **OFTEN}


class Era(NamedTuple):
    """The records of a cluster that the restored one does not have, and where they began."""

    ends: dict[int, int]
    """The ends of the partitions in the backup."""
    cut_off: Log


class Clients:
    """All clients of the three brokers, and the answers that they got."""

    def __init__(self, cluster: Sequence[Broker], topic: str, seed: int) -> None:
        urls = [broker.base_url for broker in cluster]
        kafka = ",".join(f"127.0.0.1:{broker.settings['kafka_port']}" for broker in cluster)
        mix = Mix(topic, PARTITIONS, producers=2, pause_s=PAUSE_S, is_cloned=True)
        self._seed = seed
        self._mix = mix
        self.loads = [
            Load(urls, mix._replace(first=10), seed),
            Load(urls[1], mix._replace(first=20, acks=("all", "1")), seed),
            Load(urls, mix._replace(first=30, is_keyed=False), seed),
        ]
        self.producers = [
            KafkaProducer(
                kafka,
                topic,
                PARTITIONS,
                100 + number,
                pause_s=PAUSE_S,
                is_forgiving=True,
                **options,  # type: ignore[arg-type]
            )
            for number, options in enumerate(({}, {"life_s": LIFE_S}, {"is_idempotent": False}))
        ]
        self.kafka_group = KafkaGroup(kafka, topic, "kafka", 2)
        self.rest_group = RestGroup(urls, topic, "rest", seed)

    def all(self) -> list[Any]:
        return [*self.loads, *self.producers, self.kafka_group, self.rest_group]

    def requests(self) -> list[Request]:
        of_kafka = (list(producer.requests) for producer in self.producers)
        return [
            request
            for some_requests in (*(load.sent() for load in self.loads), *of_kafka)
            for request in some_requests
        ]

    def waiting(self) -> set[int]:
        """The ids of requests that a client may still send again."""
        clients = (*self.loads, *self.producers)
        return {id(request) for client in clients for request in client.waiting()}

    def use(self, clone: Broker, number: int) -> None:
        """A load that has only this broker; it ends with all answers."""
        mix = self._mix._replace(first=1000 + 10 * number, acks=("all", "1"))
        load = Load(clone.base_url, mix, self._seed)
        kafka = KafkaProducer(
            f"127.0.0.1:{clone.settings['kafka_port']}",
            mix.topic,
            PARTITIONS,
            1_000_000 + number,
            pause_s=PAUSE_S,
            is_forgiving=True,
        )
        self.loads.append(load)
        self.producers.append(kafka)
        with load, kafka:
            load.wait_for_acks(20)
            kafka.wait_for_acks(10)
            load.finish()
            kafka.finish()


class Restores(Nemesis):
    """Faults of brokers, clones of them, and restores of their store."""

    def __init__(self, cluster: Sequence[Broker], clients: Clients, root: Path, seed: int) -> None:
        self._variables_of_store = {
            f"TIDELOG_{name.upper()}": str(value) for name, value in YOUNG.items()
        }
        super().__init__(
            cluster, (), (), view_age_s=VIEW_AGE_S, seed=seed, variables=self._variables_of_store
        )
        self._clients = clients
        self._root = root
        self.eras: list[Era] = []
        self._restores_s: list[tuple[float, float]] = []
        """When restores began and ended."""
        self._deeds = (
            self._kill,
            self._kill_several,
            self._terminate,
            self._stop_for_a_moment,
            self._stop_for_longer_than_a_view_may_be_old,
            self._clone,
            self._restore,
        )
        self._next = [self._kill, self._restore, self._clone]

    @property
    def store(self) -> str:
        return self._brokers[0].store

    def _clone(self) -> None:
        """Another broker with the same name begins with a copy of the directory.

        Its producers ask for ids while those of the original live on.
        """
        victim = self._victim()
        number = self.counts["clone"]
        folder = self._root / f"clone-{number}"
        with stopped(victim):
            shutil.copytree(victim.settings["hot_dir"], folder)  # type: ignore[call-overload]
        settings = self._private(victim, folder) | {"kafka_port": free_port()}
        with Broker(folder, self.store, **settings) as clone:
            self._clients.use(clone, number)
            if self._draw.random() < 0.5:
                clone.kill()  # its hot log has what it acked with acks=1
                clone.start()
            status = clone.stop()
            assert status == 0, clone.log()[-3000:]
        self._supervise(victim)

    def _supervise(self, original: Broker) -> None:
        """A process that learns of a copy of it ends.

        Let it commit, and start it again if it did.
        """
        wait_until(lambda: not original.is_running or self._commits(original), "a commit")
        if not original.is_running:
            assert "a copy of the process runs" in original.log(), original.log()[-3000:]
            self.counts["originals that ended"] += 1
            original.start()

    def _commits(self, broker: Broker) -> bool:
        record = b'{"records":[{"value":1}]}'
        with contextlib.suppress(NotSent, AnswerLost), Client(broker.base_url) as client:
            answer = client.call("POST", f"/topics/{PROBES}", record, {"Content-Type": JSON})
            return answer.status == 200
        return False

    def _restore(self) -> None:
        """Back up as clients write, lose the store, restore the backup at the same addresses."""
        began_s = time.monotonic()
        number = self.counts["restore"]
        newest_offsets = _newest(self._clients.requests())
        place = (self._root / f"backups-{number}").as_uri()
        new = (self._root / f"store-{number}").as_uri()
        tidelog("backup", place, "--store", self.store, **self._variables_of_store)
        self._wait(0.3, 2.0)
        for broker in self._brokers:
            broker.kill()
        try:
            tidelog("restore", place, "--store", new, **self._variables_of_store)
            log, restored = self._read(self.store), self._read(new)
            self._check_cut(log, restored, newest_offsets)
            ends = {partition: len(records) for partition, records in restored.items()}
            self.eras.append(Era(ends, {number: log[number][end:] for number, end in ends.items()}))
            self._clients.kafka_group.resets += 1
            for broker in self._brokers:
                broker.store = new  # and new disks: a broker refuses a hot log of the old cluster
                broker.settings["hot_dir"] = broker.folder / f"hot-{number}"
        finally:  # also if the test fails: its clients end with answers
            for broker in self._brokers:
                broker.start()
        self._restores_s.append((began_s, time.monotonic()))

    def unexplained(self, lives: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return the lives of producers that ended though no restore had cut their records off."""
        return [
            (born_s, ended_s)
            for born_s, ended_s in lives
            if not any(begin_s < ended_s and end_s > born_s for begin_s, end_s in self._restores_s)
        ]

    def _check_cut(self, log: Log, restored: Log, newest_offsets: Mapping[int, int]) -> None:
        for partition, records in restored.items():
            assert records == log[partition][: len(records)], "the backup is no beginning"
            assert len(records) > newest_offsets.get(partition, -1), (
                "acked before the backup, not in it"
            )
        requests = self._clients.requests()
        waiting = self._clients.waiting()  # clients go on: a request that is new by now is not cut
        values = {read.value for records in log.values() for read in records}
        for request in requests:
            request.unknown += id(request) in waiting
        durable_requests = [request for request in requests if not _is_hot(request, values)]
        assert violations(durable_requests, log) == []
        assert cut(requests, restored, lambda request: id(request) in waiting) == []

    def _read(self, store: str) -> Log:
        topic = self._clients._mix.topic
        folder = self._root / "reader" / secrets.token_hex(4)
        settings = self._private(self._brokers[0], folder) | {"broker_id": "reader"}
        with Broker(folder, store, **settings) as reader:
            return the_log(reader, topic, PARTITIONS)

    def _private(self, broker: Broker, folder: Path) -> dict[str, Any]:
        return {**broker.settings, "kafka_port": 0, "hot_dir": folder, "tuning": OFTEN["tuning"]}


def _is_hot(request: Request, values: set[bytes | None]) -> bool:
    """Acked with acks=1 alone, and with the hot log of a broker that did not come back."""
    is_there = any(record.value in values for record in request.records)
    return not is_there and not request.acks and request.acks_without_offsets > 0


def _newest(requests: Sequence[Request]) -> dict[int, int]:
    """The newest acked offsets by partition."""
    newest: dict[int, int] = {}
    for request in requests:
        for place in (place for acked in request.acks for place in acked):
            newest[place.partition] = max(newest.get(place.partition, -1), place.offset)
    return newest


def passed_over(
    read: Mapping[int, Sequence[tuple[int, bytes]]],
    eras: Sequence[Era],
    log: Log,
    committed: Mapping[int, int],
) -> tuple[list[str], int]:
    """Return the errors of a group's reads below its committed offsets, and the skipped records.

    The second is how many records it passed over by right: a member that lives on keeps its
    position of before a restore, and new records may take the offsets up to it.
    """
    wrong: list[str] = []
    excused = 0
    for partition, records in log.items():
        read_places = set(read.get(partition, ()))
        log_places = _places(records)
        old_places = [_places(era.cut_off[partition]) for era in eras]
        wrong += [
            f"{partition}: read {place}"
            for place in sorted(read_places - log_places.union(*old_places))[:3]
        ]
        gaps = []
        for era, old in zip(eras, old_places, strict=True):
            start = era.ends[partition]
            ahead = [offset for offset, _ in read_places & old]
            gaps.append(range(start, max(ahead, default=start - 1) + 1))
        end = committed.get(partition, 0)
        missing = sorted(offset for offset, _ in log_places - read_places if offset < end)
        not_read = [offset for offset in missing if not any(offset in gap for gap in gaps)]
        excused += len(missing) - len(not_read)
        if not_read:
            wrong.append(f"{partition}: {len(not_read)} passed over: {not_read[:5]}")
    return wrong, excused


def _places(records: Sequence[Read]) -> set[tuple[int, bytes | None]]:
    return {(record.offset, record.value) for record in records}


def _wait_for_commits(
    url: str, group: str, ends: Mapping[int, int], failures: Sequence[object]
) -> None:
    """Wait until the group has committed its reads of all partitions to their ends.

    A member that lives on may commit a position of before a restore, which is behind the end.
    """
    committed: dict[int, int] = {}

    def is_at_the_end() -> bool:
        assert not failures, f"members of group {group} failed: {failures}"
        with contextlib.suppress(NotServed), Client(url) as client:
            committed.update(client.committed(group))
        return all(committed.get(partition, 0) >= end for partition, end in ends.items())

    try:
        wait_until(is_at_the_end, f"the commit of the last records by group {group}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {committed} of {ends}") from error


@pytest.mark.slow
def test_clients_live_on_when_stores_are_restored_and_brokers_cloned(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seconds = 60 * float(request.config.getoption("--torture-minutes"))
    if seconds < SECONDS_MIN:
        pytest.skip("make torture-restores runs it")
    seed = request.config.getoption("--torture-seed") or secrets.randbits(32)
    print(f"seed {seed}")
    topic = new_topic()
    own = [{"kafka_port": free_port()} for _ in range(3)]
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(brokers(tmp_path, own=own, **SETTINGS))
        with Client(cluster[0].base_url) as client:
            client.create_topic(topic, PARTITIONS, segment_ms=1500)
            client.create_topic(PROBES, 1)
        clients = Clients(cluster, topic, seed)
        nemesis = Restores(cluster, clients, tmp_path, seed)
        with contextlib.ExitStack() as running:
            for client in clients.all():
                running.enter_context(client)
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s or not nemesis.eras:
                nemesis.step()
                clients.loads[0].wait_for_acks(20)
                groups = (clients.kafka_group, clients.rest_group)
                assert [failure for group in groups for failure in group.failures] == []
            for load in clients.loads[:3]:
                load.finish()
            for producer in clients.producers[:3]:
                producer.finish()
            for broker in cluster:
                wait_for_commits(broker)
            logs = [the_log(broker, topic, PARTITIONS) for broker in cluster]
            ends = {partition: len(records) for partition, records in logs[0].items()}
            for name, group in (("kafka", clients.kafka_group), ("rest", clients.rest_group)):
                _wait_for_commits(cluster[0].base_url, name, ends, group.failures)
        assert logs[0] == logs[1] == logs[2]
        assert violations(clients.requests(), logs[0]) == []
        for producer in clients.producers:
            assert nemesis.unexplained(producer.ended_lives) == []
        by_kafka = passed_over(clients.kafka_group.read, nemesis.eras, logs[0], ends)
        by_rest = passed_over(clients.rest_group.read, nemesis.eras, logs[0], ends)
        assert (by_kafka[0], by_rest[0]) == ([], [])
        assert clients.kafka_group.failures + clients.rest_group.failures == []
        for broker in cluster:
            assert broker.stop() == 0, broker.log()[-3000:]
        store = nemesis.store
    scrubbed = tidelog("scrub", "--store", store, "--json")
    assert json.loads(scrubbed.stdout)["is_whole"], scrubbed.stdout
    print(json.dumps(_counted(clients, nemesis, (by_kafka[1], by_rest[1])), indent=2))


def _counted(
    clients: Clients, nemesis: Restores, excused: tuple[int, int]
) -> dict[str, dict[str, int]]:
    requests = clients.requests()
    counts = [len(records) for era in nemesis.eras for records in era.cut_off.values()]
    return {
        "records": {
            "acked and there": sum(
                len(request.records) for request in requests if request.is_acked
            ),
            "cut off by restores": sum(counts),
            "passed over at old positions, Kafka": excused[0],
            "passed over at old positions, REST": excused[1],
        },
        "Kafka producers": {
            "clients": sum(producer.clients for producer in clients.producers),
            "clients that could not go on": sum(
                len(producer.ended_lives) for producer in clients.producers
            ),
            "records of unknown outcome": sum(
                request.unknown for producer in clients.producers for request in producer.requests
            ),
        },
        "Kafka group": {
            "read": clients.kafka_group.count(),
            "assignments": clients.kafka_group.rebalances,
        },
        "REST group": {
            "read": sum(len(records) for records in clients.rest_group.read.values()),
            **clients.rest_group.counts,
        },
        "deeds": dict(nemesis.counts),
    }
