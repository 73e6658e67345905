"""What a method is made of, in words that are the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cached_property, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Generator, Tensor, nn

from pyrofl.inference.method import Method

RECIPE = "recipe"  # says how a thing was made, not what it is
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def described(method: Method) -> dict[str, str]:
    """Tell the parts of a method: "phases.0.moves.0.optim.lr" -> "0.01", and so on.

    Functions are told by their code and by what they hold: arguments of what made them, such as the
    family and the scale of a prior, defaults, fields of objects, tensors by their values, networks
    by their layers. What a function finds by a global name when it runs is not seen, as constants
    of a module and helpers beside it; nor private dicts and lists, which may remember results.
    """
    found: dict[str, str] = {}
    known: dict[int, Any] = {}  # held, so that no two have the same id
    for field in fields(method):
        if field.name != RECIPE:
            _tell(field.name, getattr(method, field.name), found, known)
    return found


CLIENTS = ("model", "guide", "phases", "join", "upload", "adapt", "statistics", "all_train")


def clients_part(method: Method) -> dict[str, str]:
    """Return a hash of each part of a method that clients run: part -> 12 hexadecimal digits.

    Server and clients need the same of these. What a server alone has may differ: its merge, and
    the rows without labels that it learns from.
    """
    parts: dict[str, Any] = {name: getattr(method, name) for name in CLIENTS}
    reads = {n: getattr(view, "read", view) for n, view in method.views.items()}
    hashes = {}
    for name, part in (parts | {"views": reads}).items():
        found: dict[str, str] = {}
        _tell(name, part, found, {})  # on its own, as others may tell what it holds before it
        hashes[name] = _hash(repr(sorted(found.items())).encode())
    return hashes


def _tell(path: str, value: Any, found: dict[str, str], known: dict[int, Any]) -> None:
    """Write down a value, and all that it holds; each thing once."""
    if isinstance(value, PLAIN):
        found[path] = repr(value)
        return
    if id(value) in known:
        return
    known[id(value)] = value
    found[path] = _kind(value)
    for name, part in _parts(value):
        _tell(f"{path}.{name}", part, found, known)


def _kind(value: Any) -> str:
    """Name a thing without what it holds."""
    if isinstance(value, Tensor):
        # A copy, as of one entry that was expanded torch says that it is contiguous, and it is not.
        flat = value.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        content = flat.view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {_hash(content)}"
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {_hash(repr(value).encode())}"
    if isinstance(value, FunctionType):
        return f"{value.__qualname__} {_code(value.__code__)}"
    if isinstance(value, set | frozenset):
        return str(sorted(map(repr, value)))
    if isinstance(value, type | BuiltinFunctionType | ModuleType):
        return getattr(value, "__qualname__", value.__name__)
    return type(value).__qualname__


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Yield what a thing holds, by name."""
    leaves = Tensor | nn.Module | Generator | type | BuiltinFunctionType | ModuleType
    if isinstance(value, leaves):
        return ()
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        held = [(name, cell.cell_contents) for name, cell in cells if _filled(cell)]
        defaults = [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        return [*held, *defaults, *_wrapped(value)]
    if isinstance(value, MethodType):
        return [("function", value.__func__), ("self", value.__self__)]
    if isinstance(value, partial):
        return [("function", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple | list):
        return enumerate(value)
    if hasattr(value, "__wrapped__"):
        return _wrapped(value)
    return sorted(
        (n, v) for n, v in getattr(value, "__dict__", {}).items() if not _fills(value, n, v)
    )


def _fills(whole: Any, name: str, value: Any) -> bool:
    """Say whether a thing would be the same without it, as without what remembers results."""
    private = name.startswith("_") and isinstance(value, dict | list | set)
    return (
        private or name == RECIPE or isinstance(getattr(type(whole), name, None), cached_property)
    )


def _wrapped(value: Any) -> list[tuple[str, Any]]:
    found = getattr(value, "__wrapped__", None)
    return [] if found is None else [("wrapped", found)]


def _filled(cell: CellType) -> bool:
    """Say whether a name that a function holds is bound."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _code(code: CodeType) -> str:
    """Hash what a function does: not where it stands, nor what is said about it."""
    found = hashlib.blake2b(
        code.co_code + repr((code.co_names, code.co_varnames)).encode(), digest_size=6
    )
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found.update(_code(constant).encode())
        elif isinstance(constant, frozenset):
            found.update(str(sorted(map(repr, constant))).encode())
        elif constant != _said(code):
            found.update(repr(constant).encode())
    return found.hexdigest()


def _said(code: CodeType) -> Any:
    """Return the docstring of a function, or what stands in its place."""
    return code.co_consts[0] if code.co_consts and isinstance(code.co_consts[0], str) else None


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()
