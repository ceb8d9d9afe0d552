"""Object store for one machine: objects are files below one folder, `file:///...`.

`create` has four steps: write a file without a name, fdatasync it, link it to its final name, fsync
the directory. So DONE means that bytes and name are on the disk (I1). A named file is always a
whole object. A key cannot be an object and a directory at once; in S3 it can.
**On a crash** (kill -9 or loss of power):
- before the link, nothing is left: the kernel frees an unnamed file. If the file system has no
  unnamed files, a temporary file stays in `.tmp/`. A store that opens the folder an hour or more
  later removes the file.
- after the link and before the directory's fsync, the whole object is left. Only a loss of power
  can remove it. No process relies on it then: its writer sent no answer yet, and the other brokers
  of the machine lost power too.

Rejected: O_EXCL on the final name (the loser of a race reads half an object); a single fsync, after
the link (160 instead of 290 us, but a loss of power leaves named, empty WAL entries); a cache of
directory descriptors (it saves 4 us, but if the kernel reuses a descriptor's number, the link goes
into a wrong folder).
"""

import asyncio
import contextlib
import errno
import itertools
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from tidelog.storage.core.errors import ObjectNotFound, StoreRefused, StoreUnfit, Unavailable
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.threads import Threads
from tidelog.storage.store.object_store import Created, ObjectInfo

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_TEMPORARY = ".tmp"
_THREADS = 8  # a create waits for the disk, not for a core; the disk merges concurrent syncs
_LIST_BATCH = 512  # names; with one stat for each, a thread needs about a millisecond per batch
_DIRECTORIES_MAX = 4096  # known durable directories; a full set is cleared and filled again
_STALE_NS = 3600 * 10**9
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600  # a user that reads secret.json can act as a broker
_IOV_MAX = os.sysconf("SC_IOV_MAX")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
# For a close after a sync, and for the removal of a temporary file: a later start repeats it.
_QUIETLY = contextlib.suppress(OSError)
_UNNAMED = getattr(os, "O_TMPFILE", 0)  # only Linux has it
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}  # no object has the key
_sync_data = getattr(os, "fdatasync", os.fsync)

_ADVICE = {
    errno.ENOSPC: "free space on its disk",
    errno.EDQUOT: "raise the quota",
    errno.EACCES: "let the broker's user write there",
    errno.EROFS: "mount it writable",
    errno.ENOTDIR: "a part of the path is a file: name a folder",
    errno.ENAMETOOLONG: "a part of its key is longer than a file's name may be",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EMFILE: "raise the open file limit (ulimit -n)",
}


