"""pyrofl.hierarchical: which method it chooses, when its fits end, and what their runs support."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import EFFECT_SD as SPREAD
from programs import NOISE_SD as NOISE
from programs import normal_effects as normal
from torch import Tensor

import pyrofl
from pyrofl import Privacy, checks, participation
from pyrofl.data import Federation
from pyrofl.data.outlines import outline
from pyrofl.inference.posteriors.proposals import bridge
from pyrofl.models import likelihood_factors
from pyrofl.tensors import generator

SIZES = (3, 1, 6, 2)
NAMES = ("a", "b", "c", "d")


def rows(*names: str, held_out: int = 0) -> Federation:
    """Return some of four clients, with rows that are always the same, in double precision."""
    y = 1.0 + 1.5 * torch.randn(sum(SIZES), generator=generator("rows")).double()
    each = dict(zip(NAMES, torch.arange(len(y)).split(SIZES), strict=True))
    train = [each[n] for n in names or NAMES]
    return Federation(
        y[:, None] * 0, y, train, [r[:0] for r in train], names or NAMES, held_out=held_out
    )


def unknown_noise(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        effect = pyro.sample("effect", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("y", dist.Normal(effect, sigma), obs=batch.y)


def positive(received, local, batch):
    """Have responses that are never 0, as the row is with which a server runs the prior."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        effect = pyro.sample("effect", dist.Normal(mu, SPREAD))
        with batch.rows():
            pyro.sample("y", dist.LogNormal(effect, NOISE), obs=batch.y.exp())


