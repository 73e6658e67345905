"""A guide that bends what clients share: gradients add up to Pyro's, and it is nearer the truth."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import programs
import pyro
import pyro.distributions as dist
import pytest
import torch
from checks import close
from pyro.infer import Trace_ELBO
from torch import Tensor

import pyrofl
from pyrofl.data import Batch, Federation
from pyrofl.data.loaders.conjugate import gaussian_means
from pyrofl.inference.checks.leave_one_out import loo
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fixed as some
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors.pointwise import pointwise
from pyrofl.models import guides, pvi
from pyrofl.models.pvi.sfvi import SharedGuide
from pyrofl.tensors import Tensors, default_type, generator

B, V = torch.tensor([1.0, -2.0, 4.0, 0.5]).double(), torch.tensor([1.0, 0.25, 2.0, 0.5]).double()
NAMES = ("center", "root", "loc/_w", "bend/log_sd", "bend/below")
EFFECT = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12]).double()
ERROR = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18]).double()


def one_row_each(x: Tensor, y: Tensor, held_out: int = 0) -> Federation:
    rows = torch.arange(len(y)).split(1)
    return Federation(x[:, None], y, rows, tuple(r[:0] for r in rows), held_out=held_out)


def schools(held_out: int = 0) -> Federation:
    return one_row_each(ERROR, EFFECT, held_out)


def means(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let theta_j ~ N(mu, 1.5), where mu and the useless nu are one for all."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        nu = pyro.sample("nu", dist.Normal(mu, 1.0))
        theta = pyro.sample("theta", dist.Normal(mu, 1.5))
        with batch.rows():
            pyro.sample("y", dist.Normal(batch.x[..., 0] * theta + 0 * nu, 1.0), obs=batch.y)


def of_means() -> tuple[Tensor, Tensor]:
    """Return mean and covariance of (mu, nu, theta_1 ... theta_4) given b_j ~ N(theta_j, v_j)."""
    prior = torch.full((6, 6), 4.0).double()
    prior[1, 1] += 1
    prior[2:, 2:] += 2.25 * torch.eye(4)
    noise = prior[2:, 2:] + V.diag()
    gain = prior[:, 2:] @ torch.linalg.inv(noise)
    return gain @ B, prior - gain @ prior[2:]


def q_of(state: RoundState) -> tuple[Tensor, Tensor]:
    """Return mean and root of the server's q(g), for the full covariance."""
    now = {n: state.server[n] for n in NAMES}
    d = len(now["center"])
    lower = torch.eye(d).to(now["root"])
    lower[tuple(torch.tril_indices(d, d, -1))] = now["bend/below"]
    root = now["root"] @ (now["bend/log_sd"].exp()[:, None] * lower)
    return now["center"] + now["root"] @ now["loc/_w"], root


def of_a_full_covariance(data: Federation) -> Method:
    guide = guides.full_covariance
    return pvi.hierarchical(means, data, shared="mu nu", guide=guide, num_particles=12)


def test_a_normal_hierarchy_is_exact():
    """Balanced draws leave gradients of a normal model without noise, and what remains shrinks.

    After 40, 80 and 120 rounds variances are off by 2e-3, 2e-5 and 9e-8.
    """
    data = gaussian_means(B[:, None], V).federation
    method = of_a_full_covariance(data)
    *_, state = federate(method, data, 80)
    mean, root = q_of(state)
    expected, covariance = of_means()
    close(mean, expected[:2], 1e-4)
    close(root @ root.T, covariance[:2, :2], 1e-4)
    # So are clients, given what they share.
    _, local = prepared(method, data, state, data.cohort(torch.arange(4)))
    slope = torch.linalg.solve(local["unit"], local["own/slope"], left=False)
    theta = local["own/mean"] + (slope @ (mean - local["about"])[..., None])[..., 0]
    close(theta[:, 0], expected[2:], 1e-4)
    variance = (slope @ root).square().sum((1, 2)) + local["own/root"].square().sum((1, 2))
    close(variance, covariance.diagonal()[2:], 1e-4)


