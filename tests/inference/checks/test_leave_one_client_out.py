"""Leave-one-client-out is the closed form where there is one, and quadrature elsewhere."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import cache

import numpy as np
import programs
import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from scipy.special import gammaln, logsumexp, roots_hermitenorm
from torch import Tensor

import pyrofl
from pyrofl.data import Batch, Federation
from pyrofl.data.loaders import datasets
from pyrofl.data.loaders.conjugate import linear_regression
from pyrofl.inference.checks.elpd import elpd_data
from pyrofl.inference.definition.metadata import PER_CLIENT, Factors, metadata_of_class
from pyrofl.inference.posteriors.export import import_arviz, smooth_weights
from pyrofl.models import fedavg, likelihoods, pvi
from pyrofl.models.pvi.leaving import without_client
from pyrofl.models.shared.gaussians import Normals
from pyrofl.nets import build
from pyrofl.partitions import federations
from pyrofl.tensors import Tensors, generator

# BUGS examples, volume I, "Surgical": deaths of infants out of heart operations, hospitals A to L.
OPERATIONS = (47, 148, 119, 810, 211, 196, 148, 215, 207, 97, 256, 360)
DEATHS = (0, 18, 8, 46, 8, 13, 9, 31, 14, 8, 29, 24)


def by_client(elpd: object) -> Tensor:
    found = elpd.elpd_i if hasattr(elpd, "elpd_i") else elpd.loo_i  # type: ignore[attr-defined]
    assert found.dims == ("client",)
    return torch.from_numpy(found.values)


def errors(elpd: object) -> Tensor:
    found = elpd.elpd_i if hasattr(elpd, "elpd_i") else elpd.loo_i  # type: ignore[attr-defined]
    return torch.from_numpy(found["mcse"].values)


def total(elpd: object) -> float:
    return float(elpd.elpd if hasattr(elpd, "elpd") else elpd.elpd_loo)  # type: ignore[attr-defined]


def left_out(y: Tensor, covariance: Tensor, rows: tuple[Tensor, ...]) -> Tensor:
    """Return log p(y_j | y_others) of a normal of all rows with mean 0, in closed form."""

    def joint(at: Tensor) -> Tensor:
        if not len(at):
            return torch.zeros(()).to(y)
        part = dist.MultivariateNormal(torch.zeros_like(y[at]), covariance[at][:, at])
        return part.log_prob(y[at])

    every = torch.arange(len(y))
    return torch.stack([joint(every) - joint(every[~torch.isin(every, mine)]) for mine in rows])


def people(spread: float = 1.5) -> Federation:
    g = generator(4)
    sizes, names = [12, 4, 1, 8], ("Ada", "Bea", "Cleo", "Dora")
    rows = torch.arange(sum(sizes)).split(sizes)
    each = spread * torch.randn(4, generator=g).double()
    y = torch.cat([m + torch.randn(n, generator=g) for m, n in zip(each, sizes, strict=True)])
    y = y.double()  # in single precision a log density of 20 is rounded by 1e-6
    return Federation(y.new_ones(len(y), 1), y, rows, [r[:0] for r in rows], names)


def hierarchy(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        theta = pyro.sample("theta", dist.Normal(mu, 1.5))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


@cache
def normal(seed: int = 0) -> pyrofl.Run:
    method = pvi.hierarchical(
        hierarchy, people(), shared="mu", damping=1.0, num_particles=8, steps=6
    )
    return pyrofl.fit(method, people(), 2, seed=seed, progress=False)


def of_people() -> Tensor:
    data = people()
    covariance = 25 + torch.eye(len(data.y), dtype=torch.float64)
    for mine in data.train:
        covariance[mine[:, None], mine] += 1.5**2
    return left_out(data.y, covariance, data.train)


@pytest.mark.parametrize("rounds", [0, 2])
def test_where_all_is_normal_it_is_the_closed_form(rounds):
    elpd = pyrofl.checks.loco(normal(), 100, rounds=rounds)
    close(by_client(elpd), of_people(), 1e-6)
    assert errors(elpd).max() < 1e-6
    assert elpd.n_data_points == 4
    assert elpd.pareto_k["client"].values.tolist() == ["Ada", "Bea", "Cleo", "Dora"]
    assert float(elpd.pareto_k.max()) < 0.5


def test_a_network_whose_parameters_all_share():
    task = linear_regression(4, 3, [9, 30, 12, 20], seed=1)
    net, data = build("linear", (3,), 1), task.federation
    method = pvi.build(
        net, likelihood=likelihoods.normal(), covariance="full", damping=1.0, lr=1.0, epochs=2
    )
    elpd = pyrofl.checks.loco(pyrofl.fit(method, data, 2, progress=False), 100)
    covariance = data.x @ data.x.T + torch.eye(len(data.y)).double()
    close(by_client(elpd), left_out(data.y, covariance, data.train), 1e-6)


def test_runs_count_the_same_and_agree():
    both = pyrofl.checks.loco([normal(0), normal(1)], 100)
    close(by_client(both), of_people(), 1e-6)


def of_schools(received: Tensors, local: Tensors, batch: Batch) -> None:
    """State eight schools centered: what a client has of its own is run as theta_noncentered."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


