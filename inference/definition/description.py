"""Text descriptions of methods, equal in all processes and Python versions, to compare methods."""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache, cached_property, partial
from logging import Logger
from pathlib import Path
from textwrap import dedent
from tokenize import TokenError
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from pyrofl.inference.definition.method import Method
from pyrofl.tensors import Tensors

PLAIN = (bool, int, float, complex, str, bytes, type(None))
INTERNAL = frozenset(vars(nn.Module()))
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
LIBRARIES = ("pyrofl", "torch", "pyro", "numpy")  # their versions are compared
UNCALLED = ("__init__", "__repr__", "__new__")  # methods that no prediction uses


@dataclass
class Description:
    """Textual description of a method, with the frozen weights and buffers of its networks.

    Attributes:
        parts: name of a part -> text that is equal for equal parts.
        constants: name of a part -> frozen weights and buffers of its networks, not copied.
        has_text: whether parts are described, which hashes their source, or only the constants.
    """

    parts: dict[str, str] = field(default_factory=dict)
    constants: Tensors = field(default_factory=dict)
    has_text: bool = True
    _described: dict[int, Any] = field(default_factory=dict)  # references keep ids unique

    def add(self, path: str, value: Any) -> None:
        """Add a value and all nested values to the text that identifies a method, each once."""
        if isinstance(value, PLAIN):
            if self.has_text:
                self.parts[path] = repr(value)
            return
        inner = value.layer if isinstance(value, _Trained) else value
        if id(inner) in self._described:
            return
        self._described[id(inner)] = inner
        if isinstance(inner, Tensor) and is_functorch_wrapped_tensor(inner):
            raise ValueError(
                "a function or hook of the method stores a tensor from inside a network's call; a "
                "network runs for several clients at once, so that nothing may be stored there"
            )
        if self.has_text:
            self.parts[path] = _kind(inner)
        for name, part in _parts(value):
            if (
                isinstance(inner, nn.Module)
                and isinstance(part, Tensor)
                and name in _direct_tensors(inner)
            ):
                self.constants[f"{path}.{name}"] = part
            self.add(f"{path}.{name}", part)


def describe(method: Method, has_text: bool = True) -> Description:
    """Map each part of a method to a description, such as "phases.0.updates.0.optim.lr" -> "0.01".

    Functions are described by their source and the values they refer to: closure variables, such
    as the family and the scale of a prior, defaults, fields of objects, tensors by their values.
    Networks are described by their layers, attributes, hooks, frozen weights and buffers, not by
    trainable weights. A user's own functions and classes behind global names are described too;
    libraries are compared by version.

    Not included are: comments, docstrings and layout; private dicts and lists, which may be caches;
    positions of iterators; global names that a function itself assigns; names looked up as strings
    (`getattr`); files and environment variables; and the statements of functions without source,
    such as those typed at a prompt or defined by `exec`, of which only names and constants are
    compared. Source is read when a function is first described, so an edit between import and fit
    is attributed to the imported function.
    """
    description = Description(has_text=has_text)
    for one in fields(method):
        description.add(one.name, getattr(method, one.name))
    return description


def described(method: Method) -> dict[str, str]:
    """Return a dict from each part of a method to its description; see `describe`."""
    return describe(method).parts


def constants_hash(method: Method) -> str:
    """Return a hash of a method's frozen weights and buffers; "" if it has none."""
    constants = describe(method, has_text=False).constants.values()
    values = sorted({_kind(value) for value in constants})
    return _hash(repr(values).encode()) if values else ""


CLIENTS = (
    "model",
    "guide",
    "phases",
    "init_client",
    "upload",
    "adapt",
)
OF_METADATA = ("statistics", "train_all_clients")


def clients_part(method: Method) -> dict[str, str]:
    """Return a hash of each part of a method that runs on clients, by the name of the part.

    Server and clients need equal hashes. Parts that only the server uses may differ: its
    aggregation, and its unlabeled rows.
    """
    parts: dict[str, Any] = {name: getattr(method, name) for name in CLIENTS}
    parts |= {name: getattr(method.metadata, name) for name in OF_METADATA}
    reads = {n: getattr(view, "read", view) for n, view in method.views.items()}
    hashes = {}
    for name, part in (parts | {"views": reads}).items():
        description = Description()
        description.add(name, part)  # separately, as each value is described only once
        hashes[name] = _hash(repr(sorted(description.parts.items())).encode())
    return hashes


@dataclass(frozen=True)
class _Trained:
    """Wrapper that marks a network layer to be described without its trainable weights."""

    layer: nn.Module


