"""Derivatives by linear predictors are those by automatic differentiation, or are not used."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyrofl import Federation
from pyrofl.models import likelihood_factors
from pyrofl.models.likelihood_factors.factors import Factor
from pyrofl.models.likelihood_factors.structure import on_cpu

P = 6


def data():
    """Return clients of 3 to 9 rows, so that some are padded, with counts as responses."""
    rng = torch.Generator().manual_seed(0)
    parts = {}
    for j, n in enumerate((3, 9, 5)):
        x = torch.randn(n, P, generator=rng, dtype=torch.float64)
        parts[str(j)] = (x, torch.poisson(torch.ones(n, dtype=torch.float64), generator=rng))
    return Federation.from_arrays(parts)


def program(response):
    """Return a program with coefficients, a dispersion and an intercept of each client."""

    def model(received, local, batch):
        with batch.clients():
            b = pyro.sample("b", dist.Normal(torch.zeros(P), 1.0).to_event(1))
            s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
            tau = pyro.sample("tau", dist.HalfNormal(1.0))
            a = pyro.sample("a", dist.Normal(b[..., 0], tau))
            with batch.rows():
                eta = a + (b * batch.x).sum(-1)
                pyro.sample(
                    "y",
                    response(eta, s, batch),
                    obs=batch.y.clamp(max=1.0 if response in BINARY else 1e9),
                )

    return model


def bernoulli(eta, s, batch):
    """Logistic regression; the dispersion is the scale of the intercepts."""
    return dist.Bernoulli(logits=eta + s.log())


def of_probability(eta, s, batch):
    """The same by probabilities."""
    return dist.Bernoulli((eta + s.log()).sigmoid())


def poisson(eta, s, batch):
    """Counts with an offset."""
    return dist.Poisson((eta - s.log()).exp())


def negative_binomial(eta, s, batch):
    """Counts with a dispersion, which is another predictor."""
    return dist.NegativeBinomial(s, logits=eta - s.log())


def inflated(eta, s, batch):
    """Counts with further zeros, of which a coefficient rules the logits, too."""
    return dist.ZeroInflatedPoisson(eta.exp(), gate_logits=(eta - s.log()) * 0.5)


def student(eta, s, batch):
    """Robust regression."""
    return dist.StudentT(4.0, eta, s)


def masked(eta, s, batch):
    """Counts of which some are hidden."""
    return dist.Poisson((eta - s.log()).exp()).mask(batch.x[..., 1] > 0)


def curved(eta, s, batch):
    """A predictor that is not linear."""
    return dist.Poisson((eta + 0.1 * eta.square() - s.log()).exp())


def across_rows(eta, s, batch):
    """Rows that depend on each other, so that second derivatives are not those of single rows."""
    return Joint((eta - s.log()).exp())


class Joint(dist.Poisson):
    """Counts whose density also has a term of all rows."""

    def log_prob(self, value):
        total = self.rate.sum(-1, keepdim=True)
        return super().log_prob(value) - 0.01 * total.square()


BINARY = (bernoulli, of_probability)
LINEAR = [bernoulli, of_probability, poisson, negative_binomial, inflated, student, masked]


@pytest.mark.parametrize("response", [*LINEAR, curved, across_rows])
def test_expansions_are_those_by_automatic_differentiation(response):
    federation = data()
    method = likelihood_factors.hierarchical(program(response), federation, shared="b s tau")
    structure, batch = method.model, on_cpu(federation.batch(torch.arange(3)))
    rng = torch.Generator().manual_seed(1)
    p, m = len(structure.reads), structure.client_sites.size
    u = 0.3 * torch.randn(3, structure.shared_sites.size, generator=rng).double()
    one = torch.eye(p).double().expand(3, p, p)
    factor = Factor(structure, u, 2 * one, 0.7 * torch.eye(m).double().expand(3, m, m), batch)
    closed = factor._replace(predictors=factor._predictors())
    assert (closed.predictors is not None) is (response in LINEAR)
    zero = u.new_zeros(3, m)
    expected = factor._expand(u[:, structure.reads], zero, True)
    for a, b in zip(closed._expand(u[:, structure.reads], zero, True), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    updated, right = (one.update() for one in (factor, factor._replace(predictors=None)))
    for name, value in right.items():
        torch.testing.assert_close(updated[name], value, rtol=1e-6, atol=1e-6)


def test_a_predictor_with_a_kink_is_automatic_beyond_it():
    """Derivatives were compared on one side of the kink, and each point is compared again."""

    def kinked(eta, s, batch):
        return dist.Poisson((eta.clamp(max=3.0) - s.log()).exp())

    federation = data()
    method = likelihood_factors.hierarchical(program(kinked), federation, shared="b s tau")
    structure, batch = method.model, on_cpu(federation.batch(torch.arange(3)))
    p = len(structure.reads)
    u = torch.zeros(3, structure.shared_sites.size).double()
    one = torch.eye(p).double().expand(3, p, p)
    factor = Factor(structure, u, one, one[:, :1, :1], batch)
    predictors = factor._predictors()
    if predictors is not None:
        eta = torch.zeros(1, 3, 1).double()
        assert predictors.derivatives_at(u[None][..., structure.reads], eta) is not None
        assert predictors.derivatives_at(u[None][..., structure.reads], eta + 4.0) is None
    else:
        pytest.fail("the predictor is linear near the point")
