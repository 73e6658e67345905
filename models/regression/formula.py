"""Reading of formulas: response, population terms, and group terms such as (1 + x | hospital).

A mapping of formulas has one for the response, and one for each parameter of the family that
depends on predictors, such as {"y": "y ~ x", "sigma": "~ x"}.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from pyrofl.arguments import check_name

NAME_PATTERN = r"[A-Za-z_][\w.]*"
SECOND = {
    "p": "trials",
    "prop": "trials",
    "proportion": "trials",
    "trials": "trials",
    "censored": "event",
    "surv": "event",
}
ADDITIONS = {
    "trials": "trials(n)",
    "se": "se(standard_error)",
    "weights": "weights(w)",
    "trunc": "trunc(lb=0)",
}
"""Name of a column after "|" -> how formulas write it."""


@dataclass(frozen=True)
class Group:
    """Group term: the columns whose coefficients differ, and the factors that name a level.

    Attributes:
        text: its columns, such as "1 + x".
        factors: columns whose values name a level.
        correlated: whether the effects of a level have correlations.
        parameter: parameter of the family that the effects change; "" is the location.
    """

    text: str
    factors: tuple[str, ...]
    correlated: bool
    parameter: str = ""

    @property
    def name(self) -> str:
        """Name of the grouping factor, such as "client:ward"."""
        return ":".join(self.factors)


@dataclass(frozen=True)
class Formula:
    """Formula in parts.

    Attributes:
        text: all formulas.
        response: a column, or an expression.
        columns: further columns of the response: "trials", "event", "upper", "entry", "se" or
            "weights" -> a column, an expression or a number.
        population: population terms of the location.
        groups: group terms of the location and of parameters.
        parameters: parameter of the family -> its population terms.
        values: parameter of the family -> its value, if it is fixed.
        adds_sigma: whether sigma is added to the known standard errors.
        truncation: smallest and largest value of a truncated response; None if it is not.
    """

    text: str
    response: str
    columns: Mapping[str, str]
    population: str
    groups: tuple[Group, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    adds_sigma: bool = False
    truncation: tuple[float, float] | None = None


def read_all(formulas: str | Mapping[str, str | float], parameters: Collection[str]) -> Formula:
    """Return the parts of a formula, or of formulas of the response and of parameters.

    A number instead of the formula of a parameter is its value.

    Args:
        formulas: a formula, or the response's name and names of parameters -> formula.
        parameters: names of the family's parameters.

    Raises:
        ValueError: if a formula cannot be read, a parameter is unknown, or there is not one
            response.
    """
    if not isinstance(formulas, Mapping):
        return read(formulas)
    first, *more = [name for name in formulas if name not in parameters] or [""]
    example = "{'y': 'y ~ x', 'sigma': '~ x'}"
    if not first:
        raise ValueError(f"formula has no response; expected one besides parameters: {example}")
    if more and not parameters:
        raise ValueError("the family has no parameter besides the location; expected one formula")
    for name in more:
        check_name(name, parameters, "parameter of the family")
    whole = read(str(formulas[first]))
    if first not in (whole.response, str(formulas[first]).split("~")[0].strip()):
        raise ValueError(
            f"formula of {first!r} has the response {whole.response}; expected {whole.response!r} "
            f"as its name: {example}"
        )
    for name in parameters:
        if name not in formulas:
            continue
        if is_number(formulas[name]):
            whole = replace(
                whole,
                text=f"{whole.text}; {name} = {formulas[name]}",
                values={**whole.values, name: float(formulas[name])},
            )
            continue
        left, _, right = str(formulas[name]).partition("~")
        if "~" not in str(formulas[name]) or left.strip() not in ("", name):
            raise ValueError(f"formula of {name} is {formulas[name]!r}; expected '~ x' or a number")
        population, groups = _terms(right.strip(), f"{name} ~ {right.strip()}")
        groups = [replace(group, parameter=name) for group in groups]
        whole = replace(
            whole,
            text=f"{whole.text}; {name} ~ {right.strip()}",
            groups=(*whole.groups, *groups),
            parameters={**whole.parameters, name: population},
        )
    return whole


def is_number(value: object) -> bool:
    """Return whether a value is a number, and no Boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read(text: str) -> Formula:
    """Return the parts of a formula.

    Raises:
        ValueError: if there is no response, parentheses do not match, or a group is malformed.
    """
    if not isinstance(text, str) or text.count("~") != 1 or not text.split("~")[0].strip():
        raise ValueError(
            f"formula is {text!r}; expected one '~' with a response before it: "
            "'y ~ x + (1 | client)'"
        )
    left, right = (part.strip() for part in text.split("~"))
    population, groups = _terms(right, text)
    before, truncation = _without_truncation(left)
    response, columns, adds_sigma = _response(before)
    parts = Formula(text, response, columns, population, tuple(groups))
    return replace(parts, adds_sigma=adds_sigma, truncation=truncation)


