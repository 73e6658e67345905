"""Exit codes, error messages and printed output of the commands.

0 if it is done, 2 if it was refused before any work, 3 if it ended on its way, 4 if all rounds were
made and a run diverged or aggregated no update, 130 if it was interrupted. If standard output is
closed, the files that were written stay, and a refusal still ends with 2.
"""

from __future__ import annotations

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Protocol

REFUSED, FAILED, UNLEARNED, INTERRUPTED = 2, 3, 4, 130
MAX_LINE_CHARACTERS = 900  # characters of an error line
TRACEBACK = "PYROFL_TRACEBACK"  # set to 1, it shows where an error was raised


class Stopped(Exception):
    """Exception that ends a command with an exit code and a one-line message."""

    def __init__(self, text: str, code: int) -> None:
        """Store the one-line message and the exit code, such as 130 for an interruption."""
        super().__init__(text)
        self.code = code


def ended(parse: Callable[[], Namespace]) -> int:
    """Run a command, print any error in one line, and return the exit code."""
    _open_streams()
    try:
        try:
            args = parse()
        except SystemExit as stop:  # help, or words that are refused: that is said already
            return flushed(int(stop.code or 0))
        args.do(args)
    except Stopped as stop:
        complain(stop, first="\n")
        return flushed(stop.code)
    except KeyboardInterrupt:
        tell("\npyrofl: interrupted\n")
        return flushed(INTERRUPTED)
    except (SystemExit, Exception) as error:
        complain(error)
        return flushed(REFUSED)
    return flushed(0)


def flushed(code: int) -> int:
    """Flush standard output; return the exit code, or an error code if printing fails."""
    try:
        show()
    except Stopped as stop:
        complain(stop)
        return code or stop.code
    return code


@contextmanager
def ending(tell: Callable[[str], str], *refusals: type[Exception]) -> Iterator[None]:
    """Convert any exception in the `with` block but refusals to a one-line `Stopped`."""
    try:
        yield
    except refusals:
        raise
    except (KeyboardInterrupt, SystemExit, Exception) as error:
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
        raise Stopped(tell(what(error)), code) from error


def show(text: str = "", note: str = "") -> None:
    """Print a command's result; if that fails, report the written files, described by `note`."""
    try:
        if text:
            print(text)
        sys.stdout.flush()
    except OSError as error:
        # Or Python would try again at its end, and change the exit code.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader has closed the pipe
            message = f"cannot print: {what(error)}{f'; {note}' if note else ''}"
            raise Stopped(message, FAILED) from error


def what(error: BaseException) -> str:
    """Describe an error in a few words; if unexpected, also explain how to get its traceback."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return f"not enough memory{f': {error}' if str(error) else ''}"
    is_message = type(error).__name__ == "BadMessage"  # whose module imports torch
    if is_message or isinstance(error, ValueError | OSError | Stopped):
        return str(error) or type(error).__name__
    first = str(error).partition("\n")[0]  # torch adds where in C++ it was
    message = f"{type(error).__name__}{f': {first}' if first else ''}"
    return f"{message} (unexpected; {TRACEBACK}=1 shows where)"


def complain(error: BaseException, first: str = "") -> None:
    """Print an error in one line, and its traceback if PYROFL_TRACEBACK is set."""
    tell(f"{trace(error) or first}{complaint(what(error))}")


def trace(error: BaseException) -> str:
    """Return the traceback of an error if PYROFL_TRACEBACK is set, else ""."""
    is_requested = os.environ.get(TRACEBACK, "0") not in ("", "0")
    return "".join(traceback.format_exception(error)) if is_requested else ""


def complaint(message: str) -> str:
    r"""Format an error message as one printable line; a very long line is cut in the middle.

    >>> complaint("too few\n  rows \x1b[2J")
    'pyrofl: error: too few rows \\x1b[2J\n'
    """
    line = " ".join(_cut(word, MAX_LINE_CHARACTERS // 4) for word in message.split())
    seen = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    return f"pyrofl: error: {_cut(seen, MAX_LINE_CHARACTERS)}\n"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 3 :]}"


def tell(text: str) -> None:
    """Write a text to standard error; ignore the failure if the stream is closed."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


class CanBeQuiet(Protocol):
    """Protocol of command-line options that include --quiet."""

    @property
    def quiet(self) -> bool:
        """Whether --quiet limits the printed output to the result table."""


def say(options: CanBeQuiet, text: str) -> None:
    """Print a progress line to standard error, unless --quiet is given."""
    if not options.quiet:
        tell(f"{text}\n")


def _open_streams() -> None:
    """Make standard output and error accept any text, even if they are closed or ASCII only."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, TextIOWrapper):
            with suppress(OSError):  # what is behind it may have been replaced
                stream.reconfigure(errors="backslashreplace")
