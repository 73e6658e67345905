"""Design of a regression: which columns of x a program reads, and the clients' rows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from pyrofl.data import Federation
from pyrofl.data.tables.preprocessor import Prepared, Preprocessor
from pyrofl.data.tables.source import Source
from pyrofl.data.tables.wording import listed
from pyrofl.models.regression.columns import Columns, Namespace, variables
from pyrofl.models.regression.families import SUPPORTS, Family
from pyrofl.models.regression.formula import Formula, Group
from pyrofl.models.regression.rows import Clients, Level, agreed, frames_of, kind_of, tensor

Kind = Literal["client", "nested", "shared"]
OFFSET, OF_RESPONSE = "sum of offsets", " of the response"  # columns of x that are no terms
LARGEST = 1e100  # sums of squares of larger numbers may overflow


@dataclass(frozen=True)
class Grouped:
    """Group term with its columns, and whose levels these are.

    Attributes:
        group: the term.
        columns: its columns.
        kind: "client" if a level is a client, "nested" if a level belongs to one client, "shared"
            if several clients have it.
        levels: "shared": all levels; "nested": client -> its levels.
        answers: levels of a categorical response but the first, each of which has coefficients.
    """

    group: Group
    columns: Columns
    kind: Kind
    levels: Mapping[str, tuple[Level, ...]]
    answers: tuple[Level, ...] = ()

    @property
    def name(self) -> str:
        """Name for sites: that of the factors."""
        return "_".join(self.group.factors).replace(".", "_")

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
    def count(self) -> int:
        """Number of levels: of all clients if shared, else the largest number of a client."""
        return max(map(len, self.levels.values()), default=1)

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
        groups: group terms.
        answers: levels of a categorical response, the first being the reference; else empty.
        client: name of the column that identifies the client.
        weights: name of the column of row weights.
        namespace: functions and values of the user, by their names in the formula.
        needed: columns of a table that the right-hand side reads, without that of the client.
    """

    formula: Formula
    family: Family
    clients: Clients
    population: Columns
    groups: tuple[Grouped, ...]
    answers: tuple[Level, ...]
    client: str
    weights: str | None
    namespace: Namespace
    needed: tuple[str, ...] = ()

    @property
    def terms(self) -> list[str]:
        """Names of the population coefficients, without the intercept."""
        return self.population.labels

    @cached_property
    def places(self) -> dict[str, int]:
        """Name of a column of x -> its index."""
        names = list(self.terms)
        names += [OFFSET] * bool(self.population.offsets)
        if self.family.column and not self._constant:
            names.append(self.family.column + OF_RESPONSE)
        for one in self.groups:
            names += [n for n in one.columns.labels if n not in names]
            names += [] if one.kind == "client" else [f"level of {one.group.name}"]
        return {name: place for place, name in enumerate(names or ["none"])}

    def level_of(self, site: str) -> str:
        """Return the value of the client column at a client; of a new client, its name."""
        if site not in self.clients.frames:
            return site
        return str(self.clients.frames[site][self.client].iloc[0])

    @property
    def _constant(self) -> float | None:
        """Number of trials, if it is one for all rows; 1 for an event that is always seen."""
        if not self.formula.second:
            return 1.0 if self.family.column == "event" else None
        try:
            return float(self.formula.second)
        except ValueError:
            return None

    @property
    def second(self) -> str:
        """Pyro code of the second column of the response, such as the trials."""
        if self._constant is not None:
            return f"{self._constant:g}"
        return f"x[..., {self.places[self.family.column + OF_RESPONSE]}]"

    def x(self, frame: pd.DataFrame, site: str) -> np.ndarray:
        """Return the columns of x of a client's rows, [N, P]."""
        columns = {name: None for name in self.places}
        values: dict[str, Any] = dict(
            zip(self.terms, self.population.evaluate(frame).T, strict=True)
        )
        if OFFSET in columns:
            values[OFFSET] = self.population.offset(frame)
        if self.family.column + OF_RESPONSE in columns:
            values[self.family.column + OF_RESPONSE] = self._second(frame)
        for one in self.groups:
            for name, column in zip(one.columns.labels, one.columns.evaluate(frame).T, strict=True):
                values.setdefault(name, column)
            if one.kind != "client":
                values[f"level of {one.group.name}"] = one.codes(frame, site, self.client)
        values.setdefault("none", np.zeros(len(frame)))
        return np.column_stack([values[name] for name in columns]).astype(np.float64)

    def _second(self, frame: pd.DataFrame) -> np.ndarray:
        if self.formula.second not in frame and self.family.column == "event":
            return np.ones(len(frame))  # of new rows
        return np.asarray(frame[self.formula.second], dtype=np.float64)

    def y(self, frame: pd.DataFrame) -> np.ndarray:
        """Return the responses of a client's rows as numbers or codes of levels, [N]."""
        name = self.formula.response
        if self.answers:
            place = {level: code for code, level in enumerate(self.answers)}
            return np.array([place[level] for level in frame[name].tolist()], dtype=np.float64)
        if name in frame:
            return np.asarray(frame[name], dtype=np.float64)
        return self._response.evaluate(frame)[:, 0]

    @cached_property
    def _response(self) -> Columns:
        """Columns of a response that is an expression."""
        return Columns(f"0 + {self.formula.response}", self.clients, self.namespace)

    def check_columns(self) -> None:
        """Raise ValueError if a column of the design, or of numbers, is not finite numbers."""
        numbers = [self.weights, self.family.column and self.formula.second]
        for site, frame in self.clients.frames.items():
            for name in numbers:
                if name and name in frame and kind_of(frame[name]) != "numbers":
                    raise ValueError(
                        f"{site}: column {name} holds text; expected numbers, and got "
                        f"{frame[name].iloc[0]!r} in row 0"
                    )
            for name, values in zip(self.places, self.x(frame, site).T, strict=True):
                _refuse_large(f"{site}: {name}", values)
        whole = [self.x(frame, site) for site, frame in self.clients.frames.items()]
        for place, name in enumerate(self.places):
            _refuse_tiny(name, [values[:, place] for values in whole])

    def check_responses(self) -> None:
        """Raise ValueError if a response is not in the support of the family."""
        for site, frame in self.clients.frames.items():
            y = self.y(frame)
            second = None
            if self.family.column and self._constant is None:
                second = self._second(frame)
                if self.family.column == "event" and not np.isin(second, (0, 1)).all():
                    raise ValueError(
                        f"{site}: {self.formula.second} holds other values than 0 and 1; expected "
                        "1 for an event and 0 for a censored time"
                    )
                whole = (second == np.round(second)) & (second >= 0)
                if self.family.column == "trials" and not whole.all():
                    raise ValueError(
                        f"{site}: {self.formula.second} is {second[~whole][0]:g} in row "
                        f"{int((~whole).argmax())}; expected whole numbers of trials"
                    )
            elif self._constant is not None:
                second = np.full(len(y), self._constant)
            bad = ~self.family.admits(y, second)
            if bad.any():
                raise ValueError(
                    f"{site}: response {self.formula.response} is {y[bad][0]:g} in row "
                    f"{int(bad.argmax())}; expected {SUPPORTS[self.family.support]}"
                )
            _refuse_large(f"{site}: response {self.formula.response}", y)
        responses = [self.y(frame) for frame in self.clients.frames.values()]
        _refuse_tiny(f"response {self.formula.response}", responses)

    def federation(self) -> Federation:
        """Return the federation that the generated program reads, in double precision."""
        frames = self.clients.frames
        x = [tensor(self.x(frame, site)) for site, frame in frames.items()]
        y = [tensor(self.y(frame)) for frame in frames.values()]
        ends = np.cumsum([0, *map(len, y)])
        rows = [torch.arange(a, b) for a, b in pairwise(ends)]
        weights = None
        if self.weights is not None:
            weights = torch.cat([tensor(frame[self.weights]) for frame in frames.values()])
        names = tuple(self.places)
        preprocessor = Preprocessor(tuple(map(Prepared, names)))
        return Federation(
            torch.cat(x),
            torch.cat(y),
            rows,
            [torch.arange(0)] * len(rows),
            tuple(frames),
            source=Source(self.formula.response, names, preparation=preprocessor),
            weights=weights,
        )


