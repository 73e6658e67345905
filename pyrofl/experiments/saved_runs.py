"""Saved runs: folders written by `pyrofl run` and `pyrofl compare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyrofl.files import run_json
from pyrofl.files.link_safe_files import refuse_link
from pyrofl.files.run_folder import SCHEMA

NOT_CONVERGED = "not converged"  # marks every difference of a run that has not


@dataclass(frozen=True)
class SavedRun:
    """Saved run: its folder, method, seed and content of run.json."""

    path: Path  # of its folder
    method: str
    seed: int
    facts: dict[str, Any]  # its run.json

    @property
    def converged(self) -> bool:
        """Whether the run ended with the status "converged"."""
        return bool(self.facts["status"]["kind"] == "converged")


def runs(folder: Path) -> list[SavedRun]:
    """Return all runs saved in a folder by `pyrofl run`, `pyrofl compare` or a Flower study."""
    one, expected = folder / "run.json", "expected a folder of pyrofl run or pyrofl compare"
    try:
        paths = [one] if one.is_file() else list(folder.glob("*/run.json"))
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}; {expected}") from error
    for path in paths:
        for inside in {path, *path.parents} - {folder, *folder.parents}:
            refuse_link(inside)
    saved_runs = [_read(path) for path in paths]
    if not saved_runs:
        raise ValueError(f"{folder} holds no run.json; {expected}")
    return sorted(saved_runs, key=lambda made: (made.method, made.seed))


def _read(path: Path) -> SavedRun:
    facts = run_json.read(path, tables=True)
    try:
        if not isinstance(facts, dict):
            raise ValueError("it holds no names and values")
        if facts["schema"] != SCHEMA:
            raise ValueError(f"its schema is {facts['schema']}, and this version reads {SCHEMA}")
        for name in ("status", "seeds", "tested", "data"):
            facts[name].keys()  # a dict, as all that follows takes for granted
        method, seed = str(facts["experiment"]["methods"][0]), int(facts["seed"])
        return SavedRun(path.parent, method, seed, facts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}; expected a run's facts") from error
