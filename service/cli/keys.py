"""`tidelog keys ...`: API keys of principals."""

import contextlib
import datetime as dt
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from tidelog.service.cli.acls import PrincipalArgument
from tidelog.service.cli.broker_requests import ClientCommand
from tidelog.service.cli.errors import BadUsage, CommandError
from tidelog.service.cli.options import Commands, YesOption
from tidelog.service.cli.output import confirm
from tidelog.service.client.connection import quoted
from tidelog.service.secret_files import why_not_read

KEYS = "/tidelog/v1/keys"

keys = Commands(no_args_is_help=True, help="Create, list, delete API keys of principals.")


@keys.command("create")
def create_key(
    principal: PrincipalArgument,
    *,
    ttl_days: Annotated[
        float | None,
        Option("--ttl-days", min=0.001, max=36_500, help="lifetime in days (default: unlimited)"),
    ] = None,
    note: Annotated[str, Option("--note", help="purpose of the key")] = "",
    out: Annotated[
        Path | None,
        Option(
            "--out",
            metavar="FILE",
            help="write the secret to this new file, which only you can read, and do not print it",
        ),
    ] = None,
    command: ClientCommand,
) -> None:
    """Create a key, and print its secret or write it to a file.

    The secret is shown only this once, because the cluster stores only its digest.

    Example: tidelog keys create alice --ttl-days 90 --out alice.key
    """
    body: dict[str, Any] = {"principal": principal, "note": note}
    if ttl_days is not None:
        body["ttl_s"] = round(ttl_days * 86_400)
    if out is None:
        created = command.request("POST", KEYS, json=body)
        command.show(created, created["secret"])
        return
    with _new_secret_file(out) as file:
        created = command.request("POST", KEYS, json=body)
        try:
            file.write(f"{created.pop('secret')}\n".encode())
        except OSError as error:
            key_id = created["key_id"]
            raise CommandError(
                f"cannot write {out}: {error.strerror}. The secret of key {key_id} is lost: delete "
                f"it with `tidelog keys delete {key_id}`"
            ) from None
    text = f"created {created['key_id']} of {created['principal']}: its secret is in {out}"
    command.show({**created, "file": str(out)}, text)


@contextlib.contextmanager
def _new_secret_file(path: Path) -> Iterator[FileIO]:
    """Create a file that only this user can read.

    If the block fails, remove it. The file has no buffer, whose bytes `close` would write again
    after an error. Raises BadUsage if the file exists or cannot be created.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise BadUsage(f"{path} exists already: give another file") from None
    except OSError as error:
        raise BadUsage(f"cannot create {path}: {why_not_read(error)}") from None
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            yield file
    except BaseException:
        path.unlink()
        raise


@keys.command("list")
def list_keys(command: ClientCommand) -> None:
    """List keys, without secrets."""
    listed = command.request("GET", KEYS)["data"]
    rows = [
        (
            key["key_id"],
            key["principal"],
            _day(key["created_ms"]),
            _day(key["expires_ms"]) + (" (expired)" if key["is_expired"] else ""),
            key["note"],
        )
        for key in listed
    ]
    command.show_rows(listed, ("key", "principal", "created", "expires", "note"), rows)


@keys.command("delete")
def delete_key(
    key_id: Annotated[str, Argument(metavar="KEY", show_default=False)],
    *,
    yes: YesOption = False,
    command: ClientCommand,
) -> None:
    """Delete a key. Brokers then reject the key."""
    confirm("deleting key", key_id, f"Delete key {key_id}?", yes=yes)
    path = f"{KEYS}/{quoted(key_id)}"
    command.request("DELETE", path, missing=f"key {key_id} does not exist")
    command.show({"key_id": key_id, "deleted": True}, f"deleted {key_id}")


def _day(time_ms: int | None) -> str:
    if time_ms is None:
        return "never"
    return f"{dt.datetime.fromtimestamp(time_ms / 1000, dt.UTC):%Y-%m-%d %H:%M}"