@cache
def schools(centered: bool = False) -> pyrofl.Run:
    data = federations.split(datasets.load("eight_schools"), "groups").to("cpu", torch.float64)
    model = of_schools if centered else programs.eight_schools
    method = pvi.hierarchical(model, data, shared="mu tau", steps=10)
    return pyrofl.fit(method, data, 12, progress=False)


def of_hospitals(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(-2.0, 1.5))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        with batch.rows():
            fn = dist.Binomial(batch.x[..., 0], logits=mu + tau * eta)
            pyro.sample("deaths", fn, obs=batch.y)


@cache
def hospitals(rounds: int = 20) -> pyrofl.Run:
    n, y = (torch.tensor(v).double() for v in (OPERATIONS, DEATHS))
    rows = torch.arange(12).split(1)
    data = Federation(n[:, None], y, rows, [r[:0] for r in rows], tuple("ABCDEFGHIJKL"))
    method = pvi.hierarchical(of_hospitals, data, shared="mu tau", steps=10)
    return pyrofl.fit(method, data, rounds, progress=False)


class Grid:
    """A grid of mu and log tau, and what every client says there with its own variable summed."""

    def __init__(self, run: pyrofl.Run, low: float, high: float) -> None:
        mu, log_tau = np.linspace(low, high, 91), np.linspace(-7, 4, 141)
        mu, log_tau = np.meshgrid(mu, log_tau, indexing="ij")
        tau, (node, weight) = np.exp(log_tau), roots_hermitenorm(60)
        self.points = torch.from_numpy(np.stack([mu, log_tau], -1))
        z = mu[..., None] + tau[..., None] * node
        x, y = (v.flatten().tolist() for v in (run.data.x, run.data.y))
        if run.data.names[0] == "A" and len(x) == 12:
            self.prior = -(((mu + 2) / 1.5) ** 2) / 2 - tau**2 / 2 + log_tau
            some = [
                b * z
                - a * np.logaddexp(0, z)
                + gammaln(a + 1)
                - gammaln(b + 1)
                - gammaln(a - b + 1)
                for a, b in zip(x, y, strict=True)
            ]
        else:
            self.prior = -((mu / 5) ** 2) / 2 - np.log1p((tau / 5) ** 2) + log_tau
            some = [
                -(((b - z) / a) ** 2) / 2 - math.log(a * math.sqrt(2 * math.pi))
                for a, b in zip(x, y, strict=True)
            ]
        share = np.log(weight / weight.sum())
        self.says = np.stack([logsumexp(one + share, axis=-1) for one in some])

    def exact(self) -> Tensor:
        """Return log p(y_j | y_others)."""
        every = self.prior + self.says.sum(0)
        found = [logsumexp(every) - logsumexp(every - one) for one in self.says]
        return torch.tensor(found)

    def of_factors(self, run: pyrofl.Run) -> Tensor:
        """Return the same where the others know q / t_j, with t_j's share of the prior."""
        normals, server = Normals(2, True), run.state.server
        core = run.method.aggregate.__self__  # type: ignore[union-attr]
        prior = {n: v.double() for n, v in core.prior.items()}
        rest = torch.from_numpy(self.prior) - normals.log_density(self.points, prior)
        found = []
        for j, says in enumerate(self.says):
            names = ("shift", "precision")
            cavity = {n: server[n] - server[f"server/{n}"][j] for n in names}
            known = normals.log_density(self.points, cavity) + server["share"] * rest
            known = (known - known.flatten().logsumexp(0)).numpy()
            found.append(logsumexp(known + says))
        return torch.tensor(found)


