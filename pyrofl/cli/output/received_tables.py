"""Tables of received folders, compared with the runs there."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyrofl.experiments.comparison import CompareRow
from pyrofl.experiments.saved_runs import SavedRun
from pyrofl.files import run_folder, run_json
from pyrofl.files.link_safe_files import refuse_link

HASH = "hash"  # entry of tune.json, of all others
AGAIN = "run the same pyrofl compare with --resume, or remove the file"


def comparison(path: Path, saved: Sequence[SavedRun]) -> list[CompareRow]:
    """Return the rows of compare.csv.

    Raises:
        ValueError: if it cannot be read, or a score is not that of the run's metrics.csv.
    """
    with _reading(path, f"expected the table of pyrofl compare: {AGAIN}"):
        lines = run_folder.read_csv(path)
        if lines and list(lines[0]) != list(run_folder.COMPARE):
            raise ValueError(f"lacks a column; expected {', '.join(run_folder.COMPARE)}")
        rows = [(*_texts(line), float(line["value"]), line["tuned"]) for line in lines]
        values_by_key: dict[Any, float] = {row[:5]: row[5] for row in rows}
    runs = {key[:2] for key in values_by_key}
    for one in saved:
        for key, value in _scores(one):
            received_value = values_by_key.get((one.method, one.seed, *key), math.nan)
            if (one.method, one.seed) in runs and not math.isclose(
                received_value, value, rel_tol=1e-9
            ):
                raise ValueError(
                    f"{path} was altered or is of other runs: {key[-1]} of {one.path.name} is "
                    f"{received_value:g}, and {value:g} in its metrics.csv; {AGAIN}"
                )
    if others := sorted(runs - {(one.method, one.seed) for one in saved}):
        method, seed = others[0]
        raise ValueError(f"{path} has {method} of seed {seed}, whose run is not there; {AGAIN}")
    return rows


def read_search(path: Path) -> dict[str, Any]:
    """Return the content of tune.json; raise ValueError if it was altered or cannot be read."""
    names = ("chosen", "about", "rounds", "seconds", "margins", "metric", "score")
    with _reading(path, "expected what pyrofl tune writes: remove the file, or tune again"):
        search: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(search, dict):
            raise ValueError("it holds no names and values")
        received_hash = search.pop(HASH, None)
        if received_hash not in (None, run_json.hash_of_facts(search)):
            raise ValueError("it was altered after the search")
        if lacking := [name for name in names if name not in search]:
            raise ValueError(f"it has no {lacking[0]}")
    return search


def _texts(line: dict[str, str]) -> tuple[str, int, str, str, str]:
    return (
        *(line["method"], int(line["seed"])),
        *(line["model"], line["adaptation"], line["metric"]),
    )


def _scores(one: SavedRun) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Yield model, adaptation and metric of a run's last scores, as compare.csv names them."""
    if not (path := one.path / "metrics.csv").is_file():
        return
    lines = run_folder.read_csv(path)
    for line in lines:
        if line["round"] == lines[-1]["round"]:
            prefix = "" if line["population"] == "training" else f"{line['population']}_"
            name = (line["model"], line["adaptation"], f"{prefix}{line['metric']}")
            yield name, float(line["value"])


@contextmanager
def _reading(path: Path, valid: str) -> Iterator[None]:
    """Raise ValueError in one line if the file is a link, or its content is another."""
    refuse_link(path)
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, RecursionError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error!r}; {valid}") from error
