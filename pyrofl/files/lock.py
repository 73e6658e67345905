"""Lock of a folder: a file that the operating system unlocks when the process ends."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from pyrofl.files.link_safe_files import open_without_links

LOCK_FILE = ".lock"
MAX_LOCK_BYTES = 4096  # bytes of a lock that are read


@contextmanager
def lock_folder(folder: str | Path) -> Iterator[str]:
    """Lock a folder; yield a message if a previous process died holding the lock, else "".

    The lock goes with the process, however that ends. Systems without `fcntl` have none. A folder
    is refused if another process holds it, or one of another host has left its lock there.
    """
    path = Path(folder, LOCK_FILE)
    handle = _open_and_lock(path)
    try:
        holder = _holder(handle)
        if holder and holder["host"] != socket.gethostname():
            raise ValueError(
                f"{_in_use_message(path, holder)}, or {path} removed if that process is over"
            )
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(mine).encode(), 0)
        try:
            yield (
                f"{path.parent} was left by {_describe_holder(holder)}, which is dead"
                if holder
                else ""
            )
        finally:
            with suppress(OSError):
                path.unlink()
    finally:
        os.close(handle)


def _open_and_lock(path: Path) -> int:
    """Open and lock a folder's lock file; return its handle; raise ValueError if it is in use."""
    while True:
        try:
            handle = open_without_links(path, os.O_RDWR)
        except OSError as error:
            raise ValueError(f"{path} cannot be made: {error.strerror}") from error
        try:
            if not _try_lock(handle):
                raise ValueError(_in_use_message(path, _holder(handle)))
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.lstat(path)):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _try_lock(handle: int) -> bool:
    """Lock a file; return False if another process holds it, True if the system has no locks."""
    try:
        fcntl: Any = import_module("fcntl")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def _holder(handle: int) -> dict[str, Any] | None:
    """Return the process recorded in a lock file; None if it is empty or not a run's lock."""
    os.lseek(handle, 0, os.SEEK_SET)
    with suppress(ValueError, KeyError, TypeError):
        holder = json.loads(os.read(handle, MAX_LOCK_BYTES))
        return {name: holder[name] for name in ("host", "pid", "since")}
    return None


def _describe_holder(holder: dict[str, Any] | None) -> str:
    template = "process {pid} on {host} since {since}"
    return template.format(**holder) if holder else "another process"


def _in_use_message(path: Path, holder: dict[str, Any] | None) -> str:
    return f"{path.parent} is in use by {_describe_holder(holder)}; expected another folder"
