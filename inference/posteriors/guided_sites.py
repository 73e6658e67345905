"""Latent sites of a method's guide, as importance sampling needs them: normal, listed or others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Generator

from pyrofl.inference.definition.elbo import is_point, latent, normal_event_size, traces
from pyrofl.inference.definition.method import Method
from pyrofl.inference.posteriors.client_groups import ClientGroup, using_client_generators
from pyrofl.inference.posteriors.draws import is_in_plate
from pyrofl.tensors import matches

MAX_VARIABLES = 2000  # maximum number of variables of a client
MIN_LISTED_DRAWS, MIN_DRAWS = 3, 8  # minimum draws of z, for listed draws or others


class CannotCorrect(ValueError):
    """Error raised if importance sampling cannot correct the posterior draws.

    Attributes:
        reason: the reason, without the remedy.
        quiet: whether this is no error, as for point estimates.
        advice: advice by default, unless it depends on the run's status.
    """

    def __init__(self, reason: str, remedy: str, quiet: bool = False, advice: str = "") -> None:
        super().__init__(f"corrected=True is not possible: {reason}; {remedy}")
        self.reason, self.quiet, self.advice = reason, quiet, advice


class NoUsableDraws(CannotCorrect):
    """Error raised if no weights are usable, as where the guide is far from the posterior."""


@dataclass(frozen=True)
class GuidedSites:
    """Latent sites of a guide, traced for one group of clients; they are the same for all."""

    method: Method
    group: ClientGroup

    @cached_property
    def num_server_draws(self) -> int:
        """Number of the server's draws if the guide selects one of these, else 0."""
        counts = [site["infer"].get("listed") for _, site in self._guided]
        return next(filter(None, counts), 0)

    @property
    def min_draws(self) -> int:
        """Minimum number of draws of z; few if the guide draws z given each shared draw."""
        return MIN_LISTED_DRAWS if self.num_server_draws else MIN_DRAWS

    @cached_property
    def _traced(self) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
        """Return the latent sites of the guide and of the model, with their distributions."""
        other = self.group._replace(generators=[Generator() for _ in self.group.ids])
        with using_client_generators(self.method, other):
            q, p = traces(self.method.model, self.method.guide, *self.group.client, 2)
        return list(latent(q)), list(latent(p))

    @property
    def _guided(self) -> list[tuple[str, Any]]:
        """Latent sites of the guide with their distributions."""
        return self._traced[0]

    @cached_property
    def in_plate_by_site(self) -> dict[str, bool]:
        """Whether each latent site of the model is in a plate of the program, by name."""
        sites = ((n, s) for n, s in self._guided if not s["infer"].get("is_auxiliary"))
        return {name: is_in_plate(site) for name, site in sites}

    @cached_property
    def finite_bounds(self) -> list[tuple[str, float]]:
        """Sites with their finite bounds, such as 1 of probabilities; near 0 no digits are lost."""
        pairs = []
        for name, site in self._traced[1]:
            support = site["fn"].support
            support = getattr(support, "base_constraint", support)
            for end in ("lower_bound", "upper_bound"):
                bound = torch.as_tensor(getattr(support, end, 0.0)).flatten()
                if bool(bound.any()) and bool((bound == bound[0]).all() & bound.isfinite().all()):
                    pairs.append((name, float(bound[0])))
        return pairs

    @cached_property
    def normal_sites(self) -> frozenset[str]:
        """Names of the sites that are drawn from normal distributions."""
        return frozenset(name for name, site in self._guided if normal_event_size(site["fn"]))

    @cached_property
    def has_nonnormal_sites(self) -> bool:
        """Whether any client-specific latent site has a distribution that is not normal."""
        distributions = (s["fn"] for n, s in self._guided if not matches(n, self.method.shared))
        return any(not is_point(fn) and not normal_event_size(fn) for fn in distributions)

    @cached_property
    def normal_counts(self) -> tuple[int, int]:
        """Numbers of normal variables: in shared and in client-specific sites.

        Raises:
            CannotCorrect: if importance sampling cannot correct draws of this guide.
        """
        self._refuse_uncorrectable()
        is_shared = {n: matches(n, self.method.shared) for n, _ in self._guided}
        num_shared = sum(normal_event_size(s["fn"]) for n, s in self._guided if is_shared[n])
        return num_shared, sum(normal_event_size(s["fn"]) for _, s in self._guided) - num_shared

    def _refuse_uncorrectable(self) -> None:
        """Raise CannotCorrect for a guide without density, and for too many or other variables."""
        sites = {n: s for n, s in self._guided if not s["infer"].get("is_auxiliary")}
        if all(is_point(s["fn"]) for _, s in self._guided):
            raise CannotCorrect(
                "the guide is a point",
                "use a guide with some spread, such as guide='mean_field'",
                quiet=True,
            )
        if all(is_point(s["fn"]) or s["infer"].get("listed") for _, s in self._guided):
            raise CannotCorrect(
                "the guide selects among draws of the server, which have no density",
                "use the draws as they are, with corrected=False",
            )
        if (variables := sum(s["value"][0, 0].numel() for s in sites.values())) > MAX_VARIABLES:
            raise CannotCorrect(
                f"a client has {variables:,} variables",
                f"at most {MAX_VARIABLES:,} can be weighted; reduce the model or use "
                "corrected=False",
            )
        for name, fn in ((n, s["fn"]) for n, s in self._guided if matches(n, self.method.shared)):
            if not is_point(fn) and not normal_event_size(fn):
                raise CannotCorrect(
                    f"the guide draws the shared {name!r} from a {type(fn).__name__}",
                    "use a normal distribution or a transformed one for it",
                )
