"""Load data sets by name, combine several data sets, and select a subset."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from pyrofl.arguments import Count, Whole, check_name, checked
from pyrofl.choices import DATASETS, IMAGES, Missing, Scaling
from pyrofl.data.federation import Dataset
from pyrofl.data.loaders import image_folders, leaf
from pyrofl.data.loaders.conjugate import (
    ConjugateTask,
    conjugate,
    gaussian_means,
    linear_regression,
)
from pyrofl.data.loaders.csv_files import load_csv
from pyrofl.data.loaders.digit_five import digit_five
from pyrofl.data.loaders.images import CACHE, load_images
from pyrofl.data.loaders.npz_files import load_npz
from pyrofl.data.loaders.small import MAKERS

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


# A plus sign within a path, as in npz:a+b.npz, is not followed by a whole name.
_PLUS = re.compile(r"\+(?=npz:|[\w-]+(?:\+|$))")


MANUAL: dict[str, Callable[[Path], Dataset]] = {
    "femnist": leaf.femnist,
    "celeba": leaf.celeba,
    "digit_five": digit_five,
    "sun397": image_folders.sun397,
    "sun397-coarse": image_folders.sun397_coarse,
    "cinic10": image_folders.cinic10,
}
"""Name of a data set that users download themselves -> function that loads it from a folder."""


@checked
def load(
    name: str,
    *,
    data_dir: str | Path | None = None,
    target: str | None = None,
    client_column: str | None = None,
    features: Sequence[str] | None = None,
    categories: Sequence[str] | None = None,
    likelihood: str | None = None,
    missing: Missing | None = None,
    scaling: Scaling | None = None,
    test_fraction: float | None = None,
    test_column: str | None = None,
    test_last: str | None = None,
    row_weights: str | None = None,
    seed: Whole = 0,
) -> Dataset:
    """Load a data set by name or from files: x float32 [N, *x], y int64 or float32 [N].

    If columns need preprocessing, x is float64 [N, C], as in the file: numbers, codes of
    categories, NaN for gaps. `federations.split` computes the features from the training rows of
    the clients that train, and stores the method as `source.preparation`.

    Args:
        name: one of `DATASETS`, with a path for npz: and csv:, which may also be a .parquet file, a
            folder of such files, or several separated by commas, one for each site.
        data_dir: folder of torchvision's files, and of data sets that users download themselves,
            each in a subfolder; None: ~/.cache/pyrofl.
        target: csv: column of y. Text gives classes, numbers a response; integers give classes too
            if the likelihood is "categorical". npz: T predicts the array `T_labels`.
        client_column: column or array that identifies the client; None: one client per file if
            there are several, otherwise no natural groups.
        features: csv: columns of x, in this order; None: all other columns of numbers, and, if
            `scaling` is "standardize", those of text with few distinct words, as categories.
        categories: csv: columns of x that are categories even if they hold numbers: a 0/1 feature
            for each level.
        likelihood: csv: one of `csv_files.LIKELIHOODS`; None: "categorical" for text and
            True or False, "normal" for numbers, which is stored as "normal:learned": y stays in its
            own unit, and `Dataset.source` of partitioned data has its mean and standard deviation.
        missing: csv: what to do with rows that lack a value in a column that is used. "error"
            raises an error, "drop" drops them, and "impute" replaces missing features by the mean
            of the training rows and adds a 0/1 indicator; None: "error". `Dataset.source` records
            the dropped rows and the omitted columns.
        scaling: csv: "standardize" columns of numbers to mean 0 and standard deviation 1 over
            training rows, computed without sharing rows; "none" keeps them, as does None, which
            warns of very different scales. The first feature of the likelihoods
            "normal_known_sd" and "binomial" is not scaled.
        test_fraction: csv: fraction of each group's rows for testing, never all; None: 0.2.
        test_column: csv: column that marks the test rows, by 1 and 0 or test and train; None: a
            random fraction of each group.
        test_last: csv: column of time, numbers or dates; the latest rows of a group are test rows.
        row_weights: csv: column of numbers of at least 0: weights of training rows, see
            `Federation.with_class_weights`.
        seed: seed of synthetic data and of the test rows of a table.

    Raises:
        ValueError: if the name is unknown, an argument does not apply to it, files cannot be
            downloaded or read, a column or array is missing or of the wrong kind, or values lack.
    """
    arguments = dict(locals())
    own = ("name", "data_dir", "seed")
    given_options = {
        n: value for n, value in arguments.items() if value is not None and n not in own
    }
    kind, _, path = name.partition(":")
    if kind in ("csv", "npz") and not path:
        raise ValueError(f"data set {name!r} lacks its file; expected {kind}:PATH")
    if kind == "csv":
        return load_csv(path, seed=seed, **given_options)
    names = parts_of(name)
    if len(names) == 1 and kind != "npz":
        check_name(name, DATASETS, "data set")
    for argument, value in given_options.items():
        if kind != "npz" or len(names) > 1 or argument not in ("target", "client_column"):
            raise ValueError(
                f"{argument} is {value!r}; expected none, as {name} does not accept it"
            )
    if len(names) > 1:
        return join([load(one, data_dir=data_dir, seed=seed) for one in names])
    if kind == "npz":
        return load_npz(path, **given_options)
    if name in MANUAL:
        return MANUAL[name](Path(data_dir or CACHE).expanduser())
    return load_images(name, data_dir) if name in IMAGES else MAKERS[name](seed)


def parts_of(name: str) -> list[str]:
    """Split a name such as "mnist+svhn" into the names of its data sets."""
    return _PLUS.split(name)


@checked
def per_class(dataset: Dataset, count: Count) -> Dataset:
    """Return a data set with only the first `count` training rows of each class and all test rows.

    Raises:
        ValueError: if y is a number.
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
        weights=None if dataset.weights is None else dataset.weights[keep],
        groups={column: codes[keep] for column, codes in dataset.groups.items()},
    )


