"""Data sets from CSV files: a target, features, and a column that says whose a row is."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyrofl.arguments import known
from pyrofl.data.federation import Dataset
from pyrofl.partitions.allocation import Ints

LIKELIHOODS: dict[str, str] = {
    "categorical": "classes",
    "normal": "a number with noise of standard deviation 1, or normal:SD",
    "measured": "a number whose standard error is the first feature",
    "bernoulli": "0 or 1",
    "binomial": "successes out of the first feature's trials, or of N: binomial:N",
    "poisson": "a count",
}


def load_csv(
    path: str | Path,
    *,
    target: str | None,
    group: str | None = None,
    features: Sequence[str] | None = None,
    likelihood: str | None = None,
    test_share: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Read a CSV file with a header row; an empty field is a missing value.

    Some rows of each group, at random, are for testing; one row at least is for training.

    Args:
        path: the file.
        target: column of y. Text gives classes, numbers a response; integers give classes too if
            the likelihood is "categorical".
        group: column that says whose a row is; None: no natural groups.
        features: columns of x, in this order, unscaled; None: all other columns of numbers.
        likelihood: one of `LIKELIHOODS`; None: "categorical" for text, "normal" for numbers.
        test_share: of each group's rows, for testing; 0 leaves all for training.
        seed: of the test rows.

    Returns:
        x float32 [N, number of features], y int64 or float32 [N].

    Raises:
        ValueError: if the file cannot be read, a column does not exist, holds text where numbers
            are needed or lacks values, the likelihood does not suit the target, or test_share is
            not in [0, 1).
    """
    if not 0 <= test_share < 1:
        raise ValueError(f"test_share is {test_share}; expected at least 0 and below 1")
    columns = _read(Path(path))
    if target is None:
        raise ValueError(f"{path}: target is missing; expected one of {', '.join(columns)}")
    for column in [target, *([group] if group else []), *(features or [])]:
        known(column, columns, f"column in {path}:")
    if likelihood is not None:
        known(likelihood.partition(":")[0], LIKELIHOODS, "likelihood")
    if features is None:
        others = [c for c in columns if c not in (target, group)]
        features = [c for c in others if _numbers(columns[c]) is not None]
    if target in features or group in features:
        raise ValueError(
            f"{path}: features are {', '.join(features)}; expected them without the target and the "
            "group"
        )
    if not features:
        raise ValueError(f"{path}: no column of numbers besides {target}; expected features")
    x = torch.stack([torch.from_numpy(_feature(path, c, columns[c])) for c in features], 1)
    y, classes = _response(path, target, columns[target], likelihood)
    if likelihood is not None and not classes:
        _refuse_range(path, likelihood, y, x[:, 0])
    codes: Ints = np.zeros(len(y), dtype=np.int64)
    names: tuple[str, ...] = ()
    if group:
        _refuse_gaps(path, group, columns[group])
        codes, names = codes_of(columns[group])
    return Dataset(
        name=Path(path).stem,
        x=x.float(),
        y=y,
        is_test=draw_test_rows(codes, np.random.default_rng([seed, 3]), test_share),
        classes=classes,
        groups={group: torch.from_numpy(codes)} if group else {},
        group_names={group: names} if group else {},
        likelihood=likelihood or ("categorical" if classes else "normal"),
    )


def draw_test_rows(codes: Ints, rng: np.random.Generator, share: float = 0.2) -> Tensor:
    """Mark a share of each group's rows (rounded, never all) for testing: bool [N].

    Args:
        codes: [N], group of each row.
        rng: draws the rows.
        share: of the rows, below 1.
    """
    is_test = np.zeros(len(codes), dtype=np.bool_)
    for code in np.unique(codes):
        rows = rng.permutation(np.flatnonzero(codes == code))
        is_test[rows[: min(round(share * len(rows)), len(rows) - 1)]] = True
    return torch.from_numpy(is_test)


