"""Files that are written in place, such as locks and logs, without following links.

A run's folder may come from another person, with links in place of its files and folders. Files
that are replaced as a whole, see `run_folder.replacing`, replace a link and not what it leads to.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

PRIVATE = 0o600  # of files that hold values of rows: readable by their owner alone
PUBLIC = 0o644
SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for ever


def open_without_links(path: Path, flags: int, mode: int = PUBLIC) -> int:
    """Open or create a run's file for writing, and return its handle.

    Raises:
        ValueError: if the path is a link, a pipe, a device, or a second name of another file.
        OSError: if it cannot be opened.
    """
    refuse_link(path)  # where the system has no O_NOFOLLOW
    try:
        handle = os.open(path, flags | os.O_CREAT | SAFE, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        if error.errno == errno.ENXIO:  # a pipe that nobody reads
            raise ValueError(_odd(path, "no file")) from error
        raise
    about = os.fstat(handle)
    kind = "" if about.st_nlink < 2 else "a second name of another file (a hard link)"
    if reason := kind if stat.S_ISREG(about.st_mode) else "no file":
        os.close(handle)
        raise ValueError(_odd(path, reason))
    return handle


def refuse_link(path: Path) -> None:
    """Raise ValueError if a path is a symbolic link."""
    if os.path.islink(path):
        raise ValueError(_odd(path, f"a link to {os.readlink(path)}"))


def subfolder(path: Path) -> Path:
    """Create a folder inside a run's folder if it is missing; raise ValueError if it is a link."""
    refuse_link(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def append(path: Path, text: str, mode: int = PUBLIC) -> None:
    """Append text to a log, without following links."""
    with os.fdopen(
        open_without_links(path, os.O_WRONLY | os.O_APPEND, mode), "a", encoding="utf-8"
    ) as file:
        file.write(text)


def _odd(path: Path, what: str) -> str:
    return f"{path} is {what}; expected a file or folder of a run, or nothing: remove it"
