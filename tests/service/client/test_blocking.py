"""The blocking classes after they are closed."""

from collections.abc import Callable
from typing import Any

import pytest

from tidelog.client import Admin, Closed, Consumer, Producer

SERVER = "127.0.0.1:1"  # none of these tests sends a request


@pytest.mark.parametrize(
    ("made", "use"),
    [
        (lambda: Producer(SERVER), lambda producer: producer.send("t", b"x")),
        (lambda: Consumer(SERVER, ["t"]), next),
        (lambda: Admin(SERVER), lambda admin: admin.topics()),
    ],
    ids=["producer", "consumer", "admin"],
)
def test_closed_client_says_so(made: Callable[[], Any], use: Callable[[Any], object]) -> None:
    client = made()
    client.close()
    with pytest.raises(Closed, match="is closed"):
        use(client)
