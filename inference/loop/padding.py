"""Groups of clients whose full batches are padded apart, and what they have taken together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from pyrofl.tensors import Tensors, join_up

Axes = dict[str, list[int]]
"""Name of a local tensor -> its axes of rows, padded to the longest client of all."""


def narrowed(tensors: Mapping[str, Tensor], axes: Axes, width: int) -> Tensors:
    """Cut axes of rows to the longest client of a group."""
    cut = dict(tensors)
    for name in axes.keys() & cut.keys():
        for axis in axes[name]:
            cut[name] = cut[name].narrow(axis, 0, min(width, cut[name].shape[axis]))
    return cut


def joined(
    parts: Sequence[Tensors], before: Sequence[Tensors], widths: Sequence[int]
) -> tuple[Tensors, Axes]:
    """Concatenate what groups of clients have, their rows padded to the longest client of all.

    Args:
        parts: what each group has changed, [C, ...].
        before: what each had, [C, ...]; what only others have changed is as it was.
        widths: rows of the longest client of each.

    Returns:
        All names that one of them has changed, and where their rows are, if groups differ there.

    Raises:
        ValueError: if a group has nothing of a name, or groups differ in other axes than rows.
    """
    if len(parts) == 1:
        return parts[0], {}
    changed: list[Tensors] = [{} for _ in parts]
    axes: Axes = {}
    for name in dict.fromkeys(n for part in parts for n in part):
        values = [part.get(name, old.get(name)) for part, old in zip(parts, before, strict=True)]
        found = [v for v in values if v is not None]
        if len(found) < len(values):
            raise ValueError(f"a client that makes no step in this phase would lack {name!r}")
        if len({v.shape[1:] for v in found}) > 1:
            axes[name] = _rows(name, found, widths)
            found = [_widened(v, axes[name], max(widths)) for v in found]
        for part, value in zip(changed, found, strict=True):
            part[name] = value
    return join_up(changed), axes


def _rows(name: str, values: Sequence[Tensor], widths: Sequence[int]) -> list[int]:
    shapes = [tuple(v.shape[1:]) for v in values]
    if len({len(shape) for shape in shapes}) == 1:
        lengths = enumerate(zip(*shapes, strict=True), 1)
        differ = [(axis, found) for axis, found in lengths if len(set(found)) > 1]
        if all(found == tuple(widths) for _, found in differ):
            return [axis for axis, _ in differ]
    raise ValueError(
        f"{name!r} has shapes {shapes} in groups of clients with up to {list(widths)} rows; "
        "expected them to differ only in axes of rows"
    )


def _widened(value: Tensor, axes: list[int], width: int) -> Tensor:
    shape = [width if axis in axes else size for axis, size in enumerate(value.shape)]
    wide = value.new_zeros(shape)
    wide[tuple(slice(size) for size in value.shape)] = value
    return wide
