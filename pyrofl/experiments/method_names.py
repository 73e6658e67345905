"""Names of methods and what they are, read from their sources: importing them takes seconds."""

from __future__ import annotations

from pathlib import Path
from pkgutil import iter_modules

import pyrofl.models


def summaries() -> dict[str, str]:
    """Return the first line of the documentation of every method, by the method's name.

    >>> summaries()["fedprox"]
    "FedAvg with a proximal term in the clients' objective"
    """
    found = dict[str, str]()
    for folder in map(Path, pyrofl.models.__path__):
        for name in sorted(module.name for module in iter_modules([str(folder)])):
            file = folder / name / "__init__.py"
            text = (file if file.exists() else folder / f"{name}.py").read_text(encoding="utf-8")
            if "\ndef build(" in text:
                found[name] = text.partition("\n")[0].partition(": ")[2].rstrip('."')
    return found
