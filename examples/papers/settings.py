"""Settings of methods in the tables of this folder, and those that examples/tuned.py chose."""

from __future__ import annotations

import ast
import csv
import inspect
import shlex
from functools import lru_cache
from pathlib import Path
from typing import Any

from pyrofl.experiments.methods import builds
from pyrofl.experiments.settings import read_settings
from pyrofl.models import fedavg

HERE = Path(__file__).parent
BUDGET = HERE / "tuned/budget.csv"
Settings = dict[str, Any]


def chosen(budget: Path = BUDGET) -> dict[str, Settings]:
    """Return what the tuning chose: method -> settings, with those that its command fixed."""
    with budget.open(newline="") as file:
        lines = {line["method"]: line for line in csv.DictReader(file)}
    return {name: _settings(name, line) for name, line in lines.items()}


@lru_cache
def tuned(budget: str) -> dict[str, dict[str, str]]:
    """Return the settings that a tuning chose: method -> name -> "name=value".

    Args:
        budget: file in the folder "tuned". Its settings that only reduced the cost of the tuning
            are not among them.
    """
    with (HERE / "tuned" / budget).open(newline="") as file:
        lines = {line["method"]: line["chosen"].split() for line in csv.DictReader(file)}
    return {
        method: {w.partition("=")[0]: w for w in words if "=" in w}
        for method, words in lines.items()
    }


def _settings(method: str, line: dict[str, str]) -> Settings:
    words = [word for word in line["chosen"].split() if "=" in word]  # none if all failed
    fixed = shlex.split(line["command"].partition(" --set ")[2].partition(" --")[0])
    return read_settings([*fixed, *words], {method: builds()[method]})[method]


def used(script: Path) -> dict[str, tuple[str, Settings]]:
    """Return `METHODS` of a script without executing it: name in the table -> method, settings."""
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "METHODS":
            found: dict[str, tuple[str, Settings]] = ast.literal_eval(node.value or node)
            return found
    raise ValueError(f"{script} has no annotated METHODS; expected a dictionary of literals")


def differences(script: Path, budget: Path = BUDGET) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return where the settings of a script differ: name -> setting -> here, chosen."""
    found, best = dict[str, dict[str, tuple[Any, Any]]](), chosen(budget)
    for name, (method, here) in used(script).items():
        other = best[method]
        both = {
            n: tuple(some.get(n, usual(method, n)) for some in (here, other))
            for n in {**here, **other}
        }
        if differ := {n: (mine, theirs) for n, (mine, theirs) in both.items() if mine != theirs}:
            found[name] = differ
    return found


def usual(method: str, setting: str) -> Any:
    """Return the default of a setting; that of FedAvg if a method passes the setting on."""
    for build in (builds()[method], fedavg.build):
        if setting in (known := inspect.signature(build).parameters):
            return known[setting].default
    raise ValueError(f"{method} has no setting {setting!r}; expected one of its `build`")
