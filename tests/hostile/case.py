"""What a hostile input is: what is given, what must come of it, and who judges that.

An input is met in this process, in a folder of its own, with limits on time and memory.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import resource
import signal
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from dying import Ended

from pyrofl.cli import main
from pyrofl.experiments import results

REFUSED, DONE, ENDED = "refused", "done", "ended on its way"
NOBODY = "diverged or aggregated no update"
CODES = {0: DONE, 2: REFUSED, 3: ENDED, 4: NOBODY, -signal.SIGALRM: "hung"}
BEGIN = "pyrofl: error: "
LONGEST = 1000  # characters of a line that anybody reads
# Without one of these nobody knows what to do.
CURES = r"expected|did you mean|choose from|choose other|required|unrecognized|ambiguous|use |"
CURES += r"explicit argument|cannot be (read|made)|cannot take rows|remove it|are wanted|"
CURES += r"; (add|build|choose|draw|fit|leave out|lower|move|name|pass|remove|run|scale|set) |"
CURES += r"no local tensor|not enough memory|run with chunk|this method (has|runs)|no client of|"
CURES += r"too many positional|must (be|have)"
OUT, LIKE = "out", "like"  # folders that a command writes, and its plain twin
SECONDS, BYTES = 300, 4 * 2**30  # for an input, beside the memory that the process has
CALL = "call"  # instead of a command: code of `python.py`


@dataclass(frozen=True)
class Case:
    """A hostile input.

    Attributes:
        words: of the command; `CALL` and the code for what is called in Python.
        wanted: the ends that are right; several where people may differ.
        told: words that the complaint has, beside what was expected.
        make: makes the files in the folder where the command runs.
        like: words of a plain command that must give the same numbers.
        writes: whether the command is to write something when it is done.
        warned: part of a warning that would be true; other warnings are wrong.
    """

    words: tuple[str, ...]
    wanted: tuple[str, ...] = (REFUSED,)
    told: tuple[str, ...] = ()
    make: Callable[[Path], object] | None = None
    like: tuple[str, ...] = ()
    writes: bool = True
    warned: str = ""

    def telling(self, *words: str) -> Case:
        """Return the same with words that the complaint has."""
        return replace(self, told=tuple(filter(None, words)))


def shown(text: str) -> tuple[str, ...]:
    """Return what a complaint repeats of a value: nothing of what is long or cannot be seen."""
    seen = text.strip() == text and text.isprintable() and text != "~"
    return (text,) if seen and 0 < len(text) < 40 else ()


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what lies in a folder: path -> kind and length."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            about = path.lstat()
            size = 0 if stat.S_ISDIR(about.st_mode) else about.st_size
            found[str(path.relative_to(folder))] = (stat.S_IFMT(about.st_mode), size)
    return found


class Hung(BaseException):
    """No command may catch it."""


@contextmanager
def within(seconds: int, memory: int) -> Iterator[None]:
    """Raise `Hung` after so many seconds; give the process so many bytes more than it has."""

    def hung(*_: Any) -> None:
        raise Hung

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, hung)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + memory, hard))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def code_of(words: Sequence[str]) -> int:
    """Run a command, without its figures, or a call; return the exit code."""
    from hostile.python import call

    try:
        with within(SECONDS, BYTES):
            return call(words[1]) if words[0] == CALL else main([*words])
    except Hung:
        return -signal.SIGALRM


def met(case: Case) -> tuple[str, str]:
    """Meet an input in a folder of its own; return how it ended, and what is wrong with that."""

    def warned(*about: Any) -> None:
        sys.stderr.write(warnings.formatwarning(*about[:4]))

    with TemporaryDirectory() as name:
        folder = Path(name, "here")
        folder.mkdir()
        if case.make:
            case.make(folder)
        before = contents(folder)
        told = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
        with (
            chdir(folder),
            patch.dict(os.environ, HOME=str(folder)),
            patch.object(results, "draw", lambda *_: iter(())),
            patch.object(warnings, "showwarning", warned),
            warnings.catch_warnings(),
            redirect_stderr(told),
            redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("default")
            codes = [code_of(words) for words in (case.words, case.like) if words]
        told.flush()
        lines = told.buffer.getvalue().decode().splitlines()  # type: ignore[attr-defined]
        ended = Ended(codes, lines)
        return end_of(ended), problems(case, ended, folder, before)


def end_of(ended: Ended) -> str:
    """Name the end of the first command."""
    return CODES.get(ended.codes[0], f"code {ended.codes[0]}")


def problems(case: Case, ended: Ended, folder: Path, before: dict[str, tuple[int, int]]) -> str:
    """Say what is wrong with an end, in a line; "" if it is right."""
    end, text = end_of(ended), " / ".join(ended.told)
    found = [] if end in case.wanted else [f"{end}; expected {' or '.join(case.wanted)}"]
    wrong = " / ".join(x for x in ended.told if not case.warned or case.warned not in x)
    found += [f"a {word}" for word in ("Traceback", "Warning:", "unexpected;") if word in wrong]
    if end in (REFUSED, ENDED, NOBODY):
        found += complaints(case, [line for line in ended.told if line], end)
    changed = sorted({name for name, _ in contents(folder).items() ^ before.items()})
    if end == REFUSED and (more := [n for n in changed if Path(n).parts[0] != LIKE]):
        found.append(f"touched {more[:3]}")
    if end == DONE:
        found += numbers(case, ended, folder)
    return f"{'; '.join(found)}; told: {text[-300:]}" if found else ""


def complaints(case: Case, lines: list[str], end: str) -> Iterable[str]:
    """Yield what is wrong with the words of an error."""
    own = [line for line in lines if line.startswith(BEGIN)]
    if len(own) != 1 or lines[-1] != own[0] or (end == REFUSED and len(lines) > 1):
        yield f"{len(lines)} lines"
        return
    line = own[0]
    if not line.isprintable():
        yield "a line that cannot be printed"
    if len(line) > LONGEST:
        yield f"a line of {len(line)} characters"
    if end == REFUSED:
        if not re.search(CURES, line):
            yield "no word of what was expected"
        # argparse shows runs of spaces as one.
        words = {word: " ".join(word.split()) for word in case.told}
        lacking = [w for w, one in words.items() if one not in line and repr(w)[1:-1] not in line]
        if lacking:
            yield f"no word of {lacking}"


def numbers(case: Case, ended: Ended, folder: Path) -> Iterable[str]:
    """Yield what is wrong with the numbers that a command left."""
    table = folder / OUT / "metrics.csv"
    if case.words[0] == "run" and case.writes:
        if not table.exists():
            yield "no metrics.csv"
            return
        with open(table, newline="", encoding="utf-8") as file:
            values = [row["value"] for row in csv.DictReader(file)]
        if not values or not all(math.isfinite(float(value)) for value in values):
            yield f"scores {values[:5]}"
    if case.like:
        if ended.codes[1:] != [0]:
            yield f"the plain one ended with {ended.codes[1:]}"
        elif table.read_bytes() != (folder / LIKE / "metrics.csv").read_bytes():
            yield "other numbers than the plain one"
