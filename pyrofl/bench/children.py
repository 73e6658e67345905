"""Processes of their own, none of which is waited for without end, and none of which is silent.

They write to files: no pipe fills up, and no end of one is waited for.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from time import monotonic

LIMIT = 300.0  # seconds without a line: many times what any of them takes for one
BEAT = 10.0  # seconds after which people hear that one still runs
GRACE = 5.0  # seconds to say where it was


def child(what: str, words: Sequence[str], limit: float = LIMIT) -> str:
    """Return what a process writes; see `lines`."""
    return "".join(f"{line}\n" for line in lines(what, words, limit))


def lines(
    what: str,
    words: Sequence[str],
    limit: float = LIMIT,
    tell: Callable[[str], object] = lambda text: None,
    beat: float = BEAT,
) -> Iterator[str]:
    """Yield the lines that a process writes; one that writes none for too long is killed.

    `tell` hears every `beat` seconds of a process that runs. Whatever ends the reading ends the
    process too, and all that it has started.

    Raises:
        ValueError: naming what was run, if it was silent for `limit` seconds, with the place in
            Python where it was; or if it failed, with its last line.
    """
    with TemporaryDirectory() as folder, _started(words, Path(folder)) as process:
        begin = heard = told = monotonic()
        out = _Lines(Path(folder, "out"))
        while (code := _ended(process, min(limit, beat, 0.5) / 5)) is None:
            for line in out.new(over=False):
                heard = monotonic()
                yield line
            if (now := monotonic()) - heard > limit:
                place = _place(process, Path(folder, "errors"))
                raise ValueError(
                    f"{what} was silent for {limit:g} s and was killed{place}; expected it to end: "
                    f"run alone {' '.join(words)}"
                )
            if now - told > beat:
                told = now
                tell(f"{what} has run {now - begin:.0f} s{_worked(process)}\n")
        yield from out.new(over=True)
        if code:
            last = Path(folder, "errors").read_text(errors="replace").strip().splitlines()[-1:]
            raise ValueError(f"{what} ended with {code}: {(last or ['no message'])[0]}")


@contextmanager
def _started(words: Sequence[str], folder: Path) -> Iterator[Popen[bytes]]:
    """Start a process that waits for no answer, and can tell where in Python it is."""
    env = os.environ | {"PYTHONFAULTHANDLER": "1"}
    with open(folder / "out", "wb") as out, open(folder / "errors", "wb") as errors:
        process = Popen(
            words, stdin=DEVNULL, stdout=out, stderr=errors, env=env, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(OSError):  # all are over
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        _ended(process, GRACE)


def _ended(process: Popen[bytes], seconds: float) -> int | None:
    """Return the exit code, or None if there is none within some seconds."""
    try:
        return process.wait(seconds)
    except TimeoutExpired:
        return None


class _Lines:
    """The lines of a file that grows."""

    def __init__(self, file: Path) -> None:
        self.file, self.read = file, 0

    def new(self, over: bool) -> list[str]:
        """Return those that are whole and new; the last one of a file is whole if that is over."""
        with open(self.file, "rb") as file:
            file.seek(self.read)
            found = file.read()
        whole = found if over else found[: found.rfind(b"\n") + 1]
        self.read += len(whole)
        return whole.decode(errors="replace").splitlines()


def _place(process: Popen[bytes], errors: Path) -> str:
    """Return where a process of Python is, which it tells as it is aborted."""
    process.send_signal(signal.SIGABRT)
    _ended(process, GRACE)
    told = errors.read_text(errors="replace").rpartition("Current thread")[2]
    place = re.search(r'  File "(.+)", line (\d+)', told)
    return f", at {place[1]}:{place[2]}" if place else ""


def _worked(process: Popen[bytes]) -> str:
    """Return the seconds of the processor that a process took, where the system tells them."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return f", {sum(map(int, fields[11:13])) / os.sysconf('SC_CLK_TCK'):.0f} s of the processor"
    except (OSError, ValueError, AttributeError):
        return ""