def with_weights(formula: Formula, weights: str | None) -> Formula:
    """Return a formula with a column of row weights, which must not have one, unless it is None."""
    if weights is None:
        return formula
    if "weights" in formula.columns:
        raise ValueError(
            f"weights={weights!r} and weights({formula.columns['weights']}) are both given; "
            "expected one of them"
        )
    return replace(formula, columns={**formula.columns, "weights": weights})


def _terms(right: str, text: str) -> tuple[str, list[Group]]:
    """Return population terms and group terms of the right-hand side of a formula."""
    if text.count("(") != text.count(")"):
        raise ValueError(f"formula is {text!r}; its parentheses do not match")
    if not right:
        raise ValueError(f"formula is {text!r}; expected predictors after '~', or 1 for a mean")
    if right.endswith(("+", "-")):
        raise ValueError(f"formula is {text!r}; expected a term after the last {right[-1]!r}")
    population: list[str] = []
    groups: list[Group] = []
    for whole in _split(right, "+"):
        part, *less = _split(whole, "-") if "|" in whole else [whole]
        if any("|" in one for one in less):
            raise ValueError(f"formula is {text!r}; expected '+' before group terms, not '-'")
        population += [f"-{one}" for one in less]
        inner = _inside(part)
        if inner is not None and "|" in inner:
            groups += _groups(inner, text)
        elif "|" in part:
            raise ValueError(
                f"formula is {text!r}; expected group terms in parentheses, joined by '+': "
                "'x + (1 | client)'"
            )
        else:
            population.append(part)
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"formula is {text!r}; {name} has two group terms, expected one: "
                f"(1 + x || {name}) for effects without correlations"
            )
    return _joined(population), groups


def _joined(parts: list[str]) -> str:
    """Return terms as one text; without any, only the intercept is left."""
    return (" + ".join(p for p in parts if p[0] != "-") or "1") + "".join(
        f" - {p[1:]}" for p in parts if p[0] == "-"
    )


def _without_truncation(left: str) -> tuple[str, tuple[float, float] | None]:
    """Return a left-hand side without trunc(lb=, ub=), and its bounds, or None."""
    response, *more = _split(left, "|")
    parts = [part for one in more for part in _split(one, "+")]
    calls = [part for part in parts if re.match(r"trunc\s*\(", part)]
    if not calls:
        return left, None
    inside = re.fullmatch(r"trunc\s*\((.*)\)", calls[0])
    pairs = [part.partition("=") for part in _split(inside[1] if inside else "", ",")]
    bounds = {name.strip(): value.strip() for name, _, value in pairs}
    try:
        low, high = float(bounds.get("lb", "-inf")), float(bounds.get("ub", "inf"))
    except ValueError:
        low, high = math.nan, math.nan
    if len(calls) > 1 or not bounds or {*bounds} - {"lb", "ub"} or not low < high:
        raise ValueError(
            f"response is {left!r}; expected trunc(lb=0), trunc(ub=10) or trunc(lb=0, ub=10) once, "
            "with numbers, which are the smallest and the largest value"
        )
    rest = [part for part in parts if part not in calls]
    return response + (f" | {' + '.join(rest)}" if rest else ""), (low, high)


