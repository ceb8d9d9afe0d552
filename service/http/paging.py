"""Pages of a listing, as in Confluent's API.

`page_size` and `page_token` are in the request, the URL of the next page in `metadata.next`.

A token is the key of the last item in a page, and the next page begins after this key. So the pages
together have each item exactly once, even if other items are added or deleted meanwhile. Items are
made and encoded in slices of time (`Slices`). Between two slices, the event loop runs other
callbacks.
"""

import asyncio
import base64
import heapq
import json
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlencode
from weakref import WeakKeyDictionary

from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel

from tidelog.service.http.parameters import SHOWN_MAX, InvalidParameter

PAGE_ITEMS_MAX = 1_000
SLICE_S = 0.005
"""A slice ends with the first item that is done after this time. An item takes at most a few ms."""
KEYS_AT_ONCE = 2_000
"""Keys that are sorted without a pause. For 2,000 tuples of strings, this takes ~3 ms."""
TOKEN_CHARS_MAX = 4_096

Key: TypeAlias = str | int | tuple[Any, ...]
K = TypeVar("K", bound=Key)
T = TypeVar("T")


class _Turns:
    """The handlers that wait for their next slice.

    The event loop runs one slice between two of its turns, so many handlers together do not hold it
    for longer than one.
    """

    _of_loops: ClassVar["WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns]"] = (
        WeakKeyDictionary()
    )

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    @classmethod
    async def wait(cls) -> None:
        loop = asyncio.get_running_loop()
        turns = cls._of_loops.get(loop)
        if turns is None:
            turns = cls._of_loops[loop] = cls()
        if not turns._waiting:
            loop.call_soon(turns._next)
        turn = loop.create_future()
        turns._waiting.append(turn)
        await turn

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else the handler was cancelled
                turn.set_result(None)
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)


class Slices:
    """The slices of one handler's work. The handler calls `pause` after each piece of the work."""

    __slots__ = ("_end_s",)

    def __init__(self) -> None:
        self._end_s = time.perf_counter() + SLICE_S

    async def pause(self) -> None:
        """If the slice has taken SLICE_S, let the event loop run other callbacks."""
        if time.perf_counter() >= self._end_s:
            await _Turns.wait()
            self._end_s = time.perf_counter() + SLICE_S


async def sliced(items: Iterable[T]) -> AsyncIterator[T]:
    """Iterate in slices over items that other callbacks do not change."""
    slices = Slices()
    for item in items:
        yield item
        await slices.pause()


class Page(NamedTuple):
    """The page that a request asks for: `size` items at most, after the key `after`.

    `query` has the other parameters of the request.
    """

    size: int
    after: Any
    query: tuple[tuple[str, str], ...] = ()

    def position(self, *kinds: type) -> tuple[Any, ...] | None:
        """Return the parts of the key `after`, or None for the first page.

        Raises InvalidParameter if the parts do not have the types `kinds`.
        """
        if self.after is None:
            return None
        parts = self.after if isinstance(self.after, list) else [self.after]
        if [type(part) for part in parts] != list(kinds):
            raise InvalidParameter("page_token is of another listing: use metadata.next")
        return tuple(parts)

    def key(self, kind: type[K]) -> K | None:
        """Return the key `after`, or None for the first page.

        Raises InvalidParameter if the key does not have the type `kind`.
        """
        position = self.position(kind)
        return None if position is None else position[0]

    def next_url(self, url: str, last: Key) -> str:
        """Return the URL of the page after the key `last`."""
        text = json.dumps(last, separators=(",", ":"), ensure_ascii=False).encode()
        token = base64.urlsafe_b64encode(text).decode()
        return f"{url}?{urlencode([*self.query, ('page_token', token)])}"


WHOLE = Page(sys.maxsize, None)
"""The page with all items. Used if the answer does not have pages."""


async def page_of_query(
    request: Request,
    page_size: Annotated[
        int, Query(ge=1, description=f"items of a page, {PAGE_ITEMS_MAX} at most")
    ] = PAGE_ITEMS_MAX,
    page_token: Annotated[
        str,
        Query(description="from `metadata.next` of the previous page; if empty, the first page"),
    ] = "",
) -> Page:
    """Return the page that a request asks for. Raises InvalidParameter."""
    query = tuple(
        (name, text) for name, text in request.query_params.multi_items() if name != "page_token"
    )
    after = None if not page_token else _key(page_token)
    return Page(min(page_size, PAGE_ITEMS_MAX), after, query)


WantedPage = Annotated[Page, Depends(page_of_query)]


def _key(token: str) -> Any:
    try:
        if len(token) > TOKEN_CHARS_MAX:
            raise ValueError
        return json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        raise InvalidParameter(
            f"page_token={token[:SHOWN_MAX]!r} is not a token: use metadata.next"
        ) from None


async def in_order(keys: Iterable[K], after: K | None = None) -> Iterator[K]:
    """Return the keys after `after`, or all keys if `after` is None, sorted."""
    all_keys: list[Any] = list(keys)
    runs = []
    for first in range(0, len(all_keys), KEYS_AT_ONCE):
        if first:
            await asyncio.sleep(0)
        some = all_keys[first : first + KEYS_AT_ONCE]
        runs.append(sorted(some if after is None else [key for key in some if key > after]))
    return heapq.merge(*runs)


async def answer_page(
    page: Page,
    shell: BaseModel,
    keys: Iterable[K],
    item: Callable[[K], BaseModel | Awaitable[BaseModel | None] | None],
) -> Any:
    """Return a response that FastAPI sends unchanged: `shell` with the items of the page.

    `shell` is a list without data. `keys` must be sorted and begin after `page.after`. `item`
    returns None if the caller may not see the item, or if it was deleted.
    """
    texts: list[str] = []
    last: K | None = None
    async for key in sliced(keys):
        resource = item(key)
        if resource is not None and not isinstance(resource, BaseModel):
            resource = await resource
        if resource is None:
            continue
        if len(texts) == page.size:
            metadata: Any = shell.metadata  # type: ignore[attr-defined]
            assert last is not None, "a page has an item at least"
            metadata.next = page.next_url(metadata.self_url, last)
            break
        texts.append(resource.model_dump_json(by_alias=True))
        last = key
    head = shell.model_dump_json(by_alias=True)
    assert head.endswith('"data":[]}'), "the items are the last field of a list"
    return Response(head[:-2] + ",".join(texts) + "]}", media_type="application/json")
