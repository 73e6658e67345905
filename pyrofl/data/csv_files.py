"""Data sets from CSV files: a target, features, and a column that says whose a row is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyrofl.arguments import ShareBelowOne, checked, known
from pyrofl.data.federation import Dataset
from pyrofl.partitions.allocation import Ints

if TYPE_CHECKING:
    import pandas

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
    test_share: ShareBelowOne = 0.2,
    seed: int = 0,
) -> Dataset:
    """Read a CSV file with a header row; see `load`. An empty field is a missing value."""
    table, groups = _read(Path(path)), [group] if group else []
    if target is None:
        raise ValueError(f"{path}: target is missing; expected one of {', '.join(table)}")
    for column in [target, *groups, *(features or [])]:
        known(column, list(table), f"column in {path}:")
    if likelihood is not None:
        known(likelihood.partition(":")[0], LIKELIHOODS, "likelihood")
    numbers = {column: _numbers(table[column]) for column in table}
    if features is None:
        features = [c for c, n in numbers.items() if n is not None and c not in (target, group)]
    if target in features or group in features:
        raise ValueError(f"{path}: features are {', '.join(features)}; expected no target or group")
    if not features:
        raise ValueError(f"{path}: no column of numbers besides {target}; expected features")
    for column in [*features, target, *groups]:
        found = numbers[column]
        gaps = table[column] == "" if found is None else ~np.isfinite(found)
        if gaps.any():
            raise ValueError(
                f"{path}: column {column} lacks {gaps.sum()} of {len(gaps)} values; expected a "
                "value in every row: choose other features, or fill or drop those rows first"
            )
        if found is None and column in features:
            raise ValueError(f"{path}: column {column} holds text; expected numbers as features")
    x = torch.tensor(np.array([numbers[column] for column in features]).T, dtype=torch.float32)
    y, classes = _response(path, table[target], numbers[target], likelihood)
    if likelihood is not None and not classes:
        _refuse_range(path, likelihood, y, x[:, 0])
    codes, names = codes_of(table[group]) if group else (np.zeros(len(y), dtype=np.int64), ())
    return Dataset(
        name=Path(path).stem,
        x=x,
        y=y,
        is_test=draw_test_rows(codes, np.random.default_rng([seed, 3]), test_share),
        classes=classes,
        groups={group: torch.from_numpy(codes)} if group else {},
        group_names={group: names} if group else {},
        likelihood=likelihood or ("categorical" if classes else "normal"),
    )


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
    numbers = _numbers(words)
    value = dict(zip(words, words if numbers is None else numbers, strict=True))
    names = tuple(sorted(value, key=lambda word: value[word]))
    place = {word: code for code, word in enumerate(names)}
    return np.array([place[word] for word in words], dtype=np.int64), names


def _read(path: Path) -> pandas.DataFrame:
    """Return a file's columns of words, without the spaces around them."""
    import pandas

    options = {"encoding": "utf-8-sig", "compression": None, "dtype": object, "na_filter": False}
    try:  # pandas' other engine takes rows that are too short
        lines = pandas.read_csv(path, header=None, engine="python", **options)
    except (OSError, ValueError) as error:  # those of pandas and of the encoding are ValueErrors
        raise ValueError(f"{path} cannot be read as CSV: {error}") from error
    if len(lines) < 2:
        raise ValueError(f"{path} has {len(lines)} lines; expected a header and at least one row")
    header = [word.strip() for word in lines.iloc[0]]
    if len(set(header)) != len(header):
        raise ValueError(f"{path}: expected a header with no two columns alike, found {header}")
    fields = lines.count(axis="columns")
    if fields.min() < len(header):
        row = fields.idxmin()
        raise ValueError(f"{path}: row {row} has {fields[row]} fields; expected {len(header)}")
    return lines[1:].set_axis(header, axis="columns").apply(lambda words: words.str.strip())


def _numbers(words: Sequence[str]) -> NDArray[np.float64] | None:
    """Return a column as numbers, NaN where a word is empty; None if it holds text or nothing."""
    try:
        return np.array([float(word or "nan") for word in words]) if any(words) else None
    except ValueError:
        return None


def _refuse_range(path: str, likelihood: str, y: Tensor, first: Tensor) -> None:
    """Refuse responses that a likelihood cannot have; `first` is the first feature."""
    name, _, number = likelihood.partition(":")
    whole = (y == y.round()) & (y >= 0)
    trials = float(number) if name == "binomial" and number else first
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


def _response(
    path: str, words: pandas.Series, numbers: NDArray[np.float64] | None, likelihood: str | None
) -> tuple[Tensor, tuple[str, ...]]:
    """Return y and its classes, none if it is a number."""
    if numbers is None and likelihood not in (None, "categorical"):
        raise ValueError(
            f"{path}: column {words.name} holds text; expected numbers for {likelihood}"
        )
    if numbers is not None and likelihood != "categorical":
        return torch.from_numpy(numbers).float(), ()
    if numbers is not None and (numbers != numbers.round()).any():
        raise ValueError(
            f"{path}: column {words.name} holds numbers with decimals; expected classes"
        )
    codes, classes = codes_of(words)
    return torch.from_numpy(codes), classes
