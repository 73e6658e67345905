"""One thread at a time: Pyro's handlers and settings, and torch's generator, are the process's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

LOCK = RLock()


def synchronized(function: F) -> F:
    """Let threads that call such functions wait for each other, so that several may fit."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with LOCK:
            return function(*args, **kwargs)

    return cast("F", call)
