"""Scrub: clean on every log that is whole, and each kind of damage by name."""

import asyncio
from typing import Any

import pytest

from tests.support.faults import Fault, Script
from tests.support.logs import COLD, append, closing, kill_while_sealing, spoil_chunk, with_topic
from tests.support.maintenance import caring, log_with, way_of
from tests.support.views import flip
from tidelog.compaction import scrub as scrub_module
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.garbage import Grace
from tidelog.compaction.scrub import ScrubReport, scrub
from tidelog.compaction.scrub_checks import FindingKind
from tidelog.storage.broker import Broker
from tidelog.storage.codec.entry import header_length
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt, Unavailable, UnknownTopic
from tidelog.storage.store.memory import MemoryStore

HOUR_MS = 3_600_000
GRACE = Grace(wal_ms=HOUR_MS, table_ms=4 * HOUR_MS)
SEGMENTS = [["a", "b"], ["c", "d"], ["e", "f"]]


async def scrubbed(inner: MemoryStore, *, is_quick: bool = False) -> ScrubReport:
    async with caring(inner, report_damage=False) as cluster:
        return await scrub(cluster, None, GRACE, is_quick=is_quick)


async def aged(inner: MemoryStore, *, is_collected: bool = True) -> Broker:
    """A log with checkpoints, a tail and, if collected, a WAL that does not begin at 1."""
    log = await log_with(inner, SEGMENTS, partitions=2)
    for value in "ghij":
        await append(log, value)
        async with caring(inner) as cluster:
            planned = await plan(cluster, GRACE)
            if is_collected:
                await collect(cluster, planned)
        inner.now_ms += HOUR_MS
    return log


async def listed(inner: MemoryStore, prefix: str) -> list[str]:
    return [info.key async for info in inner.list(prefix)]


@pytest.mark.parametrize("is_collected", [False, True])
@pytest.mark.parametrize("is_quick", [False, True])
async def test_whole_log_is_clean(inner: MemoryStore, is_collected: bool, is_quick: bool) -> None:
    async with closing(await aged(inner, is_collected=is_collected)) as log:
        async with caring(inner) as cluster:
            await delete_records(cluster, "t", {0: 2, 1: 3}, is_dry=False)
        report = await scrubbed(inner, is_quick=is_quick)
        assert report.findings == []
        assert report.is_whole
        assert (report.topics, report.partitions, report.segments) == (1, 2, 4)
        assert report.runs == 4
        assert report.rows == (4 if is_quick else 11)
        assert (report.entries < log.state.seq) is is_collected
        assert (1 in {object_keys.seq_of(key) for key in await listed(inner, object_keys.WAL)}) is (
            not is_collected
        )


async def test_an_empty_cluster_is_clean(inner: MemoryStore) -> None:
    async with closing(await log_with(inner, [])):
        assert (await scrubbed(inner)).findings == []


