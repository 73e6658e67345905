"""Corrected draws are draws of the exact posterior, whatever the guide was."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import programs
import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from promises import others_slow
from pyro import poutine
from scipy.special import log_expit, logsumexp
from torch import Tensor

import pyrofl
from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.metadata import SHARED, Metadata
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.monitoring.status import ConvergenceStatus
from pyrofl.inference.posteriors import client_groups, corrected, group_weights
from pyrofl.inference.posteriors.export import smooth_weights
from pyrofl.inference.posteriors.proposals import draw_around_modes, normal_lattices
from pyrofl.models import fedavg, likelihood_factors, pfedvem, pvi
from pyrofl.tensors import Tensors

SIZES = (3, 1, 6)
DRAWS = 2000


def federation(x: Tensor, y: Tensor, sizes: tuple[int, ...], held_out: int = 0) -> Federation:
    parts = torch.arange(sum(sizes)).split(list(sizes))
    names = tuple(f"site {i}" for i in range(len(sizes)))
    return Federation(x, y, parts, tuple(p[:0] for p in parts), names=names, held_out=held_out)


def schools() -> Federation:
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(sum(SIZES), 1)))
    y = 2 * x[:, 0] + torch.from_numpy(rng.normal(size=sum(SIZES)))
    return federation(x, y, SIZES)


def model(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let slopes be mu + 2 eta_j, where all clients share mu."""
    zero = batch.x.new_zeros(())
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(zero, 5.0))
        eta = pyro.sample("eta", dist.Normal(zero, 1.0))
        slope = pyro.deterministic("slope", mu + 2 * eta)
        with batch.rows():
            pyro.sample("y", dist.Normal(slope * batch.x[..., 0], 0.5), obs=batch.y)


