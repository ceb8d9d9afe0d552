"""Segments: what was written is read back by ranges, and no damaged byte is ever decoded."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidelog.storage.codec import segment
from tidelog.storage.codec.record_columns import RECORD_SCHEMA, Headers, Rows, batch_of_rows
from tidelog.storage.core import topic_configs
from tidelog.storage.core.errors import Corrupt

KEY = "topics/orders-1/partition=0/segment.parquet"
START_MS = 1_700_000_000_000


def batch_of(
    rows: Sequence[tuple[int, bytes | None, bytes | None, Headers | None]],
    offsets: Sequence[int] | None = None,
) -> pa.RecordBatch:
    """Rows of (timestamp, key, value, headers); offsets count from 0 unless given."""
    chunk = batch_of_rows(
        [
            Rows(
                [row[0] for row in rows],
                [row[1] for row in rows],
                [row[2] for row in rows],
                [row[3] for row in rows],
            )
        ]
    )
    numbers = pa.array(range(len(rows)) if offsets is None else offsets, pa.int64())
    return pa.RecordBatch.from_arrays([numbers, *chunk.columns], schema=RECORD_SCHEMA)


def events(count: int, *, base_offset: int = 0, value_bytes: int = 50) -> pa.RecordBatch:
    draw = random.Random(base_offset)
    rows = [
        (START_MS + i, b"user-%d" % draw.randrange(count), draw.randbytes(value_bytes), None)
        for i in range(count)
    ]
    return batch_of(rows, range(base_offset, base_offset + count))


def write(*batches: pa.RecordBatch, codec: str = "producer") -> bytes:
    return segment.write(batches, codec=codec, is_json=False).body.to_pybytes()


def open_footer(body: bytes) -> segment.Footer:
    needed = segment.footer_length(body[-100:], KEY)
    return segment.read_footer(body[-needed:], len(body), KEY)


def decode(body: bytes, footer: segment.Footer, index: int) -> pa.RecordBatch:
    group = footer.groups[index]
    return footer.decode_group(index, body[group.start : group.start + group.length], KEY)


def decode_all(body: bytes) -> pa.Table:
    footer = open_footer(body)
    groups = [decode(body, footer, group.index) for group in footer.groups]
    return pa.Table.from_batches(groups, schema=RECORD_SCHEMA)


STRANGE = [
    (START_MS, None, None, None),
    (START_MS, b"", b"", []),
    (START_MS - 1, b"\x00\xff", b'{"a": "\xc3\xbc\xe2\x82\xac"}', [("trace", b"\x00\x01")]),
    (0, "clé".encode(), b"x" * 1000, [("é", None), ("é", b""), ("", b"2")]),
    (-1, None, b"tombstones have no value, this has no key", None),
    (2**41, b"k", None, [("a", b"b")]),
]


def test_records_come_back_as_they_were() -> None:
    batch = batch_of(STRANGE)
    body = write(batch)
    assert decode_all(body).equals(pa.Table.from_batches([batch]))
    assert decode_all(body).schema.equals(RECORD_SCHEMA)


@pytest.mark.parametrize("codec", [*segment._CODECS, "zstd", "lz4", "snappy", "gzip"])
def test_every_codec_of_a_topic_is_written_and_read(codec: str) -> None:
    topic_configs.check("compression.type", codec)
    batch = events(100)
    body = write(batch, codec=codec)
    assert decode_all(body).equals(pa.Table.from_batches([batch]))
    metadata = pq.read_metadata(pa.BufferReader(body))
    names = {"producer": "ZSTD", "lz4": "LZ4"}
    assert metadata.row_group(0).column(3).compression == names.get(codec, codec.upper())


def test_statistics_describe_the_written_records() -> None:
    written = segment.write(
        [batch_of(STRANGE[:2], [7, 9]), batch_of(STRANGE[2:], [100, 101, 102, 2**40])],
        codec="producer",
        is_json=True,
    )
    assert written.rows == 6
    assert (written.base_offset, written.end_offset) == (7, 2**40 + 1)
    assert (written.timestamp_min, written.timestamp_max) == (-1, 2**41)
    assert written.size == len(written.body.to_pybytes())
    footer = open_footer(written.body.to_pybytes())
    assert footer.is_json
    assert not open_footer(write(events(1))).is_json
    [group] = footer.groups
    assert (group.base_offset, group.end_offset, group.rows) == (7, 2**40 + 1, 6)
    assert (group.timestamp_min, group.timestamp_max) == (-1, 2**41)


def test_offsets_may_have_gaps_and_must_ascend() -> None:
    offsets = [5, 6, 1000, 2**62]
    body = write(batch_of(STRANGE[:4], offsets))
    assert decode_all(body).column("offset").to_pylist() == offsets
    with pytest.raises(AssertionError):
        write(batch_of(STRANGE[:2], [5, 5]))
    with pytest.raises(AssertionError):
        write(batch_of(STRANGE[:1], [5]), batch_of(STRANGE[:1], [4]))
    with pytest.raises(AssertionError):
        write()


def test_groups_are_bounded_in_rows() -> None:
    batch = events(25_000)
    body = write(batch)
    footer = open_footer(body)
    assert [group.rows for group in footer.groups] == [10_000, 10_000, 5_000]
    assert [group.base_offset for group in footer.groups] == [0, 10_000, 20_000]
    assert decode_all(body).equals(pa.Table.from_batches([batch]))


def test_groups_are_bounded_in_bytes_but_for_a_single_large_record() -> None:
    mib = 1024 * 1024
    lengths = [3 * mib, 3 * mib, 3 * mib, 9 * mib, 1, 5 * mib, 2 * mib]
    header = [("h", bytes(4 * mib))]
    rows = [(START_MS, None, bytes(length), None) for length in lengths]
    body = write(batch_of([*rows, (START_MS, b"", b"", header), (START_MS, b"", b"", header)]))
    groups = open_footer(body).groups
    assert [group.rows for group in groups] == [2, 1, 1, 3, 1, 1]


def test_the_bytes_do_not_depend_on_how_the_batches_are_cut() -> None:
    batch = events(23_000)
    whole = write(batch)
    for seed in range(3):
        draw = random.Random(seed)
        cuts = sorted(draw.sample(range(1, 23_000), 400))
        parts = [batch.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, 23_000], strict=True)]
        assert write(*parts) == whole


@pytest.mark.parametrize("seed", range(60))
def test_random_records_in_random_batches_come_back(seed: int) -> None:
    draw = random.Random(seed)

    def optional() -> bytes | None:
        return draw.choice([None, draw.randbytes(draw.randrange(21))])

    def header() -> tuple[str, bytes | None]:
        return "".join(
            chr(draw.choice([draw.randrange(128), 0x20AC])) for _ in range(3)
        ), optional()

    rows = [
        (
            draw.randrange(2**42),
            optional(),
            optional(),
            draw.choice([None, [header() for _ in range(draw.randrange(4))]]),
        )
        for _ in range(draw.randint(1, 60))
    ]
    batch = batch_of(rows, np.cumsum([draw.randint(1, 1000) for _ in rows]).tolist())
    cuts = sorted({draw.randint(1, len(rows)) for _ in range(draw.randrange(6))} | {len(rows)})
    parts = [batch.slice(a, b - a) for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]
    body = write(*parts)
    assert decode_all(body).equals(pa.Table.from_batches([batch]))


# --- reading by ranges


def test_one_group_is_read_without_the_others() -> None:
    body = write(events(30_000))
    footer = open_footer(body)
    group = footer.groups[1]
    nothing_else = bytes(group.start) + body[group.start : group.start + group.length]
    batch = footer.decode_group(1, nothing_else[group.start :], KEY)
    assert batch.column("offset").to_pylist() == list(range(10_000, 20_000))
    ranges = sorted((group.start, group.start + group.length) for group in footer.groups)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))


def test_long_footer_says_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "GROUP_ROWS", 1)
    body = write(events(200))
    tail = body[-segment.FOOTER_READ_BYTES :]
    needed = segment.footer_length(tail, KEY)
    assert needed > segment.FOOTER_READ_BYTES
    with pytest.raises(Corrupt):
        segment.read_footer(tail, len(body), KEY)
    footer = segment.read_footer(body[-needed:], len(body), KEY)
    assert len(footer.groups) == 200
    assert footer.nbytes > needed


def test_groups_are_found_by_offset() -> None:
    offsets = [*range(10_000), *range(50_000, 60_000), *range(70_000, 70_010)]
    count = len(offsets)
    footer = open_footer(write(batch_of([(START_MS, None, b"", None)] * count, offsets)))

    def found(first: int, end: int) -> list[int]:
        return [group.index for group in footer.groups_between(first, end)]

    assert found(0, 1) == [0]
    assert found(9_999, 10_000) == [0]
    assert found(10_000, 50_000) == []
    assert found(10_000, 50_001) == [1]
    assert found(0, 10**9) == [0, 1, 2]
    assert found(59_999, 70_001) == [1, 2]
    assert found(70_010, 10**9) == []


def test_one_footer_serves_many_threads() -> None:
    batch = events(40_000)
    body = write(batch)
    footer = open_footer(body)
    expected = [batch.slice(10_000 * index, 10_000) for index in range(4)]
    with ThreadPoolExecutor(4) as pool:
        decoded = pool.map(lambda i: (i % 4, decode(body, footer, i % 4)), range(80))
        assert all(batch.equals(expected[index]) for index, batch in decoded)


# --- damage


def damaged(body: bytes, first: int, end: int) -> Iterator[bytes]:
    for position in range(first, end):
        copy = bytearray(body)
        copy[position] ^= 1 << (position % 8)
        yield bytes(copy)


def test_a_flipped_bit_in_a_row_group_is_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "GROUP_ROWS", 4)
    body = write(batch_of(STRANGE))
    footer = open_footer(body)
    assert len(footer.groups) == 2
    for group in footer.groups:
        for bad in damaged(body, group.start, group.start + group.length):
            with pytest.raises(Corrupt) as caught:
                decode(bad, footer, group.index)
            assert caught.value.key == KEY


def test_a_flipped_bit_in_the_footer_is_corrupt() -> None:
    body = write(batch_of(STRANGE))
    needed = segment.footer_length(body, KEY)
    for bad in damaged(body, len(body) - needed, len(body)):
        with pytest.raises(Corrupt):
            segment.read_footer(bad, len(bad), KEY)


def test_a_cut_file_is_corrupt() -> None:
    body = write(batch_of(STRANGE))
    for length in range(len(body)):
        with pytest.raises(Corrupt):
            segment.read_footer(body[:length], length, KEY)


def test_a_group_that_is_cut_or_another_one_is_corrupt() -> None:
    body = write(events(20_000))
    footer = open_footer(body)
    first, second = footer.groups
    data = body[first.start : first.start + first.length]
    with pytest.raises(Corrupt):
        footer.decode_group(0, data[:-1], KEY)
    with pytest.raises(Corrupt):
        footer.decode_group(0, b"", KEY)
    with pytest.raises(Corrupt):
        footer.decode_group(0, body[second.start : second.start + second.length], KEY)


def test_a_parquet_file_of_another_writer_is_corrupt() -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_batches([events(10)]), sink)
    body = sink.getvalue().to_pybytes()
    with pytest.raises(Corrupt, match="not a segment"):
        segment.read_footer(body, len(body), KEY)


# --- other engines read the file as Parquet


def test_it_is_a_parquet_file_with_what_engines_ask_for() -> None:
    batch = batch_of([(START_MS + i, b"k%d" % (i % 9), b"v", None) for i in range(20_000)])
    body = write(batch)
    file = pq.ParquetFile(pa.BufferReader(body), page_checksum_verification=True)
    assert file.read().equals(pa.Table.from_batches([batch]))
    timestamp = file.schema.column(1)
    assert str(timestamp.logical_type).startswith(
        "Timestamp(isAdjustedToUTC=true, timeUnit=microseconds"
    )
    columns = {
        column.path_in_schema: column
        for column in map(file.metadata.row_group(1).column, range(file.metadata.num_columns))
    }
    assert [name for name, column in columns.items() if column.has_dictionary_page] == ["key"]
    assert [name for name, column in columns.items() if column.is_stats_set] == [
        "offset",
        "timestamp",
    ]
    assert all(column.has_offset_index for column in columns.values())
    assert columns["offset"].has_column_index
    assert (file.metadata.metadata or {})[b"tidelog.format"] == b"1"
    assert "partition" not in columns


def test_distinct_keys_get_no_dictionary() -> None:
    body = write(batch_of([(START_MS, b"%d" % i, b"v", None) for i in range(1000)]))
    assert not pq.read_metadata(pa.BufferReader(body)).row_group(0).column(2).has_dictionary_page