@pytest.mark.slow
def test_where_half_of_the_clients_report_what_remains_is_noise_of_who_did():
    data = gaussian_means(B[:, None], V).federation
    expected, covariance = of_means()
    sd, off, spread = covariance.diagonal()[:2].sqrt(), [], []
    for seed in range(8):
        *_, state = federate(of_a_full_covariance(data), data, 60, participation=some(2), seed=seed)
        mean, root = q_of(state)
        off.append((mean - expected[:2]) / sd)
        spread.append((root.square().sum(-1).sqrt() / sd).log())
    for found in (torch.stack(off), torch.stack(spread)):
        assert (found.mean(0).abs() < 4 * found.std(0) / 8**0.5).all()
        assert (found.std(0) < 0.3).all()


def test_what_clients_send_adds_up_to_the_gradient_of_pyro(monkeypatch):
    """Of one program of all rows, by Trace_ELBO, with the same noise."""
    data, kept = schools(), []
    method = pvi.hierarchical(
        programs.eight_schools, data, shared="mu tau", guide=guides.full_covariance, num_particles=6
    )
    begun, everyone = first(method, data, 0), torch.arange(8)
    for _ in range(3):
        begun = run_round(method, data, begun, everyone, everyone)
    bound = SharedGuide.bound
    monkeypatch.setattr(SharedGuide, "bound", lambda *args: kept.append(args[-1]) or bound(*args))
    state = run_round(method, data, begun, everyone, everyone)
    e = kept[-1][:, :, 0]  # [S, C, 3], of the gradient, which comes last
    assert len(e) == 6
    close(e[..., :2], e[:, :1, :2].expand(-1, 8, -1), 1e-12)
    assert (e[:, 0, 2] != e[:, 1, 2]).all()
    phi = {n: begun.server[n].clone().requires_grad_() for n in NAMES}
    own = state.client_states

    def model(s: int) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("schools", 8):
            eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
            pyro.sample("effect", dist.Normal(mu + tau * eta, ERROR), obs=EFFECT)

    def guide(s: int) -> None:
        lower = (
            torch.eye(2)
            .double()
            .index_put((torch.tensor([1]), torch.tensor([0])), phi["bend/below"])
        )
        w = phi["loc/_w"] + phi["bend/log_sd"].exp() * (lower @ e[s, 0, :2])
        u = phi["center"] + phi["root"] @ w
        log_q = dist.Normal(0.0, 1.0).log_prob(e[s, 0, :2]).sum() - phi["bend/log_sd"].sum()
        log_q = log_q - torch.linalg.slogdet(phi["root"]).logabsdet - u[1]
        pyro.sample("mu", dist.Delta(u[0], log_density=log_q))
        pyro.sample("tau", dist.Delta(u[1].exp()))
        off = u - own["about"]
        x = torch.linalg.solve(own["unit"], off)
        root = own["own/root"][:, 0, 0]
        v = own["own/mean"][:, 0] + (own["own/slope"][:, 0] * x).sum(-1) + root * e[s, :, 2]
        exponent = (own["own/power"][:, 0] * off).sum(-1)
        log_q = dist.Normal(0.0, 1.0).log_prob(e[s, :, 2]) - root.log() - exponent
        with pyro.plate("schools", 8):
            pyro.sample("eta", dist.Delta(v * exponent.exp(), log_density=log_q))

    for s in range(6):
        with default_type(torch.float64):  # as the library's programs run in the data's
            loss = Trace_ELBO().differentiable_loss(model, guide, s)
        (loss / 6).backward()
    for n in NAMES:
        close(state.message[n].sum(0), phi[n].grad, 1e-9)
    assert all(float(phi[n].grad.abs().max()) > 1e-3 for n in NAMES)


DEATHS = torch.tensor([0.0, 18, 8, 46, 8, 13]).double()
CASES = torch.tensor([47.0, 148, 119, 810, 211, 196]).double()
MU, TAU = (-2.7833, 0.2971), (0.5610, 0.3455)  # by quadrature, as in test_corrected


def bound_of(run: Run, draws: int = 4000) -> tuple[float, float]:
    """Return the ELBO of all clients together, and its standard error."""
    asked = EvaluationSpec.of({"draws": draws}, excluded=("population", "part"))
    told = pointwise(run.method, run.data, run.state, torch.arange(run.data.clients), asked)
    each = [{n: v.value.flatten() for n, v in one["density"].items()} for one in told]
    total = sum(one["log_p"] - one["log_q"] for one in each)
    total = total + each[0]["shared log_p"] - each[0]["shared log_q"]
    return float(total.mean()), float(total.std()) / draws**0.5


