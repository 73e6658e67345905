"""Simulation-based calibration: is the truth anywhere among the draws, as often as it should be?

Talts, Betancourt, Simpson, Vehtari and Gelman, "Validating Bayesian Inference Algorithms with
Simulation-Based Calibration", 2018.

    theta ~ p(theta),  y ~ p(y | theta),  theta_1 ... theta_L ~ q(theta; y)
    rank = number of theta_l below theta,  uniform on 0 ... L if q is the posterior

Ranks say how far to trust a method: p values of their being uniform, and what intervals cover.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Generator, Tensor

from pyrofl.arguments import Count, Range, checked
from pyrofl.data import Federation
from pyrofl.inference.checks.replicas import (
    compact,
    first_of,
    rounds_of,
    side_by_side,
    with_responses,
)
from pyrofl.inference.evaluation.asked import Asked
from pyrofl.inference.loop.rounds import federate, first
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.arviz import ClientAxes, Variable, of_prior
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.inference.posteriors.export import coordinates
from pyrofl.inference.seeds import Seed, Stream, stream
from pyrofl.tensors import Tensors, matches

if TYPE_CHECKING:
    import pandas
    import xarray

AtLeastTwo = Annotated[int, Range(2)]

BYTES = 500_000_000  # rows of the replications that are fitted side by side
LEVELS = (0.5, 0.8, 0.95)
EXPECTED = 10  # replications in a bin


@dataclass(frozen=True)
class Ranks:
    """Ranks of the truth among the draws.

    Attributes:
        ranks: of every site, 0 to L, dims replication, client (not for shared sites) and the
            site's own; NaN where the fit failed.
        draws: L.
        bins: of the test for uniform ranks.
        failed: "replication: what was not finite". These replications count nowhere else, so a
            method is as good as its ranks only if this is empty.
    """

    ranks: xarray.Dataset
    draws: int
    bins: int
    failed: tuple[str, ...] = ()

    @property
    def places(self) -> xarray.Dataset:
        """Ranks between 0 and 1: (rank + 1/2) / (L + 1), uniform as they are."""
        return (self.ranks + 0.5) / (self.draws + 1)

    def of_client(self, client: str) -> dict[str, Any]:
        """Return the places [R] of what a client has or shares, by coordinate."""
        known = self.places
        if "client" in known.dims:
            known = known.sel(client=client)
        return {
            place: values.isel(at).to_numpy()
            for values in known.values()
            for place, at in coordinates(values.isel(replication=0))
        }

    def coverage(self, levels: Sequence[float] = LEVELS) -> xarray.Dataset:
        """Return how often central intervals held the truth, with a new dim, level.

        An interval ends at draws, so that no error comes from interpolation; levels are rounded to
        those that such intervals have, (L + 1 - 2 k) / (L + 1). By chance alone, a share of
        replications R is off by (level (1 - level) / R)^1/2.

        Raises:
            ValueError: if a level is not between 0 and 1.
        """
        import xarray

        if not all(0 < level < 1 for level in levels):
            raise ValueError(f"levels are {list(levels)}; expected numbers between 0 and 1")
        known = self.ranks.dropna("replication")
        tails = [round((1 - level) / 2 * (self.draws + 1)) for level in levels]
        inside = [((known >= k) & (known <= self.draws - k)).mean("replication") for k in tails]
        exact = [1 - 2 * k / (self.draws + 1) for k in tails]
        return xarray.concat(inside, xarray.Variable("level", exact))

    def p_values(self) -> xarray.Dataset:
        """Return the p value of uniform ranks by the chi-square test, one for each coordinate.

        Replications are independent, and so are ranks of one coordinate. Those of two clients in
        one replication are not, as long as something is shared, nor are those of two coordinates
        of a client: they are never thrown together here.
        """
        import xarray

        known = self.ranks.dropna("replication")
        found: xarray.Dataset = xarray.apply_ufunc(
            self._p_value, known, input_core_dims=[["replication"]]
        )
        return found

    def _p_value(self, ranks: Any) -> Any:
        from scipy.stats import chisquare

        width = (self.draws + 1) // self.bins
        counts = [((ranks // width) == b).sum(-1) for b in range(self.bins)]
        return chisquare(np.stack(counts, -1), axis=-1).pvalue

    def table(self) -> pandas.DataFrame:
        """Return a row for each coordinate, named as in `arviz.summary`.

        Columns: variable; p, see `p_values`; p_holm, adjusted for the number of rows, which holds
        whatever depends on what (Holm 1979); and the coverage of 50%, 80% and 95% intervals.
        """
        import pandas

        p, coverage = self.p_values(), self.coverage()
        rows = {}
        for name, values in p.items():
            for place, at in coordinates(values):
                covered = coverage[name].isel(at)
                rows[place] = {"variable": name, "p": float(values.isel(at))}
                rows[place] |= {f"{v:.0%}": float(c) for v, c in zip(LEVELS, covered, strict=True)}
        table = pandas.DataFrame.from_dict(rows, orient="index")
        table.insert(2, "p_holm", _holm(table["p"].to_numpy()))
        return table

    @property
    def p_value(self) -> float:
        """Smallest p value after Holm's adjustment: that all ranks are uniform."""
        return float(self.table()["p_holm"].min())


