"""Design of a regression: which columns of x a program reads, and the clients' rows of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from pyrofl.data import Federation
from pyrofl.data.frames import place_of
from pyrofl.data.outlines import outline
from pyrofl.data.tables.preprocessor import ColumnPreprocessing, Preprocessor
from pyrofl.data.tables.source import Source
from pyrofl.data.tables.wording import listed
from pyrofl.models.regression.agreement import Agreement, Report
from pyrofl.models.regression.columns import Columns, Namespace, variables
from pyrofl.models.regression.families import SUPPORTS, Family
from pyrofl.models.regression.formula import Formula, Group
from pyrofl.models.regression.rows import (
    COLUMNS,
    MAX_NUMBER,
    MOST_LEVELS,
    Clients,
    Level,
    agreed,
    frames_of,
    kind_of,
    refuse_large,
    refuse_levels,
    tensor,
)
from pyrofl.models.regression.survival import BOUNDS, check_times, refuse_open_bounds

LevelScope = Literal["client", "nested", "shared"]
OFFSET, RESPONSE_SUFFIX = "sum of offsets", " of the response"  # columns of x that are no terms
NO_NEW_ROWS = ("event", *BOUNDS)  # columns of the response that predictions do not need


@dataclass(frozen=True)
class GroupTerm:
    """Group term with its columns, and whose levels these are.

    Attributes:
        group: the term.
        columns: its columns.
        kind: "client" if a level is a client, "nested" if a level belongs to one client, "shared"
            if several clients have it.
        levels: "shared": all levels; "nested": client -> its levels, of the clients that are here.
        answers: levels of a categorical response but the first, each of which has coefficients.
        most: "nested": largest number of levels of a client.
        texts: "nested": labels of the levels of each client.
    """

    group: Group
    columns: Columns
    kind: LevelScope
    levels: Mapping[str, tuple[Level, ...]]
    answers: tuple[Level, ...] = ()
    most: int = 1
    texts: tuple[str, ...] = ()

    @property
    def parameter(self) -> str:
        """Parameter of the family that the effects change; "" is the location."""
        return self.group.parameter

    @property
    def name(self) -> str:
        """Name for sites: that of the factors, after the parameter."""
        parts = [self.parameter] * bool(self.parameter) + list(self.group.factors)
        return "_".join(parts).replace(".", "_")

    @property
    def labels(self) -> list[str]:
        """Names of the columns."""
        return ["Intercept"] * self.columns.has_intercept + self.columns.labels

    @property
    def entries(self) -> list[str]:
        """Names of the coefficients: of the columns, and of each level of a response."""
        if not self.answers:
            return self.labels
        return [f"{label} ({answer})" for label in self.labels for answer in self.answers]

    @property
    def is_correlated(self) -> bool:
        """Whether the effects of a level have correlations."""
        return len(self.labels) > 1 and self.group.correlated

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Indices of the effects of each correlation, in the order of the lower triangle."""
        return [(i, j) for j in range(len(self.entries)) for i in range(j)]

    @property
    def correlations(self) -> list[str]:
        """Names of the correlations, such as "Intercept, x"."""
        names = self.entries
        return [f"{names[i]}, {names[j]}" for i, j in self.pairs] if self.is_correlated else []

    @property
    def count(self) -> int:
        """Number of levels: of all clients if shared, else the largest number of a client."""
        return max([self.most, *map(len, self.levels.values())])

    def factors(self, client: str) -> tuple[str, ...]:
        """Return the factors that distinguish levels of one client."""
        return tuple(name for name in self.group.factors if name != client)

    def codes(self, frame: pd.DataFrame, site: str, client: str) -> np.ndarray:
        """Return the index of each row's level, [N]."""
        levels = self.levels["" if self.kind == "shared" else site]
        place = {level: code for code, level in enumerate(levels)}
        return np.array([place[level] for level in self.level_of_rows(frame, client)])

    def level_of_rows(self, frame: pd.DataFrame, client: str) -> list[Level]:
        """Return the level of each row of a client, without the client itself."""
        return _levels(frame, self.factors(client))


