"""Secrets that are given as text or as `@FILE`, and reasons why a file cannot be used.

The permissions are those that PostgreSQL asks of a key file: 0600 for a file of this user, and 0640
for a file of another user, mostly root: Kubernetes mounts a secret as root's, readable by the group
of the pod (`fsGroup`), with mode 0440 if its `defaultMode` is 0440 or 0400.
"""

import os
import stat
from pathlib import Path

PRIVATE_UMASK = 0o077
"""Of brokers and commands: what libraries write (tables, temporary files) is private, too."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def secret_of(text: str) -> str:
    """Return `text`, or for `@FILE` the content of the file without blanks around it.

    Raises ValueError, whose message names the file and the reason.
    """
    if not text.startswith("@"):
        return text
    file = text[1:]
    if why := why_exposed(Path(file)):
        raise ValueError(why)
    try:
        secret = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {why_not_read(error)}") from None
    except UnicodeDecodeError:
        raise ValueError(f"cannot read {file}: it is not UTF-8 text") from None
    if not secret:
        raise ValueError(f"{file} is empty")
    return secret


def why_exposed(path: Path) -> str | None:
    """Return why other users can read or change the file of a secret, and what to do; None if they
    cannot, or if it is no regular file (a pipe)."""
    try:
        status = path.stat()
    except OSError:
        return None  # the read has the reason
    is_own = status.st_uid == os.geteuid()
    forbidden = OTHERS if is_own else OTHERS & ~stat.S_IRGRP
    if not stat.S_ISREG(status.st_mode) or not status.st_mode & forbidden:
        return None
    mode = "0600" if is_own else "0440"
    return (
        f"other users can read or change {path} (mode {stat.S_IMODE(status.st_mode):04o}): "
        f"chmod {mode} {path}"
    )


def why_not_read(error: OSError) -> str:
    """Return the reason alone: Python's text of the error repeats the path and has a number."""
    match error:
        case FileNotFoundError():
            return "no such file"
        case IsADirectoryError():
            return "it is a folder"
        case _:
            return (error.strerror or str(error)).lower()