async def damage(inner: MemoryStore, log: Broker, how: str, key: str) -> None:
    body = await inner.get(key)
    match how:
        case "flipped":
            position = len(body) // 2
            await inner.put(
                key, [body[:position], bytes([body[position] ^ 4]), body[position + 1 :]]
            )
        case "cut":
            await inner.put(key, [body[: len(body) * 2 // 3]])
        case "gone":
            await inner.delete([key])


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
@pytest.mark.parametrize("object_name", ["segment", "newest entry but one", "entry of a tail"])
async def test_a_damaged_object_is_named(inner: MemoryStore, how: str, object_name: str) -> None:
    async with closing(await aged(inner)) as log:
        run_ = log.state.partition("t", 0).tail[0]
        key = {
            "segment": (await listed(inner, f"{log.state.topic('t').prefix}/"))[1],
            "newest entry but one": object_keys.wal(log.state.seq - 1),
            "entry of a tail": run_.object_key,
        }[object_name]
        await damage(inner, log, how, key)
        report = await scrubbed(inner)
        assert not report.is_whole
        assert {finding.where for finding in report.findings} == {key}
        kinds = {finding.kind for finding in report.findings}
        if how == "gone":
            assert kinds == {FindingKind.MISSING}
        elif object_name == "segment":
            assert kinds == {FindingKind.SEGMENT}
        else:
            assert kinds <= {FindingKind.WAL, FindingKind.TAIL}


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
async def test_scrub_reports_damage_that_stops_brokers(inner: MemoryStore, how: str) -> None:
    """An entry after the newest checkpoint, and a segment that has nothing to do with it."""
    async with closing(await aged(inner)) as log:
        await append(log, "k")
        await append(log, "l")
        key = object_keys.wal(log.state.seq - 1)
        segment = (await listed(inner, f"{log.state.topic('t').prefix}/"))[1]
        body = await inner.get(key)
        copy = len(body) - 12 - header_length(body, key)
        await inner.put(key, [flip(flip(body, 20), copy + 20)])
        if how != "flipped":
            await damage(inner, log, how, key)
        await damage(inner, log, "cut", segment)
        with pytest.raises(Corrupt):
            async with caring(inner):
                """No broker would start either."""
        report = await scrubbed(inner)
        assert {finding.where for finding in report.findings} >= {key, segment}


@pytest.mark.parametrize("how", ["flipped", "cut"])
@pytest.mark.parametrize("which", [0, -1])
async def test_a_damaged_checkpoint_is_named(inner: MemoryStore, how: str, which: int) -> None:
    async with closing(await aged(inner)) as log:
        key = (await listed(inner, object_keys.CHECKPOINTS))[which]
        await damage(inner, log, how, key)
        report = await scrubbed(inner)
        assert [(finding.kind, finding.where) for finding in report.findings] == [
            (FindingKind.CHECKPOINT, key)
        ]


@pytest.mark.parametrize("part", ["header", "copy"])
async def test_damage_below_checkpoint_is_named(inner: MemoryStore, part: str) -> None:
    """No reader applies the entry again: it is behind a collected one. Its chunk is in a tail."""
    async with closing(await log_with(inner, SEGMENTS, partitions=2)) as log:
        await append(log, "in a tail")
        seq = log.state.seq
        await append(log, "collected")
        await log._log.wal.checkpoint()
        await append(log, "after")
        await inner.delete([object_keys.wal(seq + 1)])
        body = await inner.get(object_keys.wal(seq))
        await inner.put(object_keys.wal(seq), [flip(body, 40 if part == "header" else -40)])
        findings = [
            finding
            for finding in (await scrubbed(inner)).findings
            if finding.where == object_keys.wal(seq)
        ]
        assert [finding.is_damage for finding in findings] == [False]


async def test_a_checkpoint_that_says_something_else_is_named(inner: MemoryStore) -> None:
    async with closing(await aged(inner)) as log:
        key = (await listed(inner, object_keys.CHECKPOINTS))[-1]
        log.state.topic("t").partitions[1].log_start_offset = 1
        log.state.seq, seq = object_keys.seq_of(key), log.state.seq
        await inner.delete([key])
        await log._log.wal.checkpoint()
        log.state.seq = seq
        report = await scrubbed(inner)
        assert [(finding.kind, finding.where) for finding in report.findings] == [
            (FindingKind.CHECKPOINT, key)
        ]


async def test_a_swapped_entry_breaks_the_chain() -> None:
    inner, other = MemoryStore(), MemoryStore()
    log, foreign = await aged(inner), await aged(other)
    async with closing(log, foreign):
        key = object_keys.wal(log.state.seq - 1)
        await inner.put(key, [await other.get(key)])
        report = await scrubbed(inner)
        assert {finding.where for finding in report.findings} == {key}
        assert any("chain" in finding.what for finding in report.findings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda files: files[1:], "in no segment"),
        (lambda files: [files[0], *files[2:]], "in no segment"),
        (lambda files: files[:-1], "in no segment"),
        (lambda files: [files[0]._replace(rows=1), *files[1:]], "1 rows"),
        (lambda files: [files[0]._replace(timestamp_max=1), *files[1:]], "has timestamps"),
        (lambda files: [files[0]._replace(size=files[0].size - 1), *files[1:]], "bytes"),
        (lambda files: [], "no segment"),
    ],
)
async def test_scrub_reports_a_wrong_manifest(inner: MemoryStore, change, words: str) -> None:
    async with closing(await log_with(inner, SEGMENTS)) as log:
        commits = log._log.store.tables[log.state.topic("t").prefix]
        files = [file for commit in commits for file in commit.files]
        commits[1] = commits[1]._replace(files=tuple(change(files)))
        for version in range(2, len(commits)):
            commits[version] = commits[version]._replace(files=())
        report = await scrubbed(inner)
        assert not report.is_whole
        assert any(words in finding.what for finding in report.findings if finding.is_damage)
        assert not (await scrubbed(inner, is_quick=True)).is_whole


async def test_scrub_lists_unnamed_objects_without_damage(inner: MemoryStore) -> None:
    async with closing(await aged(inner)) as log:
        prefix = log.state.topic("t").prefix
        orphan = f"{prefix}/{object_keys.segment(0, 6, 9, 'ab12')}"
        forgotten = f"{object_keys.topic('u', 'f' * 32)}/{object_keys.segment(0, 6, 9, 'ab12')}"
        foreign = [f"{prefix}/notes.txt", "notes.txt", "topics/notes.txt"]
        for key in (orphan, forgotten, "secret.json", *foreign):
            await inner.create(key, [b"x"])
        report = await scrubbed(inner)
        assert sorted(finding.where for finding in report.findings) == sorted(foreign)
        inner.now_ms += GRACE.unnamed_ms
        report = await scrubbed(inner)
        kinds = {finding.where: finding.kind for finding in report.findings}
        assert kinds == dict.fromkeys(foreign, FindingKind.FOREIGN) | {
            orphan: FindingKind.ORPHAN,
            forgotten: FindingKind.ORPHAN,
        }
        assert report.is_whole


async def test_a_store_that_fails_is_said_to(inner: MemoryStore) -> None:
    async with closing(await aged(inner)):
        for verb, prefix in (
            ("get_range", object_keys.TOPICS),
            ("list", ""),
            ("get", object_keys.WAL),
        ):
            async with caring(inner) as cluster:
                way_of(cluster).plan = Script(verb, prefix, [Fault.UNAVAILABLE])
                with pytest.raises(Unavailable):
                    await scrub(cluster, None, GRACE)


async def test_one_topic_is_looked_at_alone(inner: MemoryStore) -> None:
    log = await aged(inner)
    await log.topics.create("u", 3, {})
    async with closing(log), caring(inner) as cluster:
        report = await scrub(cluster, ["u"], GRACE)
        assert (report.topics, report.partitions, report.segments) == (1, 3, 0)
        with pytest.raises(UnknownTopic):
            await scrub(cluster, ["v"], GRACE)


async def test_a_log_that_is_written_meanwhile_is_clean(inner: MemoryStore) -> None:
    log = await aged(inner)
    async with closing(log), caring(inner) as cluster:
        way_of(cluster).latency = lambda _: 0.05
        task = asyncio.create_task(scrub(cluster, None, GRACE))
        for value in "abcdefgh":
            await append(log, value)
            await log.records.seal("t")
            await asyncio.sleep(0.1)
        report = await task
        assert report.findings == []


@pytest.mark.parametrize("is_sealed", [True, False])
async def test_a_tail_that_is_sealed_and_collected_meanwhile_is_no_damage(
    inner: MemoryStore, is_sealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scrub may take longer than collection waits."""
    async with closing(await log_with(inner, SEGMENTS)) as log:
        await append(log, "g")
        (chunk,) = log.state.partition("t", 0).tail
        look = scrub_module._Scrub.tails

        async def look_late(self: Any, topic: Any, verified: Any) -> None:
            if is_sealed:
                await log.records.seal("t")
            await inner.delete([chunk.object_key])
            await look(self, topic, frozenset())

        monkeypatch.setattr(scrub_module._Scrub, "tails", look_late)
        findings = (await scrubbed(inner)).findings
        missing = [finding.where for finding in findings if finding.is_damage]
        assert missing == ([] if is_sealed else [chunk.object_key])


async def test_damaged_tail_is_not_called_damaged_segment(inner: MemoryStore) -> None:
    """A sealer crashed between its two commits, then the entry in the WAL was damaged."""
    log = await with_topic(inner, COLD)
    await append(log, "a")
    await kill_while_sealing(log)
    chunk = log.state.partition("t", 0).tail[0]
    await spoil_chunk(inner, chunk)
    async with caring(inner, report_damage=False) as cluster:
        report = await scrub(cluster, None, GRACE)
    await log.close()
    assert {finding.where for finding in report.findings if finding.is_damage} == {chunk.object_key}
