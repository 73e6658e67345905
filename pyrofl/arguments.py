"""Validation of arguments by the types declared in a signature.

    @checked
    def build(net: Network, *, lr: Positive = 0.01, epochs: Count = 5, order: Order = "exact"):

refuses lr = 0, epochs = 2.5 and an order that its Literal does not have, in one line that names the
argument, the value and what was expected. `help(build)` shows the same words.
"""

from __future__ import annotations

import inspect
import re
import typing
import unicodedata
from collections import abc
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, wraps
from math import inf
from numbers import Integral, Real
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin

CHECKED = ("pyrofl", "torch")  # whose classes in annotations are meant
KNOWN = ("builtins", "torch", "numpy", "pandas", "pyrofl")  # whose classes stand for nothing else

WORDS: dict[Any, str] = {abc.Callable: "a function", abc.Mapping: "a dict"}
WORDS |= {
    abc.Sequence: "a list or tuple",
    tuple: "a tuple",
    str: "a string",
    Path: "a path",
    bool: "True or False",
}

RENAMED = {
    "done": "elapsed",
    "fold_messages": "discard_messages",
    "fresh_tau": "confidence_after_training",
    "hold_back": "validation_fraction",
    "labels_global": "same_classes",
    "own_base": "personal_base",
    "particles": "num_particles",
    "server": "server_data",
    "settings": "trials",
    "share": "validation_fraction",
    "together": "multiply",
    "tries": "trials",
    "unlabelled": "server_data",
    "wide": "improper_sd",
}
"""Former name of an argument or option -> its name."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Range:
    """Range of numbers from `low` to `high`, both included unless declared open."""

    low: float = -inf
    high: float = inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        """Return whether a number lies in the range; NaN does not."""
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        """Describe the range for an error message, such as "of at least 1"; "" if unbounded."""
        if self.low == -inf and self.high == inf:
            return ""
        if self.high == inf:
            finite = " and finite" if self.open_high else ""
            return f"{'above' if self.open_low else 'of at least'} {self.low:g}{finite}"
        low = f"above {self.low:g}" if self.open_low else f"from {self.low:g}"
        return f"{low} to {'below ' if self.open_high else ''}{self.high:g}"


Number = Annotated[float, Range()]
Positive = Annotated[float, Range(0, open_low=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, open_low=True)]
ShareBelowOne = Annotated[float, Range(0, 1, open_high=True)]
ProperShare = Annotated[float, Range(0, 1, open_low=True, open_high=True)]
Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]


CONVERSIONS: dict[Any, tuple[type, Callable[[Any], Any]]] = {}
"""Annotated class -> another class whose values are converted to it, and the conversion."""


OPTION_HINTS: dict[str, tuple[Callable[..., Any], str]] = {}
"""Module of a function -> a function with more options, and its name in messages."""


def checked(function: F) -> F:
    """Decorate a function so that it validates its arguments against their type annotations."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = sorted(kwargs.keys() - signature.parameters.keys())
            hint = f"; {_hint(unknown[0], list(signature.parameters))}" if unknown else ""
            other, name = OPTION_HINTS.get(function.__module__, (None, ""))
            if unknown and other and unknown[0] in inspect.signature(other).parameters:
                hint = f"; it is an option of {name}"
            raise TypeError(f"{function.__qualname__}() {error}{hint}") from None
        hints = _hints(function)
        for name, value in bound.arguments.items():
            other, convert = CONVERSIONS.get(hints.get(name), (NoneType, None))
            if convert and isinstance(value, other):
                bound.arguments[name] = convert(value)
        _refuse_bad(bound.arguments, hints)
        return function(*bound.args, **bound.kwargs)

    return cast("F", call)


def check_fields(record: Any) -> None:
    """Raise an error if a dataclass field violates its type annotation; called in __post_init__."""
    _refuse_bad(vars(record), _hints(cast("Hashable", type(record))))