class FolderStore:
    """A store in a folder.

    Owns its threads until `close`. Safe for concurrent tasks, and for several processes with the
    same folder.

    The constructor blocks: it creates the folder, tests the file system and removes stale temporary
    files. It raises `StoreUnfit` if it cannot create a folder, a file or a link.
    A cancelled call may still finish in its thread, so a cancelled create has an unknown outcome.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.path.abspath(root)
        self._temporary = os.path.join(self._root, _TEMPORARY)
        self._numbers = itertools.count()
        self._unsynced: set[str] = set()
        self._seen_ms = 0
        above = (str(path) for path in (Path(self._root), *Path(self._root).parents))
        self._durable = set(itertools.islice(filter(os.path.isdir, above), 1))
        try:
            self._has_unnamed = self._try_file_system()
        except OSError as error:
            raise StoreUnfit(_what("cannot be written", self._root, error)) from error
        self._durable = {self._root}
        self._pool = Threads(_THREADS, thread_name_prefix="folder-store")

    @property
    def url(self) -> str:
        return Path(self._root).as_uri()

    @property
    def seen_ms(self) -> int:
        return self._seen_ms

    def table_uri(self, key: str) -> str:
        return self._path(key)

    async def get(self, key: str) -> bytes:
        return await self._run(self._read, key, self._path(key), 0, None)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return await self._run(self._read, key, self._path(key), start, length)

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        return await self._run(self._create, key, self._path(key), parts)

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        await self._run(self._put, key, self._path(key), parts)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        directory = prefix[: prefix.rfind("/") + 1]
        if directory:
            self._path(directory[:-1])
        walk = _walk(self._root, directory, prefix, start_after)
        while batch := await self._run(lambda: tuple(itertools.islice(walk, _LIST_BATCH))):
            for info in batch:
                yield info

    async def delete(self, keys: Iterable[str]) -> None:
        """Delete in the given order. A loss of power may restore a deleted object, whole."""
        await self._run(self._delete, [(key, self._path(key)) for key in keys])

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.shutdown)

    async def _run(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *args)

    def _path(self, key: str) -> str:
        """Return the file of a key.

        If `key` is no valid key, which is a bug of the caller, raises ValueError. A valid key may
        be too long for a file name. Then no object has this key, and a write raises StoreRefused.
        """
        names = key.split("/")
        is_strange = any(name in {"", ".", ".."} for name in names)
        if is_strange or not key.isascii() or "\0" in key or names[0] == _TEMPORARY:
            raise ValueError(f"{key!r} is not an object key: it cannot be a file below the root")
        return f"{self._root}/{key}"

    # --- in a thread ------------------------------------------------------------------------

    def _create(self, key: str, path: str, parts: Sequence[Part]) -> Created:
        directory, _, name = path.rpartition("/")
        try:
            with (
                self._directory(directory) as directory_fd,
                self._file(directory_fd, parts, is_named=not self._has_unnamed) as source,
            ):
                try:
                    # With directory descriptors this is linkat(AT_SYMLINK_FOLLOW), which needs no
                    # privilege to name an unnamed file.
                    os.link(source, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
                    outcome = Created.DONE
                except FileExistsError:
                    outcome = Created.EXISTS  # its creator may not have synced the directory yet
                except OSError as error:
                    if error.errno == errno.ENAMETOOLONG:
                        raise
                    return Created.UNKNOWN
                is_durable = self._sync(directory, directory_fd)
                return outcome if is_durable else Created.UNKNOWN
        except OSError as error:  # before the link: nothing is stored and nothing will be
            raise StoreRefused(_what(f"refused {key}", self._root, error)) from error

    def _put(self, key: str, path: str, parts: Sequence[Part]) -> None:
        directory = os.path.dirname(path)
        try:
            with (
                self._directory(directory) as directory_fd,
                self._file(directory_fd, parts, is_named=True) as source,
            ):
                os.replace(source, path)
                is_durable = self._sync(directory, directory_fd)
        except OSError as error:
            raise StoreRefused(_what(f"refused {key}", self._root, error)) from error
        if not is_durable:
            raise Unavailable(f"folder {self._root} could not sync the directory of {key}")

    def _read(self, key: str, path: str, start: int, length: int | None) -> bytes:
        try:
            if (directory := os.path.dirname(path)) in self._unsynced:
                sync_path(directory)
                self._unsynced.discard(directory)
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                end = size if length is None else min(start + length, size)
                chunks = []
                while start < end and (chunk := os.pread(file.fileno(), end - start, start)):
                    chunks.append(chunk)  # one read returns up to 2 GiB
                    start += len(chunk)
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        except OSError as error:
            if error.errno in _ABSENT:
                raise ObjectNotFound(key) from None
            raise Unavailable(_what(f"could not read {key}", self._root, error)) from error

    def _delete(self, keys: Iterable[tuple[str, str]]) -> None:
        for key, path in keys:
            try:
                os.unlink(path)
            except OSError as error:
                if error.errno in _ABSENT:
                    continue
                raise Unavailable(_what(f"could not delete {key}", self._root, error)) from error

    @contextlib.contextmanager
    def _directory(self, directory: str) -> Iterator[int]:
        """Yield a descriptor of the directory. The directory exists and its name is durable."""
        try:
            self._make_durable(directory)
            fd = os.open(directory, _DIRECTORY)
        except FileNotFoundError:  # another process removed it, or a directory above it
            self._durable = {self._root}
            self._make_durable(directory)
            fd = os.open(directory, _DIRECTORY)
        try:
            yield fd
        finally:
            with _QUIETLY:
                os.close(fd)

    def _make_durable(self, directory: str) -> None:
        """Create the directory, and sync its parent.

        Sync the parent also if the directory exists, because its creator may not have synced the
        parent yet.
        """
        if directory in self._durable:
            return
        parent = os.path.dirname(directory)
        self._make_durable(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, _FOLDER_MODE)
        sync_path(parent)
        if len(self._durable) >= _DIRECTORIES_MAX:
            self._durable = {self._root}
        self._durable.add(directory)

    @contextlib.contextmanager
    def _file(self, directory_fd: int, parts: Sequence[Part], *, is_named: bool) -> Iterator[str]:
        """Yield the path of a synced file, which the caller may link.

        At exit, a file without a link is removed.
        """
        path = ""
        if is_named:
            fd, path = self._open_named()
        else:
            fd = os.open(".", os.O_WRONLY | _UNNAMED, _FILE_MODE, dir_fd=directory_fd)
        try:
            _write(fd, parts)
            _sync_data(fd)
            self._seen_ms = os.fstat(fd).st_mtime_ns // 1_000_000
            yield path or f"/proc/self/fd/{fd}"
        finally:
            with _QUIETLY:
                os.close(fd)
            if path:  # the kernel frees an unnamed file
                with _QUIETLY:
                    os.unlink(path)

    def _open_named(self) -> tuple[int, str]:
        for number in self._numbers:  # containers that share a folder may share a process id
            path = f"{self._temporary}/{os.getpid()}-{number}"
            with contextlib.suppress(FileExistsError):
                return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE), path
        raise AssertionError("itertools.count does not end")

    def _sync(self, directory: str, directory_fd: int) -> bool:
        """Sync the directory.

        Return whether the fsync succeeded. If it failed, the next read in the directory must first
        repeat the fsync with success. Without this rule, a writer that reads its own bytes back
        would treat them as committed, although they are not durable.
        """
        try:
            os.fsync(directory_fd)
        except OSError:
            self._unsynced.add(directory)
            return False
        self._unsynced.discard(directory)
        return True

    def _try_file_system(self) -> bool:
        """Return whether unnamed files can be linked.

        Remove stale temporary files. Raises OSError if no file can be linked.
        """
        with self._directory(self._temporary) as directory_fd:
            with self._file(directory_fd, (), is_named=True) as source:
                now_ns = self._try_link(directory_fd, source)
            with os.scandir(self._temporary) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        if entry.stat(follow_symlinks=False).st_mtime_ns < now_ns - _STALE_NS:
                            os.unlink(entry.path)
            try:
                with self._file(directory_fd, (), is_named=False) as source:
                    self._try_link(directory_fd, source)
            except OSError:
                return False
        return _UNNAMED != 0

    def _try_link(self, directory_fd: int, source: str) -> int:
        """Test a link; return the file's modification time in ns.

        It is comparable with other files' modification times, because the same clock sets all of
        them.
        """
        status = os.stat(source)
        name = f"{self._temporary}/inode-{status.st_ino}"  # used by this file or by no file
        os.link(source, name, src_dir_fd=directory_fd)
        os.unlink(name)
        return status.st_mtime_ns


def _what(verb: str, root: str, error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, "?")
    advice = _ADVICE.get(error.errno or 0, "check the disk")
    return f"folder {root} {verb}: {error.strerror} ({code}); {advice}"


def sync_path(path: str | Path) -> None:
    """Make a file, or the names in a directory, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(fd: int, parts: Sequence[Part]) -> None:
    views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
    first = 0
    while first < len(views):
        written = os.writev(fd, views[first : first + _IOV_MAX])
        while written and written >= views[first].nbytes:
            written -= views[first].nbytes
            first += 1
        if written:  # full disk, size limit or 2 GiB: the next call writes the rest or raises why
            views[first] = views[first][written:]


