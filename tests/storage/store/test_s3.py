"""Byte order out of a server that lists as a tree of directories, as SeaweedFS does."""

from collections.abc import AsyncIterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from tidelog.storage.store.object_store import ObjectInfo
from tidelog.storage.store.s3 import in_byte_order


class TreeServer:
    """Lists by (directory, name), passes over all that is not after `start_after` in that order."""

    def __init__(self, keys: set[str], page_size: int) -> None:
        self.keys = keys
        self.page_size = page_size
        self.requests = 0

    async def pages(
        self, prefix: str, start_after: str, delimiter: str
    ) -> AsyncIterator[tuple[Sequence[ObjectInfo], Sequence[str]]]:
        assert delimiter == "/"
        directory = prefix[: prefix.rfind("/") + 1]
        names = set()
        for key in self.keys:
            name, slash, _ = key.removeprefix(directory).partition("/")
            if key.startswith(prefix) and (directory + name) > start_after:
                names.add((name, slash))
        remaining_names = sorted(names)
        while True:
            self.requests += 1
            page, remaining_names = (
                remaining_names[: self.page_size],
                remaining_names[self.page_size :],
            )
            files = [ObjectInfo(directory + name, 1, 1) for name, slash in page if not slash]
            yield files, [f"{directory}{name}/" for name, slash in page if slash]
            if not remaining_names:
                return


def without_clashes(keys: set[str]) -> set[str]:
    """A tree has no file where it has a directory."""
    return {key for key in keys if not any(other.startswith(f"{key}/") for other in keys)}


NAMES = st.text("a0-.~", min_size=1, max_size=3)
KEYS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
STARTS = st.text("a0-.~/", max_size=8)


@given(st.sets(KEYS, max_size=25).map(without_clashes), STARTS, STARTS, st.integers(1, 4))
async def test_it_lists_what_is_asked_for_in_byte_order(
    keys: set[str], prefix: str, start_after: str, page_size: int
) -> None:
    server = TreeServer(keys, page_size)
    listed_keys = [info.key async for info in in_byte_order(server.pages, prefix, start_after)]
    assert listed_keys == sorted(it for it in keys if it.startswith(prefix) and it > start_after)


async def test_a_flat_prefix_costs_one_request_a_page() -> None:
    keys = {f"wal/{number:020d}" for number in range(25)}
    server = TreeServer(keys | {"x/1"}, page_size=10)
    listed_keys = [info.key async for info in in_byte_order(server.pages, "wal/", "")]
    assert (listed_keys, server.requests) == (sorted(keys), 3)
    server.requests = 0
    later_keys = [info.key async for info in in_byte_order(server.pages, "wal/", listed_keys[20])]
    assert (later_keys, server.requests) == (
        listed_keys[21:],
        2,
    )  # and one for a directory of that name
