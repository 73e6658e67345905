"""Training schedules for clients with different numbers of rows: minibatches and groups.

Groups are padded separately; joined results are padded to the longest client of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from pyrofl.tensors import Tensors, cut, placed

WORTH = 2000  # rows of padding that take longer than an additional step: measured
WORTH_SHORT = 500  # the same for clients that train in the space of their rows: measured

ROOM = 256  # maximum padding of a group, so that shapes recur, as recordings need

Axes = dict[str, list[int]]
"""Name of a local tensor -> its axes of rows, padded to the longest client of all."""


class Schedule(NamedTuple):
    """Row indices of the minibatches of several clients, by step.

    At step t, client c has the minibatch rows[t, c] if t < steps[c].
    """

    rows: Tensor  # [T, C, B] int64; padding is the client's first row
    mask: Tensor  # [T, C, B] bool
    steps: Tensor  # [C] int64
    at: Tensor  # [T, C, B] int64, which of the client's rows they are

    def of(self, clients: Tensor | slice) -> Schedule:
        """Return the schedule restricted to the given clients, in their order."""
        rows, mask, steps, at = self
        return Schedule(rows[:, clients], mask[:, clients], steps[clients], at[:, clients])


def make_schedule(
    rows: list[Tensor], epochs: list[int], batch: int | None, order: list[Generator]
) -> Schedule:
    """Return the shuffled minibatches of all clients for all their epochs.

    Every epoch is shuffled by the client's `order`; its last minibatch may be shorter than `batch`.
    None uses all rows, in order.
    """
    # By NumPy, which takes a fifth of torch's time for so few numbers.
    sizes, many = np.array([len(r) for r in rows]), np.array(epochs)
    longest = int(sizes.max())
    width = min(batch or longest, longest)
    per_epoch = -(-sizes // width)
    steps, slots = many * per_epoch, int(per_epoch.max()) * width
    streams = np.tile(np.arange(slots), (len(rows), int(many.max()), 1))  # [C, epochs, slots]
    if batch:
        for own, size, e, g in zip(streams, sizes.tolist(), epochs, order, strict=True):
            for epoch in own[:e]:
                epoch[:size] = torch.randperm(size, generator=g).numpy()
    step = np.arange(int(steps.max()))[:, None]
    begin = step % per_epoch * width  # [T, C], of a minibatch in its epoch
    slot = begin[..., None] + np.arange(width)
    mask = (slot < sizes[:, None]) & (step < steps)[..., None]
    place = (step // per_epoch)[..., None] * slots + slot
    client = np.arange(len(rows))[:, None]
    at = streams.reshape(len(rows), -1)[client, place * mask] * mask  # padding is the first row
    table = pad_sequence(rows, batch_first=True).numpy()
    found = (np.ascontiguousarray(part) for part in (table[client, at], mask, steps, at))
    return Schedule(*map(torch.from_numpy, found))  # a step lies alike in short and long plans


def alike(sizes: Tensor, bounds: Sequence[float]) -> list[Tensor]:
    """Group clients with numbers of rows [C] in the same interval between the given bounds."""
    within = [tuple(size <= most for most in bounds) for size in sizes.tolist()]
    kinds = dict.fromkeys(within)
    return [torch.tensor([c for c, w in enumerate(within) if w == kind]) for kind in kinds]


def buckets(sizes: Tensor, worth: int | None = None) -> list[Tensor]:
    """Group clients by similar numbers of rows [C], largest first, to save padding."""
    order = sizes.argsort(descending=True, stable=True)
    return list(order.split(runs(sizes[order].tolist(), WORTH if worth is None else worth)))


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
    step = 1 << max(0, min(longest // 2, ROOM // len(sizes)).bit_length() - 1)
    return min(-(-longest // step) * step, bound)


def narrowed(tensors: Mapping[str, Tensor], axes: Axes, width: int) -> Tensors:
    """Cut the padded row axes of tensors to at most `width` rows."""
    cut = dict(tensors)
    for name in axes.keys() & cut.keys():
        for axis in axes[name]:
            cut[name] = cut[name].narrow(axis, 0, min(width, cut[name].shape[axis]))
    return cut


def joined(
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
        found = [v for v in values if v is not None]
        if len(found) < len(values):
            raise ValueError(
                f"a client without a step in this phase would lack {name!r}; compute it in "
                "init_client too"
            )
        if len({v.shape[1:] for v in found}) > 1:
            axes[name] = _rows(name, found, widths)
            found = [_widened(v, axes[name], max(widths)) for v in found]
        changed[name] = placed(found, places)
    return changed, axes


def _rows(name: str, values: Sequence[Tensor], widths: Sequence[int]) -> list[int]:
    shapes = [tuple(v.shape[1:]) for v in values]
    if len({len(shape) for shape in shapes}) == 1:
        lengths = enumerate(zip(*shapes, strict=True), 1)
        differ = [(axis, found) for axis, found in lengths if len(set(found)) > 1]
        if all(found == tuple(widths) for _, found in differ):
            return [axis for axis, _ in differ]
    raise ValueError(
        f"{name!r} has shapes {shapes} in groups of clients with up to {list(widths)} rows; "
        "they may only differ in axes of rows"
    )


def _widened(value: Tensor, axes: list[int], width: int) -> Tensor:
    wide = value.new_zeros([width if a in axes else n for a, n in enumerate(value.shape)])
    wide[tuple(map(slice, value.shape))] = value
    return wide