def _kind(value: Any) -> str:
    """Return a short text that identifies a value, such as its type or hash, without its parts."""
    if isinstance(value, np.ndarray):
        objects = value.dtype.hasobject
        content = repr(value.tolist()).encode() if objects else value.tobytes()
        return f"{value.dtype} {list(value.shape)} {_hash(content)}"
    if isinstance(value, np.generic | torch.dtype | torch.device | Enum):
        return repr(value)
    if isinstance(value, Tensor) and (value.is_nested or value.is_meta):
        parts = () if value.is_meta else value.unbind()
        return f"{value.dtype} nested or without data {[_kind(part) for part in parts]}"
    if isinstance(value, Tensor) and value.layout != torch.strided:
        entries = value.detach().to_sparse_coo().coalesce()
        parts = (entries.indices(), entries.values())
        return f"{value.layout} {list(value.shape)} {[_kind(part) for part in parts]}"
    if isinstance(value, Tensor):
        # A copy: torch reports an expanded tensor of one entry as contiguous, which it is not.
        flat = value.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        content = flat.view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {_hash(content)}"
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {_hash(repr(value).encode())}"
    if isinstance(value, torch.jit.ScriptFunction):
        return f"ScriptFunction {_hash(str(value.code).encode())}"
    if isinstance(value, FunctionType):
        home = _home(value)
        compared = home.partition(".")[0] == "pyrofl" or is_user_module(home)
        source = _source(value.__code__) if compared else ""  # other libraries: by version
        return f"{home}.{value.__qualname__} {source}"
    if isinstance(value, set | frozenset):
        return str(sorted(map(repr, value)))
    if isinstance(value, type | BuiltinFunctionType | ModuleType):
        return getattr(value, "__qualname__", value.__name__)
    kind = type(value).__qualname__
    if hasattr(value, "__dict__") or is_user_module(type(value).__module__):
        return kind  # its attributes follow
    if isinstance(value, Mapping | tuple | list | Iterator):
        return kind  # its parts follow, or reading would change it
    try:  # objects of C types have no attributes: range, slice, Fraction, re.Pattern
        return f"{kind} {_hash(pickle.dumps(value, protocol=4))}"
    except Exception:  # classes may raise any type
        return kind


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Yield name and value of all items, attributes or other values nested in an object."""
    leaves = Tensor | np.ndarray | Generator | BuiltinFunctionType | ModuleType | Logger | Enum
    if isinstance(value, leaves):
        return ()
    if isinstance(value, nn.Module | _Trained):
        return _of_layer(value)
    if isinstance(value, type):
        return _of_class(value)
    if isinstance(value, FunctionType):
        held = [*closure(value).items()]
        defaults = [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        return [*held, *defaults, *_globals(value), *_wrapped(value)]
    if isinstance(value, MethodType):
        return [("function", value.__func__), ("self", value.__self__)]
    if isinstance(value, partial):
        return [("function", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, property):
        return [("fget", value.fget)]
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple | list):
        return enumerate(value)
    if hasattr(value, "__wrapped__"):
        return _wrapped(value)
    kind = type(value)
    held = [(n, v) for n, v in attributes(value) if not _fills(value, n, v)]
    if is_user_module(kind.__module__):
        return [*held, ("class", kind)]
    # Networks first: other owners of their layers do not mark the trainable weights.
    nets = [(n, _Trained(v)) for n, v in held if isinstance(v, nn.Module)]
    return [*nets, *((n, v) for n, v in held if not isinstance(v, nn.Module))]


def attributes(value: Any) -> list[tuple[str, Any]]:
    """Return an object's attributes sorted by name, including slots of user-defined classes."""
    attributes_by_name = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ()) if is_user_module(kind.__module__) else ()
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                attributes_by_name[name] = getattr(value, name)
    return sorted(attributes_by_name.items())


def _of_layer(value: nn.Module | _Trained) -> Iterator[tuple[str, Any]]:
    """Yield the weights, buffers, sublayers, attributes and hooks that describe a network layer.

    Trainable weights of a marked layer (`_Trained`) are omitted.
    """
    inside = isinstance(value, _Trained)
    layer = value.layer if isinstance(value, _Trained) else value
    for name, weight in layer._parameters.items():
        if weight is not None and not (inside and weight.requires_grad):
            yield name, weight
    yield from ((n, v) for n, v in layer._buffers.items() if v is not None)
    for name, part in layer._modules.items():
        if part is not None:
            yield name, _Trained(part) if inside else part
    for name, held in sorted(vars(layer).items()):
        if name not in INTERNAL and not _fills(layer, name, held):
            yield name, held
    for name in HOOKS:
        yield from ((f"{name}.{i}", hook) for i, hook in enumerate(vars(layer)[name].values()))
    if is_user_module(type(layer).__module__):
        yield "class", type(layer)


