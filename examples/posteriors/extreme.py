"""Fifteen posteriors of small or extreme data, on which a correction by weights may fail.

Events are rare or absent, covariates separate the responses, groups are few, clients have few rows,
or the tails of the responses are learned. All data are simulated with fixed seeds. Each result must
be accurate, or the method must have warned; the script ends with the count of those that are not.

Run: python examples/posteriors/extreme.py [--problems NAMES] [--methods default pvi]
     [--seeds 0] [--references FOLDER]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from metrics import Reference
from problems import Problem
from references import make
from run import evaluate, find
from torch import Tensor

from pyrofl import Federation
from pyrofl.inference.definition.programs import Program
from pyrofl.tensors import generator


@dataclass(frozen=True, eq=False)
class Extreme(Problem):
    """A problem with its program and data, instead of their names."""

    stated: Program | None = None
    simulated: Callable[[], Federation] | None = None

    @functools.cached_property
    def federation(self) -> Federation:
        """The simulated rows of all clients."""
        assert self.simulated is not None
        return self.simulated()

    @property
    def program(self) -> Program:
        """The Pyro program."""
        assert self.stated is not None
        return self.stated


def clients(x: Tensor, y: Tensor, sizes: list[int]) -> Federation:
    """Return clients with the given numbers of rows."""
    rows = list(torch.arange(len(y)).split(sizes))
    return Federation(x.double(), y.double(), rows, [r[:0] for r in rows])


def counted(n: list[int], y: list[int]) -> Callable[[], Federation]:
    """Return clients with one row each: y events of n."""
    return lambda: clients(torch.tensor(n)[:, None], torch.tensor(y), [1] * len(n))


def vector(name: str, size: int, scale: float) -> Tensor:
    """Sample independent normal coefficients."""
    value: Tensor = pyro.sample(name, dist.Normal(0.0, scale).expand([size]).to_event(1))
    return value


def events(prior: Any) -> Program:
    """Return events of exchangeable clients, with a prior of tau."""

    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            tau = pyro.sample("tau", prior)
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            with batch.rows():
                pyro.sample("y", dist.Binomial(batch.x[..., 0], logits=theta), obs=batch.y)

    return model


def counts(prior: Any) -> Program:
    """Return Poisson counts of exchangeable clients, with a prior of tau."""

    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
            tau = pyro.sample("tau", prior)
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            with batch.rows():
                pyro.sample("y", dist.Poisson((theta * batch.x[..., 0]).exp()), obs=batch.y)

    return model


def heavy_noise(received, local, batch):
    """Return a regression with Student t noise, learned degrees of freedom and intercepts."""
    with batch.clients():
        beta = vector("beta", 2, 5.0)
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
        df = pyro.sample("df", dist.Gamma(2.0, 0.1))
        b = pyro.sample("b", dist.Normal(0.0, tau))
        mean = beta[..., 0] + b + beta[..., 1] * batch.x[..., 0]
        with batch.rows():
            pyro.sample("y", dist.StudentT(df, mean, sigma), obs=batch.y)


def two_effects(received, local, batch):
    """Return a logistic regression with an intercept and a slope of each client."""
    with batch.clients():
        beta = vector("beta", 2, 2.0)
        tau = pyro.sample("tau", dist.HalfNormal(1.0).expand([2]).to_event(1))
        w = pyro.sample("w", dist.Normal(beta, tau).to_event(1))
        with batch.rows():
            logits = w[..., 0] + w[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def separated(scale: float) -> Program:
    """Return a logistic regression with intercepts of clients, and a prior scale of the slope."""

    def model(received, local, batch):
        with batch.clients():
            beta = vector("beta", 2, scale)
            tau = pyro.sample("tau", dist.HalfNormal(1.0))
            b = pyro.sample("b", dist.Normal(0.0, tau))
            with batch.rows():
                logits = beta[..., 0] + b + beta[..., 1] * batch.x[..., 0]
                pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)

    return model


def cauchy_coefficients(received, local, batch):
    """Return a logistic regression with heavy-tailed priors (Gelman et al., 2008)."""
    with batch.clients():
        beta = pyro.sample("beta", dist.Cauchy(0.0, 2.5).expand([3]).to_event(1))
        with batch.rows():
            logits = beta[..., 0] + (beta[..., 1:] * batch.x).sum(-1)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def overdispersed(received, local, batch):
    """Return negative binomial counts with a learned dispersion, and intercepts of clients."""
    with batch.clients():
        beta = vector("beta", 2, 2.0)
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        size = pyro.sample("size", dist.Gamma(2.0, 0.5))
        b = pyro.sample("b", dist.Normal(0.0, tau))
        with batch.rows():
            log_mean = beta[..., 0] + b + beta[..., 1] * batch.x[..., 0]
            y = dist.NegativeBinomial(size, logits=log_mean - size.log())
            pyro.sample("y", y, obs=batch.y)


def positive(received, local, batch):
    """Return gamma responses with a learned shape, and intercepts of clients."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.HalfCauchy(1.0))
        shape = pyro.sample("shape", dist.Gamma(2.0, 0.5))
        b = pyro.sample("b", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("y", dist.Gamma(shape, shape * (-b).exp()), obs=batch.y)


def survival(received, local, batch):
    """Return exponential times with few events; x: time and whether there was an event."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(-2.0, 3.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.5))
        b = pyro.sample("b", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("y", dist.Poisson(batch.x[..., 0] * b.exp()), obs=batch.y)


def heavy_effects(received, local, batch):
    """Return Poisson counts with effects of clients that have Student t tails."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        z = pyro.sample("z", dist.StudentT(3.0, 0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * z)
        with batch.rows():
            pyro.sample("y", dist.Poisson(theta.exp()), obs=batch.y)


def regression_data() -> Federation:
    """60 rows at six clients, with Cauchy noise."""
    source = generator("heavy noise")
    x, b = torch.randn(60, generator=source), torch.randn(6, generator=source)
    noise = torch.randn(2, 60, generator=source)
    y = 1 + x + 0.5 * b.repeat_interleave(10) + 0.5 * noise[0] / noise[1].abs()
    return clients(x[:, None], y, [10] * 6)


def logistic_data(count: int, size: int, slope: float) -> Federation:
    """Responses of 0 and 1 with an intercept and a slope of each client."""
    source = generator("two effects", count)
    x = torch.randn(count * size, generator=source)
    w = torch.randn(2, count, generator=source).repeat_interleave(size, 1)
    y = torch.bernoulli((0.3 + w[0] + (slope + 0.7 * w[1]) * x).sigmoid(), generator=source)
    return clients(x[:, None], y, [size] * count)


def separated_data() -> Federation:
    """Responses that are 1 exactly where x is positive."""
    x = torch.linspace(-2.1, 2.0, 40)[torch.randperm(40, generator=generator("separated"))]
    return clients(x[:, None], (x > 0).float(), [8] * 5)


def cauchy_data() -> Federation:
    """30 rows at three clients, with a rare covariate that occurs with events alone."""
    source = generator("rare covariate")
    x = torch.stack([torch.randn(30, generator=source), torch.zeros(30)], 1)
    y = torch.bernoulli((x[:, 0] - 0.5).sigmoid(), generator=source)
    x[y.nonzero()[:3, 0], 1] = 1.0
    return clients(x, y, [10] * 3)


def overdispersed_data() -> Federation:
    """40 counts at eight clients, most of them 0."""
    source = generator("overdispersed")
    x = torch.randn(40, generator=source)
    rate = (-0.5 + 0.6 * x + 1.2 * torch.randn(40, generator=source)).exp()
    return clients(x[:, None], torch.poisson(rate, generator=source), [5] * 8)


def positive_data() -> Federation:
    """Twelve positive responses at four clients."""
    source = generator("positive")
    y = (0.8 * torch.randn(12, generator=source)).exp()
    return clients(torch.zeros(12, 1), y, [3] * 4)


def survival_data() -> Federation:
    """Times of 48 patients at eight clients, four of whom have events."""
    source = generator("survival")
    time = -4 * torch.rand(48, generator=source).log()
    event = torch.zeros(48)
    event[[3, 4, 20, 41]] = 1.0
    return clients(time[:, None], event, [6] * 8)


DEATHS = counted(
    [12, 30, 8, 55, 20, 9, 14, 40, 6, 25, 18, 33], [0, 1, 0, 0, 1, 0, 0, 2, 0, 0, 0, 1]
)
NONE = counted([20, 35, 15, 50, 28, 40, 22, 31], [0] * 8)
ALL = counted([4, 6, 3, 5, 8, 7], [4, 6, 3, 5, 7, 7])
THREE = counted([1, 1, 1], [2, 11, 5])
ONE_EACH = counted([1] * 40, [0, 1, 0, 0, 3, 0, 9, 1, 0, 2] * 4)
ZEROS = counted([1] * 12, [0] * 11 + [2])
OUTLIER = counted([1] * 15, [1, 2, 0, 1, 3, 2, 1, 0, 2, 60, 1, 2, 1, 0, 1])
CAUCHY, WIDE, HALF = dist.HalfCauchy(2.5), dist.HalfNormal(2.5), dist.HalfNormal(1.0)


def problem(name: str, model: Program, data: Any, shared: str, own: str = "", by="quadrature"):
    """Return a problem with a reference of its own."""
    more = {"own": own, "made_by": by, "reference": name, "stated": model, "simulated": data}
    return Extreme(name, "", "", shared, "", **more)


PROBLEMS = {
    one.name: one
    for one in (
        problem("rare_events", events(CAUCHY), DEATHS, "mu tau", "theta"),
        problem("no_events", events(HALF), NONE, "mu tau", "theta"),
        problem("nearly_all_events", events(WIDE), ALL, "mu tau", "theta"),
        problem("three_groups", counts(WIDE), THREE, "mu tau", "theta", "hmc"),
        problem("one_row_each", counts(HALF), ONE_EACH, "mu tau", "theta"),
        problem("one_count", counts(WIDE), ZEROS, "mu tau", "theta", "hmc"),
        problem("one_outlier", counts(HALF), OUTLIER, "mu tau", "theta"),
        problem("heavy_noise", heavy_noise, regression_data, "beta tau sigma df", "b"),
        problem(
            "two_effects",
            two_effects,
            functools.partial(logistic_data, 50, 4, 0.8),
            "beta tau",
            "w",
            "hmc",
        ),
        problem("separated", separated(5.0), separated_data, "beta tau", "b"),
        problem("cauchy_coefficients", cauchy_coefficients, cauchy_data, "beta"),
        problem("overdispersed", overdispersed, overdispersed_data, "beta tau size", "b"),
        problem("positive", positive, positive_data, "mu tau shape", "b", "hmc"),
        problem("survival", survival, survival_data, "mu tau", "b", "hmc"),
        problem("heavy_effects", heavy_effects, OUTLIER, "mu tau", "theta", "hmc"),
    )
}


def main() -> None:
    """Run methods on all problems, and count the results that are inaccurate without a warning."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--methods", nargs="+", default=["default"], help="Names of methods.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="Seeds of the methods.")
    parser.add_argument("--references", type=Path, help="Folder that keeps the references.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    silent = []
    with TemporaryDirectory() as temporary:
        folder = args.references or Path(temporary)
        for name in args.problems:
            if not (folder / f"{name}.json").exists():
                make(PROBLEMS[name]).save(folder, name)
            known = Reference.load(folder, name)
            for method in args.methods:
                for seed in args.seeds:
                    one = Extreme(**{**vars_of(PROBLEMS[name]), "seed": seed})
                    row = evaluate(find(method), one, known=known)
                    print(name, method, seed, row, flush=True)
                    if row["verdict"] not in ("accurate", "not applicable") and not row["warning"]:
                        silent.append(f"{name} ({method}, seed {seed})")
    print(f"{len(silent)} inaccurate without a warning: {', '.join(silent) or 'none'}")


def vars_of(one: Extreme) -> dict[str, Any]:
    """Return the fields of a problem."""
    return {n: getattr(one, n) for n in one.__dataclass_fields__}


if __name__ == "__main__":
    main()