@dataclass(frozen=True)
class Design:
    """Agreed design of a regression.

    Attributes:
        formula: the formula.
        family: the family of the responses.
        clients: complete rows of all clients.
        population: columns with coefficients that are one for all clients.
        parameters: parameter of the family with a formula -> its columns.
        further: role of a further column of the response, such as "trials" -> columns it reads.
        groups: group terms, also those of parameters.
        answers: levels of a categorical response, the first being the reference; else empty.
        client: name of the column that identifies the client.
        namespace: functions and values of the user, by their names in the formula.
        needed: columns of a table that the right-hand side reads, without that of the client.
    """

    formula: Formula
    family: Family
    clients: Clients
    population: Columns
    groups: tuple[GroupTerm, ...]
    answers: tuple[Level, ...]
    client: str
    namespace: Namespace
    needed: tuple[str, ...] = ()
    parameters: Mapping[str, Columns] = field(default_factory=dict)
    further: Mapping[str, set[str]] = field(default_factory=dict)

    @property
    def terms(self) -> list[str]:
        """Names of the population coefficients, without the intercept."""
        return self.population.labels

    @property
    def predictors(self) -> dict[str, Columns]:
        """Parameter of the family -> population columns; "" is the location."""
        return {"": self.population, **self.parameters}

    @property
    def auxiliary(self) -> dict[str, str]:
        """Name of a parameter that is one for all rows -> Pyro code of its prior."""
        gone = {*self.parameters, *self.formula.values}
        if "se" in self.formula.columns and not self.formula.adds_sigma:
            gone.add("sigma")
        return {name: code for name, code in self.family.auxiliary.items() if name not in gone}

    @property
    def event(self) -> str:
        """Name of the response, and of two categories the modeled one: "died = yes"."""
        name = self.formula.response
        is_binary = self.family.support == "binary" and len(self.answers) == 2
        return f"{name} = {self.answers[1]}" if is_binary else name

    @property
    def roles(self) -> list[str]:
        """Names of the response's further columns that the program reads, such as "trials"."""
        roles = [self.family.column] * bool(self.family.column)
        return roles + [role for role in self.formula.columns if role not in (*roles, "weights")]

    @cached_property
    def places(self) -> dict[str, int]:
        """Name of a column of x -> its index."""
        names = list(self.terms)
        for parameter, columns in self.predictors.items():
            names += [name for name in columns.labels if name not in names]
            names += [offset_of(parameter)] * bool(columns.offsets)
        names += [role + RESPONSE_SUFFIX for role in self.roles if self.constant(role) is None]
        for one in self.groups:
            levels = [] if one.kind == "client" else [f"level of {one.group.name}"]
            names += [name for name in one.columns.labels + levels if name not in names]
        return {name: place for place, name in enumerate(names or ["none"])}

    def level_of(self, site: str) -> str:
        """Return the value of the client column at a client; of a new client, its name."""
        if site in self.clients.frames:
            return str(self.clients.frames[site][self.client].iloc[0])
        return str(self.clients.roster.get("values", {}).get(site, site))

    def constant(self, role: str) -> float | None:
        """Return the number of trials, or so, if it is one for all rows; 1 for events."""
        text = self.formula.columns.get(role)
        if text is None:
            return 1.0 if role == "event" else None
        return _number(text)

    def code(self, role: str) -> str:
        """Return Pyro code of a further column of the response, such as the trials."""
        value = self.constant(role)
        return f"x[..., {self.places[role + RESPONSE_SUFFIX]}]" if value is None else f"{value:g}"

    def columns(self, frame: pd.DataFrame) -> dict[str, np.ndarray]:
        """Return the columns of x of a client's rows, [N] each, without indices of levels."""
        values: dict[str, Any] = {}
        for parameter, columns in self.predictors.items():
            values |= zip(columns.labels, columns.evaluate(frame).T, strict=True)
            if columns.offsets:
                values[offset_of(parameter)] = columns.offset(frame)
        for role in self.roles:
            if role + RESPONSE_SUFFIX in self.places:
                values[role + RESPONSE_SUFFIX] = self.response_column(role, frame)
        for one in self.groups:
            for name, column in zip(one.columns.labels, one.columns.evaluate(frame).T, strict=True):
                values.setdefault(name, column)
        return values

    def x(self, frame: pd.DataFrame, site: str) -> np.ndarray:
        """Return the columns of x of a client's rows, [N, P]."""
        values = self.columns(frame)
        for one in self.groups:
            if one.kind != "client":
                values[f"level of {one.group.name}"] = one.codes(frame, site, self.client)
        values.setdefault("none", np.zeros(len(frame)))
        return np.column_stack([values[name] for name in self.places]).astype(np.float64)

    def response_column(self, role: str, frame: pd.DataFrame) -> np.ndarray:
        """Return a further column of the response, such as "trials", or "weights", [N]."""
        text = self.formula.columns.get(role)
        if text is None or (role in NO_NEW_ROWS and not self.further[role] <= {*frame}):
            return np.ones(len(frame))  # events, also of new rows
        return self._values(text, frame)

    def _values(self, text: str, frame: pd.DataFrame) -> np.ndarray:
        """Return a column, a number or an expression at rows, [N]."""
        if text in frame:
            return np.asarray(frame[text], dtype=np.float64)
        if (number := _number(text)) is not None:
            return np.full(len(frame), number)
        if text not in self._expressions:
            right = _right_hand_side(text, is_response=text == self.formula.response)
            columns = Columns(right, self.clients, self.namespace)
            if len(columns.labels) != 1 or columns.blocks:
                raise ValueError(
                    f"{text} is a term with coefficients, of the right-hand side; expected a "
                    "column, or a function of single rows such as log(y)"
                )
            self._expressions[text] = columns
        return self._expressions[text].evaluate(frame)[:, 0]

    @cached_property
    def _expressions(self) -> dict[str, Columns]:
        """Columns of expressions of the response, filled by `_values`."""
        return {}

    def y(self, frame: pd.DataFrame) -> np.ndarray:
        """Return the responses of a client's rows as numbers or codes of levels, [N]."""
        name = self.formula.response
        if self.answers:
            place = {level: code for code, level in enumerate(self.answers)}
            return np.array([place[level] for level in frame[name].tolist()], dtype=np.float64)
        return self._values(name, frame)

    def check_columns(self) -> None:
        """Raise ValueError if a column of the design, or of numbers, is not finite numbers."""
        numbers = self.formula.columns.values()
        for site, frame in self.clients.frames.items():
            for name in numbers:
                if name in frame and kind_of(frame[name]) != "numbers":
                    raise ValueError(
                        f"{site}: column {name} holds text; expected numbers, and got "
                        f"{frame[name].iloc[0]!r} in {place_of(frame, 0)}"
                    )
            for name, values in zip(self.places, self.x(frame, site).T, strict=True):
                refuse_large(f"{site}: {name}", values, frame)

    def check_responses(self) -> None:
        """Raise ValueError if a response is not in the support of the family."""
        for site, frame in self.clients.frames.items():
            y = self.y(frame)
            for role in self.formula.columns:
                self.check_role(role, site, frame)
            bad = ~self.family.admits(y, self._second(y, frame))
            if bad.any():
                place = place_of(frame, int(bad.argmax()))
                raise ValueError(
                    f"{site}: response {self.formula.response} is {y[bad][0]:g} in {place}; "
                    f"expected {SUPPORTS[self.family.support]}"
                )
            refuse_large(f"{site}: response {self.formula.response}", y, frame)
            low, high = self.formula.truncation or (-np.inf, np.inf)
            if (bad := (y < low) | (y > high)).any():
                place = place_of(frame, int(bad.argmax()))
                raise ValueError(
                    f"{site}: response {self.formula.response} is {y[bad][0]:g} in {place}; "
                    f"expected numbers from {low:g} to {high:g}, as of trunc()"
                )
            if bounds := {*BOUNDS} & {*self.formula.columns}:
                columns = {n: self.response_column(n, frame) for n in ("event", *bounds)}
                names = {"time": self.formula.response, **self.formula.columns}
                check_times(site, frame, y, columns, names)

    def _second(self, y: np.ndarray, frame: pd.DataFrame) -> np.ndarray | None:
        """Return trials, or upper bounds of events after a time, [N]; None if there are none."""
        if self.family.column == "trials":
            return self.response_column("trials", frame)
        if "upper" not in self.formula.columns:
            return None
        is_event = self.response_column("event", frame) == 1
        return np.where(is_event, self.response_column("upper", frame), 0.0)

    def outline(self) -> Federation:
        """Return a federation of the shapes that all clients agree on, without rows."""
        agreed_facts = self.clients.agreement.results[COLUMNS]
        count, largest = agreed_facts["clients"], agreed_facts["largest"]
        names, sizes = [f"client {j}" for j in range(count)], [largest, *[1] * (count - 1)]
        return outline(names, sizes, (len(self.places),), dtype=torch.float64)

    def check_role(self, role: str, site: str, frame: pd.DataFrame) -> None:
        """Raise ValueError if a further column of the response has impossible values."""
        values = self.response_column(role, frame)
        fits, words = {
            "event": (np.isin(values, (0, 1)), "1 for an event and 0 for a censored time"),
            "trials": ((values == np.round(values)) & (values >= 0), "whole numbers of trials"),
            "se": (values > 0, "standard errors above 0"),
            "weights": (values >= 0, "weights of at least 0"),
            "upper": (values >= 0, "bounds of at least the time"),
            "entry": (values >= 0, "times of at least 0"),
        }[role]
        if not fits.all():
            row, name = int((~fits).argmax()), self.formula.columns[role]
            raise ValueError(
                f"{site}: {name} is {values[row]:g} in {place_of(frame, row)}; expected {words}"
            )

    def federation(self) -> Federation:
        """Return the federation that the generated program reads, in double precision.

        It has the clients whose rows are here.
        """
        frames = self.clients.frames
        x = [tensor(self.x(frame, site)) for site, frame in frames.items()]
        y = [tensor(self.y(frame)) for frame in frames.values()]
        ends = np.cumsum([0, *map(len, y)])
        rows = [torch.arange(a, b) for a, b in pairwise(ends)]
        weights = None
        if "weights" in self.formula.columns:
            parts = [tensor(self.response_column("weights", frame)) for frame in frames.values()]
            weights = torch.cat(parts)
        return Federation(
            torch.cat(x),
            torch.cat(y),
            rows,
            [torch.arange(0)] * len(rows),
            tuple(frames),
            source=self.source,
            weights=weights,
        )

    @property
    def source(self) -> Source:
        """Names of the response and of the columns of x."""
        names = tuple(self.places)
        preprocessor = Preprocessor(tuple(map(ColumnPreprocessing, names)))
        return Source(self.formula.response, names, preparation=preprocessor)


