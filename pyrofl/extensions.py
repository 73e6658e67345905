"""Extension points: functions of removable parts of the package, which the core finds by name.

The core imports none of these parts. `pyrofl/__init__.py` registers their functions, and each is
imported when it is first needed. Without a part, the core runs by its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

_places: dict[str, str] = {}
_functions: dict[str, Any] = {}


def register(places: Mapping[str, str]) -> None:
    """Register functions, as extension point -> "module:function"; later ones replace earlier."""
    _places.update(places)
    for point in places:
        _functions.pop(point, None)


def extension(point: str) -> Any:
    """Return the function registered at an extension point, or None if its part was removed."""
    if point not in _functions:
        module, _, name = _places.get(point, "").partition(":")
        try:
            _functions[point] = getattr(import_module(module), name) if module else None
        except ModuleNotFoundError as error:
            if not (error.name and module.startswith(error.name)):
                raise  # the part is there, and lacks a package that it needs
            _functions[point] = None
    return _functions[point]


def required(point: str, argument: str) -> Any:
    """Return the function at an extension point that an argument needs.

    Raises:
        ValueError: if no part of the package is registered there.
    """
    function = extension(point)
    if function is None:
        module = _places.get(point, "").partition(":")[0]
        raise ValueError(f"{argument} needs {module}, a part of pyrofl that was removed")
    return function
