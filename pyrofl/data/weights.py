"""Weights of rows and of classes in the log-likelihood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pyrofl.arguments import check_name

OfClasses = Mapping[str, float] | Literal["balanced"]
"""Class -> weight, others 1; or "balanced"."""


def check_weights(weights: Tensor, rows: int) -> None:
    """Raise ValueError unless weights are a tensor with one finite number >= 0 per row."""
    if not torch.is_tensor(weights) or weights.shape != (rows,) or weights.device.type != "cpu":
        what = list(weights.shape) if torch.is_tensor(weights) else type(weights).__name__
        raise ValueError(f"weights are {what}; expected a tensor [{rows}] on the CPU")
    bad = ~(weights.isfinite() & (weights >= 0))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(f"row {row} weighs {float(weights[row]):g}; expected a number, at least 0")


def class_weights(
    weights_by_class: OfClasses,
    classes: Sequence[str],
    y: Tensor,
    train: Sequence[Tensor],
    before: Tensor,
) -> Tensor:
    """Return the weight of each class [K], given weights by class name, or "balanced".

    Balanced weights are computed from each client's weight sums by class.
    """
    if isinstance(weights_by_class, str):
        check_name(weights_by_class, ("balanced",), "weights of classes:")
        none = torch.zeros(len(classes), dtype=torch.float64)
        counts = [none.index_add(0, y[rows], before[rows]) for rows in train]
        sums = torch.stack(counts).sum(0)
        return torch.where(sums > 0, sums.sum() / ((sums > 0).sum() * sums), 1.0)
    if not isinstance(weights_by_class, Mapping):
        counts = f"weights of classes are a {type(weights_by_class).__name__}"
        raise ValueError(f"{counts}; expected 'balanced', or a dict: class -> weight")
    for name, value in weights_by_class.items():
        check_name(str(name), classes, "class")
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < inf:
            raise ValueError(f"class {name} weighs {value!r}; expected a number, at least 0")
    return torch.tensor(
        [float(weights_by_class.get(name, 1)) for name in classes], dtype=torch.float64
    )


def site_weights(
    weights: Mapping[str, Any],
    sites: Mapping[str, Sequence[Any]],
    names: Sequence[str],
    train: Sequence[Tensor],
    rows: int,
) -> Tensor:
    """Return the weights of all rows [N]: those given for some clients' training rows, else 1."""
    found = torch.ones(rows, dtype=torch.float64)
    if not isinstance(weights, Mapping):
        message = f"weights are a {type(weights).__name__}"
        raise ValueError(f"{message}; expected a dict: site -> [N]")
    for name, values in weights.items():
        check_name(str(name), names, "site with weights")
        train_rows = train[names.index(name)]
        if np.ma.is_masked(values):
            raise ValueError(f"{name}: weights are masked in some rows; expected a number in all")
        refuse_other_index(f"{name}:", sites[name][0], values, "weights")
        try:
            client_weights = torch.from_numpy(np.array(values, dtype=np.float64))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name}: weights cannot be read: {error}; expected numbers"
            ) from error
        if client_weights.shape != train_rows.shape:
            raise ValueError(
                f"{name}: weights have shape {list(client_weights.shape)}; expected "
                f"[{len(train_rows)}], one for each training row"
            )
        check_weights(client_weights, len(train_rows))
        found[train_rows] = client_weights
    return found


def refuse_other_index(where: str, x: Any, other: Any, what: str) -> None:
    """Raise ValueError if a data frame x and a pandas Series have different indexes."""
    frames = hasattr(x, "columns") and hasattr(other, "index") and hasattr(other, "to_numpy")
    if frames and not x.index.equals(other.index):
        raise ValueError(
            f"{where} x and {what} have different indexes; expected the same rows in the same "
            f"order: {what}.loc[x.index]"
        )


def read(text: str) -> OfClasses:
    """Parse class weights: "balanced", or "NAME=VALUE,NAME=VALUE".

    >>> read("yes=3,no=0.5")
    {'yes': 3.0, 'no': 0.5}
    """
    if text == "balanced":
        return "balanced"
    weights: dict[str, float] = {}
    for word in text.split(","):
        name, equals, value = word.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not equals or not name or name in weights or not 0 <= number < inf:
            raise ValueError(
                f"{word!r} is no weight of a class; expected balanced, or NAME=VALUE,... with "
                "numbers of at least 0, no class twice"
            )
        weights[name] = number
    return weights