def absolute_errors(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        effect = pyro.sample("effect", dist.Normal(mu, SPREAD))
        with batch.rows():
            pyro.sample("y", dist.Laplace(effect, NOISE), obs=batch.y)


def sharp(received, local, batch):
    """Have absolute deviations whose scale is shared: only the scale has second derivatives."""
    with batch.clients():
        width = pyro.sample("width", dist.HalfNormal(1.0))
        effect = pyro.sample("effect", dist.Normal(0.0, SPREAD))
        with batch.rows():
            pyro.sample("y", dist.Laplace(effect, width), obs=batch.y)


def counts(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        effect = pyro.sample("effect", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("y", dist.Poisson(effect.exp()), obs=batch.y.abs().round())


def gamma_effects(received, local, batch):
    with batch.clients():
        shape = pyro.sample("shape", dist.HalfNormal(1.0))
        rate = pyro.sample("rate", dist.Gamma(shape, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(rate, 1.0), obs=batch.y)


def exact(*names: str) -> tuple[float, float]:
    """Return mean and standard deviation of mu of `normal`, given these clients' rows."""
    data = rows(*names)
    spread = [SPREAD**2 + NOISE**2 / len(r) for r in data.train]
    precision = 1 / 4 + sum(1 / v for v in spread)
    mean = sum(float(data.y[r].mean()) / v for r, v in zip(data.train, spread, strict=True))
    return mean / precision, precision**-0.5


def log_marginal(*names: str) -> float:
    """Return the log marginal likelihood of `normal` for these clients' rows."""
    data = rows(*names)
    y = torch.cat([data.y[r] for r in data.train])
    which = torch.cat([torch.full((len(r),), j) for j, r in enumerate(data.train)])
    same = (which[:, None] == which).double()
    covariance = 4.0 + SPREAD**2 * same + NOISE**2 * torch.eye(len(y)).double()
    return float(torch.distributions.MultivariateNormal(0 * y, covariance).log_prob(y))


def assert_mu(run: pyrofl.Run, *names: str) -> None:
    """Compare the posterior of mu with the exact one, by four standard errors of 1,000 draws."""
    mean, sd = exact(*names)
    values = run.to_arviz(2000, progress=False)["posterior"]["mu"].values
    assert abs(values.mean() - mean) < 4 * sd / 1000**0.5
    assert abs(math.log(values.std() / sd)) < 4 / 2000**0.5


@pytest.mark.parametrize(
    ("program", "shared", "name", "told"),
    [
        (normal, "mu", "likelihood_factors", "method: likelihood factors, 1 round"),
        (counts, "mu tau", "likelihood_factors", "likelihood factors"),
        (positive, "mu", "likelihood_factors", "method: likelihood factors"),
        (
            absolute_errors,
            "mu",
            "pvi",
            "method: PVI, as the log likelihood is piece",
        ),
        (sharp, "width", "pvi", "method: PVI, as the log likelihood is piece"),
        (gamma_effects, "shape", "pvi", "method: PVI, as site 'rate' of each cl"),
    ],
)
def test_the_method_is_shown_with_the_site_that_decided(program, shared, name, told, capsys):
    data = rows()
    method = pyrofl.hierarchical(program, data, shared=shared)
    assert method.name == name
    assert told in str(method)
    pyrofl.fit(method, data, rounds=1)
    assert told in capsys.readouterr().err.splitlines()[0]


def test_the_method_does_not_need_rows():
    for program, shared, name in (
        (normal, "mu", "likelihood_factors"),
        (gamma_effects, "shape", "pvi"),
    ):
        method = pyrofl.hierarchical(program, outline(NAMES, SIZES, (1,)), shared=shared)
        assert method.name == name
    one = pyrofl.hierarchical(normal, outline(["a"], [1], (1,)), shared="mu")
    assert one.name == "likelihood_factors"


def test_other_errors_are_those_of_the_user():
    with pytest.raises(ValueError, match="expected names or patterns of some of mu, effect"):
        pyrofl.hierarchical(normal, rows(), shared="tau")


@pytest.mark.parametrize("option", ["batch", "covariance"])
def test_options_of_pvi_are_refused(option):
    reason = f"unexpected keyword argument '{option}'; it is an option of pvi.hierarchical"
    with pytest.raises(TypeError, match=reason):
        pyrofl.hierarchical(normal, rows(), shared="mu", **{option: 4})


def test_progress_names_no_tensor_of_the_guide(capsys):
    data = rows()
    pyrofl.fit(pyrofl.models.pvi.hierarchical(normal, data, shared="mu"), data, rounds=1)
    shown = capsys.readouterr().err
    assert "loss: posterior " in shown
    assert "root" not in shown


def test_a_fit_without_options_ends_by_itself():
    data = rows()
    linear = pyrofl.fit(pyrofl.hierarchical(unknown_noise, data, shared="mu tau sigma"), data)
    assert linear.state.number == 1
    assert str(linear.status) == "converged: the draws are of the exact posterior"
    method = pyrofl.hierarchical(counts, data, shared="mu tau")
    chains = pyrofl.fit(method, data, seeds=[3], progress=False)
    for run in chains:
        assert 2 <= run.state.number <= 6
        assert run.status.kind == "converged"
        assert run.parameter_changes()["round"].max() == run.state.number
        last = run.records[-1].moved
        assert max(max(parts.values()) for parts in last.values()) <= 0.05
    # A run that has converged is not continued.
    again = pyrofl.fit(method, data, resume_from=chains[0], progress=False)
    assert again.state.number == chains[0].state.number
    values = chains.to_arviz(50, groups="all")
    assert values["posterior"]["effect"].shape == (1, 50, 4)
    assert values["log_likelihood"]["y"].shape == (1, 50, sum(SIZES))


def test_a_fit_has_not_converged_while_clients_are_missing():
    data = rows()
    method = pyrofl.hierarchical(unknown_noise, data, shared="mu tau sigma")
    run = pyrofl.fit(method, data, 1, participation=participation.fixed(3), progress=False)
    assert run.status.kind == "not converged"
    assert "missing is 1: that many clients have not reported" in run.status.why
    others = participation.fixed(3)
    run = pyrofl.fit(method, data, participation=others, resume_from=run, progress=False)
    assert run.status.kind == "converged"
    assert set().union(*(record.reported for record in run.records)) == {0, 1, 2, 3}


def test_a_saved_run_is_loaded_with_its_method(tmp_path):
    data = rows()
    method = pyrofl.hierarchical(normal, data, shared="mu")
    run = pyrofl.fit(method, data, progress=False)
    run.save(tmp_path / "run")
    again = pyrofl.load(tmp_path / "run", method=method)
    assert again.status == run.status
    assert [r.undamped for r in again.records] == [True] * run.state.number
    known = pyrofl.load(tmp_path / "run", method=method, data=data)
    for name, value in run.posterior(5).items():
        assert torch.equal(known.posterior(5)[name], value)


def test_a_client_leaves_and_joins_at_once():
    data = rows()
    run = pyrofl.fit(pyrofl.hierarchical(normal, data, shared="mu"), data, progress=False)
    assert_mu(run, *NAMES)
    left = pyrofl.leave(run, "c")
    assert_mu(left, "a", "b", "d")
    joined = pyrofl.join(left, rows("d", "c", "a", "b"))
    assert float(joined.state.server["server/missing"]) == 1
    joined = pyrofl.fit(joined.method, joined.data, resume_from=joined, progress=False)
    assert joined.status.kind == "converged"
    assert_mu(joined, *NAMES)
    assert not joined.warnings


@pytest.mark.parametrize("refit", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_client_is_left_out_exactly(refit):
    """The log density of a client given the others is a difference of log marginals."""
    data = rows()
    run = pyrofl.fit(pyrofl.hierarchical(normal, data, shared="mu"), data, progress=False)
    found = checks.loco(run, 2000, rounds=refit)
    each = found.elpd_i if hasattr(found, "elpd_i") else found.loo_i
    for name, value, error in zip(NAMES, each.values, each["mcse"].values, strict=True):
        expected = log_marginal(*NAMES) - log_marginal(*(n for n in NAMES if n != name))
        assert abs(float(value) - expected) < 4 * error + 0.01, name
        assert 0 < error < 0.05, name


def test_the_ratio_of_constants_is_that_of_two_normals():
    """Unnormalized normals N(0, 1) and N(1, 2^2): the ratio of their constants is 2."""
    noise = torch.randn(2, 20_000, generator=generator("bridge")).double()

    def log_ratio(x: Tensor) -> Tensor:
        return -((x - 1).square()) / 8 + x.square() / 2

    for few in (20_000, 2_000):  # draws of the second
        level = bridge(log_ratio(noise[0]), log_ratio(1 + 2 * noise[1, :few]))
        assert float(level) == pytest.approx(math.log(2), abs=4 * (2 / few) ** 0.5)


def test_new_and_held_out_clients_have_posteriors():
    data = rows(held_out=1)
    run = pyrofl.fit(pyrofl.hierarchical(normal, data, shared="mu"), data, progress=False)
    assert_mu(run, "a", "b", "c")
    assert run.posterior(10)["effect"].shape == (10, 3)
    found = run.predict(torch.zeros(2, 1).double(), None)
    assert found.mean.shape == (2,)


def test_privacy_is_refused_in_a_line():
    pytest.importorskip("dp_accounting")
    data = rows()
    method = pyrofl.hierarchical(normal, data, shared="mu")
    with pytest.raises(ValueError, match=r"its server needs the factor of every client.*use pvi"):
        pyrofl.fit(method, data, 2, privacy=Privacy(clip=1.0, noise_multiplier=1.0))


def test_logarithms_of_responses_have_the_posterior_of_a_normal_model():
    data = rows()
    run = pyrofl.fit(pyrofl.hierarchical(positive, data, shared="mu"), data, progress=False)
    assert_mu(run, *data.names)


def test_a_client_whose_rows_are_masked_has_reported():
    """It tells nothing, and no other client waits for it."""
    data, last = rows(), rows().names[-1]

    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
            effect = pyro.sample("effect", dist.Normal(mu, SPREAD))
            with batch.rows():
                seen = (batch.ids != data.clients - 1)[:, None].expand_as(batch.y)
                pyro.sample("y", dist.Normal(effect, NOISE).mask(seen), obs=batch.y)

    run = pyrofl.fit(pyrofl.hierarchical(program, data, shared="mu"), data, progress=False)
    assert (run.state.number, run.status.kind, run.warnings) == (1, "converged", [])
    assert_mu(run, *(name for name in data.names if name != last))


def test_likelihood_factors_alone_have_the_sites_without_a_choice():
    method = likelihood_factors.hierarchical(normal, rows(), shared="mu")
    assert "method:" not in method.metadata.sites


def of_unknown_rows(received, local, batch):
    """Have responses that are unknown where y is above 2, and no variable of a client but these."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(mu, NOISE), obs=batch.y, obs_mask=batch.y <= 2.0)


def test_rows_may_have_the_only_variables_of_a_client():
    data = rows()
    run = pyrofl.fit(pyrofl.hierarchical(of_unknown_rows, data, shared="mu"), data, progress=False)
    known = data.y[data.y <= 2.0]
    assert 0 < len(known) < len(data.y)
    precision = 1 / 4 + len(known) / NOISE**2
    mean, sd = float(known.sum()) / NOISE**2 / precision, precision**-0.5
    draws = run.to_arviz(draws=4000, progress=False)["posterior"]["mu"]
    assert abs(float(draws.mean()) - mean) < 4 * sd / 1700**0.5
    assert abs(float(draws.std()) / sd - 1) < 4 / (2 * 1700) ** 0.5


def of_some_rows(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with pyro.plate("some", batch.y.shape[1], subsample_size=1, dim=-1) as at:
            pyro.sample("y", dist.Normal(mu, NOISE), obs=batch.y[:, at])


def test_a_plate_with_subsampling_is_refused_when_the_method_is_built():
    with pytest.raises(ValueError, match="is in plate 'some', which subsamples 1 of 3 entries"):
        pyrofl.hierarchical(of_some_rows, rows(), shared="mu")
