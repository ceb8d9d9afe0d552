"""The code in C: it is built if gcc is installed, and reads and writes only its buffers."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest

from tests.repo.test_house_rules import ROOT
from tidelog.storage import codec
from tidelog.storage.codec import byte_loops, plain_byte_loops

SOURCE = ROOT / "storage/codec/native.c"
HEADERS = Path(sysconfig.get_paths()["include"])
CALLS = int(os.environ.get("TIDELOG_MUTATIONS", "4000"))
FLAGS = ["-O1", "-g", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
SANITIZERS = ["libasan.so", "libubsan.so"]

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or not (HEADERS / "Python.h").exists(),
    reason="gcc or the headers of Python are not installed",
)


def test_where_a_compiler_is_the_code_in_c_is_used() -> None:
    assert not byte_loops.WHY_SLOW, f"{byte_loops.WHY_SLOW}: pip install --editable ."


@pytest.mark.parametrize(
    "version", [None, plain_byte_loops.VERSION - 1, plain_byte_loops.VERSION + 1]
)
def test_other_build_is_unused(version: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds before the first version have no number."""
    build = types.ModuleType("_native")
    if version is not None:
        vars(build)["VERSION"] = version
    monkeypatch.setattr(codec, "_native", build)
    loaded = runpy.run_path(byte_loops.__file__)
    newest = plain_byte_loops.VERSION
    assert (
        loaded["WHY_SLOW"] == f"its version is {version or 0}, not {newest}: install tidelog again"
    )
    assert loaded["walk"] is plain_byte_loops.walk


def test_the_code_in_c_reads_and_writes_only_its_buffers(tmp_path: Path) -> None:
    """gcc has no warning, and the sanitizers of addresses and undefined behaviour are silent.

    The calls have changed records and wrong sizes.
    """
    library_paths = [ran("gcc", f"-print-file-name={name}").stdout.strip() for name in SANITIZERS]
    if not all(Path(path).is_absolute() for path in library_paths):
        pytest.skip("gcc has no sanitizers here")
    file = tmp_path / "_native.so"
    ran("gcc", *FLAGS, "-fsanitize=address,undefined", f"-I{HEADERS}", SOURCE, "-o", file)
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(library_paths),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    module = "tests.storage.codec.native_fuzz"
    process = ran(sys.executable, "-m", module, file, str(CALLS), env=environment)
    assert f"{CALLS} calls" in process.stdout


def ran(
    *words: str | Path, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    process = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process