def make_design(
    formula: Formula,
    data: Any,
    family: Family,
    *,
    client: str,
    weights: str | None,
    namespace: Namespace,
) -> Design:
    """Return the design that the clients agree on; see `regression`."""
    right = [formula.population, *(group.text for group in formula.groups)]
    seen = [variables(text) for text in right]
    names, factors = (set().union(*part) for part in zip(*seen, strict=True))
    frames = frames_of(data, client)
    columns = {str(name) for frame in frames.values() for name in frame.columns}
    names -= set(namespace) - columns
    factors |= {name for group in formula.groups for name in group.factors}
    plain, answer = formula.response.isidentifier(), {formula.response}
    if not plain:
        answer = variables(f"0 + {formula.response}")[0]
    if both := sorted(answer & names):
        raise ValueError(
            f"column {both[0]} is in the response and among the predictors; expected it in one"
        )
    second = {formula.second} if formula.second.isidentifier() else set()
    used = [*sorted(answer | second), *sorted(names | factors | {client} - answer)]
    used += [weights] if weights and weights not in used else []
    categorical = sorted(factors | {client})
    if family.kind in ("ordinal", "categorical") and plain:
        categorical.append(formula.response)
    clients = agreed(frames, list(dict.fromkeys(used)), categorical)
    answers = clients.levels.get(formula.response, ()) if plain else ()
    answers = _check_answers(formula, family, answers)
    # The levels of grouping factors may be many; only those of the columns' own factors matter.
    within = {n for n in clients.levels if n in names or n in seen[0][1]}
    clients = clients.restrict({n: v for n, v in clients.levels.items() if n in within})
    population = Columns(formula.population, clients, namespace)
    many = answers[1:] if family.kind == "categorical" else ()
    groups = tuple(
        _grouped(group, Columns(group.text, clients, namespace), clients, client, many)
        for group in formula.groups
    )
    levels = {name for one in groups if one.kind != "client" for name in one.group.factors}
    needed = names.union(levels, *(part[1] for part in seen)) - {client}
    needed |= second if family.column == "trials" else set()
    parts = (formula, family, clients, population, groups, answers, client, weights, namespace)
    return Design(*parts, needed=tuple(sorted(needed)))


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


