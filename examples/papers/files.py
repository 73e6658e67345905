"""What the pages of this folder share: lines that runs leave in CSV files, and tables of them."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any

HERE = Path(__file__).parent
MADE = ("seconds", "commit", "command")
SEEDS = 3  # a table has what ran with so many

Lines = list[dict[str, str]]


def fill(
    path: Path,
    head: Sequence[str],
    runs: Iterable[tuple[Any, ...]],
    measure: Callable[..., Iterable[Sequence[Any]]],
    **settings: Any,
) -> Lines:
    """Make the runs that a file lacks, and return its lines of these settings.

    A run that is interrupted leaves no line, so that the same command goes on where it stopped.

    Args:
        path: of the CSV file.
        head: its columns but "settings" and `MADE`; the first ones name a run.
        runs: what names each of them.
        measure: what names a run -> the rest of its lines.
        settings: what else decides a run, as the network: a run with other ones is another run.

    Raises:
        ValueError: if the file has other columns.
    """
    columns, said = [*head, "settings", *MADE], in_words(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    old = list(csv.reader(path.read_text().splitlines())) if path.is_file() else []
    if old and old[0] != columns:
        raise ValueError(f"{path} has the columns {old[0]}; expected {columns}, or another file")
    with path.open("a", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if not old:
            table.writerow(columns)
        for run in runs:
            name = [*map(str, run)]
            if any([*line[: len(name)], line[len(head)]] == [*name, said] for line in old[1:]):
                continue
            begun = perf_counter()
            found = [[*name, *map(short, line)] for line in measure(*run)]
            made = (f"{perf_counter() - begun:.1f}", commit(), command())
            table.writerows([*line, said, *made] for line in found)
            file.flush()
            print(f"{', '.join(name)}: {made[0]} s", flush=True)
    return [line for line in read(path) if line["settings"] == said]


def in_words(settings: Mapping[str, Any]) -> str:
    """Write settings in a line; of a file, its name alone."""
    return " ".join(f"{name}={without_folders(str(value))}" for name, value in settings.items())


def without_folders(word: str) -> str:
    """Take the folders out of a path, which only this machine knows."""
    return re.sub(r"(^|:)/.*/", r"\1", word)


def short(value: Any) -> str:
    """Write a number with six figures, and None as nothing."""
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def commit() -> str:
    """Return the commit that is checked out, "" where there is none."""
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(words, cwd=HERE, capture_output=True, text=True).stdout.strip()


def command() -> str:
    """Return the words that began this program; of files on this machine, the names alone."""
    script = Path(sys.argv[0]).resolve()
    words = [
        "python",
        str(script.relative_to(HERE.parents[1])),
        *map(without_folders, sys.argv[1:]),
    ]
    return shlex.join(words)


def read(path: Path) -> list[dict[str, str]]:
    """Return the lines of a file, none if it is not there."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.is_file() else []


def numbers(lines: Iterable[dict[str, str]], column: str, scale: float = 1) -> list[float]:
    """Return a column of some lines, without what is empty."""
    return [scale * float(line[column]) for line in lines if line[column]]


def spread(values: Sequence[float], digits: str = ".1f", of_error: str | None = None) -> str:
    """Write a mean, with its standard error if there are several; nothing of nothing."""
    if len(values) < 2:
        return f"{values[0]:{digits}}" if values else ""
    error = stdev(values) / len(values) ** 0.5
    return f"{mean(values):{digits}} ± {error:{of_error or digits.strip('+')}}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table."""
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def means(groups: Mapping[str, Lines], columns: Mapping[str, float]) -> str:
    """Lay out the means of some columns, each times a scale, of every group of lines."""
    rows = [
        [name, *(spread(numbers(lines, n, scale), ".3g", ".2g") for n, scale in columns.items())]
        for name, lines in groups.items()
    ]
    return markdown(["", *columns], rows)


def by(lines: Iterable[dict[str, str]], column: str) -> dict[str, list[dict[str, str]]]:
    """Group lines by what stands in a column."""
    found: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        found.setdefault(line[column], []).append(line)
    return found


def best(
    lines: Iterable[dict[str, str]], score: str, over: str, of: str = "method"
) -> dict[str, list[dict[str, str]]]:
    """Return the lines of every method at the setting whose mean score is highest."""
    return {
        name: max(by(some, over).values(), key=lambda at: mean(numbers(at, score)))
        for name, some in by(lines, of).items()
    }


def gains(of: Lines, than: Lines, column: str) -> list[float]:
    """Return what each seed gains, in percent."""
    before = {line["seed"]: float(line[column]) for line in than}
    return [100 * (float(line[column]) - before[line["seed"]]) for line in of]


def finished(lines: Lines, column: str) -> dict[str, Lines]:
    """Group lines by a column, without what has not run with all seeds."""
    return {name: some for name, some in by(lines, column).items() if len(some) >= SEEDS}


def kept(path: str, column: str, scale: float = 100, **where: str) -> list[float]:
    """Return a column of the lines of a file that have these values."""
    lines = read(HERE / path)
    return numbers([x for x in lines if all(x[n] == v for n, v in where.items())], column, scale)
