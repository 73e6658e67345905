"""Hierarchical programs that several tests fit."""

from __future__ import annotations

import pyro
import pyro.distributions as dist

from pyrofl.data import Batch
from pyrofl.tensors import Tensors

EFFECT_SD, NOISE_SD = 0.9, 0.7  # of `normal_effects`


def normal_effects(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Sample normal effects of clients around mu, with a posterior in closed form."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        effect = pyro.sample("effect", dist.Normal(mu, EFFECT_SD))
        with batch.rows():
            pyro.sample("y", dist.Normal(effect, NOISE_SD), obs=batch.y)


def eight_schools(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let effects of schools be normal around mu, non-centered; x is the standard error."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * eta)
        with batch.rows():
            pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


def radon(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let counties have intercepts and slopes; x is the floor and the county's uranium."""
    floor, uranium = batch.x[..., 0], batch.x[..., :1, 1]
    with batch.clients():
        gamma = pyro.sample("gamma", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        sd = pyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        center = gamma[..., 0] + gamma[..., 1] * uranium
        intercept = pyro.deterministic("intercept", center + sd[..., 0] * z[..., 0])
        slope = pyro.deterministic("slope", gamma[..., 2] + sd[..., 1] * z[..., 1])
        with batch.rows():
            pyro.sample("y", dist.Normal(intercept + slope * floor, sigma), obs=batch.y)


def lines(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let clients' intercepts and slopes be normal around those of all; x is the time."""
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        sd = pyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        w = pyro.sample("w", dist.Normal(beta, sd).to_event(1))
        with batch.rows():
            line = w[..., 0] + w[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Normal(line, sigma), obs=batch.y)


def frailty(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let times be Weibull with a frailty of each client; x: whether it was seen, age, sex."""
    seen, y = batch.x[..., 0], batch.y.clamp(min=1e-9)  # padding is 0
    with batch.clients():
        b0 = pyro.sample("b0", dist.Normal(0.0, 10.0))
        beta = pyro.sample("beta", dist.Normal(0.0, 5.0).expand([2]).to_event(1))
        shape = pyro.sample("shape", dist.HalfNormal(3.0))
        tau = pyro.sample("tau", dist.HalfCauchy(1.0))
        f = pyro.sample("f", dist.Normal(0.0, tau))
        with batch.rows():
            eta = b0 + f + (beta * batch.x[..., 1:]).sum(-1)
            log_hazard = shape.log() + (shape - 1) * y.log() + eta
            pyro.factor("time", seen * log_hazard - y**shape * eta.exp())


def hospitals(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let logits of death be normal around those of all hospitals; x is the number of cases."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(-2.0, 1.5))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        with batch.rows():
            logits = mu + tau * eta
            pyro.sample("deaths", dist.Binomial(batch.x[..., 0], logits=logits), obs=batch.y)
