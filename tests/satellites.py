"""Satellites of the core: what each needs, and a copy of the package without it.

Run: python tests/satellites.py   (the table of examples/docs/architecture.md)
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from module_imports import FILES, PACKAGE, part, reached, read

ROOT = PACKAGE.parent
TABLES = "preprocessor columns column_summary row_checks data_quality array_checks owners units "
TABLES += "table_files feature_selection holdout file_checks description dictionary "
TABLES += "cross_tables near_copies"
SATELLITES: dict[str, tuple[str, ...]] = {
    "acceleration": ("inference.acceleration",),
    "validation": ("inference.validation",),
    "hierarchical": (
        *("models.hierarchical", "models.likelihood_factors", "models.pvi", "models.regression"),
        *("models.conjugate", "models.two_stage"),
    ),
    "privacy": ("inference.privacy",),
    "deployment": (
        *("inference.transport", "flower", "models.regression.remote"),
        *("models.regression.rule_checks", "models.regression.rehearsal"),
        *("models.regression.kaplan_meier", "cli.commands.describe"),
    ),
    "conformal": ("inference.conformal",),
    "checks": ("inference.checks", "inference.reference"),
    "planning": ("inference.planning", "inference.dependencies", "inference.data_flow"),
    "Pyro programs": ("inference.pyro_pair",),
    "tuning": ("inference.tuning",),
    "tables": (
        *("data.loaders", "partitions.federations"),
        *(f"data.tables.{name}" for name in TABLES.split()),
    ),
    "figures": ("figures",),
    "command line": ("cli", "__main__", "experiments", "reports"),
}
"""Name -> modules and folders in pyrofl/."""
ADDS = {
    "acceleration": "recorded updates, groups of clients by size, training in the space of rows",
    "validation": "checks of a method and its data before round one",
    "hierarchical": "`pyrofl.hierarchical`, `regression`, PVI, conjugate and two-stage models",
    "privacy": "differential privacy, clipped sums and masks",
    "deployment": "`Server` and `Client`, Ray, Flower",
    "conformal": "prediction sets with coverage by client",
    "checks": "calibration, leave-one-out, predictive checks; MCMC on the pooled rows",
    "planning": "`pyrofl.plan`, `pyrofl.get_data_flow`, `pyrofl.get_dependencies`",
    "Pyro programs": "`method.to_pyro`",
    "tuning": "`pyrofl.tune`",
    "tables": "data sets, tables and their checks, `federations.split`",
    "figures": "`pyrofl.figures`",
    "command line": "`pyrofl compare` and the other commands, experiments, HTML reports",
}
CORE_METHODS = (
    *("pfedvem", "pfedmb", "metavd", "fedbe", "fedabml", "local", "fedavg", "fedprox", "fedavgm"),
    *("fedopt", "scaffold", "fedper", "fedrep", "fedbabu", "lgfedavg", "ditto", "pfedme", "apfl"),
    *("perfedavg", "priors", "guides", "likelihoods", "shared"),
)


@cache
def leaves() -> list[str]:
    """Return the modules of the methods that are neither in the core nor in a satellite."""
    names = {m.split(".")[2] for m in read(types=False) if m.startswith("pyrofl.models.")}
    taken = {m.split(".")[1] for part in SATELLITES.values() for m in part if "models." in m}
    return sorted(names - taken - {*CORE_METHODS})


@cache
def owner(module: str) -> str:
    """Return the satellite of a module, the name of its method, or "core"."""
    every = {**SATELLITES, **{name: (f"models.{name}",) for name in leaves()}}
    owners = {place: name for name, places in every.items() for place in places}
    places = [place for place in owners if f"{module}.".startswith(f"pyrofl.{place}.")]
    return owners[max(places, key=len)] if places else "core"


@cache
def needs() -> dict[str, set[str]]:
    """Return the satellites that each of them imports, and "core": directly or by others."""
    arrows: dict[str, set[str]] = {name: set() for name in ("core", *SATELLITES, *leaves())}
    for module, modules in read(types=False).items():
        if module != "pyrofl":  # it registers satellites by name
            arrows[owner(module)] |= {owner(m) for m in modules - {"pyrofl"}}
    arrows = {name: found - {name, "core"} for name, found in arrows.items()}
    return {name: reached(arrows, name) for name in arrows}


def removed_with(*satellites: str) -> list[str]:
    """Return satellites and all that need one of them."""
    return [name for name, found in needs().items() if {name, *found} & {*satellites}]


def lines_of_code(file: Path) -> int:
    """Return the number of lines of a file without comments, docstrings and empty lines."""
    source = file.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(re.match(r"\s*[^\s#]", line)) for i, line in lines if i not in strings)


def size_of(names: Iterable[str]) -> int:
    """Return the lines of code of satellites, methods or the core, in hundreds."""
    wanted = {*names}
    return 100 * round(sum(lines_of_code(f) for f in FILES if owner(part(f)) in wanted) / 100)


def table() -> str:
    """Return the table of the page, in Markdown."""
    rows = [
        f"| core | rounds, posteriors, the five papers and common baselines |  | {core_size():,} |"
    ]
    for name in SATELLITES:
        needed = ", ".join(sorted(needs()[name]))
        rows.append(f"| {name} | {ADDS[name]} | {needed} | {size_of([name]):,} |")
    rows.append(f"| other methods | one file or folder each |  | {size_of(leaves()):,} |")
    return "\n".join(["| Satellite | Adds | Needs | Lines of code |", "|---|---|---|---:|", *rows])


def core_size() -> int:
    """Return the lines of code of the core, in hundreds."""
    return size_of(["core"])


def copy_without(target: Path, *satellites: str) -> None:
    """Copy the package to a folder, without satellites and all that need them."""
    ignored = shutil.ignore_patterns("__pycache__", "models", "inference", "lessons")
    shutil.copytree(PACKAGE, target / "pyrofl", ignore=ignored)
    for name in ("models", "inference"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        (target / "pyrofl" / name).symlink_to(target / name)
    for name in removed_with(*satellites):
        for place in SATELLITES.get(name, (f"models.{name}",)):
            path = (target / "pyrofl" / place.replace(".", "/")).absolute()
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.with_suffix(".py").unlink(missing_ok=True)


if __name__ == "__main__":
    print(table())
