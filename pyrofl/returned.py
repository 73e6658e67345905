"""Validation of values returned by the functions of a method, and their error messages.

An error is one line that names the function, what it returned and what is valid; the error that a
function raised stays the cause, with its traceback.
"""

from __future__ import annotations

import linecache
import re
import textwrap
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyrofl.tensors import Tensors


class ClientError(ValueError):
    """Error in the rows of clients, whose message holds no value of a row.

    Unlike those of other errors at a client, its message may be sent to the server.

    Attributes:
        clients: ids of the clients.
        positions: their positions in the batch.
        names: their names, once `named` has added them to the message.
    """

    def __init__(
        self, text: str, clients: Sequence[int] = (), positions: Sequence[int] = ()
    ) -> None:
        super().__init__(text)
        self.clients, self.positions = tuple(clients), tuple(positions)
        self.names: tuple[str, ...] = ()

    @staticmethod
    @contextmanager
    def named(names: Sequence[str]) -> Iterator[None]:
        """Add the clients' names to the message of such an error in the `with` block."""
        try:
            yield
        except ClientError as error:
            if own := tuple(names[i] for i in error.clients):
                error.args, error.clients, error.names = (f"{', '.join(own)}: {error}",), (), own
            raise


@contextmanager
def calling(what: str, names: Collection[str] = ()) -> Iterator[None]:
    """Convert errors in the `with` block to a one-line error that names the user's function.

    Args:
        what: the function.
        names: of the tensors that it may read.
    """
    try:
        yield
    except (ValueError, MemoryError, OSError, Warning):
        raise
    except Exception as error:
        named = names and isinstance(error, KeyError)
        hint = f"expected one of {', '.join(names)}" if named else ""
        raise ValueError(
            f"{what} raises {explained(error, what.partition(' ')[0], hint)}"
        ) from error


ARGUMENTS = {
    "init": "(generator, clients)",
    "init_client": "(received, cohort, generator)",
    "reset_clients": "(server, cohort)",
    "download": "(server, cohort)",
    "upload": "(received, local)",
    "aggregate": "(server, message, cohort, generator)",
    "view": "(received, local)",
    "metric": "(prediction, y, mask)",
    "statistics": "(received, local, batch)",
    "program": "(received, local, batch)",
    "update": "(received, local, batch)",
}
"""Arguments with which the functions of a method are called."""

AXES = (
    "tensors are [clients, 1, ...] in batch.clients() and [clients, rows, ...] in batch.rows(): "
    "give the prior of a vector .to_event(1), read its entries as b[..., 0], and write x @ b as "
    "(x * b).sum(-1)"
)
CAUSES = (
    (
        r"size of tensor|[Ss]hape|must match|[Ee]xpected size|cannot be multiplied|out of bounds",
        AXES,
    ),
    (
        r"collide at dim=",
        "give an own plate a place inside batch.clients(), at its default dim=-1, or use a vector "
        "with .expand([K]).to_event(1)",
    ),
    (r"named '(clients|rows)'", "enter each plate once: batch.rows() inside one batch.clients()"),
    (r"sites are named|sample sites named", "give every site its own name"),
    (r"Expected scale", "poutine.scale requires a scale above 0"),
    (r"Input arguments must all be", "parameters of a distribution must be numbers or tensors"),
    (r"Poisson rate", "a rate must be positive: pass it through exp()"),
    (
        r"same dtype|expected scalar type|different dtypes",
        "tensors made outside of the program need the type of its data: use them as "
        "TENSOR.to(batch.x)",
    ),
    (r"^KeyError", "expected a name that init, download or init_client returns"),
    (r"'NoneType' object has no attribute 'log_prob'", "pyro.sample requires a distribution"),
)
"""Patterns of what Pyro and torch report, and the usual cause."""

LIBRARIES = {"pyrofl", "pyro", "torch", "contextlib", "functools", "numpy"}


def is_of_library(error: BaseException) -> bool:
    """Return whether Pyro or torch itself raised an error, not pyrofl's or a user's code."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("pyro", "torch")


def explained(error: BaseException, kind: str = "program", hint: str = "") -> str:
    """Describe an error in a user's function: error, sample site, source line, usual cause.

    Args:
        error: what was raised.
        kind: a key of `ARGUMENTS`, for the error of a function with other arguments.
        hint: the remedy; "" looks it up in `CAUSES`.
    """
    first = str(error).partition("\n")[0]
    text = f"{type(error).__name__}{f': {first}' if first else ''}"
    line, site = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in LIBRARIES:
            path = frame.f_code.co_filename
            code = textwrap.shorten(linecache.getline(path, number), 100, placeholder=" ...")
            line = f" in {code!r} ({Path(path).name}:{number})" if code else ""
        elif module == "pyro.primitives" and frame.f_code.co_name == "sample":
            site = f" at site {frame.f_locals['name']!r}"
    if not hint and isinstance(error, TypeError) and re.search(r"positional arg|argument '", first):
        hint = f"it is called with {ARGUMENTS[kind]}" if kind in ARGUMENTS else ""
    hint = hint or next((cause for pattern, cause in CAUSES if re.search(pattern, text)), "")
    return f"{text}{site}{line}{f'; {hint}' if hint else ''}"


def as_tensors(what: str, given: object, clients: int | None = None) -> Tensors:
    """Return the given value if it is a dict of tensors; raise ValueError if it is not.

    Args:
        what: the value, for errors: "what upload returns".
        given: the value.
        clients: length that the first axis of every tensor must have; None allows any shape.

    Raises:
        ValueError: naming the tensor that is unsuitable.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} is {_kind(given)}; expected a dict of tensors")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"{what} holds {name!r}, {_kind(value)}; expected tensors by their names"
            )
        if value.layout != torch.strided or value.is_nested or value.is_meta:
            raise ValueError(f"{what} holds {name!r}, which is not dense; expected dense tensors")
        if value.dtype == torch.complex32:  # which has no sums
            raise ValueError(f"{what} holds {name!r}, a complex32; expected complex64")
        if clients is not None and value.shape[:1] != (clients,):
            raise ValueError(
                f"{what} holds {name!r} of shape {list(value.shape)}; expected "
                f"[{clients}, ...], with the axis of the clients in front"
            )
    return dict(given)


def as_numbers(what: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    """Return the given value if it is a tensor of the given shape; raise ValueError if it is not.

    Args:
        what: the value, for errors.
        value: the value.
        shape: of the tensor; where it ends with -1, further axes may follow.
        dtype: torch.bool, torch.long for whole numbers of any type, or None for any numbers.

    Raises:
        ValueError: if it is no such tensor.
    """
    open_end, shape = shape[-1:] == (-1,), tuple(n for n in shape if n >= 0)
    words = {None: "numbers", torch.bool: "bools", torch.long: "whole numbers"}[dtype]
    axes = [*map(str, shape), *["..."] * open_end]
    expected = f"expected a tensor of {words}, [{', '.join(axes)}]"
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} is {_kind(value)}; {expected}")
    if (value.shape[: len(shape)] if open_end else value.shape) != shape:
        raise ValueError(f"{what} has shape {list(value.shape)}; {expected}")
    whole = not value.is_floating_point() or bool((value == value.round()).all())
    if (dtype is torch.bool and value.dtype != dtype) or (dtype is torch.long and not whole):
        raise ValueError(f"{what} is {value.dtype}; {expected}")
    return value


def _kind(value: object) -> str:
    """Return the name of a value's type with an article, such as "a dict"."""
    return f"a {type(value).__name__}"