def codes_of(fields: Sequence[str]) -> tuple[Ints, tuple[str, ...]]:
    """Number the different words: codes [N] and the words, numbers in numerical order.

    >>> codes_of(["10", "9", "10"])
    (array([1, 0, 1]), ('9', '10'))
    """
    numbers = _numbers(fields)
    order = dict(zip(fields, fields if numbers is None else numbers.tolist(), strict=True))
    names = tuple(sorted(order, key=lambda word: order[word]))
    place = {word: code for code, word in enumerate(names)}
    return np.array([place[word] for word in fields], dtype=np.int64), names


def _read(path: Path) -> dict[str, list[str]]:
    """Return the columns of a file, stripped of spaces."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}") from error
    if len(lines) < 2:
        raise ValueError(f"{path} has {len(lines)} lines; expected a header and at least one row")
    header = [word.strip() for word in lines[0]]
    if len(set(header)) != len(header):
        raise ValueError(f"{path}: expected a header with no two columns alike, found {header}")
    for number, line in enumerate(lines[1:], 1):
        if len(line) != len(header):
            raise ValueError(f"{path}: row {number} has {len(line)} fields; expected {len(header)}")
    return {
        name: [word.strip() for word in column]
        for name, column in zip(header, zip(*lines[1:], strict=True), strict=True)
    }


def _numbers(fields: Sequence[str]) -> NDArray[np.float64] | None:
    """Return a column as numbers, NaN where a field is empty; None if it holds text or nothing."""
    if not any(fields):
        return None
    try:
        return np.array([float(word or "nan") for word in fields])
    except ValueError:
        return None


def _feature(path: str | Path, name: str, fields: Sequence[str]) -> NDArray[np.float64]:
    _refuse_gaps(path, name, fields)
    numbers = _numbers(fields)
    if numbers is None:
        raise ValueError(f"{path}: column {name} holds text; expected numbers as features")
    return numbers


def _refuse_range(path: str | Path, likelihood: str, y: Tensor, first: Tensor) -> None:
    """Refuse responses that a likelihood cannot have; `first` is the first feature."""
    name, _, number = likelihood.partition(":")
    whole = bool((y == y.round()).all()) and bool((y >= 0).all())
    trials = float(number) if name == "binomial" and number else first
    fits, expected = {
        "bernoulli": (bool(((y == 0) | (y == 1)).all()), "0 and 1"),
        "poisson": (whole, "whole numbers of at least 0"),
        "binomial": (
            whole and bool((y <= trials).all()),
            "whole numbers from 0 to the trials, which are the first feature or binomial:N",
        ),
        "measured": (bool((first > 0).all()), "positive standard errors as first feature"),
    }.get(name, (True, ""))
    if not fits:
        raise ValueError(
            f"{path}: the target runs from {float(y.min()):g} to {float(y.max()):g} and the first "
            f"feature from {float(first.min()):g}; expected {expected} for {likelihood}"
        )


def _response(
    path: str | Path, name: str, fields: Sequence[str], likelihood: str | None
) -> tuple[Tensor, tuple[str, ...]]:
    """Return y and its classes, none if it is a number."""
    _refuse_gaps(path, name, fields)
    numbers = _numbers(fields)
    if numbers is None and likelihood not in (None, "categorical"):
        raise ValueError(
            f"{path}: column {name} holds text, which suits the likelihood categorical; "
            f"found {likelihood}"
        )
    if numbers is not None and likelihood != "categorical":
        return torch.from_numpy(numbers).float(), ()
    if numbers is not None and (numbers != numbers.round()).any():
        raise ValueError(
            f"{path}: column {name} holds numbers with decimals; expected whole numbers or text "
            "for the likelihood categorical"
        )
    codes, classes = codes_of(fields)
    return torch.from_numpy(codes), classes


def _refuse_gaps(path: str | Path, name: str, fields: Sequence[str]) -> None:
    numbers = _numbers(fields)
    gaps = [not word for word in fields] if numbers is None else ~np.isfinite(numbers)
    if np.any(gaps):
        raise ValueError(
            f"{path}: column {name} lacks {np.sum(gaps)} of {len(fields)} values; expected a value "
            "in every row: choose other features, or fill or drop those rows first"
        )
