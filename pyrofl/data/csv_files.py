"""Data sets from CSV files: a target, features, and a column that says whose a row is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyrofl.arguments import ShareBelowOne, checked, known
from pyrofl.data.columns import UNNAMED, Column, Missing, complete, number, read
from pyrofl.data.federation import Dataset
from pyrofl.data.source import Source
from pyrofl.partitions.allocation import Ints

LIKELIHOODS: dict[str, str] = {
    "categorical": "classes",
    "normal": "a number with noise of standard deviation 1, or normal:SD",
    "measured": "a number whose standard error is the first feature",
    "bernoulli": "0 or 1",
    "binomial": "successes out of the first feature's trials, or of N: binomial:N",
    "poisson": "a count",
}


@checked
def load_csv(
    path: str,
    *,
    target: str | None = None,
    group: str | None = None,
    features: Sequence[str] | None = None,
    likelihood: str | None = None,
    missing: Missing = "refuse",
    test_share: ShareBelowOne = 0.2,
    seed: int = 0,
) -> Dataset:
    """Read a CSV file with a header row; see `load`.

    A cell that is empty, ".", NA, n/a, NaN or null has no value. A column holds numbers if at least
    half of its cells that have a value are numbers, and text otherwise; a column of numbers with
    other cells, such as 5% or 1e999, is refused where it is used.
    """
    table = read(path)
    if target is None:
        raise ValueError(f"{path}: target is missing; expected one of {', '.join(table)}")
    if likelihood is not None:
        known(likelihood.partition(":")[0], LIKELIHOODS, "likelihood")
    owners = [target, *([group] if group else [])]
    _refuse_names(path, table, owners, features)
    names, left_out = _features(table, owners, features)
    if likelihood != "categorical" and table[target].is_numeric:
        table[target].refuse_odd("take all for classes (--likelihood categorical)")
    used = {name: table[name] for name in (*names, *owners)}
    whole = complete(used.values(), missing)
    kept = {name: column.at(whole) for name, column in used.items()}
    x = torch.from_numpy(np.stack([kept[name].single() for name in names], axis=1))
    y, classes = _response(kept[target], likelihood)
    if likelihood is not None and not classes:
        refuse_range(path, likelihood, y, x[:, 0])
    codes, groups = _groups(kept[group]) if group else (np.zeros(len(y), dtype=np.int64), ())
    lost = set(table[group].words[~table[group].gaps]) - set(groups) if group else ()
    return Dataset(
        name=Path(path).stem,
        x=x,
        y=y,
        is_test=draw_test_rows(codes, np.random.default_rng([seed, 3]), test_share),
        classes=classes,
        groups={group: torch.from_numpy(codes)} if group else {},
        group_names={group: groups} if group else {},
        likelihood=likelihood or ("categorical" if classes else "normal"),
        source=Source(
            target=target,
            features=names,
            left_out=left_out,
            dropped=len(whole) - len(y),
            lacking={name: int(c.gaps.sum()) for name, c in used.items() if c.gaps.any()},
            lost=tuple(sorted(lost)),
        ),
    )


def _groups(column: Column) -> tuple[Ints, tuple[str, ...]]:
    if not np.isnan(column.numbers).any():
        column.refuse_spellings()
    return codes_of(column.words.tolist())


def draw_test_rows(codes: Ints, rng: np.random.Generator, share: float = 0.2) -> Tensor:
    """Mark a share of the rows of each group [N] (rounded, never all) for testing: bool [N]."""
    is_test = np.zeros(len(codes), dtype=np.bool_)
    for code in np.unique(codes):
        rows = rng.permutation(np.flatnonzero(codes == code))
        is_test[rows[: min(round(share * len(rows)), len(rows) - 1)]] = True
    return torch.from_numpy(is_test)


def codes_of(words: Sequence[str]) -> tuple[Ints, tuple[str, ...]]:
    """Number the different words: codes [N] and the words, numbers in numerical order.

    >>> codes_of(["10", "9", "10"])
    (array([1, 0, 1]), ('9', '10'))
    """
    value = {word: number(word) for word in words}
    numeric = not np.isnan(list(value.values())).any()
    names = tuple(sorted(value, key=value.__getitem__ if numeric else None))
    place = {word: code for code, word in enumerate(names)}
    return np.array([place[word] for word in words], dtype=np.int64), names


def _refuse_names(
    path: str, table: Mapping[str, Column], owners: Sequence[str], wanted: Sequence[str] | None
) -> None:
    """Refuse columns that are not there, or that are asked for twice; owners: target and group."""
    for column in [*owners, *(wanted or ())]:
        known(column, list(table), f"column in {path}:")
    if len(set(owners)) < len(owners):
        raise ValueError(f"{path}: target and group are {owners[0]}; expected two columns")
    if wanted is not None and (set(owners) & set(wanted) or not wanted):
        told = f"{path}: features are {', '.join(wanted)}"
        raise ValueError(f"{told}; expected no target or group, one at least")
    if wanted is not None and len(set(wanted)) < len(wanted):
        raise ValueError(f"{path}: features are {', '.join(wanted)}; expected no two alike")


def _features(
    table: Mapping[str, Column], owners: Sequence[str], wanted: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the columns of x, those wanted or all of numbers, and why others are left out."""
    file, left_out = table[owners[0]].file, {}
    for place, (name, column) in enumerate(table.items(), 1):
        if wanted is not None:
            why = "" if name in wanted else "not asked for"
        elif name == UNNAMED.format(place):
            why = "it has no name"
        else:
            why = "" if column.is_numeric else column.nature
        if why and name not in owners:
            left_out[name] = why
    names = tuple(wanted or (name for name in table if name not in (*owners, *left_out)))
    if not names:
        raise ValueError(f"{file}: no column of numbers besides {owners[0]}; expected features")
    for name in names:
        if not table[name].is_numeric:
            found = table[name].nature
            raise ValueError(f"{file}: column {name} holds {found}; expected numbers as features")
        table[name].refuse_odd("name the features that are wanted, without it (--features)")
    return names, left_out


