"""Names of methods and what they are, read from their sources: importing them takes seconds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import iter_modules

import pyrofl.models


def method_summaries() -> dict[str, str]:
    """Return the first line of the documentation of every method, by the method's name.

    >>> method_summaries()["fedprox"]
    "FedAvg with a proximal term in the clients' objective"
    """
    lines = {name: text.partition("\n")[0] for name, text in _sources()}
    return {name: line.partition(": ")[2].rstrip('."') for name, line in lines.items()}


def is_method_argument(name: str) -> bool:
    """Return whether an argument of a method has this name.

    >>> is_method_argument("epochs"), is_method_argument("epoch")
    (True, False)
    """
    return any(re.search(rf"(?m)^    {re.escape(name)}: .+ = ", text) for _, text in _sources())


def _sources() -> Iterator[tuple[str, str]]:
    """Yield name and source of every method: every module of `pyrofl.models` with a build."""
    for folder in map(Path, pyrofl.models.__path__):
        for name in sorted(module.name for module in iter_modules([str(folder)])):
            file = folder / name / "__init__.py"
            text = (file if file.exists() else folder / f"{name}.py").read_text(encoding="utf-8")
            if "\ndef build(" in text:
                yield name, text
