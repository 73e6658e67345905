"""Normal effects and normal responses; lines of subjects, also robust ones; elections."""

import pyro
import pyro.distributions as dist
import torch

NES = ("real_ideo", "race_adj", "age_discrete", "educ1", "gender", "income")
CENTER = (4, 1, 2.5, 2.5, 1.5, 3)  # the middle of each scale


def eight_schools(received, local, batch):
    """Let effects of schools be normal around mu (Rubin, 1981); x: the standard error."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * eta)
        with batch.rows():
            pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


def counties(uranium):
    """State the sites of the radon data; return intercepts, slopes and the spread of rows."""
    gamma = pyro.sample("gamma", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    sd = pyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    center, effect = gamma[..., 0] + gamma[..., 1] * uranium, sd * z
    intercept = pyro.deterministic("intercept", center + effect[..., 0])
    return intercept, pyro.deterministic("slope", gamma[..., 2] + effect[..., 1]), sigma


def radon(received, local, batch):
    """Let counties have intercepts and slopes (Gelman and Hill, 2007); x: floor, log uranium."""
    with batch.clients():
        intercept, slope, sigma = counties(batch.x[..., :1, 1])
        with batch.rows():
            line = intercept + slope * batch.x[..., 0]
            pyro.sample("y", dist.Normal(line, sigma), obs=batch.y)


def radon_sums(received, local, batch):
    """State the same model of one row of sums for each county; x: log uranium, then the sums."""
    with batch.clients():
        intercept, slope, sigma = counties(batch.x[..., :1, 0])
        with batch.rows():
            of_sums(torch.stack([intercept, slope], -1), sigma, batch.x[..., 1:], batch.y)


def of_sums(w, sigma, x, rows):
    """Add the log likelihood of linear regressions, given sums over the rows.

    Args:
        w: coefficients [..., k].
        sigma: standard deviation of a response.
        x: sums [..., k * k + k + 1] of products of the columns, of the columns with y, of y with y.
        rows: number of rows.
    """
    k = w.shape[-1]
    products, with_y, squares = x.split([k * k, k, 1], -1)
    curved = (w * (products.unflatten(-1, (k, k)) @ w[..., None])[..., 0]).sum(-1)
    left = squares[..., 0] - 2 * (with_y * w).sum(-1) + curved
    pyro.factor("sums", -rows * sigma.log() - left / (2 * sigma**2))


def population():
    """State what the lines of all subjects share, without how their ends go together."""
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    sd = pyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
    return beta, sd, pyro.sample("sigma", dist.HalfNormal(1.0))


def lines(received, local, batch):
    """Let intercepts and slopes be normal around those of the population; x: time."""
    with batch.clients():
        beta, sd, sigma = population()
        w = pyro.sample("w", dist.Normal(beta, sd).to_event(1))
        with batch.rows():
            line = w[..., 0] + w[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Normal(line, sigma), obs=batch.y)


def robust_lines(received, local, batch):
    """Let responses follow Student's t around a line of every subject; x: time."""
    with batch.clients():
        beta, sd, sigma = population()
        df = pyro.sample("df", dist.Gamma(2.0, 0.1))
        w = pyro.sample("w", dist.Normal(beta, sd).to_event(1))
        with batch.rows():
            line = w[..., 0] + w[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.StudentT(df, line, sigma), obs=batch.y)


def correlated_lines(received, local, batch):
    """Let intercepts and slopes of the subjects go together; x: time."""
    with batch.clients():
        beta, sd, sigma = population()
        root = pyro.sample("root", dist.LKJCholesky(2, 2.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        pyro.deterministic("rho", root[..., 1, 0])
        w = beta + sd * (root @ z[..., None])[..., 0]
        w = pyro.deterministic("w", w, event_dim=1)
        with batch.rows():
            line = w[..., 0] + w[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Normal(line, sigma), obs=batch.y)


def years(batch):
    """State the sites of the elections; return each year's coefficients and the spread of rows."""
    ones = batch.x.new_ones(len(NES) + 1)
    beta = pyro.sample("beta", dist.Normal(0 * ones, 5.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(0.5 * ones).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(5.0))
    return pyro.sample("w", dist.Normal(beta, tau).to_event(1)), sigma


def nes(received, local, batch):
    """Let every year's coefficients be normal around those of all years; x: see NES."""
    x = batch.x - batch.x.new_tensor(CENTER)
    with batch.clients():
        w, sigma = years(batch)
        with batch.rows():
            eta = w[..., 0] + (w[..., 1:] * x).sum(-1)
            pyro.sample("y", dist.Normal(eta, sigma), obs=batch.y)


def nes_sums(received, local, batch):
    """State the same model of one row of sums for each year, instead of 8,423 rows."""
    with batch.clients():
        w, sigma = years(batch)
        with batch.rows():
            of_sums(w, sigma, batch.x, batch.y)
