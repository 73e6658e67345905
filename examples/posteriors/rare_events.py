"""Check the calibration of regressions of rare events at three clients, by simulation.

Each of 200 replications draws coefficients, scales and effects from the prior, and responses given
them: about one event in twenty rows. Ranks of the drawn values among the draws that `to_arviz`
returns by default are uniform if the posterior is right. Priors are weakly informative; times are
censored at 1. Rows of other families in the file are kept.

Run: nice python examples/posteriors/rare_events.py [--families NAMES] [--replications 200]
     [--rounds 3] [--out FILE.csv]
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

import pyrofl
from pyrofl import Federation, Method, checks, federations

SIZES = {"A": 80, "B": 50, "C": 30}
END = 1.0  # at which times are censored
PRIORS = {
    "Intercept": dist.Normal(-3.0, 1.0),
    "b": dist.Normal(0.0, 1.0),
    "sd": dist.HalfNormal(1.0),
}
SHOWN = ("b", "Intercept", "shape", "sd_client", "r_client")
FAMILIES = ("bernoulli", "negative_binomial", "weibull")


class CensoredWeibull(TorchDistribution):
    """Weibull times of log hazard `eta`, of which those after `END` are known to be after it."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support: ClassVar[Any] = dist.constraints.positive

    def __init__(self, eta: Tensor, shape: Tensor) -> None:
        self.eta, self.shape = torch.broadcast_tensors(eta, shape)
        super().__init__(self.eta.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> CensoredWeibull:
        """Return the distribution expanded to another batch shape."""
        return CensoredWeibull(self.eta.expand(batch_shape), self.shape.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of a time, or the log probability of a time after `END`."""
        log_hazard = self.eta + self.shape.log() + (self.shape - 1) * value.log()
        return torch.where(value < END, log_hazard, 0.0) - value**self.shape * self.eta.exp()

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw times [*sample_shape, *batch_shape], at most `END`."""
        with torch.no_grad():
            uniform = torch.rand(torch.Size(sample_shape) + self.batch_shape).to(self.eta)
            times: Tensor = (-uniform.log() * (-self.eta).exp()) ** (1 / self.shape)
            return times.clamp(1e-9, END)


def weibull(received: Any, local: Any, batch: Any) -> None:
    """Run the Weibull regression with normal effects of clients."""
    x, y = batch.x, batch.y
    with batch.clients():
        b = pyro.sample("b", dist.Normal(x.new_zeros(1), 1.0).to_event(1))
        intercept = pyro.sample("Intercept", PRIORS["Intercept"])
        shape = pyro.sample("shape", dist.Gamma(2.0, 1.0))
        sd = pyro.sample("sd_client", PRIORS["sd"])
        r = pyro.sample("r_client", dist.Normal(0.0, sd))
        eta = intercept + (x * b).sum(-1) + r
        with batch.rows():
            pyro.sample("time", CensoredWeibull(eta, shape), obs=y)


def study(family: str) -> tuple[Method, Federation]:
    """Return the method of a family, and the clients with their predictor."""
    rng = np.random.default_rng(0)
    frames = {}
    for name, rows in SIZES.items():
        y = (np.arange(rows) % 20 == 0).astype(float)  # to be replaced by simulated responses
        frames[name] = pd.DataFrame({"x": rng.normal(size=rows), "y": y})
    if family == "weibull":
        times = federations.from_frames(
            {name: frame.assign(y=END - frame["y"] / 2) for name, frame in frames.items()}
        )
        data = pyrofl.regression("y ~ x", times).prepare(times)
        shared = "b Intercept shape sd_client"
        return pyrofl.hierarchical(weibull, data, shared=shared), data
    tables = federations.from_frames(frames)
    method = pyrofl.regression("y ~ x + (1 | client)", tables, family=family, priors=PRIORS)
    return method, method.prepare(tables)


def main() -> None:
    """Check the families one after the other, and write a row for each parameter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--replications", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("rare_events.csv"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if args.out.exists():
        with args.out.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["family"] not in args.families]
    for family in args.families:
        began, (method, data) = time.process_time(), study(family)
        how = {"draws": 99, "seed": args.seed, "corrected": True}
        ranks = checks.sbc(method, data, args.rounds, args.replications, **how)
        table = ranks.table()
        minutes = (time.process_time() - began) / 60
        table = table[table["variable"].isin(SHOWN)].drop(columns="variable").round(3)
        counts = {"replications": args.replications, "seed": args.seed}
        counts |= {"failed": len(ranks.failed), "uncorrected": len(ranks.uncorrected)}
        rows += [
            {"family": family, "parameter": n, **row, **counts}
            for n, row in table.to_dict("index").items()
        ]
        rows.sort(key=lambda row: FAMILIES.index(row["family"]))
        print(f"{family}: {minutes:.1f} CPU minutes")
        print(f"failed {list(ranks.failed)}, uncorrected {list(ranks.uncorrected)}")
        print(table.to_string(), flush=True)
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