def fitted(guide: guides.Family, rounds: int, held_out: int = 0) -> Run:
    data = one_row_each(CASES, DEATHS, held_out)
    method = pvi.hierarchical(programs.hospitals, data, shared="mu tau", guide=guide)
    return pyrofl.fit(method, data, rounds, progress=False)


@pytest.fixture(scope="module")
def bent() -> Run:
    return fitted(guides.flow(3), 60)


def test_a_flow_is_nearer_to_a_skewed_posterior_than_any_normal(bent):
    normal = fitted(guides.full_covariance, 40)
    (better, error), (worse, other) = bound_of(bent), bound_of(normal)
    assert better - worse > 4 * math.hypot(error, other)
    for name, (mean, sd) in {"mu": MU, "tau": TAU}.items():
        wide, narrow = (run.posterior(20_000)[name][:, 0] for run in (bent, normal))
        far, farther = (abs(math.log(float(v.std()) / sd)) for v in (wide, narrow))
        assert farther - far > 4 * math.hypot(1, 1) / (2 * 20_000) ** 0.5
        assert abs(float(wide.mean()) - mean) < 0.2 * sd


def test_corrected_draws_of_a_flow_are_exact(bent):
    found = bent.to_arviz(2000, corrected=True)
    stats = found["sample_stats"]
    assert float(stats["pareto_k"][0]) < 0.7
    count = min(2000.0, float(stats["importance_ess"][0])) / 2  # drawn anew from weighted ones
    for name, (mean, sd) in {"mu": MU, "tau": TAU}.items():
        values = found["posterior"][name].values[0]
        assert abs(values.mean() - mean) < 4 * sd / count**0.5
        assert abs(np.log(values.std() / sd)) < 4 / (2 * count) ** 0.5


def test_all_that_reads_a_posterior_reads_this_one(bent):
    found = bent.to_arviz(200, groups="all")
    assert set(found["posterior"].data_vars) == {"mu", "tau", "eta"}
    assert found["posterior"]["mu"].dims == ("chain", "draw")
    assert found["posterior"]["eta"].dims == ("chain", "draw", "client")
    with pytest.warns(UserWarning, match="Pareto k is above"):  # each client has one row
        assert len(loo(bent, 400).pareto_k) == 6
    with pytest.raises(ValueError, match="the server of this run keeps no factors of clients"):
        pyrofl.leave(bent, bent.data.names[0])


def test_a_newcomer_learns_of_itself_from_its_rows():
    run = fitted(guides.copula, 30, held_out=1)
    ids = torch.tensor([5])
    before = run.posterior(2000, ids=ids)["eta"].squeeze()
    after = run.posterior(2000, ids=ids, adaptation="train")
    assert float(before.std()) == pytest.approx(1.0, rel=0.1)
    assert float(after["eta"].std()) < 0.9
    again = run.posterior(2000, ids=ids)
    close(after["mu"], again["mu"], 1e-12)  # q(g) is as the server knows it


