"""Pickling of records that contain functions, with cloudpickle."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

R = TypeVar("R")


class Pickled:
    """Base class of dataclasses with closures, which cloudpickle pickles if it is installed."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the object's fields by cloudpickle; raise TypeError if it is not installed."""
        try:
            cloud = import_module("cloudpickle")
        except ImportError as error:
            raise TypeError(
                f"a {type(self).__name__} cannot be pickled without cloudpickle, as its programs "
                "are functions inside functions; install that, or save a run with "
                "pyrofl.inference.fitted_run.checkpoints.save"
            ) from error
        return _made, (type(self), cloud.dumps(vars(self)))

    def __copy__(self: R) -> R:
        """Return a shallow copy of the dataclass instance."""
        return type(self)(**vars(self))


def _made(kind: Callable[..., R], fields: bytes) -> R:
    return kind(**import_module("cloudpickle").loads(fields))
