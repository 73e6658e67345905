"""Output folder of a run: files written atomically, CSV tables, and versions."""

from __future__ import annotations

import csv
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

from pyrofl.arguments import checked
from pyrofl.files import lock
from pyrofl.files.link_safe_files import PRIVATE

SCHEMA = 2  # of run.json: raised when a key is renamed or changes its meaning
METRICS = ("round", "model", "adaptation", "population", "metric", "value")
CLIENTS = ("client", "size", "model", "adaptation", "metric", "value")
COMPARE = ("method", "seed", "model", "adaptation", "metric", "value", "tuned")
CHECKPOINT = "checkpoint.safetensors"  # the run as of its last round
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # with which a formula of a spreadsheet begins
HALF = r"\.[0-9a-f]{32}(\.\w+)?|\.tmp\w{6}"  # names of what a killed write leaves


@checked
def prepare(path: str | Path, overwrite: bool = False, holding: str = "") -> Path:
    """Create an output folder and its parents; raise ValueError if it may not be used.

    With `overwrite` it may hold files, else only those with names like `holding`. They stay until
    new ones of the same name replace them. A lock, see `locked`, is no such file.
    """
    path = Path(path)
    # The nearest thing that exists decides whether the rest can be made.
    parent = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
    if not parent.is_dir():
        raise ValueError(f"{path}: {parent} is a file; expected a directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: cannot write to {parent}; expected a writable directory")
    present = [] if overwrite or parent != path else sorted(p.name for p in path.iterdir())
    own = f"{HALF}|{re.escape(lock.LOCK_FILE)}|{holding}"
    if strange := [name for name in present if not re.fullmatch(own, name)]:
        raise ValueError(
            f"{path} is not empty, it holds {strange[0]}; expected an empty directory or overwrite"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".{uuid4().hex}"  # what a system permits and what it does may differ
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be made or written to: {error.strerror}; expected a writable directory"
        ) from error
    return path


def refuse_no_output(path: Path, suffixes: Sequence[str], overwrite: bool) -> None:
    """Raise ValueError if an output file has a wrong suffix, or exists and may not be replaced."""
    if path.suffix not in suffixes:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(suffixes)}")
    if path.is_dir() or (path.exists() and not overwrite):
        raise ValueError(f"{path} is there already; expected a new file, or --overwrite")


@contextmanager
def only_if_done(*paths: Path) -> Iterator[None]:
    """Remove folders created in the `with` block, if they are empty, when the block fails."""
    new: list[Path] = []
    for path in paths:
        missing = [p for p in (path, *path.parents) if not os.path.lexists(p)]
        new += [p for p in missing if p not in new]
    try:
        yield
    except BaseException:
        for path in sorted(new, key=lambda p: len(p.parts), reverse=True):
            with suppress(OSError):
                path.rmdir()
        raise


@checked
@contextmanager
def replacing(path: str | Path, is_private: bool = False) -> Iterator[Path]:
    """Yield a temporary path; the file there replaces `path` at the end of the `with` block.

    Readers of `path` see the old file or the new one, never a part of it. If the body raises,
    the old file stays and the new one is removed. A private file, with values of rows, is readable
    by its owner alone.
    """
    path = Path(path)
    # Two writers at once must not share a name; the suffix stays, as some libraries read it.
    temporary = path.with_name(f".{uuid4().hex}{path.suffix}")
    try:
        if is_private:
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE))
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _settle(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _settle(folder: Path) -> None:
    """Flush a directory's entries to disk, on systems that support it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sweep(path: str | Path) -> None:
    """Remove temporary files that killed processes left in a directory or below."""
    for file in Path(path).rglob(".*"):
        if re.fullmatch(HALF, file.name):
            file.unlink(missing_ok=True)


def write_csv(
    path: str | Path,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    is_private: bool = False,
) -> None:
    """Write a CSV table with rows of equal length; numbers keep every digit.

    Texts that a spreadsheet would run as a formula are marked, see `safe_cell`. A private table
    is that of `replacing`.
    """
    with (
        replacing(path, is_private) as temporary,
        open(temporary, "w", newline="", encoding="utf-8") as file,
    ):
        table = csv.writer(file, lineterminator="\n")
        table.writerow(map(safe_cell, columns))
        for number, row in enumerate(rows):
            if (num_entries := len(row)) != (width := len(columns)):
                raise ValueError(
                    f"{path}: row {number} has {num_entries} entries; expected {width}"
                )
            table.writerow(map(safe_cell, row))


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """Read a CSV table written by `write_csv`, as one dict of texts per row."""
    with open(path, newline="", encoding="utf-8") as file:
        head, *rows = [[plain_cell(cell) for cell in row] for row in csv.reader(file)] or [[]]
    for number, row in enumerate(rows, 2):
        if len(row) != len(head):
            raise ValueError(
                f"{path}: line {number} has {len(row)} cells; expected {len(head)}, as pyrofl "
                "writes them: run again with --overwrite"
            )
    return [dict(zip(head, row, strict=True)) for row in rows]


def safe_cell(value: Any) -> Any:
    """Prefix a text with a quote if a spreadsheet would read it as a formula.

    Numbers stay as they are, also those that are texts.

    >>> [safe_cell(value) for value in ("=1+2", "@here", "-1.5", -1.5, "a=b", "'=1")]
    ["'=1+2", "'@here", '-1.5', -1.5, 'a=b', "''=1"]
    """
    if not isinstance(value, str) or not value.lstrip("'").startswith(FORMULAS):
        return value
    with suppress(ValueError):
        float(value)
        return value
    return f"'{value}"


def plain_cell(text: str) -> str:
    """Remove the quote that `safe_cell` added to the text of a CSV cell, if there is one."""
    marked = text.startswith("'") and text.lstrip("'").startswith(FORMULAS)
    return text[1:] if marked else text


def write_json(path: str | Path, value: Mapping[str, Any]) -> None:
    """Write a dict as indented JSON, in its order of keys."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")


def versions() -> dict[str, str]:
    """Return versions of the Python packages that results depend on; "unknown" if missing."""
    packages = ("pyrofl", "torch", "pyro-ppl", "numpy", "arviz")
    return {"python": platform.python_version()} | {
        package.removesuffix("-ppl"): _installed_version(package) for package in packages
    }


@cache  # every message of a round names versions, and reading a package's metadata takes 1 ms
def _installed_version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return "unknown"


def compared_versions() -> dict[str, str]:
    """Return the package versions that are compared when a run is resumed.

    Python and NumPy are not among them: a run saved under one version of Python opens under others.
    """
    installed = versions()
    return {f"version of {n}": installed[n] for n in ("pyrofl", "torch", "pyro")}
