"""The folder store where the machine fails it: kill -9, full disks, failing links and fsyncs."""

import asyncio
import contextlib
import errno
import hashlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidelog.storage.core.errors import ObjectNotFound, StoreRefused, StoreUnfit, Unavailable
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.object_store import Created

ROOT = Path(__file__).parents[3]
HOUR_NS = 3600 * 10**9


@contextlib.asynccontextmanager
async def opened(root: Path, *, is_named: bool = False):
    store = FolderStore(root)
    store._has_unnamed = store._has_unnamed and not is_named
    try:
        yield store
    finally:
        await store.close()


async def listed(store: FolderStore, prefix: str = "") -> list[str]:
    return [info.key async for info in store.list(prefix)]


def content(key: str) -> bytes:
    """Some 10 kB that only this key has."""
    return hashlib.sha256(key.encode()).digest() * (300 + len(key) * 7)


WRITER = """
    import asyncio, sys
    from pathlib import Path
    from tests.storage.store.test_folder import content, opened

    async def main():
        async with opened(Path(sys.argv[1]), is_named=sys.argv[2] == "named") as store:
            async def create(task):
                for number in range(1_000_000):
                    key = f"wal/{sys.argv[3]}-{task}/{number % 3}/{number}"
                    body = content(key)
                    await store.create(key, [body[:100], body[100:5000], body[5000:]])
                    if number % 10 == 5:
                        await store.put(f"brokers/{task}", [content(f"brokers/{task}")])
                    if number == 5:
                        print("up", flush=True)
            await asyncio.gather(*(create(task) for task in range(8)))

    asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["unnamed", "named"])
async def test_a_killed_writer_leaves_whole_objects_only(tmp_path: Path, kind: str) -> None:
    """I1: what has a name has all its bytes."""
    for kill in range(4):
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path), kind, str(kill)]
        writer = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        assert writer.stdout is not None
        assert await writer.stdout.readline() == b"up\n"
        await asyncio.sleep(0.05 + 0.037 * kill)
        writer.send_signal(signal.SIGKILL)
        assert await writer.wait() == -signal.SIGKILL
        async with opened(tmp_path) as store:
            keys = await listed(store)
            assert len([key for key in keys if key.startswith(f"wal/{kill}-")]) >= 6
            for key in keys:
                assert await store.get(key) == content(key), key
    assert set(os.listdir(tmp_path)) <= {".tmp", "wal", "brokers"}
    if kind == "unnamed":  # `put` alone has named temporary files then
        assert len(os.listdir(tmp_path / ".tmp")) <= 4 * 8


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "disk"
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(root)]
    if os.geteuid() != 0 or subprocess.call(command, stderr=subprocess.DEVNULL):
        pytest.skip("only root can mount a small disk")
    yield root
    subprocess.run(["umount", str(root)], check=True)


@pytest.mark.parametrize("is_named", [False, True])
async def test_a_full_disk_is_a_definite_no(small_disk: Path, is_named: bool) -> None:
    """I6: refused means not stored, now or later."""
    async with opened(small_disk, is_named=is_named) as store:
        with pytest.raises(StoreRefused, match=rf"{small_disk} refused wal/1: .*ENOSPC.*; free sp"):
            await store.create("wal/1", [b"x" * 100_000] * 5)
        with pytest.raises(StoreRefused, match="ENOSPC"):
            await store.put("brokers/1", [b"x" * 500_000])
        with pytest.raises(ObjectNotFound):
            await store.get("wal/1")
        assert await listed(store) == []
        assert os.listdir(small_disk / ".tmp") == []
        assert await store.create("wal/1", [b"x" * 100_000]) is Created.DONE


@pytest.mark.parametrize("is_named", [False, True])
async def test_a_file_size_limit_is_a_definite_no(tmp_path: Path, is_named: bool) -> None:
    """Python ignores SIGXFSZ, so the write is short first and fails then."""
    async with opened(tmp_path, is_named=is_named) as store:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
        try:
            with pytest.raises(StoreRefused, match=r"EFBIG.*ulimit"):
                await store.create("wal/1", [b"x" * 300_000] * 5)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert await listed(store) == []
        assert await store.create("wal/1", [b"x" * 300_000] * 5) is Created.DONE


async def test_a_file_in_the_way_is_a_definite_no(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.create("a", [b"1"])
        with pytest.raises(StoreRefused, match="ENOTDIR"):
            await store.create("a/b", [b"2"])
        await store.create("b/c", [b"1"])
        assert await store.create("b", [b"2"]) is Created.EXISTS
        await store.delete(["b", "a/b"])
        assert await listed(store) == ["a", "b/c"]


async def test_a_failed_link_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async with opened(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", fails)
            assert await store.create("wal/1", [b"1"]) is Created.UNKNOWN
        assert await listed(store) == []
        assert await store.create("wal/1", [b"1"]) is Created.DONE


async def test_failed_folder_fsync_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: reading one's own bytes back must not turn UNKNOWN into done before they are durable."""

    def fails(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async with opened(tmp_path) as store:
        await store.create("wal/1", [b"1"])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fails)
            assert await store.create("wal/2", [b"2"]) is Created.UNKNOWN
            assert await store.create("wal/2", [b"2"]) is Created.UNKNOWN
            for key in ("wal/1", "wal/2"):
                with pytest.raises(Unavailable, match="EIO"):
                    await store.get(key)
            with pytest.raises(Unavailable, match="sync"):
                await store.put("wal/3", [b"3"])
            with pytest.raises(StoreRefused, match="EIO"):  # its directory is not durable: no link
                await store.create("new/1", [b"1"])
        assert await store.get("wal/2") == b"2"
        assert await store.create("wal/2", [b"2"]) is Created.EXISTS
        assert await store.create("new/1", [b"1"]) is Created.DONE


