"""Data sets by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyrofl.arguments import Count, CountOrNone, checked, known
from pyrofl.data import natural_groups
from pyrofl.data.conjugate import ConjugateTask, conjugate, gaussian_means, linear_regression
from pyrofl.data.csv_files import draw_test_rows, load_csv
from pyrofl.data.federation import Dataset
from pyrofl.data.images import IMAGES, load_images, load_npz
from pyrofl.data.joined import join, resized
from pyrofl.tensors import generator

__all__ = [
    "DATASETS",
    "ConjugateTask",
    "conjugate",
    "gaussian_means",
    "join",
    "linear_regression",
    "load",
    "per_class",
    "resized",
]

DATASETS: dict[str, str] = {
    "digits": "handwritten digits, 1,347 + 450 rows of 8 x 8 pixels, 10 classes; comes along",
    "eight_schools": "effects of coaching in eight schools (Rubin 1981); comes along",
    "baseball": "hits of 18 batters in 45 at-bats, tested on the rest of 1970; comes along",
    "rat_tumours": "rats with a tumour in 71 experiments (Tarone 1982); comes along",
    "gaussian": "synthetic: clients with Gaussian likelihoods of different widths, exact posterior",
    "linear": "synthetic: a linear regression per client around a common one",
    **{name: f"{about}; downloaded" for name, about in IMAGES.items()},
    "npz:PATH": "images in a file with arrays images (or jpeg, offsets), labels, is_test, classes",
    "csv:PATH": "a table with a target, feature columns and perhaps a group column",
    "NAME+NAME": "several of these (no csv) as domains of one: all rows, all classes",
}

# A plus sign within a path, as in npz:a+b.npz, is not followed by a whole name.
_PLUS = re.compile(r"\+(?=npz:|[\w-]+(?:\+|$))")


@checked
def load(
    name: str,
    *,
    data_dir: str | Path | None = None,
    target: str | None = None,
    group: str | None = None,
    features: Sequence[str] | None = None,
    likelihood: str | None = None,
    test_share: float | None = None,
    seed: CountOrNone = 0,
) -> Dataset:
    """Load a data set.

    Args:
        name: one of `DATASETS`, with a path for npz: and csv:.
        data_dir: where downloaded files are kept; None: ~/.cache/pyrofl.
        target: see `load_csv` and `load_npz`; only these have a choice.
        group: the same.
        features: see `load_csv`.
        likelihood: see `load_csv`.
        test_share: see `load_csv`.
        seed: of synthetic data and of the test rows of a table.

    Returns:
        x float32 [N, *x], y int64 or float32 [N].

    Raises:
        ValueError: if the name is unknown, an argument does not go with it, or the files cannot be
            had or used.
    """
    given: dict[str, Any] = {
        "target": target,
        "group": group,
        "features": features,
        "likelihood": likelihood,
        "test_share": test_share,
    }
    given = {argument: value for argument, value in given.items() if value is not None}
    kind, _, path = name.partition(":")
    if kind in ("csv", "npz") and not path:
        raise ValueError(f"data set {name!r} lacks its file; expected {kind}: and a path")
    if kind == "csv":
        return load_csv(path, seed=seed, **{"target": None} | given)
    names = _PLUS.split(name)
    if len(names) == 1 and kind != "npz":
        known(name, DATASETS, "data set")
    for argument, value in given.items():
        if kind != "npz" or len(names) > 1 or argument not in ("target", "group"):
            raise ValueError(
                f"{argument} is {value!r}; expected none, as {name} has no choice of it"
            )
    if len(names) > 1:
        return join([load(one, data_dir=data_dir, seed=seed) for one in names])
    if kind == "npz":
        return load_npz(path, **given)
    return load_images(name, data_dir) if name in IMAGES else _MAKERS[name](seed)


@checked
def per_class(dataset: Dataset, count: Count) -> Dataset:
    """Keep the first `count` training rows of each class, and all test rows.

    Raises:
        ValueError: if count is not positive or y is a number.
    """
    if not dataset.classes:
        raise ValueError(f"{dataset.name} has no classes; expected data with classes")
    keep = dataset.is_test.clone()
    for label in range(len(dataset.classes)):
        rows = ((dataset.y == label) & ~dataset.is_test).nonzero().flatten()
        keep[rows[:count]] = True
    return replace(
        dataset,
        x=dataset.x[keep],
        y=dataset.y[keep],
        is_test=dataset.is_test[keep],
        types=None if dataset.types is None else dataset.types[keep],
        groups={column: codes[keep] for column, codes in dataset.groups.items()},
    )


def _digits(seed: int) -> Dataset:
    """Return the digits; a quarter of each class is for testing, the same whatever the seed."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    _, test = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    is_test[test] = True
    x = torch.from_numpy(pixels).float() / 16
    return Dataset("digits", x, torch.from_numpy(labels).long(), is_test, tuple("0123456789"))


def _gaussian(seed: int) -> Dataset:
    """Return ten clients in the plane, of variances 0.05 to 1; all rows are for training."""
    centres = torch.randn(10, 2, generator=generator(seed))
    return _of_task("gaussian", gaussian_means(centres, torch.linspace(0.05, 1.0, 10)))


def _linear(seed: int) -> Dataset:
    """Return 20 clients of 10 to 105 rows with 5 covariates; a fifth is for testing."""
    task = linear_regression(20, 5, range(10, 110, 5), noise=0.5, between=0.5, seed=seed)
    table = _of_task("linear", task)
    codes = table.groups["client"].numpy()
    return replace(table, is_test=draw_test_rows(codes, np.random.default_rng([seed, 3])))


def _of_task(name: str, task: ConjugateTask) -> Dataset:
    data = task.federation
    codes = torch.arange(len(data.names)).repeat_interleave(data.sizes)
    x, y = data.x.float(), data.y.float()
    return natural_groups.of_clients(name, x, y, "normal", {"client": data.names}, codes)


_MAKERS: dict[str, Callable[[int], Dataset]] = {
    "digits": _digits,
    "eight_schools": natural_groups.eight_schools,
    "baseball": natural_groups.baseball,
    "rat_tumours": natural_groups.rat_tumours,
    "gaussian": _gaussian,
    "linear": _linear,
}
