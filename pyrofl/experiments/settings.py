"""Settings of methods as text, parsed by the argument types of their `build` function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from pyrofl.arguments import known
from pyrofl.experiments.options import not_tiny
from pyrofl.models.shared.schedules import uneven

Build = Callable[..., Any]
Epochs = Callable[[Tensor], Tensor]
N = TypeVar("N", int, float)
Value = int | float | bool | str | Epochs | None


DONE = "done"  # the share of the rounds that are over
KNOWN = (DONE, "unlabelled")  # no settings: the command line knows them


def read_settings(words: Sequence[str], builds: Mapping[str, Build]) -> dict[str, dict[str, Value]]:
    """Parse settings "name=value" of all methods, or "method.name=value" of one.

    Returns method -> settings.
    """
    chosen: dict[str, dict[str, Value]] = {method: {} for method in builds}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise ValueError(f"setting {word!r} has no value; expected name=value")
        method, dot, argument = name.rpartition(".")
        if dot:
            known(method, builds, f"method in setting {word!r}:")
        asked = {m: arguments(builds[m]) for m in ([method] if dot else builds)}
        names = sorted({argument for own in asked.values() for argument in own})
        known(argument, names, f"setting of {', '.join(asked)}:")
        for m, own in asked.items():
            if argument in own:
                chosen[m][argument] = parse(text, own[argument], f"setting {argument} of {m}")
    return chosen


def arguments(build: Build) -> dict[str, Any]:
    """Return the types of a method's arguments that can be given as text."""
    return {n: kind for n, kind in accepted(build).items() if n not in KNOWN and readable(kind)}


def accepted(build: Build) -> dict[str, Any]:
    """Return the types of a method's arguments, including those passed on to other functions."""
    hints = get_type_hints(build)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(build).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            found[name] = hints[name]
        elif parameter.kind is parameter.VAR_KEYWORD:  # **name: Unpack[a TypedDict]
            found |= get_type_hints(get_args(hints[name])[0])
    return found


def _number(text: str) -> float:
    if not math.isfinite(found := float(text)):
        raise ValueError(text)
    return within(not_tiny(found, text), 2.0**63)  # whose square single precision still has


def _whole(text: str) -> int:
    return within(int(text), 2**31 - 1)


def within(value: N, most: N) -> N:
    """Return the number unchanged; raise OverflowError if its absolute value exceeds `most`."""
    if abs(value) > most:
        raise OverflowError(f"at most {most:.10g}")
    return value


def _epochs(text: str) -> Epochs:
    name, _, most = text.partition(":")
    if name != "uneven":
        raise ValueError(text)
    return uneven(_whole(most))


# Types that words can stand for: what is expected, and who reads it.
READERS: dict[Any, tuple[str, Callable[[str], Value]]] = {
    NoneType: ("none", {"none": None}.__getitem__),
    bool: ("true or false", {"true": True, "false": False}.__getitem__),
    int: ("a whole number", _whole),
    float: ("a number", _number),
    str: ("a word", str),
    Epochs: ("uneven:MOST", _epochs),
}


def readable(kind: Any) -> list[Any]:
    """Return the members of a type or union for which values can be parsed from text."""
    union = get_origin(kind) in (Union, UnionType)
    kinds = get_args(kind) if union else (kind,)
    known = [k for k in kinds if k in READERS or get_origin(k) is Literal]
    return known if known != [NoneType] else []  # a family or None, say, is not for words


def parse(text: str, kind: Any, what: str) -> Value:
    """Parse a text as a value of a type: int, float, bool, str, None, Literal or a union.

    >>> parse("none", int | None, "setting batch"), parse("1e-3", float, "setting lr")
    (None, 0.001)
    """
    readers = {k: READERS.get(k) or _choice(k) for k in readable(kind)}
    for one in sorted(readers, key=lambda k: (k is not NoneType, k is str)):
        try:
            with suppress(ValueError, KeyError):
                return readers[one][1](text)
        except OverflowError as bound:
            raise ValueError(f"{what} is {text!r}; expected {bound}") from bound
    expected = " or ".join(words for words, _ in readers.values())
    raise ValueError(f"{what} is {text!r}; expected {expected}")


def _choice(kind: Any) -> tuple[str, Callable[[str], Value]]:
    """Return a description of a Literal's words, and a function that parses one of them."""
    words = {str(choice): choice for choice in get_args(kind)}
    return f"one of {', '.join(words)}", words.__getitem__
