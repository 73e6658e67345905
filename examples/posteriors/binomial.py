"""Deaths, seeds, tumours, hits and sick animals, each out of a known number; sick people."""

import pyro
import pyro.distributions as dist

HEART = ("age", "sex", "pain", "thalach", "exang", "oldpeak", "chol", "ca")


def surgical(received, local, batch):
    """Let logits of the risks be normal around mu (BUGS, vol. 1); x: operations."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1000.0))
        tau = pyro.sample("tau", dist.HalfCauchy(1.0))
        b = pyro.sample("b", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("deaths", dist.Binomial(batch.x[..., 0], logits=b), obs=batch.y)


def seeds(received, local, batch):
    """Let plates differ beside type, extract and both (Crowder, 1978); x: seeds, type, extract."""
    total, kind, extract = batch.x.unbind(-1)
    with batch.clients():
        alpha = pyro.sample("alpha", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
        b = pyro.sample("b", dist.Normal(0.0, sigma))
        with batch.rows():
            of_plate = alpha[..., 1] * kind + alpha[..., 2] * extract
            logits = alpha[..., 0] + of_plate + alpha[..., 3] * kind * extract + b
            pyro.sample("grown", dist.Binomial(total, logits=logits), obs=batch.y)


def herds(batch):
    """State the shared sites of the cattle disease, and return the logits of all rows."""
    beta = pyro.sample("beta", dist.Normal(0.0, 2.5).expand([4]).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    b = pyro.sample("b", dist.Normal(0.0, tau))
    return beta[..., 0] + (beta[..., 1:] * batch.x[..., 1:]).sum(-1) + b


def cbpp(received, local, batch):
    """Let herds differ beside periods (lme4); x: size of the herd, periods 2, 3 and 4."""
    with batch.clients():
        logits = herds(batch)
        with batch.rows():
            pyro.sample("sick", dist.Binomial(batch.x[..., 0], logits=logits), obs=batch.y)


def cbpp_beta(received, local, batch):
    """Let the share of the sick be beta in every herd and period, too."""
    with batch.clients():
        size = pyro.sample("size", dist.Gamma(2.0, 0.1))
        rate = herds(batch).sigmoid().clamp(1e-9, 1 - 1e-9)  # the tails of proposals reach 0
        with batch.rows():
            sick = dist.BetaBinomial(rate * size, (1 - rate) * size, batch.x[..., 0])
            pyro.sample("sick", sick, obs=batch.y)


def rat_tumours(received, local, batch):
    """Let logits of the rates be normal around mu; x: rats."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(-2.0, 1.5))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        logit = mu + tau * eta
        pyro.deterministic("rate", logit.sigmoid())
        with batch.rows():
            tumours = dist.Binomial(batch.x[..., 0], logits=logit)
            pyro.sample("tumours", tumours, obs=batch.y)


def baseball(received, local, batch):
    """Let logits of the abilities be normal around mu; x: at-bats."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(-1.0, 1.0))
        tau = pyro.sample("tau", dist.HalfNormal(0.5))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        ability = pyro.deterministic("ability", (mu + tau * eta).sigmoid())
        with batch.rows():
            pyro.sample("hits", dist.Binomial(batch.x[..., 0], ability), obs=batch.y)


def heart_disease(received, local, batch):
    """Let every hospital's coefficients be normal around the population's; x: see HEART."""
    ones = batch.x.new_ones(len(HEART) + 1)
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0 * ones, 1.5).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(0.5 * ones).to_event(1))
        w = pyro.sample("w", dist.Normal(beta, tau).to_event(1))
        with batch.rows():
            logits = w[..., 0] + (w[..., 1:] * batch.x).sum(-1)
            pyro.sample("disease", dist.Bernoulli(logits=logits), obs=batch.y)
