"""Lock for Pyro's handlers and torch's generator, which are not thread-safe."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

LOCK = RLock()


def synchronized(function: F) -> F:
    """Decorate a function so that only one thread at a time can run it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with LOCK:
            return function(*args, **kwargs)

    return cast("F", call)
