"""The Makefile: what it installs, and when it calls pip."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.repo.test_house_rules import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


INSTALLED = ["pyproject.toml", "storage/codec/native.c"]
"""Files whose change makes an installation outdated."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clone whose interpreter is a script that writes its arguments into the file `calls`."""
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    (tmp_path / "storage" / "public").mkdir(parents=True)
    (tmp_path / "storage" / "public" / "spark.py").touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "pip"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text('#!/bin/sh\necho "$@" >> calls\n')
        program.chmod(0o755)
    (tmp_path / "storage" / "codec").mkdir()
    for path in INSTALLED:
        (tmp_path / path).touch()
        os.utime(tmp_path / path, (1, 1))
    return tmp_path


def made(tree: Path, target: str) -> list[str]:
    """Run make; return what it asked pip to install."""
    calls = tree / "calls"
    calls.unlink(missing_ok=True)
    subprocess.run(["make", target], cwd=tree, check=True, capture_output=True, timeout=60)
    lines = calls.read_text().splitlines() if calls.exists() else []
    assert all(line.startswith("-m pip install ") for line in lines)
    assert not any("--quiet" in line for line in lines), "pip shows its progress"
    return [line.rpartition(" ")[2] for line in lines]


def test_pip_runs_only_if_an_extra_is_missing(tree: Path) -> None:
    assert made(tree, "has-demo") == [".[demo,server,spark]"]
    assert made(tree, "has-demo") == []
    assert made(tree, "has-runtime") == [], "make serve after make demo needs no network"
    assert made(tree, "has-all") == [".[demo,server,spark,dev]"]
    assert made(tree, "has-demo") == []


@pytest.mark.parametrize("path", INSTALLED)
def test_a_change_updates_all_that_is_installed(tree: Path, path: str) -> None:
    made(tree, "has-demo")
    later_s = (tree / ".venv" / ".has").stat().st_mtime + 1
    os.utime(tree / path, (later_s, later_s))
    assert made(tree, "has-runtime") == [".[demo,server,spark]"]


def test_an_install_that_failed_runs_again(tree: Path) -> None:
    program = tree / ".venv" / "bin" / "python"
    works = program.read_text()
    program.write_text("#!/bin/sh\nexit 1\n")
    process = subprocess.run(["make", "has-all"], cwd=tree, capture_output=True, check=False)
    assert process.returncode != 0
    program.write_text(works)
    assert made(tree, "has-all") == [".[demo,dev,server,spark]"]


def test_make_alone_says_how_large_the_first_setup_is(tree: Path) -> None:
    process = subprocess.run(["make"], cwd=tree, check=True, capture_output=True, text=True)
    assert "make dev " in process.stdout
    assert process.stdout.count(" GB (") == 3