def _response(left: str) -> tuple[str, dict[str, str], bool]:
    """Return the response, its further columns, and whether sigma is added to standard errors."""
    response, *more = _split(left, "|")
    if len(more) > 1 or left.endswith("|"):
        raise ValueError(f"response is {left!r}; expected one '|', as in y | se(error)")
    columns: dict[str, str] = {}
    adds_sigma = False
    call = re.fullmatch(rf"({NAME_PATTERN})\((.*)\)", response)
    if call and call[1] in SECOND:
        response, columns = _two_columns(left, SECOND[call[1]], _split(call[2], ","))
    for part in _split(more[0], "+") if more else ():
        name, arguments = _addition(part)
        if name in columns:
            raise ValueError(f"response is {left!r}; {name} is there twice, expected it once")
        columns[name], *options = arguments
        if options and (name != "se" or not re.fullmatch(r"sigma\s*=\s*(TRUE|True)", options[0])):
            raise ValueError(
                f"response is {left!r}; unexpected {options[0]!r}, expected {ADDITIONS[name]}"
                f"{' or se(standard_error, sigma=True)' if name == 'se' else ''}"
            )
        adds_sigma |= bool(options)
    return response, columns, adds_sigma


def _two_columns(left: str, role: str, parts: list[str]) -> tuple[str, dict[str, str]]:
    """Return response and further columns of p(successes, trials) or censored(time, event)."""
    bounds = {}
    if role == "event":
        named = [re.fullmatch(r"(upper|entry)\s*=\s*([^=].*)", part) for part in parts]
        bounds = {one[1]: one[2] for one in named if one}
        parts = [part for part, one in zip(parts, named, strict=True) if not one]
        if len(bounds) < sum(map(bool, named)):
            raise ValueError(f"response is {left!r}; expected upper= and entry= once")
    if len(parts) != 2:
        raise ValueError(
            f"response is {left!r}; expected two columns: p(successes, trials) or "
            "censored(time, event), with upper=column for events after time and up to a bound, "
            "and entry=column for delayed entry"
        )
    return parts[0], {role: parts[1], **bounds}


def _addition(part: str) -> tuple[str, list[str]]:
    """Return name and arguments of a column after "|", such as se(error)."""
    call = re.fullmatch(rf"({NAME_PATTERN})\((.*)\)", part)
    forms = ", ".join(ADDITIONS.values())
    if not call:
        raise ValueError(f"response has {part!r} after '|'; expected {forms}")
    if call[1] == "cens":
        raise ValueError(
            f"response has {part!r} after '|'; expected censored(time, event), with event 1 for an "
            "event, and upper=column for interval or left censoring"
        )
    check_name(call[1], ADDITIONS, "column after '|':")
    arguments = _split(call[2], ",")
    if not 1 <= len(arguments) <= 2:
        raise ValueError(f"response has {part!r} after '|'; expected {ADDITIONS[call[1]]}")
    return call[1], arguments


def _groups(inner: str, text: str) -> list[Group]:
    """Return the group terms of the inside of a parenthesis; a / b stands for a and a:b."""
    correlated = "||" not in inner
    parts = [part.strip() for part in inner.split("|" if correlated else "||")]
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"formula is {text!r}; expected one '|' in ({inner}), as in (1 + x | g)")
    levels = [part.strip() for part in parts[1].split("/")]
    names = [[one.strip() for one in level.split(":")] for level in levels]
    if not all(re.fullmatch(NAME_PATTERN, one) for level in names for one in level):
        raise ValueError(
            f"formula is {text!r}; expected names of columns after '|', joined by ':' or '/', "
            f"and got {parts[1]!r}"
        )
    return [
        Group(parts[0], tuple(one for level in names[: k + 1] for one in level), correlated)
        for k in range(len(names))
    ]


def _inside(part: str) -> str | None:
    """Return the inside of a text that is one pair of parentheses, or None."""
    if not (part.startswith("(") and part.endswith(")")):
        return None
    depth = 0
    for place, sign in enumerate(part):
        depth += (sign == "(") - (sign == ")")
        if not depth and place < len(part) - 1:
            return None
    return part[1:-1]


def _split(text: str, sign: str) -> list[str]:
    """Split a text at a sign that is outside of all brackets."""
    parts, depth = [""], 0
    for one in text:
        depth += (one in "([{") - (one in ")]}")
        if one == sign and not depth:
            parts.append("")
        else:
            parts[-1] += one
    return [part.strip() for part in parts if part.strip()]