def make_design(
    formula: Formula,
    data: Any,
    family: Family,
    *,
    client: str,
    namespace: Namespace,
    agreement: Agreement | None = None,
) -> Design:
    """Return the design that the clients agree on; see `regression`.

    Args:
        formula: the formula.
        data: tables of the clients that are here; None at a server.
        family: the family of the responses.
        client: name of the column that identifies the client.
        namespace: name -> function or value that the formula may use.
        agreement: results of all clients' rows; None if all rows are here.
    """
    right = [formula.population, *formula.parameters.values()]
    right += [group.text for group in formula.groups]
    seen = [variables(text) for text in right]
    names, factors = (set().union(*part) for part in zip(*seen, strict=True))
    frames = {} if data is None else frames_of(data, client)
    columns = {str(name) for frame in frames.values() for name in frame.columns}
    names -= set(namespace) - columns
    factors |= {name for group in formula.groups for name in group.factors}
    plain = formula.response.isidentifier()
    answer = _columns_in(formula.response, namespace, columns, is_response=True)
    if both := sorted(answer & names):
        raise ValueError(
            f"column {both[0]} is in the response and among the predictors; expected it in one"
        )
    if "Intercept" in names | factors:
        raise ValueError("a column has the name Intercept, that of the intercept; rename it")
    further = {role: _columns_in(t, namespace, columns) for role, t in formula.columns.items()}
    if "upper" in further:  # an expression has the gaps of its columns, such as the time itself
        refuse_open_bounds(frames, formula.columns["upper"])
    used = [*sorted(answer.union(*further.values()))]
    used += sorted((names | factors | {client}) - answer)
    categorical = sorted(factors | {client})
    if family.kind in ("ordinal", "categorical") and plain:
        categorical.append(formula.response)
    listed_names = names | (answer if plain else set())
    hidden = [name for name in categorical if name not in listed_names]
    agreement = agreement or Agreement()
    clients = agreed(frames, list(dict.fromkeys(used)), categorical, hidden, client, agreement)
    answers = clients.levels.get(formula.response, ()) if plain else ()
    answers = _check_answers(formula, family, answers)
    # The levels of grouping factors may be many; only those of the columns' own factors matter.
    within = {n for n in clients.levels if n in names}
    clients = clients.restrict({n: v for n, v in clients.levels.items() if n in within})
    population = Columns(formula.population, clients, namespace)
    parameters = {n: Columns(t, clients, namespace) for n, t in formula.parameters.items()}
    many = answers[1:] if family.kind == "categorical" else ()
    groups = tuple(
        _make_group_term(group, Columns(group.text, clients, namespace), clients, client, many)
        for group in formula.groups
    )
    _refuse_equal_names(groups)
    levels = {name for one in groups if one.kind != "client" for name in one.group.factors}
    needed = names.union(levels, *(part[1] for part in seen)) - {client}
    needed |= set().union(*(further.get(role, set()) for role in ("trials", "se")))
    parts = (formula, family, clients, population, groups, answers, client, namespace)
    return Design(*parts, needed=tuple(sorted(needed)), parameters=parameters, further=further)