@checked
def join(datasets: Sequence[Dataset], shape: tuple[int, ...] | None = None) -> Dataset:
    """Combine data sets, as in MetaVD: concatenate all rows, with the union of their classes.

    Their group column "domain" records the data set of each row: partition "groups" makes every
    domain one client, "domains:PARTITION" makes clients with rows of one domain each, and every
    other partition spreads all domains over all clients.

    Args:
        datasets: with classes. A class name that several have is prefixed by the data set's name.
        shape: common shape of images [channels, height, width], see `resized`; None: the largest
            of every axis.

    Raises:
        ValueError: if there are fewer than two, two have one name, one has no classes, or rows
            cannot be converted to one shape.
    """
    if not all(isinstance(part, Dataset) for part in datasets):
        kinds = ", ".join(type(part).__name__ for part in datasets)
        raise ValueError(f"data sets are {kinds}; expected data sets returned by `load`")
    names = [part.name for part in datasets]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"data sets are {', '.join(names)}; expected at least two different ones")
    for part in datasets:
        if not part.classes:
            raise ValueError(f"{part.name} has no classes; expected data sets with classes only")
    shapes = {tuple(part.x.shape[1:]) for part in datasets}
    if len(shapes) > 1 and len({len(s) for s in shapes}) == 1:
        shape = shape or tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    parts = [resized(part, shape) if shape else part for part in datasets]
    if len({part.x.shape[1:] for part in parts}) > 1:
        message = f"rows of {', '.join(names)} have shapes {sorted(shapes)}"
        raise ValueError(f"{message}; expected one shape")
    every = [(part.name, label) for part in parts for label in part.classes]
    often = Counter(label for _, label in every)
    types = [part.y if part.types is None else part.types for part in parts]
    finer = any(part.types is not None for part in parts)
    lengths = torch.tensor([len(part.y) for part in parts])
    ones = (torch.ones(len(part.y), dtype=torch.float64) for part in parts)
    weights = [w if p.weights is None else p.weights for p, w in zip(parts, ones, strict=True)]
    return Dataset(
        "+".join(names),
        x=torch.cat([part.x for part in parts]),
        y=_shifted_codes([part.y for part in parts], [len(part.classes) for part in parts]),
        is_test=torch.cat([part.is_test for part in parts]),
        classes=tuple(label if often[label] == 1 else f"{name} {label}" for name, label in every),
        types=_shifted_codes(types, [int(t.max()) + 1 for t in types]) if finer else None,
        groups={"domain": torch.arange(len(parts)).repeat_interleave(lengths)},
        group_names={"domain": tuple(names)},
        weights=torch.cat(weights) if any(part.weights is not None for part in parts) else None,
    )


def _shifted_codes(codes: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Concatenate the class codes of several data sets, shifted so that they do not overlap."""
    first = torch.tensor([0, *counts[:-1]]).cumsum(0)
    return torch.cat([code + start for code, start in zip(codes, first, strict=True)])


@checked
def resized(dataset: Dataset, shape: tuple[int, ...]) -> Dataset:
    """Convert a data set's images to one shape: repeat gray channels, interpolate the pixels.

    Interpolation is bilinear, with antialiasing.

    Args:
        dataset: with x [N, channels, height, width].
        shape: [channels, height, width].

    Raises:
        ValueError: if rows are not images, or color would be lost.
    """
    x, old = dataset.x, tuple(dataset.x.shape[1:])
    if old == tuple(shape):
        return dataset
    if len(old) != 3 or len(shape) != 3 or old[0] not in (1, shape[0]):
        raise ValueError(
            f"{dataset.name} has rows of shape {list(old)}, requested is {list(shape)}; expected "
            "images [channels, height, width], gray or with the requested number of channels"
        )
    if old[1:] != tuple(shape[1:]):
        x = functional.interpolate(x, size=shape[1:], mode="bilinear", antialias=True)
    return replace(dataset, x=x.expand(-1, shape[0], -1, -1).contiguous())