CASES = {"schools": (schools, -40.0, 50.0), "hospitals": (hospitals, -6.0, 2.0)}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_integral_over_what_the_others_know(case):
    """Normal factors are off by 0.06 at most, where clients differ by 2 and 3 nats."""
    make, low, high = CASES[case]
    elpd, grid = pyrofl.checks.loco(make(), 4000), Grid(make(), low, high)
    found, exact = by_client(elpd), grid.exact()
    off = found - grid.of_factors(make())
    assert (off.abs() < 4 * errors(elpd)).all(), off / errors(elpd)
    assert (errors(elpd) < 0.01).all()
    assert (found - exact).abs().max() < 0.1
    assert found.argsort().tolist() == exact.argsort().tolist()


def test_a_centered_program_says_the_same():
    one, other = (pyrofl.checks.loco(schools(centered), 2000) for centered in (True, False))
    off = by_client(one) - by_client(other)
    assert off.abs().max() < 0.02  # fits with other noise


@pytest.mark.filterwarnings("ignore:Pareto k is above")  # 400 draws are few
def test_the_error_is_what_other_seeds_differ_by():
    runs = [schools().copy(seed=s) for s in range(16)]
    many = [pyrofl.checks.loco(run, 400) for run in runs]
    spread = torch.stack([by_client(one) for one in many]).std(0)
    told = torch.stack([errors(one) for one in many]).square().mean(0).sqrt()
    # Of 16 seeds the standard deviation has a relative standard error of 1 / 30^1/2.
    assert ((spread / told - 1).abs() < 4 / 30**0.5).all(), spread / told
    together = pyrofl.checks.loco(runs[:4], 400)
    assert errors(together).mean() == pytest.approx(float(told.mean()) / 2, rel=0.2)


@pytest.mark.slow
def test_it_is_what_fits_without_each_client_say():
    """After 8 rounds within 2 standard errors of the difference; at once 0.055 off, of 3 nats."""
    run = hospitals(30)
    at_once, mended = (pyrofl.checks.loco(run, 4000, rounds=r) for r in (0, 8))
    each = [pyrofl.checks.loco(with_refits(run, seed), 4000) for seed in (1, 2, 3)]
    refits = torch.stack([by_client(one) for one in each]).mean(0)
    # A fit has noise of its own: client A's refits differ by 0.002, as much as 4,000 draws do.
    fits = torch.stack([by_client(one) for one in each]).std(0) * (1 + 1 / len(each)) ** 0.5
    error = errors(mended).hypot(errors(each[0])).hypot(fits)
    assert (by_client(at_once) - refits).abs().max() < 0.07
    assert ((by_client(mended) - refits).abs() < 2 * error).all()
    order = refits.argsort().tolist()
    assert by_client(at_once).argsort().tolist() == by_client(mended).argsort().tolist() == order


def with_refits(run: pyrofl.Run, seed: int = 1) -> pyrofl.Run:
    """Return the run with a method that fits all others from the start, with this seed."""

    def refitted(run: pyrofl.Run, client: str, rounds: int) -> pyrofl.RoundState:
        data = pyrofl.leave(run, client).data
        others = pyrofl.fit(run.method, data, 30, seed=seed, progress=False).state.server
        server, at = run.state.server, run.data.names.index(client)
        q = {n: others[n] + server[f"server/{n}"][at] for n in ("shift", "precision")}
        return replace(run.state, server=server | q | {"share": torch.zeros_like(server["share"])})

    metadata = run.method.metadata
    ((at, factors),) = metadata_of_class(metadata.tensors, Factors)
    known = metadata.extend({at: (PER_CLIENT, replace(factors, without=refitted))})
    return run.copy(method=replace(run.method, metadata=known))


