"""Points at which a program fails are rejected, and change no other point."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrofl
from pyrofl import Federation
from pyrofl.inference.acceleration.recording.tape import Tape
from pyrofl.inference.definition.elbo import elbo, traces
from pyrofl.inference.definition.rejection import SINGULAR, rejecting
from pyrofl.models import pvi

LINALG = torch.linalg
BAD = torch.tensor([False, True, True, False])
FUNCTIONS = {
    "cholesky": LINALG.cholesky,
    "inv": LINALG.inv,
    "solve": lambda a: LINALG.solve(a, a),
    "solve a vector": lambda a: LINALG.solve(a, a[..., 0]),
    "precision": lambda a: dist.MultivariateNormal(torch.zeros(3).double(), a).scale_tril,
}


def matrices():
    """Return four matrices: good, singular, NaN, good."""
    found = torch.diag(torch.tensor([1.0, 2.0, 3.0])).double().repeat(4, 1, 1)
    found[1], found[2] = -1.0, torch.nan
    return found.requires_grad_()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_matrices_that_fail_are_nan_and_others_exact(name):
    function, a = FUNCTIONS[name], matrices()
    with pyro.validation_enabled(False):
        with pytest.raises(SINGULAR):
            function(a)
        with rejecting():
            found = function(a)
        alone = a.detach()[~BAD].requires_grad_()
        expected = function(alone)
    assert torch.equal(found.flatten(1).isnan().any(1), BAD)
    assert torch.equal(found[~BAD], expected)
    (slope,) = torch.autograd.grad(found[~BAD].sum(), a)
    (right,) = torch.autograd.grad(expected.sum(), alone)
    assert torch.equal(slope[~BAD], right)
    assert not slope[BAD].any()


def test_a_distribution_with_validation_is_rejected_too():
    with pytest.raises(ValueError, match="scale"):
        dist.Normal(0.0, torch.tensor([1.0, -1.0]), validate_args=True)
    with rejecting():
        density = dist.Normal(0.0, torch.tensor([1.0, -1.0]), validate_args=True).log_prob(
            torch.zeros(2)
        )
    assert density.isnan().tolist() == [False, True]


def clinics():
    """Return four clients of five normal rows."""
    y = 1 + torch.randn(20, generator=torch.Generator().manual_seed(0)).double()
    rows = list(torch.arange(20).split(5))
    return Federation(torch.zeros(20, 1).double(), y, rows, [r[:0] for r in rows])


def singular(received, local, batch):
    """Normal rows of variance 1, by a root that fails where the shared mean is below -2."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        root = torch.linalg.cholesky(torch.where(mu < -2, -1.0, 1.0)[..., None, None])
        with batch.rows():
            pyro.sample("y", dist.Normal(mu, root[..., 0, 0]), obs=batch.y)


def validated(received, local, batch):
    """Normal rows of variance 1, with a scale that is invalid where the mean is below -2."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        scale = torch.where(mu < -2, -1.0, 1.0)
        with batch.rows():
            pyro.sample("y", dist.Normal(mu, scale, validate_args=True), obs=batch.y)


def at(program, values):
    """Return the model's trace, and the guide's values, at values [S] of mu."""
    data = clinics()
    value = torch.tensor(values).double().requires_grad_()

    def guide(received, local, batch):
        with batch.clients():
            known = value[:, None, None].expand(-1, 4, 1)
            pyro.sample("mu", dist.Delta(known))

    batch = data.batch(torch.arange(4))
    return value, guide, batch, traces(program, guide, {}, {}, batch, len(values))[1]


@pytest.mark.parametrize("program", [singular, validated])
def test_a_rejected_draw_has_no_density_and_no_part_in_a_loss(program):
    with pyro.validation_enabled(False):
        value, guide, batch, p = at(program, [0.5, -3.0, 1.0])
        density = p.nodes["y"]["fn"].log_prob(batch.y).sum((1, 2))
        assert p.rejects
        assert density.isnan().tolist() == [False, True, False]
        loss = elbo(3)(program, guide, {}, {}, batch).sum()
        (slope,) = torch.autograd.grad(loss, value)
        value, guide, batch, p = at(program, [0.5, 1.0])
        assert not p.rejects
        right = elbo(2)(program, guide, {}, {}, batch).sum()
        (expected,) = torch.autograd.grad(right, value)
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(slope, torch.stack([expected[0], 0 * expected[0], expected[1]]))


def test_a_program_that_always_fails_raises_its_error():
    def wrong(received, local, batch):
        raise ValueError("no such column")

    with pytest.raises(ValueError, match="no such column"):
        at(wrong, [0.5])


def test_updates_with_matrices_that_may_fail_are_not_recorded():
    tape = Tape()
    with tape:
        torch.linalg.cholesky(torch.eye(2))
    assert "singular" in tape.reason


@pytest.mark.parametrize("program", [singular, validated])
@pytest.mark.parametrize("build", [pyrofl.hierarchical, pvi.hierarchical])
def test_fits_reject_points(program, build):
    data = clinics()
    run = pyrofl.fit(build(program, data, shared="mu"), data, rounds=4, progress=False)
    draws = run.to_arviz(2000, progress=False)["posterior"]["mu"].values
    precision = 1 / 4 + 20
    assert abs(draws.mean() - float(data.y.sum()) / precision) < 4 / (precision * 1000) ** 0.5
    assert abs(draws.std() * precision**0.5 - 1) < 0.1
