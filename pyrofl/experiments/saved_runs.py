"""Folders that `pyrofl run` and `pyrofl compare` have written, read again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPEN = "not converged"  # marks every difference of a run that has not


@dataclass(frozen=True)
class SavedRun:
    """A run that was made.

    Attributes:
        path: of its folder.
        method, seed: of the run.
        facts: its run.json.
    """

    path: Path
    method: str
    seed: int
    facts: dict[str, Any]

    @property
    def converged(self) -> bool:
        """Whether the run ended with the verdict "converged"."""
        return bool(self.facts["verdict"]["kind"] == "converged")


def runs(folder: Path) -> list[SavedRun]:
    """Return the runs in a folder of `pyrofl compare` or of a Flower study, or the one run."""
    one = folder / "run.json"
    try:
        paths = [one] if one.is_file() else list(folder.glob("*/run.json"))
    except OSError as error:
        told = f"{folder}: {error.strerror}; expected a folder of pyrofl run or pyrofl compare"
        raise ValueError(told) from error
    found = [_read(path) for path in paths]
    if not found:
        raise ValueError(
            f"{folder} holds no run.json; expected a folder of pyrofl run or pyrofl compare"
        )
    return sorted(found, key=lambda made: (made.method, made.seed))


def _read(path: Path) -> SavedRun:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        for name in ("verdict", "seeds", "tested", "data"):
            facts[name].keys()  # a dict, as all that follows takes for granted
        return SavedRun(
            path.parent, str(facts["experiment"]["methods"][0]), int(facts["seed"]), facts
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}; expected a run's facts") from error
