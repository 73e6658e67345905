"""Simulation-based calibration: is the truth anywhere among the draws, as often as it should be?

Talts, Betancourt, Simpson, Vehtari and Gelman, "Validating Bayesian Inference Algorithms with
Simulation-Based Calibration", 2018.

    theta ~ p(theta),  y ~ p(y | theta),  theta_1 ... theta_L ~ q(theta; y)
    rank = number of theta_l below theta,  uniform on 0 ... L if q is the posterior
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.checks.replicas import (
    compact,
    first_of,
    rounds_of,
    side_by_side,
    with_responses,
)
from pyrofl.inference.checks.sbc_ranks import Ranks, rank, usual_bins
from pyrofl.inference.evaluation.asked import Asked
from pyrofl.inference.loop.rounds import federate, first
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.arviz import ClientAxes, Variable, of_prior
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.inference.seeds import Seed, Stream, stream
from pyrofl.tensors import Tensors, matches

BYTES = 500_000_000  # rows of the replications that are fitted side by side


def sbc(
    method: Method | Callable[[int], Method],
    data: Federation,
    rounds: int,
    replications: int = 200,
    draws: int = 199,
    seed: Seed = 0,
    *,
    server: Tensors | None = None,
    bins: int | None = None,
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

    bins = usual_bins(replications, draws, bins)
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
    """Draw truths and responses from the model, given the server.

    Args:
        method: gives the model.
        data: a federation of training rows.
        state: a round.
        count: R.
        seed: of all draws.

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
