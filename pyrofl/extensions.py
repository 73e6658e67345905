"""Extension points: functions of removable parts of the package, which the core finds by name.

The core imports none of these parts. `pyrofl/__init__.py` registers their functions, and each is
imported when it is first needed. Without a part, the core runs by its default.

Extension points, the arguments of their functions, and the default:

- executor: those of `training.phases.run_phases`, which is the default; runs the phases of a chunk.
- unrecorded updates: method, steps, seconds; a line about a function of the user. Default: none.
- engine ray: workers, data; starts the engine. Default: refused.
- constants: method; hash of frozen weights, compared on resuming. Default: not compared.
- privacy: method, `Privacy`, clients, participation; the private method. Default: refused.
- private data: method, data; refuses unbounded preprocessing. Default: refused.
- validation: method, data, chunk size, server state; checks before round one. Default: none.
- checks of arrays, words, frames and units: data; warnings. Default: none.
- preprocessor, summary of columns, clients of rows: columns of tables. Default: none.
- figure of rows, figure of run: figures in notebooks. Default: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pyrofl.arguments import check_name

PACKAGE_PREFIX = "pyrofl."  # parts of the package, which may be removed

_function_paths: dict[str, str] = {}
_functions: dict[str, Any] = {}


def register(functions_by_point: Mapping[str, str]) -> None:
    """Register functions, as extension point -> "module:function"; later ones replace earlier.

    Raises:
        ValueError: if a path is not of this form, or if there is no such extension point.
    """
    for point, path in functions_by_point.items():
        if not isinstance(path, str) or not all(path.partition(":")):
            raise ValueError(
                f"{point} is registered as {path!r}; expected a string 'module:function'"
            )
        if _function_paths and not path.startswith(PACKAGE_PREFIX):
            check_name(point, _function_paths, "extension point")
    _function_paths.update(functions_by_point)
    for point in functions_by_point:
        _functions.pop(point, None)


def find_extension(extension_point: str) -> Any:
    """Return the function registered at an extension point, or None if its part was removed.

    Raises:
        ValueError: if the registered module is not a part of pyrofl, and does not exist.
    """
    if extension_point not in _functions:
        module, _, name = _function_paths.get(extension_point, "").partition(":")
        try:
            _functions[extension_point] = getattr(import_module(module), name) if module else None
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise  # the part is there, and lacks a package that it needs
            if not module.startswith(PACKAGE_PREFIX):
                raise ValueError(
                    f"{extension_point} is registered as '{module}:{name}', but there is no module "
                    f"{error.name!r}"
                ) from error
            _functions[extension_point] = None
    return _functions[extension_point]


def required(extension_point: str, argument: str) -> Any:
    """Return the function at an extension point that an argument needs.

    Raises:
        ValueError: if no part of the package is registered there.
    """
    function = find_extension(extension_point)
    if function is None:
        module = _function_paths.get(extension_point, "").partition(":")[0]
        raise ValueError(f"{argument} needs {module}, a part of pyrofl that was removed")
    return function