async def test_failed_read_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_fd: int, _length: int, _start: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    async with opened(tmp_path) as store:
        await store.create("wal/1", [b"1"])
        monkeypatch.setattr(os, "pread", fails)
        with pytest.raises(Unavailable, match=r"could not read wal/1: .*EIO"):
            await store.get("wal/1")


@pytest.mark.parametrize("is_named", [False, True])
async def test_temporary_files_show_nowhere(tmp_path: Path, is_named: bool) -> None:
    async with opened(tmp_path, is_named=is_named) as store:
        await asyncio.gather(
            *(store.create(f"wal/{number % 50}", [b"x" * 1000]) for number in range(100)),
            *(store.put("brokers/1", [b"x" * 1000]) for _ in range(20)),
        )
        assert os.listdir(tmp_path / ".tmp") == []
        (tmp_path / ".tmp" / "1-1").write_bytes(b"half")
        assert [key for key in await listed(store) if not key.startswith("wal/")] == ["brokers/1"]
        for call in (store.get(".tmp/1-1"), store.create(".tmp/x", [b""])):
            with pytest.raises(ValueError, match="not an object key"):
                await call
        with pytest.raises(ValueError, match="not an object key"):
            await listed(store, ".tmp/")


async def test_stale_temporary_files_are_swept_at_open(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    for name, age_ns in (("1-0", 2 * HOUR_NS), ("1-1", HOUR_NS // 2)):
        path = tmp_path / ".tmp" / name
        path.write_bytes(b"half")
        now_ns = path.stat().st_mtime_ns
        os.utime(path, ns=(now_ns - age_ns, now_ns - age_ns))
    async with opened(tmp_path):
        assert os.listdir(tmp_path / ".tmp") == ["1-1"]


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/.", "ä", "a\0b"]
)
async def test_a_key_leads_nowhere_but_below_the_root(tmp_path: Path, key: str) -> None:
    async with opened(tmp_path / "store") as store:
        calls = [store.get(key), store.get_range(key, 0, 1), store.create(key, [b"1"])]
        for call in [*calls, store.put(key, [b"1"]), store.delete([key])]:
            with pytest.raises(ValueError, match="not an object key"):
                await call
        for prefix in {"../", f"{key}/x"} - {"/x"}:
            with pytest.raises(ValueError, match="not an object key"):
                await listed(store, prefix)
    assert os.listdir(tmp_path) == ["store"]


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("key", ["a" * 256, f"topics/{'a' * 256}/x"], ids=["file", "folder"])
async def test_impossible_key_is_refused(tmp_path: Path, key: str, is_named: bool) -> None:
    async with opened(tmp_path, is_named=is_named) as store:
        for call in (store.create, store.put):
            with pytest.raises(StoreRefused, match="longer than a file's name may be"):
                await call(key, [b"1"])
        with pytest.raises(ObjectNotFound):
            await store.get(key)
        with pytest.raises(ObjectNotFound):
            await store.get_range(key, 0, 1)
        await store.delete([key])
        assert await listed(store, f"{key}/") == await listed(store) == []


async def test_two_stores_on_one_folder_agree(tmp_path: Path) -> None:
    async with opened(tmp_path) as store_a, opened(tmp_path, is_named=True) as store_b:
        for number in range(20):
            calls = (
                store.create(f"wal/{number}", [bytes([n])])
                for n, store in enumerate((store_a, store_b))
            )
            outcomes = await asyncio.gather(*calls)
            assert {it.value for it in outcomes} == {"done", "exists"}
            assert await store_a.get(f"wal/{number}") == bytes([outcomes.index(Created.DONE)])


async def test_a_removed_directory_is_made_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.create("a/b/c", [b"1"])
        (tmp_path / "a/b/c").unlink()
        (tmp_path / "a/b").rmdir()
        (tmp_path / "a").rmdir()
        assert await store.create("a/b/c", [b"2"]) is Created.DONE


async def test_a_file_in_the_place_of_a_directory_fails_creates_until_it_is_removed(
    tmp_path: Path,
) -> None:
    store = FolderStore(tmp_path)
    (tmp_path / "a").write_text("no directory")
    with pytest.raises(StoreRefused, match="a part of the path is a file"):
        await store.create("a/b/c", [b"x"])
    (tmp_path / "a").unlink()
    assert await store.create("a/b/c", [b"x"]) is Created.DONE
    await store.close()


async def test_a_removed_root_is_not_made_again(tmp_path: Path) -> None:
    """It is a disk that is not mounted any more: writing below its mount point would hide there."""
    async with opened(tmp_path / "store") as store:
        (tmp_path / "store" / ".tmp").rmdir()
        (tmp_path / "store").rmdir()
        with pytest.raises(StoreRefused, match="ENOENT"):
            await store.create("a/b", [b"1"])


async def test_what_others_put_there_is_listed_or_passed_over(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.create("t/a", [b"1"])
        (tmp_path / "t" / "ä").write_bytes(b"22")
        os.mkfifo(tmp_path / "t" / "fifo")
        (tmp_path / "t" / "loop").symlink_to(tmp_path)
        assert await listed(store) == ["t/a", "t/ä"]


async def test_a_table_is_found_by_its_path(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert store.table_uri("topics/t-1") == f"{tmp_path}/topics/t-1"


def test_a_folder_without_links_is_unfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", fails)
    with pytest.raises(StoreUnfit, match=rf"folder {tmp_path} cannot be written: .*EPERM"):
        FolderStore(tmp_path)


async def test_named_files_replace_unnamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def without_proc(source: str, *args, **kwargs) -> None:
        if source.startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        link(source, *args, **kwargs)

    monkeypatch.setattr(os, "link", without_proc)
    async with opened(tmp_path) as store:
        assert not store._has_unnamed
        assert await store.create("a/b", [b"1"]) is Created.DONE
        assert await store.create("a/b", [b"2"]) is Created.EXISTS
        assert await store.get("a/b") == b"1"
        assert os.listdir(tmp_path / ".tmp") == []
