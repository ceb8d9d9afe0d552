"""Secrets that are given as text or as `@FILE`, and reasons why a file cannot be read."""

from pathlib import Path


def secret_of(text: str) -> str:
    """Return `text`, or for `@FILE` the content of the file without blanks around it.

    Raises ValueError, whose message names the file and the reason.
    """
    if not text.startswith("@"):
        return text
    file = text[1:]
    try:
        secret = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {why_not_read(error)}") from None
    except UnicodeDecodeError:
        raise ValueError(f"cannot read {file}: it is not UTF-8 text") from None
    if not secret:
        raise ValueError(f"{file} is empty")
    return secret


def why_not_read(error: OSError) -> str:
    """Return the reason alone: Python's text of the error repeats the path and has a number."""
    match error:
        case FileNotFoundError():
            return "no such file"
        case IsADirectoryError():
            return "it is a folder"
        case _:
            return (error.strerror or str(error)).lower()