def _response(column: Column, likelihood: str | None) -> tuple[Tensor, tuple[str, ...]]:
    """Return y and its classes, none if it is a number."""
    different = len(set(column.words))
    told = f"{column.file}: column {column.name} holds"
    if different < 2 and likelihood in (None, "categorical"):
        raise ValueError(f"{told} only {column.words[0]!r}; expected at least two different values")
    if likelihood != "categorical" and column.is_numeric:
        return torch.from_numpy(column.single()), ()
    if likelihood not in (None, "categorical"):
        raise ValueError(f"{told} {column.nature}; expected numbers for {likelihood}")
    if likelihood is None and 2 * different > len(column.words):
        raise ValueError(
            f"{told} {different} different texts, such as {column.words[0]!r}, in "
            f"{len(column.words)} rows, and no likelihood is given; expected numbers such as 1.5, "
            "or classes of two rows and more (any others by --likelihood categorical)"
        )
    if not np.isnan(column.numbers).any():
        column.refuse_spellings()
        if (column.numbers != column.numbers.round()).any():
            raise ValueError(f"{told} numbers with decimals; expected classes")
    codes, classes = codes_of(column.words.tolist())
    return torch.from_numpy(codes), classes


def refuse_range(path: str, likelihood: str, y: Tensor, first: Tensor) -> None:
    """Refuse responses that a likelihood cannot have; `first` is the first feature."""
    name, colon, count = likelihood.partition(":")
    if name == "binomial" and colon and not count.isdecimal():
        raise ValueError(f"likelihood is {likelihood!r}; expected binomial:N, N a whole number")
    whole = (y == y.round()) & (y >= 0)
    trials = float(count) if name == "binomial" and count else first
    fits, expected = {
        "bernoulli": ((y == 0) | (y == 1), "0 and 1"),
        "poisson": (whole, "whole numbers of at least 0"),
        "binomial": (
            whole & (y <= trials),
            "whole numbers from 0 to the trials, which are the first feature or binomial:N",
        ),
        "measured": (first > 0, "positive standard errors as first feature"),
    }.get(name, (torch.ones(1), ""))
    if not bool(fits.all()):
        raise ValueError(
            f"{path}: the target runs from {float(y.min()):g} to {float(y.max()):g} and the first "
            f"feature from {float(first.min()):g}; expected {expected} for {likelihood}"
        )