def _refuse_equal_names(groups: Sequence[GroupTerm]) -> None:
    """Raise ValueError if two group terms have one name in the program, such as sigma_client."""
    names = [one.name for one in groups]
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(
            f"two group terms have the name {twice[0]} in the program, as of a column with this "
            "name; rename the column"
        )


def offset_of(parameter: str) -> str:
    """Return the name of the column of x with the offsets of a parameter; "" is the location."""
    return OFFSET + (f" of {parameter}" if parameter else "")


def _columns_in(
    text: str, namespace: Namespace, columns: set[str], *, is_response: bool = False
) -> set[str]:
    """Return the columns in a column, a number or an expression of the response."""
    if text.isidentifier() or text in columns:
        return {text}
    if _number(text) is not None:
        return set()
    return variables(_right_hand_side(text, is_response=is_response))[0] - (
        set(namespace) - columns
    )


def _right_hand_side(text: str, *, is_response: bool) -> str:
    """Return the right-hand side of an expression, in which + and * are those of numbers."""
    return f"0 + {text}" if is_response or text.startswith("{") else f"0 + {{{text}}}"


def _number(text: str) -> float | None:
    """Return the number that a text is, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def _check_answers(
    formula: Formula, family: Family, levels: tuple[Level, ...]
) -> tuple[Level, ...]:
    """Return the levels of a categorical response; raise ValueError if the family has none."""
    name = formula.response
    if not levels:
        return ()
    shown = listed([str(level) for level in levels], 5)
    if family.kind in ("ordinal", "categorical"):
        if len(levels) < 3:
            raise ValueError(
                f"response {name} has {len(levels)} levels ({shown}); expected 3 or more, or "
                "bernoulli"
            )
        return levels
    if family.support != "binary" or len(levels) != 2:
        raise ValueError(
            f"response {name} holds text with {len(levels)} levels ({shown}); expected numbers, a "
            "family of categories (cumulative, categorical), or two levels for bernoulli"
        )
    return levels


def _make_group_term(
    group: Group, columns: Columns, clients: Clients, client: str, answers: tuple[Level, ...]
) -> GroupTerm:
    """Return a group term with its levels, which are those of one client or of several."""
    if columns.offsets or not (columns.labels or columns.has_intercept):
        raise ValueError(f"({group.text} | {group.name}) has no coefficient; expected 1 or a name")
    own = tuple(name for name in group.factors if name != client)
    for name, block in columns.blocks.items():
        function = f"{block.transform.name}()"
        raise ValueError(
            f"group term ({group.text} | {group.name}) has {function}; expected "
            f"{'poly() or bs()' if name[:2] in ('s_', 'gp') else 'the variable itself'}, or "
            f"{function} as a term of its own"
        )
    grouped = GroupTerm(group, columns, "client", {}, answers)
    if not own:
        return grouped
    result = clients.agree(
        f"levels of {group.name}",
        lambda frame: [_digest(level) for level in _distinct_levels(frame, own)],
        lambda reports: _kind_of_levels([*reports.values()], client in group.factors),
        lambda report: refuse_levels(group.name, report),
    )
    if result["kind"] == "client":
        return grouped
    is_shared = result["kind"] == "shared"
    texts: Sequence[Level] = range(1, result["most"] + 1)
    if result["is_named"]:
        texts = clients.agree(
            f"names of levels of {group.name}",
            lambda frame: [*map(_plain_level, _distinct_levels(frame, own))],
            lambda reports: _merge_level_names([*reports.values()], is_shared),
            lambda report: _refuse_names(group.name, report, len(own)),
        )
        texts = [tuple(level) if isinstance(level, list) else level for level in texts]
    if is_shared:
        return replace(grouped, kind="shared", levels={"": tuple(texts)})
    seen = {site: _distinct_levels(frame, own) for site, frame in clients.frames.items()}
    labels = tuple(map(level_text, texts))
    return replace(grouped, kind="nested", levels=seen, most=result["most"], texts=labels)


def _kind_of_levels(each: Sequence[Sequence[str]], is_of_client: bool) -> Report:
    """Return whose levels the clients' levels are, given their digests in order.

    Levels that several clients have are named to all, and so are those of each client if they are
    the same for all clients.
    """
    every = [level for levels in each for level in levels]
    most = max(map(len, each))
    if is_of_client or len(set(every)) == len(every):
        longest = max(each, key=len)
        is_one = all(list(levels) == list(longest[: len(levels)]) for levels in each)
        kind = "client" if most == 1 else "nested"
        return {"kind": kind, "most": most, "is_named": kind == "nested" and is_one}
    return {"kind": "shared", "most": 1, "is_named": True}


def _merge_level_names(each: Sequence[Sequence[Report]], is_shared: bool) -> list[Report]:
    """Return the union of the clients' levels in order, or the longest list."""
    if not is_shared:
        return [*max(each, key=len)]
    tuples = {tuple(level) if isinstance(level, list) else level for one in each for level in one}
    return [_plain_level(level) for level in sorted(tuples)]


