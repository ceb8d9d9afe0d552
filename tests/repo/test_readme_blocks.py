"""The blocks of README.md, of the pages of service/ and of deploy/README.md do what they say.

A page's shell and Python blocks run as printed, in its order, in one shell, against a broker with
an empty log: only the address of the broker is another. An answer after a block is compared. A
block that cannot run here has `<!-- not run: reason -->` before it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.repo.test_house_rules import ROOT
from tests.support.broker import Broker, environment
from tests.support.ports import free_port

PAGES = ("README.md", "service/docs/API.md", "service/docs/GUIDE.md", "service/docs/CLIENT.md")
READ = (*PAGES, "deploy/README.md")
"""Pages whose blocks run, or say why not. No block of deploy/README.md can run here."""
ADDRESS = "localhost:8082"
ANYTHING = "..."
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"^(?:\$ |sudo |make |pip |tidelog |curl |python3? )", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block. `answer` is what the page shows after it; empty: nothing."""

    language: str
    text: str
    reason: str
    answer: str


def blocks_of(page: str) -> list[Block]:
    blocks: list[Block] = []
    for match in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
        if match["language"] == "json" and blocks:
            blocks[-1] = blocks[-1]._replace(answer=match["text"])
        else:
            blocks.append(Block(match["language"], match["text"], match["reason"] or "", ""))
    return blocks


def has_java() -> bool:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=f"{home}/bin" if home else None) is not None


def script_of(blocks: Sequence[Block], folder: Path, port: int) -> str:
    """One shell for all: each block's output is a file, and the first that fails ends it."""
    lines = ["set -eu", 'curl() { command curl --fail-with-body -sS "$@"; }']
    for number, block in enumerate(blocks):
        lines.append(f"exec > {folder}/{number}.out")
        text = block.text.replace(ADDRESS, f"127.0.0.1:{port}")
        if block.language == "python":
            (folder / f"{number}.py").write_text(text, encoding="utf-8")
            text = f"{sys.executable} {folder}/{number}.py\n"
        lines.append(text)
    return "\n".join(lines)


def is_like(pattern: Any, answer: Any) -> bool:
    """Whether an answer is what the page shows: objects may have more, `...` is anything."""
    if pattern == ANYTHING:
        return True
    if isinstance(pattern, dict) and isinstance(answer, dict):
        members = {key: value for key, value in pattern.items() if key != ANYTHING}
        return all(key in answer and is_like(it, answer[key]) for key, it in members.items())
    if isinstance(pattern, list) and isinstance(answer, list) and len(pattern) == len(answer):
        return all(
            is_like(wanted_item, answer_item)
            for wanted_item, answer_item in zip(pattern, answer, strict=True)
        )
    return bool(pattern == answer)


def last_of(text: str) -> Any:
    """The last of the answers: a block may have several commands."""
    decoder, position, answer = json.JSONDecoder(), 0, None
    while position < len(text):
        answer, position = decoder.raw_decode(text, position)
        position += len(text[position:]) - len(text[position:].lstrip())
    return answer


