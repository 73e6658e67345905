"""Arrays with named axes for ArviZ, joined from the values of single clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pyrofl.choices import GROUPS
from pyrofl.data import Federation
from pyrofl.inference.posteriors.draws import Values, agrees, common_draws
from pyrofl.inference.posteriors.pointwise import ClientValues
from pyrofl.tensors import matches

DENSITIES = ("log_likelihood", "log_prior")


class Variable(NamedTuple):
    """Array of an ArviZ group, with the names of its axes."""

    value: Tensor
    axes: tuple[str, ...]


Groups = dict[str, dict[str, Variable]]
"""group -> name -> variable, of one run: without the axis of chains."""


def labels(data: Federation) -> dict[str, tuple[str, ...]]:
    """Return the axis labels for ArviZ: names of the covariates and of the classes.

    The axes are "feature" and "class".
    """
    return {"feature": data.source.features if data.source else (), "class": data.classes}


@dataclass(frozen=True)
class ClientAxes:
    """Builder of ArviZ arrays with named axes from the values of several clients."""

    data: Federation
    ids: Tensor  # of the clients
    shared: str  # patterns of the shared sites
    dims: Mapping[str, tuple[str, ...]]  # site -> names of its axes; default "SITE_dim_0" ...
    # Of deterministic sites, see `find_client_dependence`.
    depends_on_client: Mapping[str, bool] = field(default_factory=dict)

    def site_axes(self, name: str, value: Tensor, lead: int) -> tuple[str, ...]:
        """Return the names of a site's own axes, without the `lead` leading axes."""
        default = tuple(f"{name}_dim_{i}" for i in range(value.dim() - lead))
        names = self.dims.get(name, default)
        if len(names) != len(default):
            raise ValueError(
                f"dims of {name!r} are {names}; expected {len(default)} names for its shape "
                f"{list(value.shape[lead:])}"
            )
        return names

    def reported(self, name: str, value: Tensor) -> Variable:
        """Return a statistic of the clients [C, *p] as an array with named axes.

        A statistic "WHAT/SITE" has the axes of SITE.
        """
        axes = self.site_axes(name.partition("/")[2] or name, value, 1)
        return Variable(value, ("client", *axes))

    def of_clients(self, name: str, value: Tensor) -> Variable:
        """Return a site's posterior draws [S, C, *p] as an array with named axes."""
        axes = self.site_axes(name, value, 2)
        point = len(value) > 1 and bool((value == value[:1]).all())
        if point:  # in float64, so that the mean is exact and the standard deviation is 0
            value = value[:1].double().expand_as(value)
        if matches(name, self.shared) or self._one_for_all(name, value):
            return Variable(common_draws(name, value), ("draw", *axes))
        return Variable(value, ("draw", "client", *axes))

    def _one_for_all(self, name: str, value: Tensor) -> bool:
        """Return whether all clients have the same draws of a site not declared as shared."""
        if len(self.ids) < 2 or len(value) < 2:
            return False
        if name not in self.depends_on_client:  # a point, or draws of the server's posterior
            return bool((value == value[:, :1]).all())
        # Computed from shared sites, so that only rounding can differ.
        return not self.depends_on_client[name] and agrees(value)

    def joined(self, name: str, parts: Sequence[Values]) -> Variable:
        """Join several clients' draws of a site along the client axis or the row axis."""
        if not any(part.rows or part.value.shape[2] > 1 for part in parts):
            return self.of_clients(name, torch.cat([part.value.squeeze(2) for part in parts], 1))
        sizes = self.data.sizes[self.ids].tolist()
        values = zip((part.value[:, 0] for part in parts), sizes, strict=True)  # [S, B or 1, *p]
        rows = torch.cat([value.expand(-1, n, *value.shape[2:]) for value, n in values], 1)
        return Variable(rows, ("draw", "row", *self.site_axes(name, rows, 2)))

    def groups(
        self, client_draws: Sequence[ClientValues], chosen: Collection[str] = GROUPS
    ) -> Groups:
        """Return the ArviZ groups of all clients, joined along the client axis or the row axis."""
        groups: Groups = {}
        for group, sites in client_draws[0].items():
            # A log density is a scalar, without the axes of its site.
            axes = replace(self, dims={}) if group in DENSITIES else self
            parts = {n: [one[group][n] for one in client_draws] for n in sites if group in chosen}
            groups |= {group: {n: axes.joined(n, v) for n, v in parts.items()}} if parts else {}
        for name, variable in groups.get("observed_data", {}).items():
            groups["observed_data"][name] = Variable(variable.value[0], variable.axes[1:])
        if "log_likelihood" in chosen:
            groups["sample_stats"] = self._densities(client_draws)
        return groups

    def _densities(self, client_draws: Sequence[ClientValues]) -> dict[str, Variable]:
        """Return log densities of each draw under model and guide, by client or in total.

        They are totals if there are shared sites.
        """
        everyone = torch.isin(torch.arange(self.data.clients), self.ids).all()
        if "density" not in client_draws[0] or (self.shared and not everyone):
            return {}  # shared sites depend on the other clients too
        densities = {}
        for n in ("log_p", "log_q"):
            # [S, C], and their sums over clients, [S].
            by_client = torch.cat([one["density"][n].value.flatten(1) for one in client_draws], 1)
            together = by_client.sum(1) + client_draws[0]["density"][f"shared {n}"].value.flatten()
            dims = ("draw",) if self.shared else ("draw", "client")
            densities[n] = Variable(together if self.shared else by_client, dims)
        return densities

    def constants(self) -> dict[str, Variable]:
        """Return ArviZ's constant data: covariates, row numbers in the table, and client sizes.

        The group is constant_data.

        If x was computed from a table, also the center and scale of each column.
        """
        rows = torch.cat([self.data.train[i] for i in self.ids.tolist()])
        x = self.data.x[rows.to(self.data.x.device)]
        named = "x" not in self.dims and list(x.shape[1:]) == [len(labels(self.data)["feature"])]
        preparation = self.data.source.preparation if named and self.data.source else None
        scales = (
            {"feature_center": preparation.center, "feature_scale": preparation.scale}
            if preparation
            else {}
        )
        return {
            "x": Variable(x, ("row", *(("feature",) if named else self.site_axes("x", x, 1)))),
            "table_row": Variable(rows, ("row",)),
            "size": Variable(self.data.sizes[self.ids], ("client",)),
            **{name: Variable(value, ("feature",)) for name, value in scales.items()},
        }