@cache
def _hints(of: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(of, include_extras=True)


def _refuse_bad(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise an error that names the first argument that violates its type annotation."""
    for name, value in values.items():
        if name in hints and (expected := _unlike(value, hints[name])):
            is_short = value is None or isinstance(value, str | Real)
            shown = repr(value) if is_short else f"a {type(value).__name__}"
            if inspect.isfunction(value):
                shown = f"a function ({', '.join(inspect.signature(value).parameters)})"
            if hints[name] is str and isinstance(value, list | tuple):
                expected += f", such as {' '.join(map(str, value))!r}"
            raise ValueError(f"{name} is {shown}; expected {expected}")
        if isinstance(value, str | PurePath) and "\0" in str(value):
            raise ValueError(f"{name} is {str(value)!r}; expected no NUL character in it")


class _Allowed(NamedTuple):
    """Values that a type annotation allows: types, number ranges and literal words."""

    kinds: list[Any]
    ranges: list[Any]  # those of the kinds that are numbers with bounds
    words: list[Any]


@cache
def _allowed(hint: Any) -> _Allowed:
    kinds_allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [
        get_origin(k) if _is_checked(get_origin(k)) else k for k in kinds_allowed
    ]  # Chains[Run] too
    ranges = [k for k in kinds if get_origin(k) is Annotated]
    words = [w for k in kinds if get_origin(k) is Literal for w in get_args(k)]
    return _Allowed(kinds, ranges, words)


def _unlike(value: Any, hint: Any) -> str:
    """Describe the values that a type annotation allows if the given one is invalid, else ""."""
    kinds, ranges, words = _allowed(hint)
    number = isinstance(value, Real) and not isinstance(value, bool)
    others: list[str] = []
    if isinstance(value, str) and (words or ranges) and str not in kinds:
        fits = value in words
    elif ranges and (number or isinstance(value, bool)):
        fits = number and any(_inside(value, k) for k in ranges)
    else:
        fits = any(_may_be(value, k) for k in kinds)
        others = [_a(k) for k in kinds if _is_checked(k)]
    if fits:
        return ""
    choices = [f"one of {', '.join(map(str, words))}"] if words else []
    return " or ".join([*map(_told, ranges), *others, *choices])


def _is_checked(kind: Any) -> bool:
    """Return whether values of a type are validated: pyrofl or torch class, str, dict, callable."""
    meant = isinstance(kind, type) and kind.__module__.partition(".")[0] in CHECKED
    return meant or kind in (str, Path, bool) or get_origin(kind) in WORDS


def _may_be(value: Any, kind: Any) -> bool:
    """Return whether a value has the given type; True for types that are not validated."""
    if kind is NoneType:
        return value is None
    if kind is bool:
        return str(value) in ("True", "False", "0", "1")  # NumPy's own too
    if get_origin(kind) in (Annotated, Literal):  # and it is neither a number nor a word
        return type(value).__module__.partition(".")[0] not in KNOWN
    if get_origin(kind) in (abc.Sequence, tuple):
        return isinstance(value, abc.Sequence) and not isinstance(value, str | bytes)
    if get_origin(kind) is abc.Callable:
        return callable(value) and _takes(value, get_args(kind)[0])
    if get_origin(kind) in WORDS:
        return isinstance(value, get_origin(kind))
    if not _is_checked(kind) or isinstance(value, kind):
        return True
    return type(value).__module__.partition(".")[0] not in KNOWN  # one's own may behave like it


def _takes(function: Any, arguments: Any) -> bool:
    """Return whether a function accepts given positional arguments; True if that is unknown."""
    return not isinstance(arguments, list) or accepts(function, *arguments)


def _a(kind: Any) -> str:
    if get_origin(kind) is abc.Callable and isinstance(get_args(kind)[0], list):
        names = [getattr(one, "__name__", str(one)) for one in get_args(kind)[0]]
        return f"a function of {len(names)} argument{'s' * (len(names) != 1)} ({', '.join(names)})"
    return WORDS.get(kind) or WORDS.get(get_origin(kind) or kind) or f"a {kind.__name__}"


def _inside(value: Any, kind: Any) -> bool:
    base, bounds = get_args(kind)[:2]
    return value in bounds and (base is not int or isinstance(value, Integral))


def _told(kind: Any) -> str:
    base, bounds = get_args(kind)[:2]
    return f"a {'whole ' if base is int else ''}number {bounds}".strip()


def described(value: object) -> str:
    """Return an object in a few words for an error message, such as "mean_field"."""
    if isinstance(value, type):
        return value.__name__
    if inspect.isfunction(value):
        own, name = value.__module__.startswith("pyrofl."), value.__name__
        if own and ".<locals>." in value.__qualname__:  # such as of low_rank(3)
            return value.__qualname__.partition(".")[0]
        arguments = ", ".join(inspect.signature(value).parameters)
        return name if own else f"{name.replace('<lambda>', 'a function ')}({arguments})"
    text = repr(value)
    return text if len(text) < 60 and "\n" not in text else f"a {type(value).__name__}"


def accepts(function: object, *args: object, **kwargs: object) -> bool:
    """Return whether a function has a signature for these arguments; True if unknown."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        return True
    return True


def check_name(name: str, names: Collection[str], what: str) -> None:
    """Raise ValueError if a name is not among `names`; the message suggests valid names."""
    if name not in names:
        hint = (
            _hint(name, names) if isinstance(name, str) else f"expected one of {', '.join(names)}"
        )
        raise ValueError(f"unknown {what} {name!r}; {hint}")


def _hint(name: str, names: Collection[str]) -> str:
    """Return the valid name most similar to an unknown one, or all names if none is similar.

    >>> _hint("leraning_rate_head", ["lr_head", "lr_base"])
    'did you mean lr_head?'
    >>> _hint("negbinomial", ["binomial", "negative_binomial"])
    'did you mean negative_binomial?'
    """
    if RENAMED.get(name) in names:
        return f"it is {RENAMED[name]} now"
    # Users of other libraries write learning_rate for lr, and negbinomial.
    others = {"lr": "learning_rate", "negative": "neg"}
    spelled = {"_".join(others.get(w, w) for w in n.split("_")): n for n in names}
    close = nearest(name, [*names, *spelled])
    if not close:
        return f"expected one of {', '.join(names)}"
    return f"did you mean {_shown(spelled.get(close, close))}?"


def _shown(name: str) -> str:
    """Return a name, in quotation marks if it has blanks at an end."""
    return name if name == name.strip() else repr(name)


MIN_PREFIX = 3  # characters of the beginning of a name that stand for it


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the name most similar to one, first of all but for blanks and case; "" if none is.

    The beginning of a single name stands for it.

    >>> nearest("age", ["Age ", "dose"]), nearest("blood_pressure", ["Blood Pressure"])
    ('Age ', 'Blood Pressure')
    >>> nearest("acc", ["nll", "accuracy"])
    'accuracy'
    """
    keys = {re.sub(r"[\W_]+", "", other.casefold()): other for other in reversed([*names])}
    key = re.sub(r"[\W_]+", "", name.casefold())
    if key in keys:
        return keys[key]
    begun = [other for other in keys if len(key) >= MIN_PREFIX and other.startswith(key)]
    if len(begun) == 1:
        return keys[begun[0]]
    close = get_close_matches(name, keys.values(), 1) or get_close_matches(key, keys, 1)
    return keys.get(close[0], close[0]) if close else ""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a message that proposes the name most similar to one, or ""."""
    close = nearest(name, names)
    return f"; did you mean {_shown(close)}?" if close else ""


def composed(text: str) -> str:
    """Normalize a text to Unicode's composed form (NFC), so that equal texts compare equal."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)
