"""Handling of interrupts while the command loads its libraries, which takes seconds."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED, REFUSED = 130, 2


def begin_command() -> None:
    """Make interrupts during loading end the command with a one-line message.

    It does nothing in a process that is not the command `pyrofl` or `python -m pyrofl`.
    """
    if not is_command():
        return
    try:
        os.getcwd()
    except OSError:
        gone = "the working directory does not exist any more"
        leave(f"error: {gone}; change to another one", REFUSED)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def end_loading() -> None:
    """Restore the default handling of interrupts (KeyboardInterrupt)."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_command() -> bool:
    """Return whether this process runs the command `pyrofl` or `python -m pyrofl`."""
    if sys.argv[:1] == ["-m"]:  # as long as the module is being looked for
        words = sys.orig_argv
        return "-m" in words and words[words.index("-m") + 1 :][:1] == ["pyrofl"]
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    return name.removesuffix(".exe") == "pyrofl"


def leave(text: str, code: int) -> None:
    """Print a line and end the process at once, without a traceback."""
    try:
        os.write(2, f"pyrofl: {text}\n".encode())
    finally:
        os._exit(code)


def _interrupted(number: int, frame: FrameType | None) -> None:
    leave("interrupted", INTERRUPTED)
