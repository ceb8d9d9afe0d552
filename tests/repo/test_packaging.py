"""The installed package: modules, extras, and a wheel that works outside the clone."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.repo.test_house_rules import MODULES, PACKAGES, PACKED, ROOT

with open(ROOT / "pyproject.toml", "rb") as file:
    PROJECT = tomllib.load(file)
SETUPTOOLS = PROJECT["tool"]["setuptools"]
BASE_MODULES = {"httpx", "msgspec", "orjson", "rich", "typer"}
"""Dependencies of the base distribution: enough for a client."""
WHERE = """
from importlib.util import find_spec
import tidelog.storage.log, tidelog.spark
print(tidelog.storage.log.__file__)
print([find_spec(name) for name in ("service", "storage", "compaction")])
"""


def folder_of(package: str) -> Path:
    """The folder of a listed package, by setuptools' rule: the nearest parent that is mapped."""
    mapped: dict[str, str] = SETUPTOOLS["package-dir"]
    name, rest = package, ""
    while name not in mapped:
        name, _, last = name.rpartition(".")
        rest = f"{last}/{rest}" if rest else last
    return Path(mapped[name], rest) if rest else Path(mapped[name])


def test_the_list_of_packages_is_the_folders() -> None:
    listed = {folder_of(package) for package in SETUPTOOLS["packages"]}
    data = {path.parent for path in PACKED}
    assert listed == set(PACKAGES) | data | {Path("storage/public")}


def test_the_namespace_is_open() -> None:
    """`tidelog` is a namespace package: another distribution can add `tidelog.client`."""
    assert Path("storage/public/__init__.py") not in MODULES


def test_the_base_installs_what_a_client_needs() -> None:
    base = {re.split(r"[\[<>=~;]", text)[0] for text in PROJECT["project"]["dependencies"]}
    assert base == BASE_MODULES


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy of what git tracks by this environment's setuptools: an isolated
    build would need the package index."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for path in [*MODULES, *PACKED, *map(Path, ("pyproject.toml", "README.md", "LICENSE"))]:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, source], check=True, timeout=110)
    return next(folder.glob("*.whl"))


@pytest.mark.xdist_group("wheel")
def test_a_wheel_holds_the_packages_and_no_other_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tidelog"}
    assert "tidelog/spark.py" in names
    assert "tidelog/__init__.py" not in names
    assert "tidelog/service/console/static/index.html" in names


@pytest.mark.xdist_group("wheel")
def test_a_wheel_serves_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    """The dependencies are those of this environment; the code is the wheel's alone."""
    python = installed(wheel, tmp_path / "venv")
    where, specs = run(python, "-c", WHERE, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(tmp_path / "venv")
    assert specs == "[None, None, None]"
    tidelog = python.with_name("tidelog")
    assert run(tidelog, "--version", cwd=tmp_path).strip() == PROJECT["project"]["version"]


@pytest.mark.xdist_group("wheel")
def test_commands_without_the_extra_server_say_so_in_a_line(wheel: Path, tmp_path: Path) -> None:
    """Only the base's modules can be imported; `tidelog -h` works, `tidelog serve` does not."""
    python = installed(wheel, tmp_path / "venv")
    hidden = ("aioboto3", "boto3", "deltalake", "fastapi", "numpy", "pyarrow", "uvicorn", "re2")
    (tmp_path / "venv" / "hide.py").write_text(
        "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in hidden)
    )
    main = "import hide, sys; from tidelog.service.cli.main import main; sys.exit(main())"
    path = {**os.environ, "PYTHONPATH": str(tmp_path / "venv")}
    usage = run(python, "-c", main, "-h", cwd=tmp_path, env=path)
    assert "serve" in usage
    for command in ("serve", "scrub"):
        words = [python, "-c", main, command]
        failed = subprocess.run(
            words, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=60, check=False
        )
        assert failed.returncode == 1
        (line,) = failed.stderr.splitlines()
        assert line.endswith(" is not installed: pip install 'tidelog[server]'")


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
    words = [program, *arguments]
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