@checked
def sbc(
    method: Method | Callable[[int], Method],
    data: Federation,
    rounds: int,
    replications: AtLeastTwo = 200,
    draws: Count = 199,
    seed: Seed = 0,
    *,
    server: Tensors | None = None,
    bins: AtLeastTwo | None = None,
    chunk: int | None = None,
    **what: Any,
) -> Ranks:
    """Check a method on federations that its own prior and likelihood make up.

    The federation gives clients, their rows x and nothing else; all its responses are simulated, so
    a method that was built for it suits every replication. All sites of the posterior are ranked,
    deterministic ones too. Draws are independent, so none is left out to thin them. Replications
    are fitted side by side: as fast as one federation with that many more clients.

    Args:
        method: a method, or round number (from 0) -> method.
        data: the template; held-out clients and test rows play no part.
        rounds: of every fit.
        replications: R.
        draws: L, from the posterior of every replication.
        seed: fixes all random numbers.
        server: what the server holds when the truth is drawn and before every fit; default what
            `method.init` says. Only a prior that reads the server depends on it. As a point in a
            server's state is no draw from a prior, calibration is then asked for given that state,
            and a method that moves the point fits it to the data twice: expect it to fail.
        bins: of ranks, a divisor of draws + 1; default as many as leave 10 replications in each,
            and 20 at most.
        chunk: clients trained side by side.
        what: further arguments of `pyrofl.posterior`: model and adapted.

    Raises:
        ValueError: if a number is out of its range, the prior is improper, or the model has not
            just one response that the federation's y stands for.

    Warns:
        UserWarning: if fits were not finite; `Ranks.failed` names them.
    """
    import xarray

    bins = _bins(replications, draws, bins)
    at = method if not isinstance(method, Method) else lambda _: method
    template = compact(data)
    ids = torch.arange(template.clients)
    begin = first(at(0), template, seed, server)
    truth, y = simulated(at(0), template, begin, replications, seed)
    seeds = torch.randint(
        2**62, (replications,), generator=stream(seed, Stream.CALIBRATION)
    ).tolist()
    last = at(max(rounds - 1, 0))
    found: list[Tensors] = []
    failed: dict[int, str] = {}
    for r, (state, bad) in enumerate(_fits(at, template, y, rounds, begin, seeds, chunk)):
        seen = {}
        if not bad:
            seen = posterior(last, template, state, draws, ids=ids, seed=seeds[r], **what)
            bad = _not_finite(seen)
        if bad:
            failed[r] = bad
        known = {n: v.value[r] for n, v in truth.items()}
        found.append(_missing(known) if bad else _ranked(seen, known, last.shared, seeds[r]))
    if len(failed) == replications:
        raise ValueError(f"no fit is finite, the first for {failed[0]}; expected some")
    if failed:
        warnings.warn(
            f"{len(failed)} of {replications} fits are not finite, and have no ranks: "
            f"replications {', '.join(map(str, failed))}",
            stacklevel=2,
        )
    ranks = xarray.Dataset(
        {
            n: (("replication", *v.axes[1:]), np.stack([one[n].cpu().numpy() for one in found]))
            for n, v in truth.items()
        },
        {"replication": range(replications), "client": list(template.names)},
    )
    return Ranks(ranks, draws, bins, tuple(f"{r}: {bad}" for r, bad in failed.items()))


