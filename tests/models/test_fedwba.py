"""FedWBA: barycenters and Stein particles with closed forms."""

from __future__ import annotations

import math

import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch import Tensor

import pyrofl
from pyrofl.cli import main
from pyrofl.data import Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fraction
from pyrofl.inference.posteriors.export import import_arviz
from pyrofl.models import fedwba, likelihoods
from pyrofl.models.fedwba import KernelDensity, direction, match
from pyrofl.nets import build
from pyrofl.tensors import generator

PARTICLES = 3
PROMISES = {
    "fedwba": Promises(
        message=(PARTICLES * toys.ALL, PARTICLES * toys.ALL),
        settings={"particles": PARTICLES, "epochs": 2},
        sites={"network": ("network_dim_0",), **toys.AXES},
        sent=frozenset({"w"}),
        random=True,
    )
}

SD, BANDWIDTH = 0.5, 0.8


def regression(sizes: tuple[int, ...], d: int) -> Federation:
    g, parts = generator("fedwba"), {}
    for j, n in enumerate(sizes):
        x = torch.randn(n, d, generator=g).double()
        z = torch.randn(d, generator=g).double()
        parts[f"client {j}"] = (x, x @ z + SD * torch.randn(n, generator=g).double())
    return Federation.from_arrays(parts).to("cpu", torch.float64)


def linear(d: int, **settings: object) -> Method:
    """Return the method for a linear model, with full batches and equal particles at the start."""
    options = {"bandwidth": BANDWIDTH, "batch": None, "init_scale": 1e-6} | settings
    return fedwba.build(build("linear", (d,), 1), likelihood=likelihoods.normal(SD), **options)


