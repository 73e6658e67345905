"""Regressions without effects of clients, and posteriors that are difficult for normal guides."""

import pyro
import pyro.distributions as dist


def regression(received, local, batch):
    """Return a linear regression without an intercept (sblri of posteriordb); x: five columns."""
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 10.0).expand([5]).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(10.0))
        with batch.rows():
            pyro.sample("y", dist.Normal((beta * batch.x).sum(-1), sigma), obs=batch.y)


def logistic(received, local, batch):
    """Return a logistic regression with standard normal coefficients; x: without the intercept."""
    size = batch.x.shape[-1] + 1
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
        with batch.rows():
            logits = beta[..., 0] + (beta[..., 1:] * batch.x).sum(-1)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def banana(received, local, batch):
    """Return a curved posterior: only b + a^2 is observed precisely."""
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.5, 1.0))
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(b + a**2, 1.0), obs=batch.y)


def two_modes(received, local, batch):
    """Return a posterior with two separate modes: the responses determine a up to its sign."""
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.1, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(a**2, 1.0), obs=batch.y)


def separated(received, local, batch):
    """Return a logistic regression with an intercept of each client; x: one column."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.5))
        beta = pyro.sample("beta", dist.Normal(0.0, 2.5))
        tau = pyro.sample("tau", dist.HalfNormal(2.0))
        b = pyro.sample("b", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("y", dist.Bernoulli(logits=b + beta * batch.x[..., 0]), obs=batch.y)
