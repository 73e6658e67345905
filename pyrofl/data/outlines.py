"""Federations without data, for code that needs only the shapes of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyrofl.data.batch import Batch
from pyrofl.data.federation import Federation
from pyrofl.data.roster import Roster
from pyrofl.data.tables.source import Source


def outline(
    names: Sequence[str],
    sizes: Sequence[int] | Tensor,
    x: Sequence[int],
    y: Sequence[int] = (),
    classes: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> Federation:
    """Build a federation of the given shapes whose rows are zeros that use no memory.

    Methods that read only the shapes of the data, such as `pvi.hierarchical`, can be built from
    it as from the rows.

    Args:
        names: names of the clients.
        sizes: their numbers of training rows.
        x: shape of a row.
        y: shape of a row's response.
        classes: names of the classes; none for a response that is a number.
        dtype: floating-point type.

    Raises:
        ValueError: if names, sizes or type are unsuitable.
    """
    roster = Roster(names, sizes, dtype)
    rows = int(roster.sizes.sum())
    labels = torch.zeros((), dtype=torch.long if classes else dtype)
    train = torch.arange(rows).split(roster.sizes.tolist())
    none = (torch.zeros(0, dtype=torch.long),) * roster.clients
    zeros = torch.zeros((), dtype=dtype)
    table = zeros.expand(rows, *x), labels.expand(rows, *y)
    return Federation(*table, train, none, roster.names, classes)


class Hidden(Federation):
    """Federation without rows; reading rows raises an error."""

    def gather(self, *args: Any, **kwargs: Any) -> Batch:
        """Raise ValueError, since the rows of the federation are not available."""
        raise ValueError(
            "the rows of this run's clients are not here, as it was loaded without them; expected "
            "pyrofl.load(DIR, data=...), with the federation that it was fitted to"
        )


def facts(data: Federation) -> dict[str, Any]:
    """Return a federation's metadata, without its rows, as JSON-compatible values."""
    return {
        "names": list(data.names),
        "sizes": data.sizes.tolist(),
        "held_out": data.held_out,
        "classes": list(data.classes),
        "x": list(data.x.shape[1:]),
        "y": list(data.y.shape[1:]),
        "types": [str(v.dtype).removeprefix("torch.") for v in (data.x, data.y)],
        "source": data.source.to_json() if data.source else None,
        "totals": None if data.weights is None else data.totals.tolist(),
    }


def outline_federation(facts: Mapping[str, Any]) -> Federation:
    """Build a federation without its rows from the metadata that `facts` returned."""
    sizes, nobody = facts["sizes"], torch.zeros(0, dtype=torch.long)
    x, y = (
        torch.zeros((), dtype=getattr(torch, kind)).expand(sum(sizes), *facts[name])
        for name, kind in zip("xy", facts["types"], strict=True)
    )
    train = torch.arange(sum(sizes)).split(sizes)
    source = Source.from_json(facts["source"]) if facts["source"] else None
    weights = _summing_to(facts["totals"], train) if facts.get("totals") else None
    options = {name: facts[name] for name in ("names", "classes", "held_out")}
    test = (nobody,) * len(sizes)
    return Hidden(x, y, train, test, **options, source=source, weights=weights)


def _summing_to(totals: Sequence[float], train: Sequence[Tensor]) -> Tensor:
    """Return row weights with the given sum over each client's training rows."""
    weights = torch.zeros(sum(map(len, train)), dtype=torch.float64)
    for total, rows in zip(totals, train, strict=True):
        weights[rows[0]] = total
    return weights
