"""Secrets that are given as text or as `@FILE`, and reasons why a file cannot be used.

A secret's file may have the permissions that PostgreSQL allows for a key file: at most 0600 for a
file of this user, and at most 0640 for a file of another user. The other user is usually root,
because Kubernetes mounts a secret as a file of root that the group of the pod (`fsGroup`) can read.
The mounted file has mode 0440 if the secret's `defaultMode` is 0440 or 0400.
"""

import os
import stat
from pathlib import Path

PRIVATE_UMASK = 0o077
"""The umask of brokers and commands. It also makes files private that libraries write (tables,
temporary files)."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def secret_of(text: str) -> str:
    """Return `text`. If it is `@FILE`, return the content of the file without blanks around it.

    If the file cannot be used, raises ValueError with a message that names the file and the reason.
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
    """Return why other users can read or change the file of a secret, and the remedy.

    If no other user can, or if the path is not a regular file (a pipe), return None.
    """
    try:
        status = path.stat()
    except OSError:
        return None  # the caller then reads the file, and reports why the read fails
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
    """Return the reason in `error`, without the error number and the path that Python adds."""
    match error:
        case FileNotFoundError():
            return "no such file"
        case IsADirectoryError():
            return "it is a folder"
        case _:
            return (error.strerror or str(error)).lower()
