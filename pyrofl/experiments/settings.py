"""Settings of methods as text, parsed by the argument types of their `build` function."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import pyro.distributions as dist
from torch import Tensor

from pyrofl.arguments import check_name
from pyrofl.experiments.options import not_tiny
from pyrofl.models import guides, priors
from pyrofl.models.shared.schedules import uneven

Build = Callable[..., Any]
Epochs = Callable[[Tensor], Tensor]
N = TypeVar("N", int, float)
PRIORS = ("flat", "student_t", "mixture", "Horseshoe", "proximal")
GUIDES = ("delta", "mean_field", "log_mean_field", "full_covariance", "copula", "low_rank", "flow")
Value = int | float | bool | str | Epochs | None


ELAPSED = "elapsed"  # the share of the rounds that are over
KNOWN = (ELAPSED, "server_data")  # no settings: the command line knows them


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
            check_name(method, builds, f"method in setting {word!r}:")
        arguments_by_method = {m: arguments(builds[m]) for m in ([method] if dot else builds)}
        names = sorted(
            {
                argument
                for method_arguments in arguments_by_method.values()
                for argument in method_arguments
            }
        )
        check_name(argument, names, f"setting of {', '.join(arguments_by_method)}:")
        for m, method_arguments in arguments_by_method.items():
            if argument in method_arguments:
                chosen[m][argument] = parse(
                    text, method_arguments[argument], f"setting {argument} of {m}"
                )
    return chosen


def arguments(build: Build) -> dict[str, Any]:
    """Return the types of a method's arguments that can be given as text."""
    kinds = {n: with_program(n, k) for n, k in argument_types(build).items() if n not in KNOWN}
    return {name: kind for name, kind in kinds.items() if readable(kind)}


def with_program(name: str, kind: Any) -> Any:
    """Return the type of an argument; texts may also stand for a prior or guide."""
    return Union[(*readable(kind), PROGRAMS[name])] if name in PROGRAMS else kind


def argument_types(build: Build) -> dict[str, Any]:
    """Return the types of a method's arguments, including those passed on to other functions."""
    hints = get_type_hints(build)
    settings: dict[str, Any] = {}
    for name, parameter in inspect.signature(build).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            settings[name] = hints[name]
        elif parameter.kind is parameter.VAR_KEYWORD:  # **name: Unpack[a TypedDict]
            settings |= get_type_hints(get_args(hints[name])[0])
    return settings


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return within(not_tiny(number, text), 2.0**63)  # whose square single precision still has


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


class PriorText:
    """Kind of the setting `prior`, for which a text such as "student_t(3)" stands."""


class GuideText:
    """Kind of the setting `guide`, for which a text such as "low_rank(3)" stands."""


PROGRAMS = {"prior": PriorText, "guide": GuideText}


def read_call(text: str) -> tuple[str, list[float], dict[str, float]] | None:
    """Return name, arguments and keywords of a call with numbers; None for another expression.

    Raises:
        ValueError: if the text is no expression, or its arguments are no numbers.

    >>> read_call("Normal(0, scale=2.5)"), read_call("flat")
    (('Normal', [0], {'scale': 2.5}), None)
    """
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.Call):
            return None
        named = {str(one.arg): ast.literal_eval(one.value) for one in tree.keywords}
        given = [ast.literal_eval(one) for one in tree.args]
        if not all(isinstance(number, int | float) for number in (*given, *named.values())):
            raise ValueError(text)
        return tree.func.id if isinstance(tree.func, ast.Name) else "", given, named
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(text) from error


def _prior(text: str) -> Any:
    names = {*PRIORS, *(name for name in dist.__all__ if name[0].isupper())}
    return _program(text, {**vars(dist), **vars(priors)}, names)


def _guide(text: str) -> Any:
    return _program(text, vars(guides), GUIDES)


def _program(text: str, values: Mapping[str, Any], names: Collection[str]) -> Any:
    """Return a named value, or what it returns if the text is a call of it with numbers."""
    call = read_call(text)
    name = call[0] if call else text
    if name not in names:
        raise ValueError(text)
    try:
        return values[name](*call[1], **call[2]) if call else values[name]
    except Exception as error:  # whatever a distribution refuses
        raise ValueError(text) from error


# Types that words can stand for: what is expected, and who reads it.
READERS: dict[Any, tuple[str, Callable[[str], Value]]] = {
    NoneType: ("none", {"none": None}.__getitem__),
    bool: ("true or false", {"true": True, "false": False}.__getitem__),
    int: ("a whole number", _whole),
    float: ("a number", _number),
    str: ("a word", str),
    Epochs: ("uneven:MOST", _epochs),
    PriorText: ("a prior, such as student_t(3), Laplace, Normal(0, 1) or flat", _prior),
    GuideText: (f"a guide: {', '.join(GUIDES[:-2])}, low_rank(3) or flow(2)", _guide),
}


def readable(kind: Any) -> list[Any]:
    """Return the members of a type or union for which values can be parsed from text."""
    union = get_origin(kind) in (Union, UnionType)
    kinds = get_args(kind) if union else (kind,)
    readable_kinds = [k for k in kinds if k in READERS or get_origin(k) is Literal]
    return (
        readable_kinds if readable_kinds != [NoneType] else []
    )  # a family or None, say, is not for words


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
