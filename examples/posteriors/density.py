"""Log density of a program at many points at once, all clients' own sites included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyro
import torch
from torch import Tensor

from pyrofl import Federation
from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import traces
from pyrofl.inference.definition.programs import Program
from pyrofl.models.likelihood_factors.structure import Structure
from pyrofl.models.shared.unconstrained import RowsFilled, layouts, noncentered
from pyrofl.tensors import Tensors, default_type

WIDE = 10.0  # standard deviation that stands for an improper prior


@dataclass(frozen=True)
class Density:
    """A program in terms of unconstrained shared variables u [d] and own noise z [m] of clients.

    The own sites are written in non-centered form, so that z is standard normal.
    """

    structure: Structure
    batch: Batch  # all clients

    @classmethod
    def of(cls, program: Program, data: Federation, shared: str) -> Density:
        """Return the density of a program; raise ValueError if z is not standard normal."""
        one = data.batch(torch.tensor([0]))
        program = noncentered(program, one)
        shared_sites, client_sites = layouts(program, one, shared, WIDE, rows=int(data.sizes.max()))
        if not all(site.exact and bool((site.sd == 1).all()) for site in client_sites.sites):
            raise ValueError("an own site is not normal, with or without a random scale")
        none = torch.zeros(client_sites.size, shared_sites.size, dtype=data.dtype)
        structure = Structure(program, frozenset(), shared_sites, client_sites, none)
        return cls(structure, data.batch(torch.arange(data.clients)))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of shared variables d, of clients C, and of own variables m of each."""
        return self.structure.shared_sites.size, len(self.batch), self.structure.client_sites.size

    def start(self) -> Tensor:
        """Return the middle of the prior of the shared variables, [d]."""
        return self.structure.shared_sites.prior()[0].to(self.batch.x)

    def evaluate(self, u: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(u) and log p(y | u, z), [S, C] each.

        Args:
            u: shared variables, [S, d], or with values of each client, [S, C, d].
            z: own variables, [S, C, m].
        """
        found = self.structure.evaluate(self._of_clients(u), z, self.batch)
        return found.prior, found.likelihood

    def joint(self, point: Tensor) -> Tensor:
        """Return the log density [S] of all variables [S, d + C m]."""
        d, clients, own = self.sizes
        u, z = point[:, :d], point[:, d:].reshape(len(point), clients, own)
        prior, likelihood = self.evaluate(u, z)
        return prior[:, 0] + (likelihood - z.square().sum(-1) / 2).sum(-1)

    def values(self, u: Tensor, z: Tensor, names: Sequence[str], own: Sequence[str]) -> Tensors:
        """Return sites and deterministic functions, [S, *p] or of clients [S, C, *p]."""
        structure = self.structure

        def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
            """Record the given points."""
            zero = u.new_zeros(len(u), len(batch), 1)
            with batch.clients():
                structure.shared_sites.sample(self._of_clients(u)[..., None, :], zero, 1.0)
                structure.client_sites.sample(z[..., None, :], zero, 0.0, batch.mask.shape[1])

        def model(received: Tensors, local: Tensors, batch: Batch) -> None:
            """Run the program with a prior for absent rows."""
            with RowsFilled(structure.client_sites.sites):
                structure.program(received, local, batch)

        with torch.no_grad(), pyro.validation_enabled(False), default_type(u.dtype):
            _, p = traces(model, guide, {}, {}, self.batch, len(u))
        found = {n: p.nodes[n]["value"][:, :, 0] for n in names}
        return {n: v if n in own else v[:, 0] for n, v in found.items()}

    def _of_clients(self, u: Tensor) -> Tensor:
        return u if u.dim() == 3 else u[:, None].expand(-1, len(self.batch), -1)
