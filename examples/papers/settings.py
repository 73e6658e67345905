"""Settings of methods in the tables of this folder, and those that examples/tuned.py chose."""

from __future__ import annotations

import ast
import csv
import hashlib
import inspect
import shlex
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from pyrofl.experiments.methods import builds
from pyrofl.experiments.settings import argument_types, read_settings
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


@lru_cache
def edges(budget: str) -> dict[str, dict[str, str]]:
    """Return the chosen numbers at the edge of their grids: method -> setting -> edge.

    An edge is the smallest or the largest of at least three numbers, and whether the grid of the
    method has a number beyond it since. Zero is no edge, as it is usually the smallest valid one.
    """
    with (HERE / "tuned" / budget).open(newline="") as file:
        lines = list(csv.DictReader(file))
    found = dict[str, dict[str, str]]()
    for line in lines:
        grid = dict(word.split("=") for word in line["grid"].split())
        now = import_module(f"pyrofl.models.{line['method']}").SEARCH_GRID
        for name, word in tuned(budget)[line["method"]].items():
            value, values = word.partition("=")[2], grid[name].split(",")
            if edge := edge_of(value, values):
                beyond = edge_of(value, [*map(str, now[name])]) != edge
                note = f"{edge}, grid since widened" if beyond else edge
                found.setdefault(line["method"], {})[name] = note
    return found


def partition_of(budget: str) -> str:
    """Return the partition on which a tuning chose settings, as its commands state it."""
    with (HERE / "tuned" / budget).open(newline="") as file:
        commands = [shlex.split(line["command"]) for line in csv.DictReader(file)]
    options = ("--partition", "--clients", "--split-seed")
    ((partition, clients, seed),) = {
        tuple(words[words.index(option) + 1] for option in options) for words in commands
    }
    return f"{partition} with {clients} clients and partition seed {seed}"


def edge_of(value: str, values: Sequence[str]) -> str:
    """Return "smallest" or "largest" if a number is that of at least three others, or ""."""
    try:
        numbers, number = sorted(map(float, values)), float(value)
    except ValueError:
        return ""  # words have no order
    if len(numbers) < 3 or number not in (numbers[0] or None, numbers[-1]):
        return ""
    return "smallest" if number == numbers[0] else "largest"


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


@lru_cache
def accepted_settings(method: str) -> frozenset[str]:
    """Return the names of a method's settings."""
    return frozenset(argument_types(builds()[method]))


@lru_cache
def digest(method: str) -> str:
    """Return a short hash of a method's defaults, which changes when one of them does."""
    shared = inspect.signature(fedavg.build).parameters
    defaults = {
        n: p.default
        for n, p in {**shared, **inspect.signature(builds()[method]).parameters}.items()
    }
    plain = {
        n: getattr(v, "__name__", v) for n, v in defaults.items() if n in accepted_settings(method)
    }
    return hashlib.sha256(repr(sorted(plain.items())).encode()).hexdigest()[:8]
