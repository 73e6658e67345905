"""Shared functions of the pages of this folder: CSV files of results, and tables of them."""

from __future__ import annotations

import csv
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any

import torch

from pyrofl.files.text_tables import markdown

HERE = Path(__file__).parent
MADE = ("machine", "seconds", "commit", "command")
SEEDS = 3  # tables show results with at least this number of seeds

Lines = list[dict[str, str]]


def fill(
    path: Path,
    head: Sequence[str],
    runs: Iterable[tuple[Any, ...]],
    measure: Callable[..., Iterable[Sequence[Any]]],
    **settings: Any,
) -> Lines:
    """Execute the runs that are missing in a file, and return its lines with these settings.

    An interrupted run writes no line, so the same command resumes where it stopped.

    Args:
        path: CSV file.
        head: columns except "settings" and `MADE`; the first ones identify a run.
        runs: identifier of each run.
        measure: function from the identifier of a run to the other columns of its lines.
        settings: other settings of a run, such as the network; they also identify it.

    Returns:
        The lines of the file with these settings.

    Raises:
        ValueError: if the file has other columns.
    """
    columns, text = [*head, "settings", *MADE], in_words(settings)
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
            if any([*line[: len(name)], line[len(head)]] == [*name, text] for line in old[1:]):
                continue
            begun = perf_counter()
            found = [[*name, *map(short, line)] for line in measure(*run)]
            made = (machine(), f"{perf_counter() - begun:.1f}", commit(), command())
            table.writerows([*line, text, *made] for line in found)
            file.flush()
            print(f"{', '.join(name)}: {made[1]} s", flush=True)
    return [line for line in read(path) if line["settings"] == text]


def in_words(settings: Mapping[str, Any]) -> str:
    """Return settings as one line of text, with file names without folders."""
    return " ".join(f"{name}={without_folders(str(value))}" for name, value in settings.items())


def without_folders(word: str) -> str:
    """Return a path without its folders, which exist on this machine only."""
    return re.sub(r"(^|:)/.*/", r"\1", word)


def short(value: Any) -> str:
    """Return a number with six significant digits, or "" for None."""
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def machine() -> str:
    """Return the processor, the number of its cores, the GPU and the version of torch."""
    found = re.search(r"model name\s*: (.*)", _text(Path("/proc/cpuinfo")))
    name = found[1] if found else platform.processor() or platform.machine()
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{name}, {os.cpu_count()} cores, {gpu}torch {torch.__version__}"


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def commit() -> str:
    """Return the commit of the checkout, or "" if there is none."""
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(words, cwd=HERE, capture_output=True, text=True).stdout.strip()


def command() -> str:
    """Return the command of this program, with file names without folders."""
    script = Path(sys.argv[0]).resolve()
    words = [
        "python",
        str(script.relative_to(HERE.parents[1])),
        *map(without_folders, sys.argv[1:]),
    ]
    return shlex.join(words)


def read(path: Path) -> list[dict[str, str]]:
    """Return the lines of a CSV file, or an empty list if it does not exist."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.is_file() else []


def numbers(lines: Iterable[dict[str, str]], column: str, scale: float = 1) -> list[float]:
    """Return the non-empty values of a column, multiplied by `scale`."""
    return [scale * float(line[column]) for line in lines if line[column]]


def spread(values: Sequence[float], digits: str = ".1f", of_error: str | None = None) -> str:
    """Return mean ± standard error as text; only the value if there is one, "" if none."""
    if len(values) < 2:
        return f"{values[0]:{digits}}" if values else ""
    error = stdev(values) / len(values) ** 0.5
    return f"{mean(values):{digits}} ± {error:{of_error or digits.strip('+')}}"


def means(groups: Mapping[str, Lines], columns: Mapping[str, float]) -> str:
    """Return a Markdown table of the scaled means of columns, one row per group of lines."""
    rows = [
        [name, *(spread(numbers(lines, n, scale), ".3g", ".2g") for n, scale in columns.items())]
        for name, lines in groups.items()
    ]
    return markdown(["", *columns], rows)


def by(lines: Iterable[dict[str, str]], column: str) -> dict[str, list[dict[str, str]]]:
    """Return lines grouped by the value of a column."""
    found: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        found.setdefault(line[column], []).append(line)
    return found


def best(
    lines: Iterable[dict[str, str]], score: str, over: str, of: str = "method"
) -> dict[str, list[dict[str, str]]]:
    """Return the lines of every method at the setting with the highest mean score."""
    return {
        name: max(by(some, over).values(), key=lambda at: mean(numbers(at, score)))
        for name, some in by(lines, of).items()
    }


def gains(of: Lines, than: Lines, column: str) -> list[float]:
    """Return the gain of each seed, in percentage points."""
    before = {line["seed"]: float(line[column]) for line in than}
    return [100 * (float(line[column]) - before[line["seed"]]) for line in of]


def finished(lines: Lines, column: str) -> dict[str, Lines]:
    """Return lines grouped by a column, without groups with fewer than `SEEDS` seeds."""
    return {name: some for name, some in by(lines, column).items() if len(some) >= SEEDS}


def kept(path: str, column: str, scale: float = 100, **where: str) -> list[float]:
    """Return a column of the lines of a file with the given values."""
    lines = read(HERE / path)
    return numbers([x for x in lines if all(x[n] == v for n, v in where.items())], column, scale)
