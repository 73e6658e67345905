"""Changes of learned parameters between rounds, for each sample site.

Compared are the tensors that clients receive (no names under "server/"). If none of them changed,
the client states are compared too, with the largest change of any training client.
Where `Moments` defines the mean and the standard deviation of a site, both are compared with those
of the previous round, in standard deviations: the largest |new - old| / sd of its entries. The
change of a tensor without a distribution is a fraction of its norm.

Sites are compared on the unconstrained scale where they are normal: log tau, not tau.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyrofl.inference.definition.metadata import MetadataByPattern, Moments, metadata_of_class
from pyrofl.inference.engine.state import RoundState
from pyrofl.tensors import Tensors, client_bytes, matches

if TYPE_CHECKING:
    from pandas import DataFrame

NONFINITE_CHANGE = torch.finfo(torch.float64).max  # change of tensors that are not finite
MAX_COMPARED_BYTES = 64_000_000  # bytes of client states that are compared at once
PARTS = ("mean", "sd", "norm")

Moved = dict[str, dict[str, float]]
"""Site -> change of its "mean" and "sd", or tensor -> change of its "norm"."""


def movement(metadata: MetadataByPattern, old: RoundState, new: RoundState) -> Moved | None:
    """Return how much each site's parameters changed in a round; None if nothing was aggregated."""
    if new.server is old.server:
        return None
    far = _moved(metadata, _received(old.server), _received(new.server))
    if not any(far.values()):  # all learned tensors may be client states
        size = client_bytes(new.get_client_states(new.trained[:1]))
        parts = [
            _moved(
                metadata,
                _real(old.get_client_states(ids)),
                _real(new.get_client_states(ids)),
                rows=True,
            )
            for ids in new.trained.split(max(1, MAX_COMPARED_BYTES // max(1, size)))
        ]
        far |= {key: max(part[key] for part in parts) for key in parts[0]}
    changes: Moved = {}
    for (name, part), value in far.items():
        changes.setdefault(name, {})[part] = value
    return changes


def _moved(
    metadata: MetadataByPattern, before: Tensors, now: Tensors, rows: bool = False
) -> dict[tuple[str, str], float]:
    """Return a round's change of each sample site's mean and sd, or of each tensor's norm."""
    far: dict[tuple[str, str], Tensor] = {}
    stated = []
    for names, moments in metadata_of_class(metadata, Moments):
        site_names = [n for n in now if matches(n, names)]
        if site_names and all(_alike(before, now, n) for n in site_names):
            stated += site_names
            first, last = moments.compute(before), moments.compute(now)
            for n, (mean, sd) in last.items():
                far[n, "mean"] = ((mean - first[n][0]).abs() / sd).amax()
                far[n, "sd"] = ((sd - first[n][1]).abs() / sd).amax()
    for name in (n for n in now if n not in stated):
        alike = _alike(before, now, name)
        one = now[name].new_ones(())
        far[name, "norm"] = _relative(before[name], now[name], rows) if alike else one
    values = [v.double() for v in far.values()] or [torch.zeros(())]
    changes = (
        torch.stack(values).nan_to_num(NONFINITE_CHANGE).tolist()
    )  # one wait for an accelerator
    return dict(zip(far, changes, strict=False))


def table(records: Sequence[Any]) -> DataFrame:
    """Return a table of parameter changes, with a row for each sample site and round.

    Columns: round; site; mean and sd, its change in standard deviations; norm, the change of a
    tensor without a distribution as a fraction of its norm; NaN where undefined.
    """
    from pandas import DataFrame

    lines = [
        {"round": record.number, "site": site, **parts}
        for record in records
        for site, parts in (record.moved or {}).items()
    ]
    return DataFrame(lines, columns=["round", "site", *PARTS])


def _relative(old: Tensor, new: Tensor, rows: bool) -> Tensor:
    """Return the norm of a tensor's change, relative to the larger norm of old and new value."""
    shape = (len(new), -1) if rows else (1, -1)
    was, now = old.reshape(shape), new.reshape(shape)
    norm = torch.linalg.vector_norm
    scale = torch.maximum(norm(was, dim=1), norm(now, dim=1))
    return torch.where(scale > 0, norm(now - was, dim=1) / scale, 0.0).amax()


def _alike(before: Tensors, now: Tensors, name: str) -> bool:
    return name in before and before[name].shape == now[name].shape


def _received(server: Tensors) -> Tensors:
    return {n: v for n, v in _real(server).items() if not n.startswith("server/")}


def _real(tensors: Mapping[str, Any]) -> Tensors:
    return {n: v for n, v in tensors.items() if v.is_floating_point() and v.numel()}
