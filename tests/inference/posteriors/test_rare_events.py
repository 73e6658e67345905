"""Posteriors of rare events by default, compared with a grid: likelihoods have one tail alone.

A client without events bounds its effect from above only, so that a normal factor misses a tail.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyrofl
from pyrofl import Federation, federations
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors import corrected, importance_sampling
from pyrofl.inference.posteriors.corrected import group_clients
from pyrofl.inference.posteriors.draws import draws_specification
from pyrofl.inference.posteriors.group_weights import GroupImportanceSampler
from pyrofl.inference.posteriors.guided_sites import GuidedSites
from pyrofl.inference.posteriors.proposals import Listed

MEAN, NORMAL = dist.Normal(0.0, 5.0), dist.Normal(0.0, 1.0)
FEW = ([12, 30, 8, 55, 20, 40], [0, 1, 0, 2, 0, 0]), dist.HalfNormal(1.0)
HOSPITALS = (
    ([12, 30, 8, 55, 20, 9, 14, 40, 6, 25, 18, 33], [0, 1, 0, 0, 1, 0, 0, 2, 0, 0, 0, 1]),
    dist.HalfCauchy(2.5),
)


def fitted(counts: tuple[list[int], list[int]], prior: Any, seed: int = 0) -> Run:
    """Fit events of clients with one row each."""

    def model(received, local, batch):
        with batch.clients():
            mu, tau = pyro.sample("mu", MEAN), pyro.sample("tau", prior)
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            with batch.rows():
                pyro.sample("y", dist.Binomial(batch.x[..., 0], logits=theta), obs=batch.y)

    n, y = torch.tensor(counts).double()
    rows = list(torch.arange(len(y)).split(1))
    data = Federation(n[:, None], y, rows, [r[:0] for r in rows])
    method = pyrofl.hierarchical(model, data, shared="mu tau")
    return pyrofl.fit(method, data, seed=seed, progress=False)


def log_likelihoods(counts: tuple[list[int], list[int]], mu: Tensor, tau: Tensor) -> Tensor:
    """Return the clients' log marginal likelihoods [S, C] at mu and tau [S]."""
    z = torch.linspace(-8, 8, 401).double()
    n, y = torch.tensor(counts).double()[:, :, None, None]
    theta = mu[:, None] + tau[:, None] * z
    each = dist.Binomial(n, logits=theta).log_prob(y) + NORMAL.log_prob(z)
    return each.logsumexp(-1).T + math.log(z[1] - z[0])


