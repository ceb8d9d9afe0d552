"""The first address that `tidelog serve` prints is the one for clients."""

import re
from pathlib import Path

from tests.support.broker import Broker


def test_first_address_is_that_of_port_for_clients(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        printed = re.findall(r"https?://[^\s\"]+", broker.log())
        assert printed[0].rstrip("/") == broker.base_url.rstrip("/"), printed
        assert any(line.startswith("    peers ") for line in broker.log().split("\n"))