def test_models_are_compared_by_client():
    def pooled(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(-2.0, 1.5))
            with batch.rows():
                fn = dist.Binomial(batch.x[..., 0], logits=mu)
                pyro.sample("deaths", fn, obs=batch.y)

    data = hospitals().data
    method = pvi.hierarchical(pooled, data, shared="mu", steps=10)
    one = pyrofl.fit(method, data, 8, progress=False)
    models = {"one rate": pyrofl.checks.loco(one), "own rates": pyrofl.checks.loco(hospitals())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = import_arviz().compare(models)
    table = pyrofl.checks.compare_loo(models)
    assert list(table.index) == list(theirs.index) == ["own rates", "one rate"]
    assert table["largest_k"]["own rates"] < 0.7
    column = "elpd" if "elpd" in table else "elpd_loo"
    assert float(table[column]["own rates"]) == pytest.approx(total(models["own rates"]))


def test_a_bad_k_is_told_by_name(monkeypatch):
    found = "pyrofl.inference.checks.leave_one_client_out.smooth_weights"
    monkeypatch.setattr(found, lambda log_w: (log_w, 0.9))
    with pytest.warns(
        UserWarning, match=r"k is above 0.50 in 4 of 4 clients: Ada, Bea, Cleo, Do"
    ) as w:
        pyrofl.checks.loco(normal(), 100)
    assert w[0].filename == __file__


def test_k_of_equal_weights_is_none():
    assert smooth_weights(torch.zeros(100))[1] == 0.0
    assert smooth_weights(torch.from_numpy(np.random.default_rng(0).standard_cauchy(1000)))[1] > 0.7


def test_rounds_without_the_client_leave_the_run_as_it_was():
    run = hospitals()
    before = {n: v.clone() for n, v in run.state.server.items()}
    state = without_client(run, "H", 1)
    toys.assert_same(run.state.server, before)
    assert state.server["share"] == 0
    at = run.data.names.index("H")
    left = pyrofl.leave(run, "H")
    others = pyrofl.fit(
        left.method, left.data, left.state.number + 1, resume_from=left, progress=False
    )
    for n in ("shift", "precision"):
        close(state.server[n] - state.server[f"server/{n}"][at], others.state.server[n], 1e-9)


def test_what_cannot_be_left_out_is_said():
    run = pyrofl.fit(fedavg.build(toys.net()), toys.blobs(), 1, progress=False)
    with pytest.raises(ValueError, match="keeps no factors of clients; expected a run of"):
        pyrofl.checks.loco(run)
    with pytest.raises(ValueError, match="runs hold a int; expected runs returned by `fit`"):
        pyrofl.checks.loco([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="the list of runs is empty; pass at least one"):
        pyrofl.checks.loco([])
    with pytest.raises(ValueError, match="draws is 10; expected a whole number of at least 100"):
        pyrofl.checks.loco(normal(), 10)
    with pytest.raises(ValueError, match=r"runs have clients .*; all chains need the same, in one"):
        pyrofl.checks.loco([normal(), hospitals()])


def test_others_who_know_no_distribution_are_named():
    run = normal()
    server = dict(run.state.server)
    server["server/precision"] = server["server/precision"].clone()
    server["server/precision"][1] += 2 * server["precision"]
    odd = run.copy(state=replace(run.state, server=server))
    with pytest.raises(ValueError, match="without 'Bea' the posterior is no distribution yet"):
        pyrofl.checks.loco(odd, 100)


def test_a_density_that_is_not_finite_is_named():
    run = normal()
    private = {n: v.clone() for n, v in run.state.client_states.items()}
    private["root"][2] = torch.nan
    lost = run.copy(state=replace(run.state, client_states=private))
    with pytest.raises(
        ValueError, match="the log density of 'Cleo' given all others is nan, not a finite"
    ):
        pyrofl.checks.loco(lost, 100)


def test_the_container_is_that_of_arviz():
    import xarray

    values = xarray.DataArray([-1.0, -2.5, -3.0], {"client": list("abc")}, ("client",))
    made = elpd_data(values, 1.5, values * 0 + 0.2, 1000)
    assert total(made) == pytest.approx(-6.5)
    spreads = [float(3 * values.var(ddof=d)) ** 0.5 for d in (0, 1)]
    assert any(made.se == pytest.approx(one) for one in spreads)  # as ArviZ 0.23 and 1.3 have it
    assert (made.n_samples, made.n_data_points, made.warning) == (1000, 3, False)
    assert "p_loo" in str(made)
    assert float(made.p if hasattr(made, "p") else made.p_loo) == 1.5