def together(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Be off, and much too narrow in mu."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(received["loc"], 0.3))
        pyro.sample("eta", dist.Normal(local["m"] - 0.3 * mu, 0.5))


def apart(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Be off, with each client's variables its own."""
    with batch.clients():
        pyro.sample("mu", dist.Normal(received["loc"], 4.0))
        pyro.sample("eta", dist.Normal(local["m"], 1.0))


def point(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Be a point."""
    with batch.clients():
        pyro.sample("mu", dist.Delta(received["loc"]))
        pyro.sample("eta", dist.Delta(local["m"]))


def still(guide: object, shared: bool) -> Method:
    """Return what does not move."""
    one = torch.tensor(1.0, dtype=torch.float64)
    return Method(
        init=lambda generator, clients: {"loc": one},
        init_client=lambda received, cohort, generator: {"m": 0.2 * cohort.ids.to(received["loc"])},
        model=model,
        guide=guide,  # type: ignore[arg-type]
        phases=(Phase((lambda received, local, batch: {"m": local["m"]},)),),
        aggregate=lambda server, message, cohort, generator: server,
        metadata=Metadata({"mu": SHARED} if shared else {}),
    )


def exact(data: Federation, groups: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return means and sds of mu and the etas of clients, where each group has a mu."""
    means, sds = [], []
    for group in groups:
        n = 1 + len(group)
        precision, shift = np.diag([1 / 25] + [1.0] * len(group)), np.zeros(n)
        for at, j in enumerate(group):
            rows = data.train[j]
            x, y = data.x[rows, 0].numpy(), data.y[rows].numpy()
            way = np.zeros(n)
            way[0], way[1 + at] = 1.0, 2.0
            precision += np.outer(way, way) * (x @ x) / 0.25
            shift += way * (x @ y) / 0.25
        covariance = np.linalg.inv(precision)
        means.append(covariance @ shift)
        sds.append(np.sqrt(np.diag(covariance)))
    return np.stack(means), np.stack(sds)


def check(found: np.ndarray, mean: np.ndarray, sd: np.ndarray, draws: float) -> None:
    """Compare moments of draws, within 4 standard errors."""
    assert np.all(abs(found.mean(0) - mean) < 4 * sd / draws**0.5)
    assert np.all(abs(np.log(found.std(0) / sd)) < 4 / (2 * draws) ** 0.5)


def test_a_wrong_guide_of_shared_sites_gives_the_exact_posterior():
    run = pyrofl.fit(still(together, True), schools(), 1, progress=False)
    found = run.to_arviz(DRAWS, corrected=True)
    (mean,), (sd,) = exact(run.data, [[0, 1, 2]])
    p, stats = found["posterior"], found["sample_stats"]
    values = np.column_stack([p["mu"].values[0], p["eta"].values[0]])
    count = min(DRAWS, float(stats["importance_ess"][0]))
    assert float(stats["pareto_k"][0]) < 0.5
    check(values, mean, sd, count / 2)  # draws made again from weighted ones
    np.testing.assert_allclose(
        p["slope"].values, p["mu"].values[..., None] + 2 * p["eta"].values, rtol=1e-12
    )
    # The guide's own draws are off by many standard errors.
    own = run.to_arviz(DRAWS, corrected=False)["posterior"]["mu"].values[0]
    assert abs(own.mean() - mean[0]) > 20 * sd[0] / DRAWS**0.5


def test_clients_that_share_nothing_are_weighted_by_themselves():
    run = pyrofl.fit(still(apart, False), schools(), 1, progress=False)
    found = run.to_arviz(DRAWS, corrected=True)
    p, stats = found["posterior"], found["sample_stats"]
    assert stats["pareto_k"].dims == ("chain", "client")
    for j in range(3):
        (mean,), (sd,) = exact(run.data, [[j]])
        values = np.column_stack([p[n].values[0, :, j] for n in ("mu", "eta")])
        count = float(stats["importance_ess"][0, j])
        check(values, mean, sd, count / 2)


DEATHS, CASES = np.array([0, 18, 8, 46, 8, 13]), np.array([47, 148, 119, 810, 211, 196])


def by_quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Return means and sds of mu and tau, on a grid."""
    mu, log_tau = np.meshgrid(np.linspace(-5, 0, 80), np.linspace(-8, 1.5, 120), indexing="ij")
    mu, log_tau = mu.ravel(), log_tau.ravel()
    at, tau = np.linspace(-6, 6, 601), np.exp(log_tau)
    logit = mu[:, None] + tau[:, None] * at
    dies, lives = log_expit(logit), log_expit(-logit)
    log_w = -0.5 * at**2 - np.log(np.exp(-0.5 * at**2).sum())
    log_p = -0.5 * ((mu + 2) / 1.5) ** 2 - 0.5 * tau**2 + log_tau
    for y, n in zip(DEATHS, CASES, strict=True):
        log_p += logsumexp(y * dies + (n - y) * lives + log_w, -1)
    w = np.exp(log_p - log_p.max())
    w /= w.sum()
    values = np.stack([mu, tau])
    means = values @ w
    return means, np.sqrt((values - means[:, None]) ** 2 @ w)


@pytest.mark.parametrize("rounds", others_slow([1, 6], [1]))
def test_hospitals_after_any_number_of_rounds(rounds):
    x, y = (torch.tensor(v, dtype=torch.float64) for v in (CASES[:, None], DEATHS))
    data = federation(x, y, (1,) * 6)
    method = pvi.hierarchical(programs.hospitals, data, shared="mu tau", num_particles=32, steps=5)
    run = pyrofl.fit(method, data, rounds, progress=False)
    found = run.to_arviz(DRAWS, corrected=True)
    p, stats = found["posterior"], found["sample_stats"]
    values = np.stack([p["mu"].values[0], p["tau"].values[0]], 1)
    assert float(stats["pareto_k"][0]) < 0.7
    check(values, *by_quadrature(), float(stats["importance_ess"][0]) / 2)


def test_points_and_networks_cannot_be_weighted():
    data = toys.blobs()
    net = toys.net()
    point = pyrofl.fit(fedavg.build(net), data, 1, progress=False)
    with pytest.raises(ValueError, match="the guide is a point; use a guide with some spread"):
        point.to_arviz(10, corrected=True)
    wide = pyrofl.fit(pfedvem.build(toys.net("mlp:400")), data, 1, progress=False)
    with pytest.raises(ValueError, match="variables; at most 2,000"):
        wide.to_arviz(10, corrected=True)


def test_held_out_clients_are_no_part_of_what_others_know():
    data = schools()
    some = federation(data.x, data.y, SIZES, held_out=1)
    run = pyrofl.fit(still(together, True), some, 1, progress=False)
    with pytest.raises(ValueError, match="'site 2' is held out; corrected=True needs"):
        run.to_arviz(10, ids=torch.tensor([2]), corrected=True)


def off(shared: dist.TorchDistribution) -> Method:
    def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            pyro.sample("mu", shared)
            pyro.sample("eta", dist.Normal(local["m"], 1.0))

    return still(guide, True)


def test_weights_that_cannot_be_trusted_are_refused_by_default():
    run = pyrofl.fit(off(dist.Normal(60.0, 1e-3)), schools(), 1, progress=False)
    with pytest.warns(UserWarning, match="corrected draws are unreliable; Pareto k is"):
        run.to_arviz(50, corrected=True)
    with pytest.warns(
        UserWarning, match="draws are not corrected: draws of the guide are used"
    ) as told:
        found = run.to_arviz(50)
    assert {one.filename for one in told} == {__file__}
    guided = run.to_arviz(50, corrected=False)
    assert found["posterior"].equals(guided["posterior"])
    assert found["posterior"].attrs["corrected"].startswith("no: Pareto k is ")
    assert run.ending["weights"].startswith("Pareto k of the correction is ")
    assert float(found["sample_stats"]["importance_ess"][0]) < 400


def test_the_status_describes_the_draws_that_to_arviz_returned_last():
    run = pyrofl.fit(still(together, True), schools(), 6, progress=False)
    run.ending = {"note": "the guide is too wide"}
    assert "to_arviz corrects" in str(run.status)
    run.to_arviz(50)
    assert str(run.status).endswith("the draws of to_arviz are corrected")
    run.to_arviz(50, corrected=False)
    assert str(run.status).endswith("its draws are not corrected")
    run.to_arviz(50, groups=["prior"])
    assert str(run.status).endswith("its draws are not corrected")


def test_draws_are_corrected_by_default():
    run = pyrofl.fit(still(together, True), schools(), 1, progress=False)
    found, exact_draws = run.to_arviz(50), run.to_arviz(50, corrected=True)
    assert found["posterior"].equals(exact_draws["posterior"])
    assert found["posterior"].attrs["corrected"] == "yes"
    assert {"pareto_k", "importance_ess"} <= set(found["sample_stats"])
    of_eta = found["sample_stats"]["pareto_k_eta"]
    assert of_eta.dims == ("chain", "estimate", "client")
    assert list(of_eta["estimate"].values) == ["mean", "sd", "2.5%", "97.5%"]
    assert found["sample_stats"]["pareto_k_mu"].dims == ("chain", "estimate")
    assert (of_eta >= found["sample_stats"]["pareto_k"]).all()
    table = run.summary(50)
    assert table.loc["mu", "pareto_k"] == float(found["sample_stats"]["pareto_k_mu"].max())
    assert not run.ending.get("weights")
    straight = run.to_arviz(50, corrected=False)
    assert straight["posterior"].attrs["corrected"] == "no: corrected=False"
    assert not straight["posterior"].equals(found["posterior"])


def test_draws_that_need_no_correction_say_so_without_a_warning():
    data, shared = toys.blobs(), schools()
    held_out = federation(shared.x, shared.y, SIZES, held_out=1)
    model_of_two = still(together, True)
    cases = [
        (still(point, True), shared, {}, "the guide is a point"),
        (still(apart, False), shared, {}, "clients share no random variable"),
        (pfedvem.build(toys.net()), data, {}, "clients share no random variable"),
        (pvi.build(toys.net("mlp:400")), data, {}, "and at most 50 can be weighted"),
        (model_of_two, held_out, {"ids": torch.tensor([2])}, "a client is held out"),
        (
            model_of_two,
            pyrofl.data.outline(("a", "b"), (3, 4), (1,), dtype=torch.float64),
            {},
            "the clients' rows are not available",
        ),
    ]
    for method, some, asked, reason in cases:
        run = pyrofl.fit(method, some, 0, progress=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = run.to_arviz(3, **asked)
        attribute = found["posterior"].attrs["corrected"]
        assert attribute.startswith("no: ")
        assert reason in attribute
        assert "pareto_k" not in found.get("sample_stats", {})


def test_advice_suits_the_verdict():
    moving, done = (ConvergenceStatus(kind, "", 1) for kind in ("not converged", "converged"))
    assert corrected.advice(moving) == "the run has not converged: fit more rounds"
    ended = replace(moving, why="chains have not mixed: use X", ended=True)
    assert corrected.advice(ended) == "the run has not converged: chains have not mixed: use X"
    assert "more rounds will not help" in corrected.advice(done)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_evenly_spaced_noise_is_normal_and_varies_less(size):
    count = 20_000
    noise = normal_lattices(count, 7, size, torch.Generator().manual_seed(0))
    each = noise.flatten(0, 1).flatten()
    # Draws of a set are negatively dependent: 4 standard errors of independent ones are enough.
    error = 4 / each.numel() ** 0.5
    assert abs(float(each.mean())) < error
    assert abs(float(each.square().mean()) - 1) < error * 2**0.5
    means = noise.square().sum(-1).mean(1)
    assert float(means.var()) < 0.8 * 2 * size / 7


def test_shared_sites_that_are_not_normal_are_refused():
    run = pyrofl.fit(off(dist.Gamma(2.0, 1.0)), schools(), 1, progress=False)
    with pytest.raises(ValueError, match="the guide draws the shared 'mu' from a Gamma; use"):
        run.to_arviz(50, corrected=True)


def test_all_groups_are_of_the_corrected_draws():
    run = pyrofl.fit(still(together, True), schools(), 1, progress=False)
    found = run.to_arviz(500, corrected=True, groups="all")
    p = found["posterior"]
    whose = found["log_likelihood"]["row_client"]
    slope = p["slope"].sel(client=whose).values[0]
    x, y = (v.numpy() for v in (run.data.x[:, 0], run.data.y))
    log_lik = -0.5 * ((y - slope * x) / 0.5) ** 2 - math.log(0.5 * math.sqrt(2 * math.pi))
    np.testing.assert_allclose(found["log_likelihood"]["y"].values[0], log_lik, atol=1e-9)
    # As draws of the posterior, they are as likely under what they come of.
    stats = found["sample_stats"]
    assert (stats["log_p"] == stats["log_q"]).all()
    assert set(p.data_vars) == {"mu", "eta", "slope"}


def test_corrected_draws_are_the_same_again_and_of_any_clients():
    run = pyrofl.fit(still(together, True), schools(), 1, progress=False)
    first, second = (run.to_arviz(50, corrected=True)["posterior"] for _ in range(2))
    assert first.equals(second)
    one = run.to_arviz(50, corrected=True, ids=torch.tensor([1]))["posterior"]
    np.testing.assert_array_equal(one["eta"].values[..., 0], first["eta"].values[..., 1])


@pytest.mark.parametrize("how", ["poutine.scale", "weights of rows"])
def test_weights_of_rows_count_in_corrected_draws(how: str) -> None:
    """Half of the rows count five times, in a normal model whose posterior is a closed form."""
    data, weights = schools(), torch.tensor([5.0, 1.0] * 5, dtype=torch.float64)
    if how == "weights of rows":
        data = replace(data, weights=weights)
    else:
        data = replace(data, x=torch.cat([data.x, weights[:, None]], 1))

    def scaled(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            scale = batch.x[..., 1] if how == "poutine.scale" else 1.0
            with batch.rows(), poutine.scale(scale=scale):
                pyro.sample("y", dist.Normal(mu * batch.x[..., 0], 0.5), obs=batch.y)

    run = pyrofl.fit(pvi.hierarchical(scaled, data, shared="mu"), data, 2, progress=False)
    found = run.to_arviz(draws=DRAWS, corrected=True)["posterior"]["mu"].values
    precision = 1 / 25 + (weights * data.x[:, 0] ** 2).sum() / 0.25
    mean = (weights * data.x[:, 0] * data.y).sum() / 0.25 / precision
    sd = float(precision) ** -0.5
    assert abs(found.mean() - float(mean)) < 4 * sd / math.sqrt(DRAWS)
    assert abs(found.std() / sd - 1) < 4 / math.sqrt(2 * DRAWS)


def test_weights_that_differ_by_rounding_are_good() -> None:
    """As of an exact guide; ArviZ divides by zero in the second case."""
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(2424), dtype=torch.float64)
    for scale in (0.0, 1e-14):
        log_w, k = smooth_weights(noise * scale - 70)
        torch.testing.assert_close(log_w.exp(), torch.full_like(log_w, 1e-3))
        assert k < 0.7


def ragged() -> Federation:
    """Return clients of 1 to 40 rows, as groups of different sizes and a remainder."""
    rng = np.random.default_rng(5)
    sizes = (3, 1, 40, 6, 25, 2, 30, 1, 9)
    x = torch.from_numpy(rng.normal(size=(sum(sizes), 1)))
    slopes = torch.from_numpy(rng.normal(1.0, 0.7, len(sizes))).repeat_interleave(
        torch.tensor(sizes)
    )
    y = torch.bernoulli(torch.sigmoid(slopes * x[:, 0]), generator=torch.Generator().manual_seed(0))
    return federation(x, y, sizes)


def logistic(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        slope = pyro.sample("slope", dist.Normal(mu, tau))
        pyro.deterministic("odds", (mu + slope).exp())
        with batch.rows():
            pyro.sample("y", dist.Bernoulli(logits=slope * batch.x[..., 0]), obs=batch.y)


# The odds exp(slope) of clients with few rows have a heavy tail.
@pytest.mark.filterwarnings("ignore:estimates of corrected draws .* for the sd of odds")
@pytest.mark.parametrize("build", [pvi.hierarchical, likelihood_factors.hierarchical])
def test_the_correction_does_not_depend_on_groups_and_chunks(build, monkeypatch):
    """One client at a time in one chunk, and all clients in groups and several chunks."""
    data = ragged()
    run = pyrofl.fit(build(logistic, data, shared="mu tau"), data, 2, progress=False)
    alone = run.to_arviz(300, corrected=True, chunk_size=1)
    monkeypatch.setattr(group_weights, "MAX_CELLS", 500)
    monkeypatch.setattr(client_groups, "MAX_GROUP_ROWS", 60)
    groups = run.to_arviz(300, corrected=True)
    for name in ("pareto_k", "importance_ess"):
        one, other = (f["sample_stats"][name].values for f in (alone, groups))
        np.testing.assert_allclose(one, other, rtol=1e-7)
    for name in ("mu", "tau", "slope", "odds"):
        one, other = (f["posterior"][name].values for f in (alone, groups))
        np.testing.assert_allclose(one, other, rtol=1e-7)
    rows = run.to_arviz(300, corrected=True, groups=["posterior", "log_likelihood"])
    for name in ("mu", "tau", "slope", "odds"):
        np.testing.assert_allclose(
            rows["posterior"][name], groups["posterior"][name], rtol=1e-7, err_msg=name
        )


@pytest.mark.parametrize(("size", "share"), [(1, 1.0), (1, 1 / 32), (2, 1 / 32), (5, 1 / 32)])
@pytest.mark.parametrize("draws", [3, 8, 17])
def test_weights_of_noise_around_a_mode_are_unbiased(size, share, draws):
    """The mean of p / r over draws of r is 1, for a normal p that is shifted from the mode."""
    source, sets = torch.Generator().manual_seed(draws), 4000
    shifts = torch.rand(sets, 1, 1, 2, size, generator=source, dtype=torch.float64)
    mode = torch.full((sets, 1, size), 0.3, dtype=torch.float64)
    root = 1.1 * torch.eye(size, dtype=torch.float64).expand(sets, 1, size, size)
    noise, log_weight = draw_around_modes(mode, root, shifts, draws, share)
    assert noise.shape == (sets, 1, draws, size)
    # The target is the standard normal, so that each ratio is exp(-log weight).
    means = (-log_weight[:, 0]).exp().mean(1)
    error = means.std() / sets**0.5
    assert abs(float(means.mean()) - 1) < 4 * float(error)
    if share == 1:  # as the trapezoidal rule on a periodic function
        assert float(means.var()) < 1e-3
    seconds = ((-log_weight[:, 0]).exp() * noise[:, 0].square().sum(-1)).mean(1)
    assert abs(float(seconds.mean()) - size) < 4 * float(seconds.std()) / sets**0.5