def _direct_tensors(layer: nn.Module) -> set[str]:
    """Return the names of a layer's own weights and buffers, without those of its sublayers."""
    return {*layer._parameters, *layer._buffers}


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the methods, constants and base classes of a user-defined class."""
    if not is_user_module(kind.__module__):
        return
    for name, held in sorted(vars(kind).items()):
        dunder = name.startswith("__") and name.endswith("__")
        calls = isinstance(held, FunctionType) and name not in UNCALLED and _is_written(held)
        if (calls or not dunder) and not _fills(kind, name, held):
            yield name, held
    yield from ((f"base.{i}", base) for i, base in enumerate(kind.__bases__))


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the global variables that a user-defined function reads."""
    if not is_user_module(_home(function)):
        return
    read, written, names = names_read(function.__code__)
    for name in read:
        if name in written or name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            if not _fills(function, name, value):
                yield name, value
        elif is_user_module(value.__name__):
            yield from ((f"{name}.{n}", vars(value)[n]) for n in names if n in vars(value))


@cache
def names_read(code: CodeType) -> tuple[list[str], set[str], list[str]]:
    """Return the global names that a code object reads and assigns, and its attribute names."""
    read, written, names = set[str](), set[str](), {*code.co_names}
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(step.argval)
        elif step.opname == "STORE_GLOBAL":
            written.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            more = names_read(constant)
            read |= {*more[0]}
            written |= more[1]
            names |= {*more[2]}
    return sorted(read), written, sorted(names)


@cache
def is_user_module(module: str | None) -> bool:
    """Return whether a module is user code, not part of an installed library."""
    top = (module or "builtins").partition(".")[0]
    if top in sys.stdlib_module_names or top in LIBRARIES:
        return False
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is None or not {"site-packages", "dist-packages"} & {*Path(file).parts}


def _fills(whole: Any, name: str, value: Any) -> bool:
    """Return whether an attribute is a cache, which does not affect what its object computes."""
    private = name.startswith("_") and isinstance(value, dict | list | set)
    return private or isinstance(getattr(type(whole), name, None), cached_property)


def _wrapped(value: Any) -> list[tuple[str, Any]]:
    function = getattr(value, "__wrapped__", None)
    return [] if function is None else [("wrapped", function)]


def closure(function: FunctionType) -> dict[str, Any]:
    """Return the closure variables of a function, by name."""
    variables = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not bound yet
            variables[name] = cell.cell_contents
    return variables


def _home(function: FunctionType) -> str:
    """Return the name of the module in which a function is defined.

    It is the module of the function's global names, which `functools.wraps` does not change.
    """
    return str(function.__globals__.get("__name__", "<unnamed>"))


def _is_written(function: FunctionType) -> bool:
    """Return whether a function was written by a user, not generated, as by dataclasses."""
    return is_user_module(_home(function)) and function.__code__.co_filename != "<string>"


@cache
def _source(code: CodeType) -> str:
    """Return a hash of a function's source code, ignoring comments, docstring and layout."""
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, SyntaxError, TokenError):  # none is known; bytecode differs between versions
        constants = [c for c in code.co_consts if isinstance(c, PLAIN)]
        return _hash(repr((code.co_names, code.co_varnames, constants)).encode())
    text = dedent("".join(lines))
    # A line may have several lambdas: count those before the first position in this one's body.
    several = code.co_name == "<lambda>" and text.count("lambda") > 1
    spots = [(line - first, at) for line, _, at, _ in code.co_positions() if line and at]
    line, at = min(spots) if spots and several else (0, 0)
    place = lines[line].encode()[:at].count(b"lambda")
    try:
        return _hash(repr((place, _statements(ast.parse(text)))).encode())
    except SyntaxError:  # a part of an expression, such as a lambda in a list
        return _hash(repr((place, text)).encode())


def _statements(node: Any) -> Any:
    """Convert a Python syntax tree to nested lists that are equal in all versions of Python."""
    if isinstance(node, list):
        return [_statements(one) for one in node if not _is_text(one)]
    if not isinstance(node, ast.AST):
        return node
    parts = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    return [type(node).__name__, *((name, _statements(value)) for name, value in parts)]


def _is_text(node: Any) -> bool:
    """Return whether a statement is only a string literal, such as a docstring."""
    value = getattr(node, "value", None)
    constant = isinstance(node, ast.Expr) and isinstance(value, ast.Constant)
    return constant and isinstance(getattr(value, "value", None), str)


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()
