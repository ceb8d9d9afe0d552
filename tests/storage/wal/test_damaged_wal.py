"""One damaged, missing or additional object in `wal/` keeps all brokers from starting."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.broker import tidelog
from tests.support.loop_brokers import Acked, assert_kept, broker, given, held, produce
from tidelog.storage.codec.entry import header_length
from tidelog.storage.core import object_keys
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore

RECORDS = 4


async def written(root: Path) -> tuple[Acked, int]:
    """A log as it is while a broker runs, and after the broker was killed: its acknowledged
    records, and the number of its newest entry. That entry and the one before hold a record."""
    running = root.with_name("running")
    log = await broker(FolderStore(running), SystemClock())
    await log.create_topic("t", 1, {})
    acked: Acked = {}
    for number in range(RECORDS):
        await produce(log, f"v{number}", acked)
    given(len(acked) == RECORDS, "all records are acknowledged")
    newest = log.state.seq
    shutil.copytree(running, root, dirs_exist_ok=True)
    await log.close()
    await log.store.close()
    return acked, newest


def flip_in_header(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[40] ^= 1
    path.write_bytes(body)


def flip_in_both_headers(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[40] ^= 1
    body[len(body) - 12 - header_length(body, path.name) + 40] ^= 1
    path.write_bytes(body)


async def held_in(root: Path) -> Acked:
    store = FolderStore(root)
    try:
        return await held(store, SystemClock())
    finally:
        await store.close()


async def test_a_broker_starts_with_one_wrong_bit_in_a_header(tmp_path: Path) -> None:
    root = tmp_path / "killed"
    acked, newest = await written(root)
    flip_in_header(root / object_keys.wal(newest - 1))
    assert_kept(acked, await held_in(root))


async def test_a_broker_starts_beside_a_number_that_is_not_in_the_chain(tmp_path: Path) -> None:
    root = tmp_path / "killed"
    acked, newest = await written(root)
    (root / object_keys.wal(newest + 1000)).write_bytes(b"")
    assert_kept(acked, await held_in(root))


async def test_a_stop_leaves_a_checkpoint(tmp_path: Path) -> None:
    _, newest = await written(tmp_path / "killed")
    checkpoints = sorted((tmp_path / "running/checkpoints").glob("*"))
    assert checkpoints
    assert int(checkpoints[-1].name) >= newest


@pytest.mark.parametrize("damage", [flip_in_both_headers, Path.unlink])
async def test_a_command_drops_what_is_behind_a_damaged_entry(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    root = tmp_path / "killed"
    acked, newest = await written(root)
    damage(root / object_keys.wal(newest - 1))
    dropped_after = str(newest - 2)
    tidelog("repair", "--drop-after", dropped_after, "--yes", "--store", str(root))
    left = {offset: value for offset, value in acked.items() if offset < RECORDS - 2}
    assert await held_in(root) == left
