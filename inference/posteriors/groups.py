"""Clients' sites joined to the groups that ArviZ knows, with the names of their axes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.posteriors.draws import Values, agreed
from pyrofl.inference.posteriors.pointwise import Study
from pyrofl.tensors import matches


class Variable(NamedTuple):
    """An array and the names of its axes."""

    value: Tensor
    axes: tuple[str, ...]


Groups = dict[str, dict[str, Variable]]
"""group -> name -> variable, of one run: without the axis of chains."""

PLACES = {
    "posterior": "sites",
    "log_likelihood": "log_likelihood",
    "posterior_predictive": "predicted",
    "observed_data": "observed",
}


class Table:
    """Some clients of a federation side by side.

    Args:
        data: the federation.
        ids: of the clients.
        shared: patterns of the sites that are one for all clients.
        dims: site -> names of its axes; default "SITE_dim_0" and so on.
    """

    def __init__(
        self, data: Federation, ids: Tensor, shared: str, dims: Mapping[str, tuple[str, ...]]
    ) -> None:
        """Keep what is asked for."""
        self.data, self.ids, self.shared, self.dims = data, ids, shared, dims

    def of_clients(self, name: str, value: Tensor) -> Variable:
        """Name the axes of a site's draws [S, C, *p].

        Raises:
            ValueError: if all clients share the site, and their draws differ.
        """
        own = self.dims.get(name, default_dims(name, value.dim() - 2))
        if matches(name, self.shared):
            return Variable(agreed(name, value), ("draw", *own))
        return Variable(value, ("draw", "client", *own))

    def joined(self, name: str, parts: Sequence[Values]) -> Variable:
        """Join the values [S, 1, B or 1, *p] of clients along their axis, or that of their rows."""
        if not any(part.rows or part.value.shape[2] > 1 for part in parts):
            return self.of_clients(name, torch.cat([part.value.squeeze(2) for part in parts], 1))
        sizes = self.data.sizes[self.ids].tolist()
        rows = [
            part.value[:, 0].expand(-1, n, *part.value.shape[3:])
            for part, n in zip(parts, sizes, strict=True)
        ]
        own = self.dims.get(name, default_dims(name, rows[0].dim() - 2))
        return Variable(torch.cat(rows, 1), ("draw", "row", *own))

    def studied(self, known: Sequence[Study], asked: Collection[str]) -> Groups:
        """Join studies, one per client, to those groups that are asked for.

        The log likelihood comes with "sample_stats": log densities of every draw.
        """
        found = {
            group: {
                name: self.joined(name, [study[place][name] for study in known])
                for name in known[0][place]
            }
            for group, place in PLACES.items()
            if group in asked
        }
        for name, variable in found.get("observed_data", {}).items():
            found["observed_data"][name] = Variable(variable.value[0], variable.axes[1:])
        if "log_likelihood" in asked:
            found["sample_stats"] = self._densities(known)
        return found

    def _densities(self, known: Sequence[Study]) -> dict[str, Variable]:
        """Return log_p and log_q of every draw, per client if clients share no site."""
        density = {
            name: torch.cat([study["density"][name].value.flatten(1) for study in known], 1)
            for name in known[0]["density"]
        }
        if not self.shared:
            return {n: Variable(density[n], ("draw", "client")) for n in ("log_p", "log_q")}
        if len(self.ids) < self.data.clients:
            return {}  # what all share depends on the clients that are not here
        return {
            n: Variable(density[n].sum(1) + density[f"shared {n}"][:, 0], ("draw",))
            for n in ("log_p", "log_q")
        }

    def constants(self) -> dict[str, Variable]:
        """Return x and the place in the federation's table of every row, and clients' sizes."""
        rows = torch.cat([self.data.train[i] for i in self.ids.tolist()])
        x = self.data.x[rows.to(self.data.x.device)]
        return {
            "x": Variable(x, ("row", *self.dims.get("x", default_dims("x", x.dim() - 1)))),
            "table_row": Variable(rows, ("row",)),
            "size": Variable(self.data.sizes[self.ids], ("client",)),
        }


def default_dims(name: str, count: int) -> tuple[str, ...]:
    """Name the axes of a site that has none of its own.

    >>> default_dims("w", 2)
    ('w_dim_0', 'w_dim_1')
    """
    return tuple(f"{name}_dim_{i}" for i in range(count))