def simulated(
    method: Method, data: Federation, state: Round, count: int, seed: Seed = 0
) -> tuple[dict[str, Variable], Tensor]:
    """Draw R truths and responses from the model, given the server.

    Returns:
        Sites, latent and deterministic, [R, C, *p] or [R, *p] if all clients share them, with the
        names of their axes; and responses [R, N, ...] of all rows, client by client.

    Raises:
        ValueError: if the prior has no draws, or the model has not just one response.
    """
    axes = ClientAxes(data, torch.arange(data.clients), method.shared, {})
    made = of_prior(axes, method, state, Asked(draws=count, seed=seed))
    responses = {n: v for n, v in made["prior_predictive"].items() if v.axes[1] == "row"}
    if len(responses) != 1:
        raise ValueError(
            f"responses inside batch.rows() are {sorted(responses)}; expected just one, as y"
        )
    sites = {n: v for n, v in made["prior"].items() if "row" not in v.axes}
    return sites, next(iter(responses.values())).value


def _fits(
    at: Callable[[int], Method],
    template: Federation,
    y: Tensor,
    rounds: int,
    begin: Round,
    seeds: Sequence[int],
    chunk: int | None,
) -> Iterator[tuple[Round, str]]:
    """Yield the last round of each replication, and which of its clients were not finite."""
    clients = template.clients
    refused: dict[int, str] = {}
    step = max(1, BYTES // max(template.x.numel() * template.x.element_size(), 1))
    for k, some in enumerate(y.split(step)):
        states = federate(
            lambda number: side_by_side(at(number), clients, refused),
            with_responses(template, some),
            rounds,
            seed=seeds[k * step],
            chunk=chunk,
            start=first_of(begin.server, len(some), clients),
        )
        state, bad = first_of(begin.server, len(some), clients), [""] * len(some)
        for state in states:
            of_clients = (reason.partition("/") for reason in state.rejected)
            told = [(int(copy), client) for copy, _, client in of_clients]
            for copy, reason in (*told, *refused.items()):
                bad[copy] = bad[copy] or f"{reason} in round {state.number}"
            refused.clear()
        for one, reason in zip(rounds_of(state, clients), bad, strict=True):
            yield one, reason or _not_finite(one.server | one.private)


def _ranked(seen: Tensors, known: Tensors, shared: str, seed: int) -> Tensors:
    """Return the rank of every site of one replication."""
    source = stream(seed, Stream.CALIBRATION)
    return {
        n: rank(seen[n][:, 0] if matches(n, shared) else seen[n], truth, source)
        for n, truth in known.items()
    }


def _missing(known: Tensors) -> Tensors:
    return {n: torch.full(v.shape, torch.nan) for n, v in known.items()}


def _not_finite(tensors: Tensors) -> str:
    """Name the tensors that hold NaN or infinity."""
    bad = [n for n, v in tensors.items() if not bool(v.isfinite().all())]
    return f"{', '.join(bad)} not finite" if bad else ""


def rank(draws: Tensor, truth: Tensor, source: Generator) -> Tensor:
    """Return how many draws [S, ...] are below the truth [...]; `source` breaks ties at random."""
    ties = (draws == truth).sum(0)
    chance = torch.rand(ties.shape, generator=source, dtype=torch.float64).to(draws.device)
    return (draws < truth).sum(0) + (chance * (ties + 1)).floor()


def _bins(replications: int, draws: int, bins: int | None) -> int:
    """Return the number of bins, checked; None asks for the usual one."""
    most = min(20, max(2, replications // EXPECTED))
    fitting = [b for b in range(2, most + 1) if (draws + 1) % b == 0]
    if bins is None and fitting:
        return fitting[-1]
    if bins is None or (draws + 1) % bins:
        raise ValueError(
            f"draws is {draws}, bins {bins}; expected draws + 1 to be a multiple of the number of "
            f"bins, such as 199 draws and 20 bins; by default at most {most} bins"
        )
    return bins


def _holm(p: Any) -> Any:
    """Adjust p values [m] for their number (Holm, Scandinavian Journal of Statistics 1979)."""
    order, m = np.argsort(p), len(p)
    found = np.empty(m)
    found[order] = np.maximum.accumulate(np.minimum(1.0, p[order] * (m - np.arange(m))))
    return found
