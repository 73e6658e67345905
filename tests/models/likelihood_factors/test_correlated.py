"""Correlated effects, as one multivariate normal site, with binary rows at few clients."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrofl
from pyrofl import Federation, reference

ROWS = 30  # of each client
EFFECTS = [[0.5, 1.0], [-0.4, 0.2], [1.1, 1.6], [0.1, -0.3]]


def clients():
    """Return four clients with an intercept and a slope each."""
    source = torch.Generator().manual_seed(1)
    x = torch.randn(4 * ROWS, generator=source).double()
    w = torch.tensor(EFFECTS).double().repeat_interleave(ROWS, 0)
    y = torch.bernoulli((w[:, 0] + w[:, 1] * x).sigmoid(), generator=source).double()
    rows = list(torch.arange(4 * ROWS).split(ROWS))
    return Federation(x[:, None], y, rows, [r[:0] for r in rows])


def program(centered):
    """Return the form that the page of programs recommends, or one that chains can follow."""

    def model(received, local, batch):
        with batch.clients():
            zero = torch.zeros(2).double()
            beta = pyro.sample("beta", dist.Normal(zero, 2.0).to_event(1))
            sd = pyro.sample("sd", dist.HalfNormal(zero + 1).to_event(1))
            chol = pyro.sample("chol", dist.LKJCholesky(2, 2.0))
            root = sd[..., None] * chol
            if centered:
                w = pyro.sample("w", dist.MultivariateNormal(beta, scale_tril=root))
            else:
                z = pyro.sample("z", dist.Normal(zero, 1.0).to_event(1))
                w = beta + (root @ z[..., None])[..., 0]
            with batch.rows():
                line = w[..., 0] + w[..., 1] * batch.x[..., 0]
                pyro.sample("y", dist.Bernoulli(logits=line), obs=batch.y)

    return model


def moments(draws):
    """Return mean and sd of the coordinates of shared sites."""
    found = {}
    for name in ("beta", "sd"):
        values = torch.as_tensor(draws["posterior"][name].values).flatten(0, 1).double()
        found[name] = values.mean(0).flatten(), values.std(0).flatten()
    return found


@pytest.mark.slow
def test_the_recommended_form_is_right_for_binary_rows():
    data, shared = clients(), "beta sd chol"
    method = pyrofl.hierarchical(program(True), data, shared=shared)
    assert method.name == "likelihood_factors"
    run = pyrofl.fit(method, data, progress=False)
    assert run.status.kind == "converged"
    assert not run.warnings
    ours = moments(run.to_arviz(draws=4000, progress=False))
    known = moments(reference.hmc(program(False), data, draws=128, shared=shared))
    for name, (mean, sd) in known.items():
        assert float(((ours[name][0] - mean) / sd).abs().max()) < 0.15, name
        assert float((ours[name][1] / sd - 1).abs().max()) < 0.15, name
