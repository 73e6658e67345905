"""Several data sets as one, each of them a domain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from pyrofl.data.federation import Dataset


def join(datasets: Sequence[Dataset], shape: tuple[int, ...] | None = None) -> Dataset:
    """Put data sets together: all their rows, and all their classes side by side (as MetaVD does).

    Their column of groups "domain" says where a row is from: partition "groups" makes every domain
    one client, "domains:PARTITION" makes clients with rows of one domain each, and every other
    partition spreads all domains over all clients.

    Args:
        datasets: with classes. A class name that several have is prefixed by the data set's.
        shape: that rows of images [channels, height, width] are brought to, see `resized`; None:
            the largest of every axis.

    Raises:
        ValueError: if there are fewer than two, two have one name, one has no classes, or rows
            cannot be brought to one shape.
    """
    names = [part.name for part in datasets]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"data sets are {', '.join(names)}; expected two or more, no two alike")
    for part in datasets:
        if not part.classes:
            raise ValueError(f"{part.name} has no classes; expected data sets with classes only")
    shapes = {tuple(part.x.shape[1:]) for part in datasets}
    if len(shapes) > 1 and len({len(s) for s in shapes}) == 1:
        shape = shape or tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    parts = [resized(part, shape) if shape else part for part in datasets]
    if len({part.x.shape[1:] for part in parts}) > 1:
        raise ValueError(
            f"rows of {', '.join(names)} have shapes {sorted(shapes)}; expected one shape"
        )
    often = Counter(label for part in parts for label in part.classes)
    classes = [
        label if often[label] == 1 else f"{part.name} {label}"
        for part in parts
        for label in part.classes
    ]
    types = [part.y if part.types is None else part.types for part in parts]
    lengths = torch.tensor([len(part.y) for part in parts])
    finer = any(part.types is not None for part in parts)
    return Dataset(
        "+".join(names),
        x=torch.cat([part.x for part in parts]),
        y=_side_by_side([part.y for part in parts], [len(part.classes) for part in parts]),
        is_test=torch.cat([part.is_test for part in parts]),
        classes=tuple(classes),
        types=_side_by_side(types, [int(t.max()) + 1 for t in types]) if finer else None,
        groups={"domain": torch.arange(len(parts)).repeat_interleave(lengths)},
        group_names={"domain": tuple(names)},
    )


def resized(dataset: Dataset, shape: tuple[int, ...]) -> Dataset:
    """Bring images to one shape: grey ones get equal channels, other sizes are interpolated.

    Interpolation is bilinear, and blurs before it shrinks.

    Args:
        dataset: with x [N, channels, height, width].
        shape: [channels, height, width].

    Raises:
        ValueError: if rows are not images, or colour would be lost.
    """
    old = tuple(dataset.x.shape[1:])
    if old == tuple(shape):
        return dataset
    if len(old) != 3 or len(shape) != 3 or old[0] not in (1, shape[0]):
        raise ValueError(
            f"{dataset.name} has rows of shape {list(old)}, wanted is {list(shape)}; expected "
            "images [channels, height, width], grey or with as many channels"
        )
    x = dataset.x
    if old[1:] != tuple(shape[1:]):
        x = functional.interpolate(x, size=shape[1:], mode="bilinear", antialias=True)
    return replace(dataset, x=x.expand(-1, shape[0], -1, -1).contiguous())


def _side_by_side(codes: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """Join codes of the data sets, each counted on from where the one before ends."""
    first = torch.tensor([0, *counts[:-1]]).cumsum(0)
    return torch.cat([code + start for code, start in zip(codes, first, strict=True)])
