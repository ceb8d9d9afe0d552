"""Pages of a listing, as in Confluent's API.

`page_size` and `page_token` are in the request, the URL of the next page in `metadata.next`.

A token is the key of the last item in a page, and the next page begins after this key. So the pages
together have each item exactly once, even if other items are added or deleted meanwhile. Items are
made and encoded in slices of time (service.slices).
"""

import base64
import json
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlencode

from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel

from tidelog.service.http.parameters import SHOWN_MAX, InvalidParameter
from tidelog.service.slices import Key, sliced

PAGE_ITEMS_MAX = 1_000
TOKEN_CHARS_MAX = 4_096

K = TypeVar("K", bound=Key)


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
    start_key = None if not page_token else _key(page_token)
    return Page(min(page_size, PAGE_ITEMS_MAX), start_key, query)


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
