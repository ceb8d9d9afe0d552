"""The installed package: modules, extras, and a wheel that works outside the clone."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.repo.test_house_rules import MODULES, PACKAGES, PACKED, ROOT
from tests.support.ports import free_port
from tidelog.service.cli.main import loaded
from tidelog.storage.codec import byte_loops

with open(ROOT / "pyproject.toml", "rb") as file:
    PROJECT = tomllib.load(file)
SETUPTOOLS = PROJECT["tool"]["setuptools"]
BASE_MODULES = {"httpx", "msgspec", "orjson", "rich", "typer"}
"""Dependencies of the base distribution: enough for a client."""
BASE_BYTES_MAX = 60_000_000
NATIVE = "storage/codec/native.c"
HIDDEN = (
    *("aioboto3", "boto3", "botocore", "deltalake", "fastapi", "google_crc32c", "httptools", "jwt"),
    *("numpy", "pandas", "prometheus_client", "pyarrow", "pyspark", "re2", "uvicorn", "uvloop"),
)
"""Modules of the extras."""
CLIENT_COMMANDS = [
    "status",
    "produce t",
    "produce t --format ndjson",
    "consume t",
    "consume t --group g",
    "seal t",
    "delete-records t 0:1",
    "compact t",
    "compactions",
    "clients",
    "topics create t",
    "topics list",
    "topics describe t",
    "topics alter t --partitions 2",
    "topics delete t --yes",
    "topics skew t",
    "defaults list",
    "defaults alter -u num.partitions",
    "groups list",
    "groups describe g",
    "groups lag g",
    "groups reset g --to -1h",
    "groups reset g --by -1",
    "groups export g",
    "groups delete g --yes",
    "keys create alice",
    "keys list",
    "keys delete k --yes",
    "acls add alice -o READ --topic t",
    "acls list",
    "acls remove --principal alice --yes",
    "quotas list",
    "quotas set alice --producer-byte-rate 1000",
    "quotas remove alice",
]
EACH_COMMAND = """
import hide
import contextlib, io, json, sys
from tidelog.service.cli.main import main
for text in sys.argv[1:]:
    words = json.loads(text)
    sys.argv[1:] = words
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main()
    print(json.dumps([words, status, said.getvalue().splitlines()]))
"""
REFUSED = (
    "connection refused; start a broker (tidelog serve), or name one with --server or TIDELOG_URL"
)
WHERE = """
from importlib.util import find_spec
import tidelog.storage.log_engine, tidelog.spark
print(tidelog.storage.log_engine.__file__)
print([find_spec(name) for name in ("service", "storage", "compaction")])
"""


def folder_of(package: str) -> Path:
    """The folder of a listed package, by setuptools' rule: the nearest parent that is mapped."""
    mapped: dict[str, str] = SETUPTOOLS["package-dir"]
    name, subfolder = package, ""
    while name not in mapped:
        name, _, last = name.rpartition(".")
        subfolder = f"{last}/{subfolder}" if subfolder else last
    return Path(mapped[name], subfolder) if subfolder else Path(mapped[name])


def test_the_list_of_packages_is_the_folders() -> None:
    listed = {folder_of(package) for package in SETUPTOOLS["packages"]}
    data = {path.parent for path in PACKED}
    assert listed == set(PACKAGES) | data | {Path("storage/public")}


def test_the_namespace_is_open() -> None:
    """`tidelog` is a namespace package: another distribution can add to it."""
    assert Path("storage/public/__init__.py") not in MODULES


def test_the_base_installs_what_a_client_needs() -> None:
    base = {re.split(r"[\[<>=~;]", text)[0] for text in PROJECT["project"]["dependencies"]}
    assert base == BASE_MODULES


def test_the_base_is_small() -> None:
    """The base's dependencies and our own modules, as installed, are under 60 MB."""
    base = PROJECT["project"]["dependencies"]
    sizes = {name: size_of(name) for name in closure(base)}
    ours = sum((ROOT / path).stat().st_size for path in [*MODULES, *PACKED])
    total = sum(sizes.values()) + ours
    assert total < BASE_BYTES_MAX, f"{total} bytes: {sizes}, and {ours} of our own"


def closure(requirements: list[str]) -> set[str]:
    """The distributions that these need in this environment, without extras."""
    names: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        if (
            requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        ) or requirement.name in names:
            continue
        names.add(requirement.name)
        waiting += [Requirement(text) for text in metadata.requires(requirement.name) or []]
    return names


def size_of(name: str) -> int:
    """The bytes of a distribution's files."""
    files = [Path(str(path.locate())) for path in metadata.files(name) or []]
    return sum(path.stat().st_size for path in files if path.is_file())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"))