def _walk(root: str, directory: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
    """Yield objects below `directory` ("" or with a final slash) in byte order of their *keys*.

    A directory sorts as its name with a slash: the object `a-b` comes before the directory `a/`,
    although `a` comes before `a-b`.
    """
    # A cheap first filter, because a listing of the newest WAL entries needs only a few of 100,000
    # names. `start_name` is the part of `start_after` that is a name in this directory. The
    # filter keeps a name that is not before `start_name`, or is a prefix of `start_name`.
    start_name = start_after.removeprefix(directory).partition("/")[0]
    is_inside = start_after.startswith(directory)
    keys = []
    try:
        with os.scandir(f"{root}/{directory}") as entries:
            for entry in entries:
                name = entry.name
                if is_inside and name < start_name and not start_name.startswith(name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    key = f"{directory}{name}/"
                    is_wanted = key.startswith(prefix) or prefix.startswith(key)
                    if is_wanted and (key > start_after or start_after.startswith(key)):
                        keys.append(key)
                elif (key := directory + name) > start_after and key.startswith(prefix):
                    keys.append(key)
    except OSError as error:
        if error.errno in _ABSENT:
            return
        raise Unavailable(_what(f"could not list {directory}", root, error)) from error
    keys.sort()
    for key in keys:
        if key.endswith("/"):
            if key != f"{_TEMPORARY}/":
                yield from _walk(root, key, prefix, start_after)
            continue
        try:
            status = os.lstat(f"{root}/{key}")
        except FileNotFoundError:
            continue  # deleted since the scan
        except OSError as error:
            raise Unavailable(_what(f"could not list {key}", root, error)) from error
        if stat.S_ISREG(status.st_mode):
            yield ObjectInfo(key, status.st_size, status.st_mtime_ns // 1_000_000)
