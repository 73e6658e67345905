"""Extension points: functions of removable parts of the package, which the core finds by name.

The core imports none of these parts. `pyrofl/__init__.py` registers their functions, and each is
imported when it is first needed. Without a part, the core runs by its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pyrofl.arguments import check_name

OWN = "pyrofl."  # parts of the package, which may be removed

_places: dict[str, str] = {}
_functions: dict[str, Any] = {}


def register(places: Mapping[str, str]) -> None:
    """Register functions, as extension point -> "module:function"; later ones replace earlier.

    Raises:
        ValueError: if a place is not of this form, or if there is no such extension point.
    """
    for point, place in places.items():
        if not isinstance(place, str) or not all(place.partition(":")):
            raise ValueError(
                f"{point} is registered as {place!r}; expected a string 'module:function'"
            )
        if _places and not place.startswith(OWN):
            check_name(point, _places, "extension point")
    _places.update(places)
    for point in places:
        _functions.pop(point, None)


def extension(point: str) -> Any:
    """Return the function registered at an extension point, or None if its part was removed.

    Raises:
        ValueError: if the registered module is not a part of pyrofl, and does not exist.
    """
    if point not in _functions:
        module, _, name = _places.get(point, "").partition(":")
        try:
            _functions[point] = getattr(import_module(module), name) if module else None
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise  # the part is there, and lacks a package that it needs
            if not module.startswith(OWN):
                raise ValueError(
                    f"{point} is registered as '{module}:{name}', but there is no module "
                    f"{error.name!r}"
                ) from error
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