def built(folder: Path, **environment: str) -> Path:
    """A wheel, built from a copy of the files in git by this environment's setuptools.

    An isolated build would need the package index.
    """
    source = folder / "source"
    other_paths = ("pyproject.toml", "README.md", "LICENSE", NATIVE)
    for path in [*MODULES, *PACKED, *map(Path, other_paths)]:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, **environment})
    return next(folder.glob("*.whl"))


@pytest.mark.xdist_group("wheel")
def test_a_wheel_holds_the_packages_and_no_other_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tidelog"}
    assert "tidelog/spark.py" in names
    assert "tidelog/client.py" in names
    assert "tidelog/__init__.py" not in names
    assert "tidelog/service/console/static/index.html" in names


@pytest.mark.xdist_group("wheel")
def test_a_wheel_has_code_in_c_if_there_is_a_compiler(wheel: Path, tmp_path: Path) -> None:
    """Without one, the installation does not fail: Python does the same."""
    without = built(tmp_path, CC="false")
    names = [zipfile.ZipFile(archive).namelist() for archive in (wheel, without)]
    has_code = [any(name.endswith(".so") for name in of_one) for of_one in names]
    assert has_code == [not byte_loops.WHY_SLOW, False]


@pytest.mark.xdist_group("wheel")
def test_a_wheel_serves_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    """The dependencies are those of this environment; the code is the wheel's alone."""
    python = installed(wheel, tmp_path / "venv")
    package_path, specs = run(python, "-c", WHERE, cwd=tmp_path).splitlines()
    assert Path(package_path).is_relative_to(tmp_path / "venv")
    assert specs == "[None, None, None]"
    tidelog = python.with_name("tidelog")
    assert run(tidelog, "--version", cwd=tmp_path).strip() == PROJECT["project"]["version"]


@pytest.mark.xdist_group("wheel")
def test_commands_without_the_extra_server_say_so_in_a_line(wheel: Path, tmp_path: Path) -> None:
    """Only the base's modules can be imported; `tidelog -h` works, `tidelog serve` does not."""
    python, path = without_extras(wheel, tmp_path)
    main = "import hide, sys; from tidelog.service.cli.main import main; sys.exit(main())"
    usage = run(python, "-c", main, "-h", cwd=tmp_path, env=path)
    assert "serve" in usage
    for command in ("serve", "scrub"):
        words = [python, "-c", main, command]
        failed = subprocess.run(
            words, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=60, check=False
        )
        assert failed.returncode == 1
        (line,) = failed.stderr.splitlines()
        assert line.startswith(f"tidelog: tidelog {command} needs the extra 'server' (")
        assert line.endswith(" is not installed): pip install 'tidelog[server]'")


@pytest.mark.xdist_group("wheel")
def test_client_commands_need_the_base_alone(wheel: Path, tmp_path: Path) -> None:
    """Every client command, in one process, up to its first connection: the port is closed."""
    python, path = without_extras(wheel, tmp_path)
    run(python, "-c", "import hide; import tidelog.client", cwd=tmp_path, env=path)
    server = f"http://127.0.0.1:{free_port()}"
    commands = [[*command.split(), "--server", server] for command in CLIENT_COMMANDS]
    output = run(python, "-c", EACH_COMMAND, *map(json.dumps, commands), cwd=tmp_path, env=path)
    assert [json.loads(line) for line in output.splitlines()] == [
        [command, 3, [f"tidelog: cannot reach {server}: {REFUSED}"]] for command in commands
    ]


def test_the_client_commands_are_those_with_a_server() -> None:
    """Every command that takes `--server` is tried without the extras."""
    tried = {tuple(command.split()[:2]) for command in CLIENT_COMMANDS}
    named = {words for words, options in commands_of(loaded()) if "--server" in options}
    assert named <= tried | {first[:1] for first in tried}


def commands_of(group: Any, *words: str) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """The words of each command, and its options."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, *words, name)
        else:
            yield (
                (*words, name),
                {option for parameter in command.params for option in parameter.opts},
            )


def without_extras(wheel: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    """The interpreter of an environment with the wheel, and variables that hide the extras.

    `import hide` hides their modules.
    """
    python = installed(wheel, folder / "venv")
    hide = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in HIDDEN)
    (folder / "venv" / "hide.py").write_text(hide)
    return python, {**os.environ, "PYTHONPATH": str(folder / "venv")}


def installed(wheel: Path, folder: Path) -> Path:
    """The interpreter of a new environment: the wheel, and this environment's other packages."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "others.pth").write_text(f"{Path(ast.__file__).parent}\n{_site_packages()}\n")
    command = python.with_name("tidelog")
    command.write_text(
        f"#!{python}\nimport sys\nfrom tidelog.service.cli.main import main\nsys.exit(main())\n"
    )
    command.chmod(0o755)
    return python


def _site_packages() -> Path:
    return Path(pytest.__file__).parents[1]


def run(program: Path, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Return what the program says. Without `env`, it finds no module by this process's path."""
    if env is None:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [program, *arguments]
    process = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
