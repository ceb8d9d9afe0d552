"""A broker's files on its machine: the folder of the hot log, permissions of a folder store."""

import hashlib
import logging
import os
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tidelog.service.secret_files import OTHERS, why_exposed
from tidelog.service.settings.settings import state_home
from tidelog.service.settings.store import StoreSettings
from tidelog.storage.broker import Broker
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import LogError, StoreUnfit
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectStore

log = logging.getLogger("tidelog")


def check_files(broker: Broker) -> None:
    """Raise StoreUnfit if other users can read the cluster's secret in a folder.

    Warn if other users can enter the folder, because objects that versions before 0.2 wrote are
    readable.
    """
    url = urlsplit(broker.store_url)
    if url.scheme != "file":
        return
    path = Path(url2pathname(url.path)) / object_keys.SECRET
    if why := why_exposed(path):
        raise StoreUnfit(why)
    if path.parent.stat().st_mode & OTHERS:
        log.warning("other users can read the folder of the store: chmod -R go= %s", path.parent)


def hot_dir(settings: StoreSettings, store: ObjectStore) -> Path | None:
    """Return the folder of the hot log: the setting `hot_dir`.

    Without the setting, the folder is inside the store's folder or, for S3, in `state_home`.

    For a memory store without the setting, return None, because its records do not outlive the
    process.
    """
    if settings.hot_dir:
        return _usable_folder(Path(settings.hot_dir))
    if isinstance(store, FolderStore):
        return Path(store.table_uri(".hot"))
    if isinstance(store, MemoryStore):
        return None
    name = hashlib.blake2b(store.url.encode(), digest_size=8).hexdigest()
    try:
        return state_home() / "tidelog" / name
    except RuntimeError:
        raise LogError("this user has no home folder for the hot log: set hot_dir") from None


def _usable_folder(path: Path) -> Path:
    """Create the folder. Raises LogError at the start if the broker cannot use it."""
    try:
        folder = path.expanduser().absolute()
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: unknown home of `~USER`
        why = (isinstance(error, OSError) and error.strerror) or error
        raise LogError(f"hot_dir {path} cannot be used: {why}") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise LogError(
            f"hot_dir {folder} cannot be used: the broker's user may not read and write it"
        )
    return folder
