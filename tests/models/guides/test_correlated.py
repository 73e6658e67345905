"""Correlated guides: their densities, moments and what they can represent exactly."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from torch import Size, Tensor

from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import elbo, latent, traces
from pyrofl.inference.definition.optim import adam
from pyrofl.inference.definition.programs import Guide
from pyrofl.inference.training.noise import ClientNoise
from pyrofl.models.guides import correlated
from pyrofl.tensors import Tensors, generator, seeded, under

SHAPES = {"a": Size([2]), "b": Size([])}
COVARIANCE = torch.tensor(
    [[1.0, 0.7, -0.2], [0.7, 2.0, 0.3], [-0.2, 0.3, 0.5]], dtype=torch.float64
)
CENTER = {
    "a": torch.tensor([0.3, -1.0], dtype=torch.float64),
    "b": torch.tensor(0.4, dtype=torch.float64),
}
FAMILIES = {
    "full": correlated.full_covariance,
    "low rank": correlated.low_rank(1),
    "copula": correlated.copula,
    "flow": correlated.flow(3, 5),
}


def target(covariance: Tensor):
    """Return a model whose posterior is Normal(CENTER, covariance), whatever the data."""

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        mean = torch.cat([CENTER["a"], CENTER["b"][None]])
        with batch.clients():
            z = [
                pyro.sample(n, dist.Normal(0.0, 1.0).expand(s).to_event(len(s)).mask(False))
                for n, s in SHAPES.items()
            ]
            joined = torch.cat([z[0], z[1][..., None]], -1)
            pyro.factor("joint", dist.MultivariateNormal(mean, covariance).log_prob(joined))

    return model


def stacked(q: Guide, clients: int, **changed: Tensor) -> Tensors:
    local = q.start({n: v.expand(clients, *v.shape) for n, v in CENTER.items()})
    return local | {n: v.expand(clients, *v.shape) for n, v in under("pi", changed).items()}


def bent(q: Guide, clients: int = 2) -> Tensors:
    """Return parameters that differ between clients and are far from the start."""
    return {
        n: v + 0.4 * torch.randn(v.shape, generator=generator(3, i), dtype=torch.float64)
        for i, (n, v) in enumerate(stacked(q, clients).items())
    }


def test_the_full_covariance_holds_any_normal():
    # log p - log q is then constant: no draw of the bound differs from the evidence, log 1.
    root = torch.linalg.cholesky(COVARIANCE)
    below = (root / root.diagonal()[:, None])[tuple(torch.tril_indices(3, 3, -1))]
    q = correlated.full_covariance(SHAPES)
    local = stacked(q, 2, log_sd=root.diagonal().log(), below=below)
    batch = toys.blobs().batch(torch.arange(2))
    loss = elbo(50)(target(COVARIANCE), q.program, {}, local, batch)
    close(loss, [0.0, 0.0], 1e-10)
    mean, variance = q.moments({}, local, batch)
    close(mean["a"][1], CENTER["a"])
    close(torch.cat([variance["a"][0], variance["b"][:1]]), COVARIANCE.diagonal())


def test_a_low_rank_holds_its_covariance():
    factor = torch.tensor([[0.5, -1.0], [2.0, 0.3], [0.1, 0.7]], dtype=torch.float64)
    sd = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    covariance = sd[:, None] * (torch.eye(3) + factor @ factor.T) * sd
    q = correlated.low_rank(2)(SHAPES)
    local = stacked(q, 2, log_sd=sd.log(), factor=factor)
    batch = toys.blobs().batch(torch.arange(2))
    close(elbo(50)(target(covariance), q.program, {}, local, batch), [0.0, 0.0], 1e-10)
    variance = q.moments({}, local, batch)[1]
    close(torch.cat([variance["a"][0], variance["b"][:1]]), covariance.diagonal())


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_densities_integrate_to_one(family):
    # E_q[p / q] = 1 for a normalized p; with p narrower than q the weights have little variance.
    q = family(SHAPES, init_scale=1.5)
    local, batch, draws = bent(q), toys.blobs().batch(torch.arange(2)), 80_000
    narrow = target(0.1 * torch.eye(3, dtype=torch.float64))
    with ClientNoise([generator(1, c) for c in range(2)]):
        g, p = traces(narrow, q.program, {}, local, batch, draws)
    p.compute_log_prob()
    g.compute_log_prob()
    log_q = sum(site["fn"].log_prob(site["value"]) for n, site in latent(g))
    weight = (p.nodes["joint"]["log_prob"] - log_q).squeeze(-1).exp()
    error = weight.std(0) / draws**0.5
    assert ((weight.mean(0) - 1).abs() < 4 * error).all()
    assert (error < 0.05).all()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_moments_are_those_of_the_draws(family):
    q = family(SHAPES, init_scale=0.7)
    local, batch, draws = bent(q), toys.blobs().batch(torch.arange(2)), 20_000
    mean, variance = q.moments({}, local, batch)
    with ClientNoise([generator(2, c) for c in range(2)]):
        g, _ = traces(target(COVARIANCE), q.program, {}, local, batch, draws)
    for n in SHAPES:
        drawn = g.nodes[n]["value"].squeeze(2)
        sd = variance[n].sqrt()
        # Four standard errors; quasi-random moments of a flow have an error of about a percent.
        assert ((drawn.mean(0) - mean[n]).abs() < sd * (4 / draws**0.5 + 0.02)).all()
        assert ((drawn.var(0) / variance[n] - 1).abs() < 4 * (2 / draws) ** 0.5 + 0.08).all()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_it_starts_where_it_is_told(family):
    q, batch = family(SHAPES, init_scale=0.3), toys.blobs().batch(torch.arange(1))
    start = {n: v[None] for n, v in CENTER.items()}
    mean, variance = q.moments({}, q.start(start), batch)
    for n in SHAPES:
        close(mean[n], start[n], 2e-3)
        assert ((variance[n].sqrt() / 0.3 - 1).abs() < 0.02).all()
    wide = {n: torch.full_like(v, 2.0) for n, v in start.items()}
    variance = q.moments({}, q.start(start, wide), batch)[1]
    assert ((variance["a"].sqrt() / 2 - 1).abs() < 0.02).all()


def test_a_copula_has_the_marginals_of_jones_and_pewsey():
    skew, log_a = torch.tensor([0.8, -0.5, 0.0]), torch.tensor([0.0, 0.3, -0.4])
    root = torch.linalg.cholesky(COVARIANCE)
    below = (root / root.diagonal()[:, None])[tuple(torch.tril_indices(3, 3, -1))]
    q = correlated.copula(SHAPES)
    local = stacked(q, 1, log_sd=torch.zeros(3).double(), below=below)
    local |= {"pi/skew": skew.double()[None], "pi/tail": log_a.double().atanh()[None]}
    with ClientNoise([generator(1)]):
        batch = toys.blobs().batch(torch.arange(1))
        g, _ = traces(target(COVARIANCE), q.program, {}, local, batch, 20_000)
    found = torch.cat([g.nodes["a"]["value"], g.nodes["b"]["value"][..., None]], -1)[:, 0, 0]
    scores = ((found - torch.cat([CENTER["a"], CENTER["b"][None]])).asinh() / log_a.exp()) - skew
    y = scores.sinh()
    # The scores are normal with the target's correlations, four standard errors.
    assert (y.mean(0).abs() < 4 / 20_000**0.5).all()
    sd = COVARIANCE.diagonal().sqrt()
    close(torch.cov(y.T), COVARIANCE / sd / sd[:, None], 4 * (2 / 20_000) ** 0.5)


@pytest.mark.slow
def test_a_flow_bends_where_a_normal_cannot():
    # A banana: b is near a_1^2. The evidence is log 1 = 0, so the loss is KL(q, p).
    def banana(received: Tensors, local: Tensors, batch: Batch) -> None:
        one = torch.ones((), dtype=torch.float64)
        with batch.clients():
            a = pyro.sample("a", dist.Normal(0 * one, one).expand([2]).to_event(1))
            pyro.sample("b", dist.Normal(a[..., 0].square(), 0.5 * one))

    batch, apart = toys.blobs().batch(torch.arange(1)), {}
    for name, family in (("full", correlated.full_covariance), ("flow", correlated.flow(4, 8))):
        q = family(SHAPES, init_scale=0.5)
        start = q.start({n: torch.zeros(1, *s, dtype=torch.float64) for n, s in SHAPES.items()})
        local = {n: v.clone().requires_grad_() for n, v in start.items()}
        optimizer = adam(0.03)(list(local.values()))
        with seeded(0):
            for _ in range(1000):
                optimizer.zero_grad()
                elbo(64)(banana, q.program, {}, local, batch).sum().backward()
                optimizer.step()
            apart[name] = float(elbo(4000)(banana, q.program, {}, local, batch).detach())
    assert apart["flow"] < apart["full"] / 2
    assert apart["full"] > 0.4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: correlated.full_covariance({"w": Size([2001])}), "2003001 numbers per client"),
        (lambda: correlated.full_covariance(SHAPES, init_scale=0.0), "init_scale is 0.0; expected"),
        (lambda: correlated.low_rank(0), "rank is 0; expected a whole number of at least 1"),
        (lambda: correlated.flow(0), "layers is 0; expected a whole number of at least 1"),
        (lambda: correlated.flow()({"w": Size([1])}), "a flow has 1 parameter"),
    ],
)
def test_what_cannot_be_made_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