def grid(counts: tuple[list[int], list[int]], prior: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Return values of mu and tau with their exact probabilities."""
    mu = torch.linspace(-16, 4, 61).double()
    log_tau = torch.linspace(-6, 4, 61).double()
    at, log_t = (v.flatten() for v in torch.meshgrid(mu, log_tau, indexing="ij"))
    tau = log_t.exp()
    parts = zip(at.split(500), tau.split(500), strict=True)
    log_p = torch.cat([log_likelihoods(counts, *some).sum(1) for some in parts])
    w = (log_p + MEAN.log_prob(at) + prior.log_prob(tau) + log_t).softmax(0)
    return {"mu": (at, w), "tau": (tau, w)}


@pytest.fixture(scope="module")
def run() -> Run:
    """Six clients with three events."""
    return fitted(*FEW)


def compare(run: Run, exact: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Assert that means and sds are within 0.1 sd of the grid, and tau's upper end within 0.15."""
    posterior = run.to_arviz(4000, progress=False)["posterior"]
    for name, (value, w) in exact.items():
        mean = float(w @ value)
        sd = float((w @ (value - mean).square()).sqrt())
        draws = posterior[name].values
        assert abs(draws.mean() - mean) < 0.1 * sd, name
        assert 0.9 < draws.std() / sd < 1.1, name
    value, w = exact["tau"]
    order = value.argsort()
    end = float(value[order][np.searchsorted(w[order].cumsum(0).numpy(), 0.975)])
    assert np.quantile(posterior["tau"].values, 0.975) == pytest.approx(end, rel=0.15)


@pytest.mark.slow
def test_effects_of_rare_events_have_their_spread(run):
    compare(run, grid(*FEW))


def test_marginal_likelihoods_are_exact_in_the_tails_of_the_list(run):
    """Draws of effects follow each client's likelihood where its normal factor does not."""
    method, size = run.method, 8  # of each point
    listed = method.views["personal"].listed(run.state.server)
    far = torch.tensor([[0.0, 0.0], [0.0, 3.0], [2.0, 2.0], [-3.0, 2.0], [-3.0, -3.0]]).double()
    noise = far.repeat_interleave(size, 0)
    server, _ = listed.listed_at(noise)
    state, asked = (
        replace(run.state, server=server),
        draws_specification(method, {"seed": 0, "draws": 10}),
    )
    (group,) = group_clients(method, run.data, state, torch.arange(run.data.clients), asked)
    part = GroupImportanceSampler(method, group, GuidedSites(method, group))
    terms = part.together(Listed(len(noise)).sample((len(noise),)), 8, 1)
    values = part.shared_values()
    off = terms.log_l - log_likelihoods(FEW[0], values["mu"], values["tau"])
    ratio = off.exp().unflatten(0, (len(far), size))
    assert float(ratio.std(1).max()) < 0.25
    assert float((ratio.mean(1) - 1).abs().max()) < 0.25


def test_draws_where_the_server_has_no_density_are_left_out(run, monkeypatch):
    """For example, the log density of cut points that are equal in floating point is NaN."""
    near_list = corrected.server_draw_list

    def undefined_for_extremes(*arguments):
        listed = near_list(*arguments)

        def listed_at(noise):
            server, level = listed.listed_at(noise)
            return server, torch.where(noise.norm(dim=-1) > 6, torch.nan, level)

        return replace(listed, listed_at=listed_at)

    monkeypatch.setattr(corrected, "server_draw_list", undefined_for_extremes)
    compare(run, grid(*FEW))
    assert run.status.kind == "converged"


def test_draws_without_any_usable_weights_are_no_converged_run(run, monkeypatch):
    def fail(*arguments):
        raise torch.linalg.LinAlgError

    monkeypatch.setattr(importance_sampling, "refit_proposal", fail)
    with pytest.warns(UserWarning, match="draws are not corrected: the weighted draws do not vary"):
        run.to_arviz(100, progress=False)
    assert str(run.status).startswith("not converged: draws cannot be corrected, as the weighted")


def binary(clients: int, events: list[int]) -> tuple[list[int], list[int]]:
    """Return the counts of clients with one row each."""
    return [1] * clients, [int(i in events) for i in range(clients)]


OVERSHOOTING = binary(20, [3]), dist.HalfNormal(2.0)


@pytest.mark.filterwarnings("ignore:estimates of corrected draws .* for the sd of")
def test_factors_that_overshoot_change_by_a_part():
    """Factors of many alike clients, all changed at once, may alternate without end."""
    run = fitted(*OVERSHOOTING)
    assert run.state.server["server/share"] < 1
    assert run.status.kind == "converged"
    compare(run, grid(*OVERSHOOTING))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:estimates of corrected draws .* for the sd of")
@pytest.mark.parametrize("seed", [0, 1])
def test_an_improper_product_of_factors_is_left_by_smaller_changes(seed):
    """Undamped changes lead to a product of prior and factors that is no distribution."""
    counts, prior = binary(60, [5, 20, 40]), dist.HalfNormal(2.0)
    compare(fitted(counts, prior, seed), grid(counts, prior))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:estimates of corrected draws .* for the sd of")
@pytest.mark.parametrize("seed", range(5))
def test_twelve_hospitals_with_six_deaths(seed):
    """As published, the exact tau has mean .805, sd .722 and a 97.5% quantile of 2.58.

    Its half-Cauchy prior has a heavy tail, so that a warning tells of its standard deviation.
    """
    compare(fitted(*HOSPITALS, seed), grid(*HOSPITALS))


EVENTS = {
    "A": "02121100312201000100120000330402002010201001111000310000200112000001000100131011",
    "B": "00000000001000000000000000000000000000010001100000",
    "C": "101110110210001000110201102050",
}
NUTS = {  # mean and sd of 40,000 draws by NumPyro on the pooled rows
    "b": (-0.12, 0.12),
    "Intercept": (-1.71, 0.684),
    "sd_client": (1.32, 0.48),
    "shape": (14.6, 12.27),
}


@pytest.mark.parametrize("seed", [0, 1])
def test_counts_with_little_information_on_a_shape(seed):
    """The likelihood is convex in the log of the shape: far out, factors may exceed the prior.

    The server's chains then went to a shape of 0, and the fit fell back to PVI with a warning.
    """
    pytest.importorskip("formulae")
    source = np.random.default_rng(0)
    frames = {
        name: pd.DataFrame({"x": source.normal(size=len(text)), "y": [*map(float, text)]})
        for name, text in EVENTS.items()
    }
    tables = federations.from_frames(frames)
    priors = {"Intercept": dist.Normal(-3.0, 1.0), "b": NORMAL, "sd": dist.HalfNormal(1.0)}
    method = pyrofl.regression(
        "y ~ x + (1 | client)", tables, family="negative_binomial", priors=priors
    )
    run = pyrofl.fit(method, tables, seed=seed, progress=False)
    assert run.status.kind == "converged"
    assert float(run.state.server["server/r_hat"]) < 1.05
    posterior = run.to_arviz(4000, progress=False)["posterior"]
    for name, (mean, sd) in NUTS.items():
        draws = posterior[name].values
        assert abs(draws.mean() - mean) < 0.1 * sd, name
        assert 0.9 < draws.std() / sd < 1.1, name
