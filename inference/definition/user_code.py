"""Search of the functions of a training update for a user's code.

Functions of pyrofl, Pyro and torch compute from their arguments alone, so that their recorded
operations stay valid. What a user's function reads besides, such as a counter, a file or a clock,
cannot be known: it is recorded only if the user promises that nothing of it changes.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from pyrofl.inference.definition.description import (
    HOOKS,
    INTERNAL,
    UNCALLED,
    attributes,
    closure,
    is_user_module,
)
from pyrofl.nets import Network

LIBRARY = ("pyrofl", "pyro", "torch")
# Modules of Python whose functions have no state, or only that of their arguments.
STATELESS = ("builtins", "_operator", "operator", "math", "functools", "contextlib", "types")
LEAVES = (str, int, float, Generator, torch.dtype, torch.device, np.ndarray, np.generic, CodeType)


def users_code(values: object) -> tuple[str, list[Network]]:
    """Return the name of a user's function that a value refers to, and all of its networks.

    Items, attributes and closure variables are searched, at any depth. The name is "" if all
    functions, layers and objects are those of pyrofl, Pyro and torch.

    >>> from json import dumps
    >>> users_code(("a", 0.1, torch.tanh)), users_code([partial(dumps)])
    (('', []), ('dumps', []))
    """
    seen, left, nets, name = dict[int, object](), deque([values]), list[Network](), ""
    while left:
        part = left.popleft()
        if id(part) in seen or isinstance(part, LEAVES):
            continue
        seen[id(part)] = part
        if isinstance(part, Network):
            nets.append(part)
        if _is_users(part):
            name = name or str(getattr(part, "__qualname__", None) or type(part).__qualname__)
        else:
            left += _parts(part)
    return name, nets


def _is_users(value: object) -> bool:
    """Return whether a value runs code that is neither the library's nor stateless Python."""
    kind = type(value)
    if isinstance(value, FunctionType):  # not by `__module__`, which `functools.wraps` copies
        return not _is_in(str(value.__globals__.get("__name__")))
    if isinstance(value, BuiltinFunctionType):
        bound = not isinstance(value.__self__, ModuleType | type | Tensor | None)
        return bound or not _is_in(value.__module__ or "builtins")
    if isinstance(value, type | nn.Module):
        return _has_users_code(value if isinstance(value, type) else kind)
    if isinstance(value, Iterator | torch.jit.ScriptFunction | Tensor):
        return type(value) not in (Tensor, nn.Parameter)
    return is_user_module(kind.__module__) or (callable(value) and not _is_in(kind.__module__))


@cache
def _has_users_code(kind: type) -> bool:
    """Return whether a class, or one that it is derived from, has functions of a user.

    A user's `class Net(nn.Sequential)` with no function besides `__init__` has none.
    """
    if issubclass(kind, torch.jit.ScriptModule):
        return True
    for one in kind.__mro__:
        if _is_in(one.__module__) or one.__module__.partition(".")[0] in sys.stdlib_module_names:
            continue
        functions = (n for n, v in vars(one).items() if callable(v) or hasattr(type(v), "__get__"))
        if not issubclass(one, nn.Module) or {*functions} - {*UNCALLED, "__dict__", "__weakref__"}:
            return True
    return False


def _is_in(module: str) -> bool:
    return module.partition(".")[0] in (*LIBRARY, *STATELESS)


def _parts(value: Any) -> Iterable[Any]:
    """Return what a value holds and its code may call: items, attributes, closure variables."""
    if isinstance(value, Tensor | ModuleType | BuiltinFunctionType | type):
        return ()
    if isinstance(value, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return (*closure(value).values(), *defaults)
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, Mapping):
        return (*value.values(),)
    if isinstance(value, tuple | list | set | frozenset | deque):
        return (*value,)
    if isinstance(value, nn.Module):
        return (*layers_held(value), *value.children())
    wrapped = (value.__wrapped__,) if hasattr(value, "__wrapped__") else ()
    return (*wrapped, *(held for _, held in attributes(value)))


def layers_held(layer: nn.Module) -> Iterator[Any]:
    """Yield the hooks, attributes, frozen weights and buffers of a network's layer."""
    held = vars(layer)
    for name in HOOKS:
        yield from held[name].values()
    yield from (v for n, v in held.items() if n not in INTERNAL or n == "training")
    tensors = (*held["_parameters"].values(), *held["_buffers"].values())
    yield from (v for v in tensors if v is not None and not v.requires_grad)
