"""Another version of tidelog, from the history of the repository, for a broker process."""

import io
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("storage", "service", "compaction")


def variables_of(revision: str, folder: Path) -> dict[str, str]:
    """Unpack a revision, and return variables with which a new interpreter imports it.

    It has the installed libraries of this version.
    """
    archive = subprocess.run(
        ["git", "archive", "--format=tar", revision, "pyproject.toml", *PACKAGES],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder / "tree", filter="data")
    package = folder / "path" / "tidelog"
    package.parent.mkdir()
    (folder / "tree/storage/public").rename(package)
    for name in PACKAGES:
        (package / name).symlink_to(folder / "tree" / name)
    _make_runnable(folder / "tree")
    variables = {"PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-c", "import tidelog.storage; print(tidelog.storage.__file__)"]
    imported = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert imported.stdout.startswith(str(package)), imported.stdout
    return variables


def _make_runnable(tree: Path) -> None:
    """Let `python -m tidelog.service.cli` run the command of a revision that has it elsewhere."""
    main = tree / "service/cli/__main__.py"
    if not main.exists():
        project = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))["project"]
        module, _, function = project["scripts"]["tidelog"].partition(":")
        main.write_text(f"from {module} import {function}\nraise SystemExit({function}())\n")