def _refuse_names(name: str, report: Report, factors: int) -> None:
    """Raise ValueError unless a report is a list of levels, of one factor or of several."""
    if factors == 1:
        refuse_levels(name, report)
        return
    if not isinstance(report, list) or not 0 < len(report) <= MOST_LEVELS:
        raise ValueError(f"{name}: got no levels; expected 1 to {MOST_LEVELS:,} levels")
    for level in report:
        if not isinstance(level, list) or len(level) != factors:
            raise ValueError(f"{name}: got a level that is no list of {factors}")
        for one in level:
            refuse_levels(name, [one])


def _plain_level(level: Level) -> Report:
    """Return a level, or a list of the levels of several factors."""
    return list(level) if isinstance(level, tuple) else level


def _digest(level: Level) -> str:
    """Return a hash of a level, which is equal for equal numbers of different types."""
    if isinstance(level, tuple):
        text = " ".join(map(_digest, level))
    elif isinstance(level, bool | int | float):
        text = repr(float(level))
    else:
        text = f"{type(level).__name__} {level}"
    return sha256(text.encode()).hexdigest()[:32]


def level_text(level: Level) -> str:
    """Return the name of a level, of one factor or of several."""
    return ":".join(map(str, level)) if isinstance(level, tuple) else str(level)


def _levels(frame: pd.DataFrame, factors: Sequence[str]) -> list[Level]:
    """Return the level of each row: a value, or a tuple if there are several factors."""
    if len(factors) == 1:
        levels: list[Level] = frame[factors[0]].tolist()
        return levels
    return list(zip(*(frame[name].tolist() for name in factors), strict=True))


def _distinct_levels(frame: pd.DataFrame, factors: Sequence[str]) -> tuple[Level, ...]:
    return tuple(sorted(set(_levels(frame, factors))))


def refuse_tiny(what: str, size: float) -> None:
    """Raise ValueError if the squares of a column's numbers, of at most this size, are 0."""
    if 0 < size < 1 / MAX_NUMBER:
        raise ValueError(
            f"{what} is at most {size:g}; expected numbers of at least {1 / MAX_NUMBER:g}, or 0: "
            "use another unit"
        )
