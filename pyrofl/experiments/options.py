"""Types of command-line options, as keyword arguments of `ArgumentParser.add_argument`."""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pyrofl.arguments import Count, Positive, ProperShare, Whole, composed
from pyrofl.choices import GROUPS

Kind = dict[str, Any]
"""Keyword arguments of `ArgumentParser.add_argument`."""

MIN_NORMAL = 2.0**-126  # smaller numbers are not normal in single precision


class CommandOption(NamedTuple):
    """Command-line argument: option name, description, default and help section."""

    words: str
    """Its option and a name for its value, such as "--out DIR"."""
    kind: Kind
    text: str
    default: Any = None
    section: str | None = None
    """Heading in the help."""

    @property
    def flag(self) -> str:
        """Its name without that of its value: "--out", or "folder" for a positional argument."""
        return self.words.partition(" ")[0]

    @property
    def name(self) -> str:
        """Name of the argument in the parsed command line."""
        found: str = self.kind.get("dest", self.flag.removeprefix("--").replace("-", "_"))
        return found


MAX_COUNT = 2**31 - 1
MAX_THREADS = max(64, os.cpu_count() or 1)  # too many threads kill a process


def number(kind: Any, most: float = MAX_COUNT) -> Kind:
    """Return the command-line option type of a number in a given range, up to a maximum."""
    base, allowed = get_args(kind)

    def read(text: str) -> Any:
        high = allowed
        with suppress(ValueError):
            value = base(text)
            try:
                not_tiny(value, text)
            except OverflowError as bound:
                raise ArgumentTypeError(f"found {text!r}; expected {bound}") from bound
            if value in allowed and value <= most:
                return value
            high = allowed if value <= most else f"of at most {most}"
        whole = "whole " if base is int else ""
        raise ArgumentTypeError(f"found {text!r}; expected a {whole}number {high}")

    return {"type": read}


def not_tiny(value: float, text: str) -> float:
    """Return the number unchanged; raise OverflowError if it is 0 in single precision only.

    >>> not_tiny(float("0e-400"), "0e-400")
    0.0
    """
    if abs(value) < MIN_NORMAL and re.search("[1-9]", re.split("[eE]", text)[0]):
        raise OverflowError(f"0, or at least {MIN_NORMAL:.3g} in absolute value")
    return value


def choice(literal: Any) -> Kind:
    """Return the command-line option type of a choice among the words of a `Literal`."""
    return {"choices": get_args(literal)}


def not_empty(text: str) -> str:
    """Return a command-line argument unchanged; raise an error if it is empty or contains NUL."""
    if not text or "\0" in text:
        raise ArgumentTypeError(f"found {text!r}; expected a string that is not empty, without NUL")
    return text


def expand_home(text: str) -> str:
    """Replace ~ at the start of each path by the home directory, also after csv: and commas."""
    comma = "|," if text.startswith("csv:") else ""
    pattern = rf"(^|\bcsv:|\bnpz:{comma})(~[^/+:,]*)"
    return re.sub(pattern, lambda m: m[1] + os.path.expanduser(m[2]), not_empty(text))


def _groups(text: str) -> str | tuple[str, ...]:
    """Parse a command-line argument: comma-separated names of ArviZ groups, or "all"."""
    names = tuple(text.split(","))
    if text != "all" and not set(names) <= set(GROUPS):
        raise ArgumentTypeError(
            f"found {text!r}; expected all, or some of {','.join(GROUPS)} with commas between"
        )
    return text if text == "all" else names


def _clients(text: str) -> int | str:
    """Parse the value of --held-out: a number of clients, or comma-separated client names.

    "5," is a client named 5.
    """
    try:
        count: int = WHOLE["type"](text)
    except ArgumentTypeError:
        with suppress(ValueError):
            float(text)  # nan, 2.5 and -1 are no names
            raise
        if not all(text.removesuffix(",").split(",")):
            raise
        return composed(not_empty(text))
    return count


TEXT: Kind = {"type": lambda text: composed(not_empty(text))}
PATH: Kind = {"type": expand_home}
REQUIRED = PATH | {"required": True}
FLAG: Kind = {"action": "store_true"}
COUNT, WHOLE = map(number, (Count, Whole))
PORT, POSITIVE = number(Count, 65535), number(Positive, 1e9)
FRACTION = number(ProperShare)
THREADS = number(Count, MAX_THREADS)


@dataclass(frozen=True, eq=False)  # types must have a hash
class ReadBy:
    """Annotation that assigns a command-line option type to a Python type."""

    kind: Kind


Path = Annotated[str, ReadBy(PATH)]
Seed = Annotated[int, ReadBy(number(Whole, inf))]
Few = Annotated[int, ReadBy(number(Count, 1000))]
Threads = Annotated[int, ReadBy(THREADS)]
Clients = Annotated[int | str, ReadBy({"type": _clients})]
ArvizGroups = Annotated[str | tuple[str, ...], ReadBy({"type": _groups})]
Settings = Annotated[tuple[str, ...], ReadBy({"nargs": "+", "action": "extend"})]


def kind_of(annotation: Any) -> Kind:
    """Return the command-line option type of a type annotation, which may be optional.

    >>> kind_of(Literal["reject", "raise"] | None)
    {'choices': ('reject', 'raise')}
    """
    if get_origin(annotation) is not Annotated and NoneType in get_args(annotation):
        (annotation,) = (one for one in get_args(annotation) if one is not NoneType)
    if get_origin(annotation) is Literal:
        return choice(annotation)
    if get_origin(annotation) is not Annotated:
        return FLAG if annotation is bool else TEXT
    how = get_args(annotation)[1]
    return how.kind if isinstance(how, ReadBy) else number(annotation)


def refuse_repeated(words: Sequence[str], flag: str = "--set") -> None:
    """Raise ValueError if a setting is given twice; "fedavg.lr" is another one than "lr"."""
    names = [word.partition("=")[0] for word in words]
    for name in names:
        if names.count(name) > 1:
            twice = " and ".join(word for word in words if word.partition("=")[0] == name)
            raise ValueError(f"{flag} gives {name} more than once, {twice}; expected one value")