def exact(data: Federation, j: int, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the posterior with the prior Normal(v, BANDWIDTH^2 I)."""
    x, y = data.x[data.train[j]], data.y[data.train[j]]
    covariance = torch.linalg.inv(torch.eye(len(v)) / BANDWIDTH**2 + x.T @ x / SD**2)
    return v + covariance @ x.T @ (y - x @ v) / SD**2, covariance


def shuffled(particles: Tensor, seed: int) -> Tensor:
    return particles[torch.randperm(len(particles), generator=generator("order", seed))]


def test_the_barycenter_of_normals_on_a_line_has_the_mean_standard_deviation():
    """As quantile functions are averaged; exact for particles at quantiles."""
    z = torch.special.ndtri((torch.arange(50).double() + 0.5) / 50)[:, None]
    means, sds = [0.0, 3.0, -1.0], [1.0, 0.2, 2.4]
    clouds = [shuffled(m + s * z, i) for i, (m, s) in enumerate(zip(means, sds, strict=True))]
    found = match(shuffled(z, 9), torch.stack(clouds)).mean(0)
    close(found.sort(0).values, 2 / 3 + 1.2 * z)


def test_the_barycenter_of_normals_with_commuting_covariances_averages_their_roots():
    z = torch.randn(40, 3, generator=generator(1)).double()
    means = torch.randn(4, 3, generator=generator(2)).double()
    sds = torch.rand(4, 3, generator=generator(3)).double() + 0.1
    clouds = torch.stack(
        [shuffled(m + s * z, i) for i, (m, s) in enumerate(zip(means, sds, strict=True))]
    )
    found = match(clouds[0], clouds).mean(0)
    expected = means.mean(0) + sds.mean(0) * z
    close(found[found[:, 0].argsort()], expected[expected[:, 0].argsort()])


def test_the_barycenter_does_not_depend_on_the_order_of_particles():
    clouds = torch.randn(3, 20, 2, generator=generator(1)).double()
    start = clouds[0] + 0.1
    found = match(start, clouds).mean(0)
    other = match(start, torch.stack([shuffled(c, i) for i, c in enumerate(clouds)])).mean(0)
    close(found, other)
    cost = sum(
        torch.cdist(found, c).square().min(1).values.mean() for c in clouds
    )  # a lower bound of that of any assignment
    assert float((match(start, clouds) - found).square().sum(2).mean(1).sum()) >= float(cost)


def test_the_direction_is_a_double_sum():
    w, score = torch.randn(2, 5, 3, generator=generator(1)).double(), torch.randn(2, 5, 3).double()
    expected = torch.zeros_like(w)
    for c in range(2):
        apart = torch.cdist(w[c], w[c]).square()
        h = apart.median() / (2 * math.log(6))
        for m in range(5):
            for k in range(5):
                kernel = (-apart[k, m] / (2 * h)).exp()
                slope = -kernel * (w[c, k] - w[c, m]) / h  # of the kernel, by w_k
                expected[c, m] += (kernel * score[c, k] + slope) / 5
    close(direction(w, score), expected, 1e-9)


def test_one_particle_climbs_to_the_mode_and_the_server_averages():
    data = regression((3, 8, 20), 2)
    method = linear(2, particles=1, epochs=3000, lr=0.01)
    start = pyrofl.inference.engine.start.first(method, data, 0).server["v"]
    (state,) = federate(method, data, 1)
    modes = torch.stack([exact(data, j, start[0])[0] for j in range(3)])
    close(state.client_states["w"][:, 0], modes, 1e-5)
    close(state.server["v"][0], modes.mean(0), 1e-5)


def test_many_particles_have_the_moments_of_a_normal_posterior():
    """Of one and two effects: means to 0.05 standard deviations, and these to 8 percent."""
    for d in (1, 2):
        data = regression((3, 8), d)
        method = linear(d, particles=60, epochs=3000, lr=0.01, init_scale=1e-3)
        start = pyrofl.inference.engine.start.first(method, data, 0).server["v"]
        (state,) = federate(method, data, 1)
        for j in range(2):
            mean, covariance = exact(data, j, start.mean(0))
            sd, w = covariance.diagonal().sqrt(), state.client_states["w"][j]
            assert ((w.mean(0) - mean) / sd).abs().max() < 0.05
            assert (w.std(0) / sd).log().abs().max() < 0.08
            if d == 2:
                correlation = covariance[0, 1] / sd.prod()
                assert abs(torch.corrcoef(w.T)[0, 1] - correlation) < 0.05


def test_the_prior_is_a_mixture_of_normals_around_the_particles():
    loc = torch.randn(4, 1, 6, 3, generator=generator(1)).double()
    prior = KernelDensity(loc, BANDWIDTH)
    kernels = torch.distributions.Independent(torch.distributions.Normal(loc, BANDWIDTH), 1)
    weights = torch.distributions.Categorical(torch.ones(4, 1, 6).double())
    known = torch.distributions.MixtureSameFamily(weights, kernels)
    value = torch.randn(7, 4, 1, 3, generator=generator(2)).double()
    close(prior.expand((7, 4, 1)).log_prob(value), known.log_prob(value))
    with pyrofl.tensors.seeded(0):
        draws = prior.sample((20_000,))
    error = known.variance.sqrt() / 20_000**0.5
    assert ((draws.mean(0) - known.mean) / error).abs().max() < 4.5
    # The relative error of a variance is at most (2 / 20,000)^1/2 for tails lighter than normal.
    assert (draws.var(0) / known.variance).log().abs().max() < 4.5 * (2 / 20_000) ** 0.5


def test_draws_are_the_particles_of_the_client():
    data = regression((3, 8), 2)
    method = linear(2, particles=7, init_scale=0.3)
    run = pyrofl.fit(method, data, 2, participation=fraction(0.5), progress=False)
    draws = pyrofl.posterior(method, data, run.state, 700)["network"]
    for j in range(2):
        w = run.state.client_states["w"][j] if run.state.seen[j] else run.state.server["v"]
        nearest = (draws[:, j, None] - w).abs().sum(-1).min(1)
        assert nearest.values.max() < 1e-12
        assert nearest.indices.bincount(minlength=7).min() > 50


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_the_server_aggregates_assigned_particles_by_a_rule(rule):
    data = regression((3, 8, 5), 2)
    method = linear(2, particles=4, init_scale=0.3, aggregation=rule)
    start = pyrofl.inference.engine.start.first(method, data, 0).server["v"]
    (state,) = federate(method, data, 1)
    matched = match(start, state.client_states["w"])
    expected = matched.mean(0) if rule == "mean" else matched.median(0).values
    close(state.server["v"], expected)


def test_the_command_saves_particles_of_the_whole_network(tmp_path):
    words = "run fedwba --per-class 12 --clients 4 --net mlp:4 --rounds 1 --set epochs=1 --quiet"
    assert main([*words.split(), "--posterior-draws", "20", "--out", str(tmp_path / "r")]) == 0
    (path,) = tmp_path.glob("r/**/posterior.nc")
    posterior = import_arviz().from_netcdf(path)["posterior"]
    size = sum(s.numel() for s in build("mlp:4", (64,), 10).shapes.values())
    assert posterior["network"].sizes["network_dim_0"] == size
    first = posterior["network"].isel(chain=0, client=0).values[:, : 4 * 64]
    assert (first == posterior["fc1.weight"].isel(chain=0, client=0).values.reshape(20, -1)).all()