@pytest.mark.parametrize("family", [guides.copula, guides.low_rank(1), guides.flow(2)])
def test_rows_in_minibatches_and_no_variables_of_ones_own(family):
    x, y = torch.randn(40, 2, generator=generator(1)).double(), torch.arange(40.0).sin().double()

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            beta = pyro.sample("beta", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
            with batch.rows():
                pyro.sample("y", dist.Normal((batch.x * beta).sum(-1), 0.5), obs=batch.y)

    parts = torch.arange(40).split(10)
    data = Federation(x, y, parts, tuple(p[:0] for p in parts))
    method = pvi.hierarchical(model, data, shared="beta", guide=family, batch=4)
    run = pyrofl.fit(method, data, 40, progress=False)
    covariance = torch.linalg.inv(torch.eye(2) + 4 * x.T @ x)
    found, sd = run.posterior(4000)["beta"][:, 0], covariance.diagonal().sqrt()
    assert ((found.mean(0) - 4 * covariance @ x.T @ y).abs() < 0.1 * sd).all()
    assert ((found.std(0) / sd).log().abs() < 0.1).all()


def wave() -> Federation:
    """Return four clients that measure a sine with noise of 0.2, places mixed."""
    x = torch.linspace(0, 1, 40).double()
    y = (8 * x).sin() + 0.2 * torch.randn(40, generator=generator(1)).double()
    parts = tuple(torch.arange(i, 40, 4) for i in range(4))
    return Federation(x[:, None], y, parts, tuple(p[:0] for p in parts))


def smooth(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let a Gaussian process with 6 inducing points be one for all clients."""
    knots = torch.linspace(0, 1, 6).double()
    with batch.clients():
        eta = pyro.sample("eta", dist.Normal(torch.zeros(6).double(), 1.0).to_event(1))
        length = pyro.sample("length", dist.LogNormal(torch.tensor(-1.0).double(), 0.7))
        size = pyro.sample("size", dist.LogNormal(torch.tensor(0.0).double(), 0.7))
        noise = pyro.sample("noise", dist.LogNormal(torch.tensor(-0.7).double(), 1.0))

        def kernel(a: Tensor, b: Tensor) -> Tensor:
            return (-0.5 * ((a[..., :, None] - b[..., None, :]) / length[..., None]) ** 2).exp()

        root = torch.linalg.cholesky(kernel(knots, knots) + 1e-4 * torch.eye(6).double())
        a = torch.linalg.solve_triangular(root, kernel(knots, batch.x[..., 0]), upper=False)
        with batch.rows():
            mean = size * (eta @ a).squeeze(-2)
            pyro.sample("y", dist.Normal(mean, noise), obs=batch.y)


WAVE = {"length": (-1.474, 0.276), "size": (0.149, 0.390), "noise": (-1.712, 0.125)}  # logs


@pytest.mark.parametrize("family", [guides.copula, guides.flow(3)])
def test_a_guide_bends_about_the_best_normal(family):
    """Means of a Gaussian process are those by quadrature, not those of a fit that is all noise."""
    method = pvi.hierarchical(smooth, wave(), shared="*", guide=family, num_particles=32)
    found = pyrofl.fit(method, wave(), 60, progress=False).posterior(4000)
    logs = {name: found[name].log() for name in WAVE}
    off = {n: float(logs[n].mean() - mean) / sd for n, (mean, sd) in WAVE.items()}
    assert abs(off["noise"]) < 0.2  # 4 standard errors are 0.06
    assert max(map(abs, off.values())) < 0.8  # the bound is flat along a ridge


def shrunk(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let each school have a mean of its own around mu."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        theta = pyro.sample("theta", dist.Normal(mu, 5.0))
        with batch.rows():
            pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"covariance": "diagonal"}, "covariance is 'diagonal' and damping is None, and there is"),
        ({"damping": 0.5}, "covariance is 'full' and damping is 0.5, and there is a guide"),
        ({"num_particles": 7}, "num_particles is 7; expected an even number"),
        ({"guide": guides.mean_field}, "draws each shared variable by itself.*covariance="),
        ({"guide": guides.delta}, "expected a family that joins them: full_covariance, low_rank"),
        ({"guide": "flow"}, "guide is 'flow'; expected a function"),
        ({"guide": guides.flow}, r"guide is flow; expected a family such as .*guides.flow\(\)"),
        ({"model": shrunk, "shared": "mu"}, "a flow has 1 parameter to bend; expected at least 2"),
        ({"lr": 2.0}, "lr is 2.0; expected a number above 0 to 1"),
    ],
)
def test_what_a_guide_cannot_be_asked_for_is_refused(asked, words):
    usual = {"model": programs.eight_schools, "shared": "mu tau", "guide": guides.flow(2)}
    with pytest.raises(ValueError, match=words):
        pvi.hierarchical(data=schools(), **(usual | asked))


def test_a_guide_whose_draws_have_no_spread_is_a_bad_message_and_no_crash():
    run = fitted(guides.copula, 2)
    flat = run.state.server | {"root": torch.zeros_like(run.state.server["root"])}
    again = replace(run.state, server=flat)
    after = pyrofl.fit(run.method, run.data, 4, resume_from=again, progress=False)
    assert after.status.kind == "diverged"
    assert "expected a finite number" in str(after.status)
