"""Counts of seizures, times to infection, and times of reaction."""

import pyro
import pyro.distributions as dist


def patients(batch):
    """State the shared sites of the seizures and return the logs of all rates.

    x: log(base / 4), treated, both, log age, fourth visit; less their means (Breslow and Clayton).
    """
    beta = pyro.sample("beta", dist.Normal(0.0, 5.0).expand([6]).to_event(1))
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    b = pyro.sample("b", dist.Normal(0.0, tau))
    return beta[..., 0] + (beta[..., 1:] * batch.x).sum(-1) + b


def epil(received, local, batch):
    """Let seizures be Poisson, with an effect of every patient."""
    with batch.clients():
        log_rate = patients(batch)
        with batch.rows():
            pyro.sample("seizures", dist.Poisson(log_rate.exp()), obs=batch.y)


def epil_visits(received, local, batch):
    """Let seizures be Poisson, with effects of every patient and every visit, as in BUGS."""
    with batch.clients():
        log_rate = patients(batch)
        sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
        with batch.rows():
            visit = pyro.sample("visit", dist.Normal(0.0, sigma))
            pyro.sample("seizures", dist.Poisson((log_rate + visit).exp()), obs=batch.y)


def epil_negative_binomial(received, local, batch):
    """Let seizures be negative binomial, with an effect of every patient."""
    with batch.clients():
        log_rate = patients(batch)
        size = pyro.sample("size", dist.Gamma(2.0, 0.1))
        with batch.rows():
            logits = log_rate - size.log()
            pyro.sample("seizures", dist.NegativeBinomial(size, logits=logits), obs=batch.y)


def kidney(received, local, batch):
    """Let times be Weibull with a frailty of each patient; x: whether it was seen, age, woman."""
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


def reactions(received, local, batch):
    """Let times of reaction be gamma, their logs rise with days; x: days of sleep loss."""
    y = batch.y.clamp(min=1e-9)  # padding is 0
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(0.5))
        spread = pyro.sample("spread", dist.HalfNormal(0.5))  # sd over mean of a time
        b = pyro.sample("b", dist.Normal(0.0, tau))
        shape = spread**-2
        with batch.rows():
            mean = (beta[..., 0] + beta[..., 1] * batch.x[..., 0] + b).exp()
            pyro.sample("time", dist.Gamma(shape, shape / mean), obs=y)
