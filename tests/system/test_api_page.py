"""service/API.md: its examples, run by a shell against a real broker in the order of the page; and
its reference, which has the routes of the OpenAPI document."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from service import api_reference
from tests.support.broker import Broker, environment

PAGE = api_reference.PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```\n(?:```json\n(.*?)^```\n)?", PAGE, re.DOTALL | re.MULTILINE)
ANYTHING = "..."


async def test_the_reference_has_every_route_that_brokers_document() -> None:
    """Routes, not every word: those are written anew by `python -m service.api_reference`."""
    wanted = api_reference.page(await api_reference.openapi())
    assert routes(wanted) == routes(PAGE), "python -m service.api_reference writes it"
    assert len(routes(PAGE)) > 70


def routes(page: str) -> list[str]:
    return re.findall(r"^\| `([A-Z]+ /[^`]*)` \|", page, re.MULTILINE)


def is_like(wanted: Any, given: Any) -> bool:
    """Whether an answer is what the page shows: objects may have more, `...` is anything."""
    if wanted == ANYTHING:
        return True
    if isinstance(wanted, dict) and isinstance(given, dict):
        members = {key: value for key, value in wanted.items() if key != ANYTHING}
        return all(key in given and is_like(it, given[key]) for key, it in members.items())
    if isinstance(wanted, list) and isinstance(given, list) and len(wanted) == len(given):
        return all(is_like(one, other) for one, other in zip(wanted, given, strict=True))
    return bool(wanted == given)


def last_of(text: str) -> Any:
    """The last of the answers: a block may have several commands."""
    decoder, at, found = json.JSONDecoder(), 0, None
    while at < len(text):
        found, at = decoder.raw_decode(text, at)
        at += len(text[at:]) - len(text[at:].lstrip())
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_every_example_does_what_the_page_says(tmp_path: Path) -> None:
    assert len(BLOCKS) > 10
    # Each block's output in a file of its own; an example that fails ends the shell.
    script = ["set -eu", 'curl() { command curl --fail-with-body -sS "$@"; }']
    for number, (commands, _) in enumerate(BLOCKS):
        script += [f"exec > {tmp_path}/{number}.out", commands]
    with Broker(tmp_path) as broker:
        text = "\n".join(script).replace("localhost:8082", f"127.0.0.1:{broker.port}")
        done = subprocess.run(
            ["bash", "-c", text],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        ran = sorted(int(path.stem) for path in tmp_path.glob("*.out"))
        last = (tmp_path / f"{ran[-1]}.out").read_text()
        assert done.returncode == 0, f"{BLOCKS[ran[-1]][0]}{last}{done.stderr}"
    assert ran == list(range(len(BLOCKS)))
    for number, (commands, shown) in enumerate(BLOCKS):
        if shown:
            given = last_of((tmp_path / f"{number}.out").read_text())
            assert is_like(json.loads(shown), given), f"{commands}{json.dumps(given)}"
