"""Build specifications: records from which another process can rebuild an object.

Functions that are `rebuildable` are listed here with the arguments of what they returned. `told`
writes such a `BuildSpec` as numbers, texts, tensors, lists and dicts, and `made` follows it: only
rebuildable functions are called then; other functions of the library and Pyro's distributions are
passed by name.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from numbers import Integral, Real
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyrofl.turns import synchronized

HANDED_ON = ("pyrofl.models", "pyrofl.inference.definition.programs", "pyro.distributions")
PLAIN = (bool, str, Tensor, type(None))

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class BuildSpec:
    """Record of how an object was built: the library function "MODULE:NAME" and its arguments."""

    maker: str
    arguments: Mapping[str, Any]


_makers: dict[str, Callable[..., Any]] = {}
_specs: dict[int, tuple[weakref.ref[Any], BuildSpec]] = {}  # by id, as methods have no hash


def rebuildable(function: F) -> F:
    """Decorate a function to record the arguments with which each returned object was built.

    Threads wait for each other and for rounds of a fit, see `synchronized`: some functions run Pyro
    programs.
    """
    signature = inspect.signature(function)
    maker = _name(function)
    more = [n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]

    @wraps(function)
    @synchronized
    def call(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        for name in more:
            arguments |= arguments.pop(name, {})
        if not _of_module(value):  # others have a name, and may be returned as they are
            key = id(value)
            _specs[key] = weakref.ref(value, lambda _: _forget(key)), BuildSpec(maker, arguments)
        return value

    _makers[maker] = call
    return cast("F", call)


def _forget(key: int) -> None:
    """Remove the build specification of a deleted object, unless its id is in use again."""
    entry = _specs.get(key)
    if entry and entry[0]() is None:
        del _specs[key]


def spec_of(value: Any) -> BuildSpec | None:
    """Return an object's build specification; None if no library function built it."""
    entry = _specs.get(id(value))
    return entry[1] if entry and entry[0]() is value else None


def rebuild(value: Any, **changes: Any) -> Any:
    """Build an object again with some other arguments.

    Raises:
        ValueError: if no library function built it, or an argument does not fit.
    """
    spec = spec_of(value)
    if spec is None:
        kind = type(value).__name__
        raise ValueError(
            f"this {kind} was not made by a build function of the library, or was changed since; "
            "build another one, or replace its fields by dataclasses.replace"
        )
    return _makers[spec.maker](**{**spec.arguments, **changes})


def _of_module(value: Any) -> bool:
    return isinstance(value, FunctionType | type) and "<locals>" not in value.__qualname__


def _name(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def told(value: Any, what: str = "it") -> Any:
    """Convert a value to a JSON-compatible build specification; the inverse of `made`."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [told(one, f"{what}[{i}]") for i, one in enumerate(value)]}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {"dict": {n: told(one, f"{what}[{n!r}]") for n, one in value.items()}}
    if spec := spec_of(value):
        argument_texts = {n: told(one, n) for n, one in spec.arguments.items()}
        return {"call": spec.maker, "with": argument_texts}
    if _of_module(value) and _found(name := _name(value)) is value:
        return {"name": name}
    if parameters := _parameters(value):
        argument_texts = {n: told(one, n) for n, one in parameters.items()}
        return {"distribution": _name(type(value)), "with": argument_texts}
    kind = getattr(value, "__qualname__", type(value).__name__)
    raise ValueError(f"{what} is {kind}, not made by the library")


def made(told: Any) -> Any:
    """Rebuild a value from its JSON-compatible specification; the inverse of `told`."""
    if isinstance(told, (*PLAIN, int, float)):
        return told
    if "call" in told:
        _imported(told["call"])  # which lists its rebuildable functions
        maker = _makers.get(told["call"])
        if maker is None:
            raise ValueError(f"{told['call']!r} makes nothing; expected a function of the library")
        return maker(**{n: made(one) for n, one in told["with"].items()})
    if "distribution" in told:
        kind = made({"name": told["distribution"]})
        return kind(**{n: made(one) for n, one in told["with"].items()})
    if "name" in told:
        if (function := _found(told["name"])) is None:
            raise ValueError(f"{told['name']!r} is unknown; expected a function of the library")
        return function
    if "dict" in told:
        return {n: made(one) for n, one in told["dict"].items()}
    kind = tuple if "tuple" in told else list
    return kind(made(one) for one in told[kind.__name__])


def _parameters(value: Any) -> dict[str, Any]:
    """Return the parameters of a distribution that its class can be called with; {} if unknown."""
    kind = type(value)
    if not isinstance(value, TorchDistributionMixin) or _found(_name(kind)) is not kind:
        return {}
    parameters = {
        n: vars(value)[n] for n in getattr(value, "arg_constraints", {}) if n in vars(value)
    }
    plain = torch.get_default_dtype()
    return {n: float(v) if not v.dim() and v.dtype == plain else v for n, v in parameters.items()}


def _found(name: str) -> Any:
    """Import the object "MODULE:NAME" if build specifications may name it; else return None."""
    if not any(f"{name.partition(':')[0]}.".startswith(f"{module}.") for module in HANDED_ON):
        return None
    value = _imported(name)
    return value if _of_module(value) else None


def _imported(name: str) -> Any:
    """Import "MODULE:NAME" from pyrofl or Pyro's distributions; return None for other modules."""
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] != "pyrofl" and not f"{module}.".startswith("pyro.distributions."):
        return None
    try:
        value = getattr(import_module(module), attribute, None)
    except ImportError:
        return None
    return value if getattr(value, "__module__", None) == module else None
