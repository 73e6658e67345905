"""Settings of methods from the command line, read by the signatures of their `build`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from pyrofl.arguments import known
from pyrofl.models.shared.schedules import uneven

Build = Callable[..., Any]
Epochs = Callable[[Tensor], Tensor]
Value = int | float | bool | str | Epochs | None

DONE = "done"  # the share of the rounds that are over
KNOWN = (DONE, "unlabelled")  # no settings: the command line knows them

_WORDS = {
    NoneType: "none",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    Epochs: "uneven:MOST",
}


def read_settings(words: Sequence[str], builds: Mapping[str, Build]) -> dict[str, dict[str, Value]]:
    """Hand settings to the methods that have them: method -> name -> value.

    Args:
        words: "name=value" goes to every method whose `build` has the argument,
            "method.name=value" to one.
        builds: method -> its `build`.

    Raises:
        ValueError: if a word is malformed, no method has the argument (the message has the nearest
            name), or a value does not suit the argument's type.
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
        names = {argument for own in asked.values() for argument in own}
        known(argument, dict.fromkeys(sorted(names)), f"setting of {', '.join(asked)}:")
        for m, own in asked.items():
            if argument in own:
                chosen[m][argument] = parse(text, own[argument], f"setting {argument} of {m}")
    return chosen


def arguments(build: Build) -> dict[str, Any]:
    """Return the types of what a method can be told in words; most functions cannot."""
    return {n: kind for n, kind in accepted(build).items() if n not in KNOWN and readable(kind)}


def accepted(build: Build) -> dict[str, Any]:
    """Return the types of a method's arguments, also of those that it hands on."""
    hints = get_type_hints(build)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(build).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            found[name] = hints[name]
        elif parameter.kind is parameter.VAR_KEYWORD:  # **name: Unpack[a TypedDict]
            found |= get_type_hints(get_args(hints[name])[0])
    return found


def readable(kind: Any) -> list[Any]:
    """Return the types, of the one or the union that is given, that words can stand for."""
    union = get_origin(kind) in (Union, UnionType)
    kinds = get_args(kind) if union else (kind,)
    return [k for k in kinds if k in _WORDS or get_origin(k) is Literal or k == Epochs]


def parse(text: str, kind: Any, what: str) -> Value:
    """Read a value of a type: int, float, bool, str, None, Literal, or a union of these.

    >>> parse("none", int | None, "setting batch"), parse("1e-3", float, "setting lr")
    (None, 0.001)

    Raises:
        ValueError: if the text is not of the type.
    """
    kinds = readable(kind)
    for one in sorted(kinds, key=lambda k: (k is not NoneType, k is str)):
        try:
            return _read(text, one)
        except ValueError:
            continue
    expected = [_WORDS.get(k) or f"one of {', '.join(map(str, get_args(k)))}" for k in kinds]
    raise ValueError(f"{what} is {text!r}; expected {' or '.join(expected)}")


def _read(text: str, kind: Any) -> Value:
    """Read a value of a simple type; ValueError if the text is of another."""
    if kind == Epochs:
        name, _, most = text.partition(":")
        if name != "uneven":
            raise ValueError(text)
        return uneven(int(most))
    if kind is int or kind is str:
        number: int | str = kind(text)
        return number
    if kind is float:
        if not math.isfinite(float(text)):
            raise ValueError(text)
        return float(text)
    words: dict[str, Value] = {str(choice): choice for choice in get_args(kind)}
    if kind is bool:
        words = {"true": True, "false": False}
    if kind is NoneType:
        words = {"none": None}
    if text not in words:
        raise ValueError(text)
    return words[text]
