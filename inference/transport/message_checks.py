"""Format of requests and replies, flat dicts of tensors, numbers and names, and its checks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pyrofl
from pyrofl.files.run_folder import versions
from pyrofl.inference.definition.description import clients_part
from pyrofl.inference.definition.method import Method
from pyrofl.tensors import Tensors, role

Flat = dict[str, Any]
"""Names -> tensors [C, ...], numbers, texts, or tuples of texts."""

MAX_NUMBER = 2**128  # number in a message; seeds may be large
MAX_QUOTED_CHARACTERS = 200  # of a received value in an error message
MAX_NAME_CHARACTERS = 200
EXPECTED_NAME = f"expected a printable name of at most {MAX_NAME_CHARACTERS} characters"
MAX_SHOWN_CHARACTERS = 1000  # of a received text in logs and records
# Optional evaluation settings.
EVALUATION_SETTINGS = "model", "adaptation", "part", "draws", "metrics"


class InvalidRequestError(ValueError):
    """Error for an invalid server request, with a message that contains no private data.

    Its message may be sent to the server, unlike those of other errors at a site.
    """


class StateLostError(InvalidRequestError):
    """Error raised if clients have lost the state after their last aggregated message."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        super().__init__(text)
        self.names = tuple(names)


def versions_and_hash() -> dict[str, str]:
    """Return package versions, by name, that must be equal at server and clients.

    Equal version numbers do not prove equal code, so a hash of pyrofl's own files is included.
    """
    installed = versions()
    compared = {name: installed[name] for name in ("pyrofl", "torch", "pyro")}
    compared["torch"] = compared["torch"].partition("+")[0]  # without its build
    return compared | {"pyrofl's code": code_hash()}


@cache
def code_hash(folder: str | Path = Path(pyrofl.__file__).parent) -> str:
    """Return a hash of the names and contents of all Python files in a folder."""
    digest = hashlib.sha256()
    # In a checkout, models and inference are links.
    walked = (
        Path(at, name) for at, _, names in os.walk(folder, followlinks=True) for name in names
    )
    files = {path.relative_to(folder).as_posix(): path for path in walked if path.suffix == ".py"}
    for name in sorted(files):
        text = files[name].read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]


def required_agreement(method: Method) -> Flat:
    """Return package versions and method settings that must be equal at server and clients."""
    parts = clients_part(method)
    both = {f"version/{n}": v for n, v in versions_and_hash().items()}
    return {**both, **{f"method/{n}": v for n, v in parts.items()}}


def refuse_disagreement(request: Mapping[str, Any], method: Method) -> None:
    """Raise InvalidRequestError if the request's versions or method differ from the client's."""
    server_side = {n: v for n, v in request.items() if n.startswith(("version/", "method/"))}
    client_side = required_agreement(method)
    if odd := sorted(
        n for n in server_side | client_side if server_side.get(n) != client_side.get(n)
    ):
        each = (
            f"{n.replace('/', ' of ')} is {client_side.get(n)}, but {server_side.get(n)}"
            for n in odd
        )
        raise InvalidRequestError(f"{'; '.join(each)} at the server; use the same at both")


def one_line(text: object, max_characters: int = MAX_SHOWN_CHARACTERS) -> str:
    r"""Return a received text in one line: without control characters, and cut where it is long.

    >>> one_line("a\nb\x1b[31m")
    'a b [31m'
    """
    received = text if isinstance(text, str) else repr(text)
    shown = "".join(c if c.isprintable() else " " for c in received[:max_characters])
    if len(received) <= max_characters:
        return shown
    return f"{shown}... ({len(received):,} characters)"


def tensors(what: str, flat: Mapping[str, Any]) -> Tensors:
    """Return tensors with the prefix `what` in a request or reply; raise ValueError if invalid.

    ValueError is raised if an entry with this prefix is not a tensor.
    """
    named_tensors = role(what, flat)
    for name, value in named_tensors.items():
        if odd := _unlike_tensor(value):
            raise ValueError(
                f"{what}/{one_line(name, MAX_QUOTED_CHARACTERS)} is {odd}; expected a tensor"
            )
        if not is_name(name):
            raise ValueError(
                f"{what} has the name {one_line(name, MAX_QUOTED_CHARACTERS)!r}; {EXPECTED_NAME}"
            )
    return named_tensors


