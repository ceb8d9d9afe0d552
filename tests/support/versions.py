"""Another version of tidelog, from the history of the repository, for a broker process."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("storage", "service", "compaction")


def variables_of(revision: str, folder: Path) -> dict[str, str]:
    """Unpack a revision, and return variables with which a new interpreter imports it.

    It has the installed libraries of this version.
    """
    archive = subprocess.run(
        ["git", "archive", "--format=tar", revision, *PACKAGES],
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
    variables = {"PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-c", "import tidelog.storage; print(tidelog.storage.__file__)"]
    imported = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert imported.stdout.startswith(str(package)), imported.stdout
    return variables
