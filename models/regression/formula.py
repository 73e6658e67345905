"""Reading of formulas: response, population terms, and group terms such as (1 + x | hospital)."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = r"[A-Za-z_][\w.]*"
SECOND = {
    "p": "trials",
    "prop": "trials",
    "proportion": "trials",
    "trials": "trials",
    "censored": "event",
    "surv": "event",
}


@dataclass(frozen=True)
class Group:
    """Group term: the columns whose coefficients differ, and the factors that name a level."""

    text: str
    factors: tuple[str, ...]
    correlated: bool

    @property
    def name(self) -> str:
        """Name of the grouping factor, such as "client:ward"."""
        return ":".join(self.factors)


@dataclass(frozen=True)
class Formula:
    """Formula in parts: the response, a second column of it, population terms and groups."""

    text: str
    response: str  # a column, or an expression
    second: str  # column or number of the trials, or column of the event; "": none
    kind: str  # "", "trials" or "event"
    population: str
    groups: tuple[Group, ...]


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
    if text.count("(") != text.count(")"):
        raise ValueError(f"formula is {text!r}; its parentheses do not match")
    if not right:
        raise ValueError(f"formula is {text!r}; expected predictors after '~', or 1 for a mean")
    if right.endswith(("+", "-")):
        raise ValueError(f"formula is {text!r}; expected a term after the last {right[-1]!r}")
    response, second, kind = _response(left)
    population, groups = [], []
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
    return Formula(text, response, second, kind, _joined(population), tuple(groups))


def _joined(parts: list[str]) -> str:
    """Return terms as one text; without any, only the intercept is left."""
    return (" + ".join(p for p in parts if p[0] != "-") or "1") + "".join(
        f" - {p[1:]}" for p in parts if p[0] == "-"
    )


def _response(left: str) -> tuple[str, str, str]:
    """Return the response, its second column or "", and what the second column is."""
    call = re.fullmatch(rf"({NAME})\((.*)\)", left)
    if call and call[1] in SECOND:
        parts = _split(call[2], ",")
        if len(parts) != 2:
            raise ValueError(
                f"response is {left!r}; expected two columns: p(successes, trials) or "
                "censored(time, event)"
            )
        return parts[0], parts[1], SECOND[call[1]]
    return left, "", ""


def _groups(inner: str, text: str) -> list[Group]:
    """Return the group terms of the inside of a parenthesis; a / b stands for a and a:b."""
    correlated = "||" not in inner
    parts = [part.strip() for part in inner.split("|" if correlated else "||")]
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"formula is {text!r}; expected one '|' in ({inner}), as in (1 + x | g)")
    levels = [part.strip() for part in parts[1].split("/")]
    names = [[one.strip() for one in level.split(":")] for level in levels]
    if not all(re.fullmatch(NAME, one) for level in names for one in level):
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
