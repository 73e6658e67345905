"""Federated learning methods, one module per paper, with their priors, guides and likelihoods.

A module here with a function `build` is a method; its name is the method's name everywhere. Each is
loaded when it is first used: `pyrofl.models.fedavg.build`.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

NAMES = sorted(found.name for found in iter_modules(__path__))


def __getattr__(name: str) -> ModuleType:
    if name not in NAMES:
        raise AttributeError(f"module 'pyrofl.models' has no attribute {name!r}")
    return import_module(f"pyrofl.models.{name}")


def __dir__() -> list[str]:
    return NAMES
