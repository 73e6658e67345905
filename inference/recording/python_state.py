"""Snapshots of the Python state that functions read: closures, attributes and globals.

A recorded update does not run its Python code again. If this state changes from update to update,
such as a counter of an annealed loss, the update runs as written; see `recorder`.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any
from zlib import crc32

import numpy as np
from torch import Generator, Tensor, dtype, nn

from pyrofl.inference.description import HOOKS, attributes, closure, is_own, names_read

PLAIN = {bool, int, float, complex, str, bytes, type(None)}
LEAVES = (*PLAIN, Tensor, np.ndarray, np.generic, Generator, dtype, ModuleType, CodeType)
LONG = 1000  # entries of a list or a dict beyond which only the number of entries is compared
MOST = 5000  # maximum number of compared objects, in breadth-first order
LARGE = 2**16  # bytes of an array beyond which its content is not compared

Read = Callable[[], Iterable[Any]]
"""Returns the current values in a function, an object or a collection."""


class PythonState:
    """Python values that given functions read, at any depth, to detect changes between updates."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.reads = list[Read]()
        seen, left = dict[int, Any](), deque(roots)
        while left and len(seen) < MOST:
            value = left.popleft()
            if id(value) in seen or isinstance(value, (*LEAVES, BuiltinFunctionType)):
                continue
            seen[id(value)] = value
            for read in _reads(value):
                self.reads.append(read)
                left += read()
        self.seen = seen  # references, so that no id is reused

    def now(self) -> tuple[object, ...]:
        """Return a fingerprint of the Python values, which changes only if a value changes."""
        return tuple(_shown(value) for read in self.reads for value in read())


def _reads(value: Any) -> Iterator[Read]:
    """Yield functions that look up an object's current attributes, items or closure variables."""
    if isinstance(value, FunctionType):
        yield from _reads_of_function(value)
    elif isinstance(value, MethodType):
        yield lambda: (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield lambda: (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, nn.Module):
        yield partial(_of_module, value)
    elif isinstance(value, type):
        if is_own(value.__module__):
            yield lambda: [v for n, v in vars(value).items() if not _is_hidden(n)]
    elif isinstance(value, (dict, MappingProxyType)):
        yield lambda: (len(value), *(value.values() if len(value) <= LONG else ()))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield lambda: (len(value), *(value if len(value) <= LONG else ()))
    else:
        yield lambda: [v for n, v in attributes(value) if not _fills(n, v)]
        if is_own(type(value).__module__):
            yield lambda: (type(value),)


def _reads_of_function(function: FunctionType) -> Iterator[Read]:
    yield lambda: (*closure(function).values(), *(function.__defaults__ or ()))
    if is_own(str(function.__globals__.get("__name__"))):
        known, (names, _, _) = function.__globals__, names_read(function.__code__)
        yield lambda: [known[n] for n in names if n in known]


def _of_module(module: nn.Module) -> Iterator[Any]:
    """Yield attributes, hooks and untrained tensors of all layers of a PyTorch module."""
    for layer in module.modules():
        held = vars(layer)
        for name, value in held.items():
            if name[0] != "_" or type(value) in PLAIN:
                yield value
        for name in HOOKS:
            yield from held[name].values()
        for value in (*held["_parameters"].values(), *held["_buffers"].values()):
            if value is not None and not value.requires_grad:
                yield value
        if is_own(type(layer).__module__):
            yield type(layer)


def _is_hidden(name: str) -> bool:
    """Return whether a class attribute has a special name such as `__dict__`, except `__call__`."""
    return name.startswith("__") and name.endswith("__") and name != "__call__"


def _fills(name: str, held: Any) -> bool:
    """Return whether an attribute may be a cache: a private dict, list or set."""
    return name.startswith("_") and isinstance(held, (dict, list, set))


def _shown(value: Any) -> object:
    """Return a fingerprint of a value, which changes if the value is modified."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        with suppress(RuntimeError):  # sparse ones have no memory of their own
            return id(value), value._version, value.data_ptr()
        return id(value), value._version
    if isinstance(value, np.ndarray):
        small = value.nbytes <= LARGE and not value.dtype.hasobject
        return id(value), crc32(value.tobytes()) if small else None
    if isinstance(value, Iterator):
        return id(value), repr(value), *_position(value)
    return id(value)


def _position(iterator: Iterator[Any]) -> tuple[object, ...]:
    """Return the position of an iterator without advancing it, or () if it is unknown."""
    frame = getattr(iterator, "gi_frame", None)
    if frame is not None:  # of a generator
        return frame.f_lasti, repr([v for v in frame.f_locals.values() if type(v) in PLAIN])
    with suppress(TypeError), warnings.catch_warnings():  # Python 3.14 has none for itertools
        warnings.simplefilter("ignore", DeprecationWarning)
        return (repr(iterator.__reduce__()[1:]),)
    return ()