def _unlike_tensor(value: Any) -> str:
    """Return what a value is, unless it is a dense tensor with numbers; else ""."""
    if type(value) is not Tensor:  # subclasses may change what their functions return
        return f"a {type(value).__name__}"
    if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta:
        kind = "nested " * value.is_nested + "quantized " * value.is_quantized
        return f"a {kind}tensor of layout {value.layout}" + " without numbers" * value.is_meta
    if value.requires_grad:
        return "a tensor that requires gradients"
    one = value[:1] if value.dim() else value  # clients may share a row
    if (size := one.numel() * value.element_size()) > value.untyped_storage().nbytes():
        return f"a tensor of {size:,} bytes that repeats its entries"
    return ""


def is_name(text: Any) -> bool:
    """Return whether a value can be the name of a client, a metric or a tensor."""
    is_text = isinstance(text, str) and 0 < len(text) <= MAX_NAME_CHARACTERS
    return is_text and bool(text.isprintable() and text.strip())


def to_own_storage(values: Tensors) -> Tensors:
    """Copy tensors to the CPU if needed, to memory that contains no data of other tensors.

    A view, such as a row of a table, would be written with the whole table. Expanded tensors, as
    for equal downloads of all clients, stay expanded.
    """
    return {n: _to_own_storage(v.detach().cpu()) for n, v in values.items()}


def _to_own_storage(value: Tensor) -> Tensor:
    one = value[:1] if value.dim() and len(value) > 1 and not value.stride(0) else value
    if one.untyped_storage().nbytes() != one.nbytes or not one.is_contiguous():
        one = one.clone(memory_format=torch.contiguous_format)
    return one.expand(value.shape)


def whole_number(flat: Mapping[str, Any], name: str) -> int:
    """Return the entry `name` of a request or reply; raise ValueError unless it is an int."""
    if isinstance(value := flat.get(name), bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {_quoted(value)}; expected a whole number")
    value = int.__int__(value)
    if not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"{name} is {_quoted(value)}; expected 0 to {MAX_NUMBER}")
    return value


def _quoted(value: Any) -> str:
    """Return a received value in an error message: not all of it if it is long."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    return one_line(repr(value), MAX_QUOTED_CHARACTERS)


def texts(flat: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the entry `name` of a request or reply; raise ValueError unless it holds strings."""
    value = flat.get(name)
    if not isinstance(value, tuple | list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{name} is {_quoted(value)}; expected a tuple of texts")
    return tuple(str.__str__(text) for text in value)  # subclasses may equal any name


def client_names(flat: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the client names of a request or reply; raise ValueError if they have duplicates."""
    names = texts(flat, "names")
    if len(set(names)) < len(names):
        raise ValueError(f"names is {_quoted(names)}; expected distinct names")
    for name in names:
        if not is_name(name):
            raise ValueError(f"names has {_quoted(name)}; {EXPECTED_NAME}")
    return names


def own_client_names(
    holder: str, flat: Any, holders: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Return the names in a sender's reply; raise ValueError unless all are clients of its own.

    Args:
        holder: name of the sender.
        flat: its reply.
        holders: sender -> names of its clients, as in the requests.
    """
    if not isinstance(flat, Mapping):
        raise ValueError(f"its reply is a {type(flat).__name__}; expected a dict")
    if odd := [key for key in flat if not isinstance(key, str)]:
        raise ValueError(f"its reply has the key {_quoted(odd[0])}; expected texts")
    names = client_names(flat)
    if holder not in holders:
        raise ValueError("no request was sent to it; expected a reply of a sender in `holders`")
    if others := [name for name in names if name not in holders[holder]]:
        raise ValueError(f"its reply is of {_listed(others)}; expected a reply of its own clients")
    return names


def _listed(names: Sequence[str]) -> str:
    return one_line(", ".join(names), MAX_QUOTED_CHARACTERS)


def column(flat: Mapping[str, Any], name: str, count: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor [count] of a request or reply; raise ValueError for another shape or type."""
    value: Any = flat.get(name)
    if _unlike_tensor(value) or value.shape != (count,) or value.dtype != dtype:
        shown = f"{value.dtype} {list(value.shape)}" if torch.is_tensor(value) else _quoted(value)
        raise ValueError(f"{name} is {shown}; expected {dtype} [{count}]")
    entries: Tensor = value
    return entries
