"""Groups of clients with similar numbers of rows, which are padded separately.

Joined results are padded to the longest client of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyrofl.tensors import Tensors, cut, placed

STEP_COST_ROWS = 2000  # rows of padding that take longer than an additional step: measured
# The same for clients that train in the space of their rows: measured.
ROW_SPACE_STEP_COST_ROWS = 500

# Rows of padding, times the numbers that a client trains, that take as long: measured.
STEP_COST_PRODUCTS = 15_000_000
CACHED_BYTES = 2**23  # bytes that a step of a group modifies, which stay in the cache: measured
CACHED_STEPS = 60  # steps in a round from which these groups are soon recorded

MAX_PADDING = 256  # maximum padding of a group, so that shapes recur, as recordings need

Axes = dict[str, list[int]]
"""Name of a local tensor -> its axes of rows, padded to the longest client of all."""


def group_by_bounds(sizes: Tensor, bounds: Sequence[float]) -> list[Tensor]:
    """Group clients with numbers of rows [C] in the same interval between the given bounds."""
    within = [tuple(size <= most for most in bounds) for size in sizes.tolist()]
    kinds = dict.fromkeys(within)
    return [torch.tensor([c for c, w in enumerate(within) if w == kind]) for kind in kinds]


def buckets(sizes: Tensor, worth: int | None = None) -> list[Tensor]:
    """Group clients by similar numbers of rows [C], largest first, to save padding."""
    order = sizes.argsort(descending=True, stable=True)
    return list(
        order.split(runs(sizes[order].tolist(), STEP_COST_ROWS if worth is None else worth))
    )


def groups_of_wide(sizes: Tensor, entries: int, modified: int) -> list[Tensor]:
    """Group clients with numbers of rows [C] in a step, to save padding and accesses to memory.

    Padding of wide networks costs more than that of others. Groups of which a step modifies more
    than 8 MiB are split evenly, as operations on them would leave the processor's cache.

    Args:
        sizes: numbers of rows.
        entries: numbers that a step of one client trains.
        modified: bytes that it modifies, including the optimizer's; 0 splits nothing.
    """
    groups = buckets(sizes, min(STEP_COST_ROWS, STEP_COST_PRODUCTS // max(entries, 1)))
    most = max(1, CACHED_BYTES // modified) if modified else len(sizes)
    return [part for group in groups for part in group.tensor_split(-(-len(group) // most))]


def runs(sizes: list[int], worth: int) -> list[int]:
    """Return sizes of client groups, given decreasing numbers of rows, split to save padding."""
    spared = [(sizes[0] - size) * (len(sizes) - c) for c, size in enumerate(sizes)]
    first = spared.index(max(spared))
    if spared[first] <= worth:
        return [len(sizes)]
    return [*runs(sizes[:first], worth), *runs(sizes[first:], worth)]


def roomy(sizes: Tensor, bound: int) -> int:
    """Return the number of rows to which full batches of clients with sizes [C] are padded.

    At most the bound, the longest of all clients, as programs may not support more rows.
    """
    longest = int(sizes.max())
    step = 1 << max(0, min(longest // 2, MAX_PADDING // len(sizes)).bit_length() - 1)
    return min(-(-longest // step) * step, bound)


def narrow_rows(tensors: Mapping[str, Tensor], axes: Axes, width: int) -> Tensors:
    """Cut the padded row axes of tensors to at most `width` rows."""
    cut = dict(tensors)
    for name in axes.keys() & cut.keys():
        for axis in axes[name]:
            cut[name] = cut[name].narrow(axis, 0, min(width, cut[name].shape[axis]))
    return cut


def join_groups(
    parts: Sequence[Tensors],
    before: Sequence[Tensors],
    widths: Sequence[int],
    places: Sequence[Tensor],
) -> tuple[Tensors, Axes]:
    """Join tensors of client groups in the order of all clients, padded along rows if needed.

    Tensors that a group has not changed are those from before. Widths are the rows of each group's
    longest client. Axes of rows are returned too, if groups differ there.
    """
    if len(parts) == 1:
        return cut(parts[0], places[0].argsort()), {}
    changed: Tensors = {}
    axes: Axes = {}
    for name in dict.fromkeys(n for part in parts for n in part):
        values = [part.get(name, old.get(name)) for part, old in zip(parts, before, strict=True)]
        present = [v for v in values if v is not None]
        if len(present) < len(values):
            raise ValueError(
                f"a client without a step in this phase would lack {name!r}; compute it in "
                "init_client too"
            )
        if len({v.shape[1:] for v in present}) > 1:
            axes[name] = _rows(name, present, widths)
            present = [_widened(v, axes[name], max(widths)) for v in present]
        changed[name] = placed(present, places)
    return changed, axes


def _rows(name: str, values: Sequence[Tensor], widths: Sequence[int]) -> list[int]:
    shapes = [tuple(v.shape[1:]) for v in values]
    if len({len(shape) for shape in shapes}) == 1:
        lengths = enumerate(zip(*shapes, strict=True), 1)
        differ = [(axis, sizes) for axis, sizes in lengths if len(set(sizes)) > 1]
        if all(sizes == tuple(widths) for _, sizes in differ):
            return [axis for axis, _ in differ]
    raise ValueError(
        f"{name!r} has shapes {shapes} in groups of clients with up to {list(widths)} rows; "
        "they may only differ in axes of rows"
    )


def _widened(value: Tensor, axes: list[int], width: int) -> Tensor:
    wide = value.new_zeros([width if a in axes else n for a, n in enumerate(value.shape)])
    wide[tuple(map(slice, value.shape))] = value
    return wide
