"""The brokers that a client knows, and the one that gets its requests. Pure.

All requests go to one broker until it fails. Then they go to the next one: first the brokers that
the caller named, in the caller's order, then the learned ones.
"""

from collections.abc import Iterable
from urllib.parse import urlsplit

from tidelog.service.client.errors import BadArgument

DEFAULT = "http://127.0.0.1:8082"
LEARNED_MAX = 64
"""Learned brokers that a client remembers: enough for a failover, with a bound."""


class Servers:
    """The URLs of brokers, without a slash at the end.

    `named` has those that the caller gave; `learned` has those that a broker gave.
    """

    def __init__(self, text: str) -> None:
        self.named = parsed(text)
        self.learned: list[str] = []
        self._current = self.named[0]

    @property
    def current(self) -> str:
        """The broker that gets the next request."""
        return self._current

    @property
    def all(self) -> list[str]:
        return [*self.named, *self.learned]

    def move_on(self, failed: str) -> None:
        """Choose the broker after `failed`. If another request has moved on already, do nothing."""
        if failed != self._current:
            return
        urls = self.all
        place = urls.index(failed) if failed in urls else -1
        self._current = urls[(place + 1) % len(urls)]

    def learn(self, urls: Iterable[str]) -> None:
        """Replace the learned brokers. The current one stays known until it fails."""
        learned_urls = [url for url in dict.fromkeys(urls) if url not in self.named][:LEARNED_MAX]
        if self._current not in self.named and self._current not in learned_urls:
            learned_urls.append(self._current)
        self.learned = learned_urls


def parsed(text: str) -> list[str]:
    """Return the URLs of a list such as `http://a:8082,b:8082`. Raises BadArgument."""
    urls = [_url(part.strip()) for part in text.split(",") if part.strip()]
    if not urls:
        raise BadArgument("the list of servers is empty: give http://HOST:PORT, or HOST:PORT")
    return list(dict.fromkeys(urls))


def _url(text: str) -> str:
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    wrong = BadArgument(f"server {text!r} does not have the form http://HOST:PORT")
    try:
        parts = urlsplit(url)
        has_port = parts.port is not None
    except ValueError:
        raise wrong from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise wrong
    if "://" not in text and not has_port:
        raise wrong
    if parts.path.endswith("/ui"):
        raise BadArgument(f"server {text!r} is the console's URL: remove /ui")
    return url