def _grouped(
    group: Group, columns: Columns, clients: Clients, client: str, answers: tuple[Level, ...]
) -> Grouped:
    """Return a group term with its levels, which are those of one client or of several."""
    if columns.offsets or not (columns.labels or columns.has_intercept):
        raise ValueError(f"({group.text} | {group.name}) has no coefficient; expected 1 or a name")
    own = tuple(name for name in group.factors if name != client)
    grouped = Grouped(group, columns, "client", {}, answers)
    if not own:
        return grouped
    seen = {site: _distinct(frame, own) for site, frame in clients.frames.items()}
    every = [level for levels in seen.values() for level in levels]
    if client in group.factors or len(set(every)) == len(every):
        if all(len(levels) == 1 for levels in seen.values()):
            return grouped
        return replace(grouped, kind="nested", levels=seen)
    return replace(grouped, kind="shared", levels={"": tuple(sorted(set(every)))})


def level_text(level: Level) -> str:
    """Return the name of a level, of one factor or of several."""
    return ":".join(map(str, level)) if isinstance(level, tuple) else str(level)


def _levels(frame: pd.DataFrame, factors: Sequence[str]) -> list[Level]:
    """Return the level of each row: a value, or a tuple if there are several factors."""
    if len(factors) == 1:
        levels: list[Level] = frame[factors[0]].tolist()
        return levels
    return list(zip(*(frame[name].tolist() for name in factors), strict=True))


def _distinct(frame: pd.DataFrame, factors: Sequence[str]) -> tuple[Level, ...]:
    return tuple(sorted(set(_levels(frame, factors))))


def _refuse_large(what: str, values: NDArray[np.float64]) -> None:
    """Raise ValueError if squares of a column's numbers [N] are not finite."""
    if (bad := ~(np.abs(values) < LARGEST)).any():
        row = int(bad.argmax())
        shown = f"{values[row]:g}" if np.isfinite(values[row]) else "not a finite number"
        raise ValueError(
            f"{what} is {shown} in row {row}; expected finite numbers below {LARGEST:g}"
        )


def _refuse_tiny(what: str, clients: Sequence[NDArray[np.float64]]) -> None:
    """Raise ValueError if the squares of a column's numbers of all clients are 0."""
    size = max(float(np.abs(values).max(initial=0.0)) for values in clients)
    if 0 < size < 1 / LARGEST:
        raise ValueError(
            f"{what} is at most {size:g}; expected numbers of at least {1 / LARGEST:g}, or 0: use "
            "another unit"
        )