@pytest.mark.parametrize("page", READ)
def test_a_block_with_commands_is_run_or_says_why_not(page: str) -> None:
    for block in blocks_of(page):
        assert block.language in ("sh", "python", ""), f"{page}: how is this run?\n{block.text}"
        assert page in PAGES or block.reason, f"{page}: nothing runs this\n{block.text}"
        for test in re.findall(r"tests/[\w/]+\.py", block.reason):
            assert (ROOT / test).is_file(), f"{page}: {test} is not there"
        if not block.language:
            assert not COMMAND.search(block.text), f"{page}: no language says\n{block.text}"
            assert not block.reason, f"{page}: nothing runs this\n{block.text}"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.xdist_group("spark")
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("page", PAGES)
def test_every_block_does_what_the_page_says(page: str, tmp_path: Path) -> None:
    blocks = [block for block in blocks_of(page) if block.language and not block.reason]
    if not has_java():  # Spark needs it, and the page says so
        blocks = [block for block in blocks if "pyspark" not in block.text]
    assert len(blocks) > 2
    with Broker(tmp_path, (tmp_path / "tidelog-data").as_uri()) as broker:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        process = subprocess.run(
            ["bash", "-c", script_of(blocks, tmp_path, broker.port)],
            cwd=tmp_path,
            env=environment(
                PATH=path,
                TIDELOG_URL=broker.base_url,
                PYSPARK_PYTHON=sys.executable,
                PYTHONWARNINGS="ignore",
            ),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    ran = sorted(int(path.stem) for path in tmp_path.glob("*.out"))
    last = (tmp_path / f"{ran[-1]}.out").read_text()
    assert process.returncode == 0, f"{page}\n{blocks[ran[-1]].text}{last}{process.stderr}"
    assert ran == list(range(len(blocks)))
    for number, block in enumerate(blocks):
        if block.answer:
            answer = last_of((tmp_path / f"{number}.out").read_text())
            assert is_like(json.loads(block.answer), answer), f"{block.text}{json.dumps(answer)}"


SERVE = re.compile(r"^(tidelog serve [^#\n]*?)(?: --port (\d+))? *(?:#.*)?$", re.MULTILINE)
READY = """
trap 'kill $(jobs -p); wait' EXIT
ready() {
    until command curl -fsS "http://127.0.0.1:$1/ready" > /dev/null 2>&1; do
        kill -0 $!
        sleep 0.1
    done
}
"""


def run_serving(block: Block, folder: Path, checks: str) -> str:
    """Run a block that starts brokers, and then the checks; return the output.

    The block runs as printed but for its ports and in the background. `$FIRST` and `$LAST` are URLs
    of the brokers.
    """
    ports: list[int] = []

    def in_background(match: re.Match[str]) -> str:
        ports.append(free_port())
        return f"{match[1]} --port {ports[-1]} > {ports[-1]}.log 2>&1 &\nready {ports[-1]}"

    text = SERVE.sub(in_background, block.text)
    assert ports
    first, last = (f"http://127.0.0.1:{port}" for port in (ports[0], ports[-1]))
    text = text.replace(ADDRESS, f"127.0.0.1:{ports[0]}")
    names = f"export TIDELOG_URL={first} FIRST={first} LAST={last}\n"
    head = 'set -eu\numask 022\ncurl() { command curl --fail-with-body -sS "$@"; }\n'
    process = subprocess.run(
        ["bash", "-c", head + READY + names + text + checks],
        cwd=folder,
        env=environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, text + process.stdout + process.stderr
    return process.stdout


def block_of_guide(words: str) -> Block:
    (guide_block,) = (block for block in blocks_of("service/docs/GUIDE.md") if words in block.text)
    return guide_block


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_block_of_keys_does_what_the_page_says(tmp_path: Path) -> None:
    checks = "tidelog consume shop.orders; tidelog acls list; tidelog quotas list"
    out = run_serving(block_of_guide("openssl rand"), tmp_path, checks)
    assert '{"id":1}\n' in out
    assert "shop." in out
    assert "20000000" in out
    for name in ("admin.key", "shop.key"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    ignored = ["git", "check-ignore", "admin.key", "shop.key", "tidelog-data/"]
    if shutil.which("git") and (ROOT / ".git").exists():
        process = subprocess.run(ignored, cwd=ROOT, capture_output=True, text=True, check=False)
        assert process.stdout.split() == ignored[2:]


def test_the_block_of_several_brokers_does_what_the_page_says(tmp_path: Path) -> None:
    checks = (
        "tidelog topics create t --server $FIRST; printf 'a\\n' | tidelog produce t --server $LAST;"
        "tidelog consume t --server $FIRST; tidelog status --json"
    )
    out = run_serving(block_of_guide("--port 8083"), tmp_path, checks)
    assert "\na\n" in out
    assert len(json.loads(out.splitlines()[-1])["brokers"]) == 2
