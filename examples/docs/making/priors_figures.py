"""Draw the figures of priors.md.

PYTHONPATH=examples:examples/docs python -m making.priors_figures
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, GradientStep, Method, Phase, adam, aggregation, elbo, guides, priors

FOLDER = Path(__file__).parents[2]  # examples/
GUIDES: Mapping[str, Any] = {
    "delta": guides.delta,
    "mean_field": guides.mean_field,
    "low_rank(1)": guides.low_rank(1),
    "full_covariance": guides.full_covariance,
    "copula": guides.copula,
    "flow(3)": guides.flow(3),
}
SHAPES = {"w": torch.Size([2])}
Y, SD = 1.0, 0.4  # response, and its known standard deviation


def densities() -> None:
    """Draw the log densities of families of priors with location 0 and scale 1."""
    families = {
        "dist.Normal": dist.Normal,
        "dist.Laplace": dist.Laplace,
        "priors.student_t(3)": priors.student_t(3),
        "priors.Horseshoe": priors.Horseshoe,
        "priors.mixture()": priors.mixture(),
    }
    figure, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
    x = torch.linspace(-5.0, 5.0, 1000)  # without 0, where the horseshoe is infinite
    for name, family in families.items():
        density = family(torch.zeros_like(x), torch.ones_like(x)).log_prob(x)
        axes.plot(x, density, label=name)
    axes.set(xlabel="weight", ylabel="log density", ylim=(-8, 2))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / "priors.png", dpi=130)


def curved(received: Any, local: Any, batch: pyrofl.Batch) -> None:
    """Have a posterior of two weights that is curved: y ~ Normal(w_0 + w_1^2, SD)."""
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Normal(w[..., 0] + w[..., 1] ** 2, SD), obs=batch.y)


def draws_of(family: Any, data: Federation) -> torch.Tensor:
    """Return posterior draws [S, 2] of a guide that one client has fitted."""
    guide = family(SHAPES)
    step = GradientStep(guide.names, adam(0.01), elbo(num_particles=20), num_steps=3000)
    method = Method(
        init=lambda source, clients: guide.start({"w": torch.tensor([0.5, 0.5])}),
        model=curved,
        guide=guide,
        phases=(Phase((step,)),),
        aggregate=aggregation.Aggregator({"*": aggregation.uniform}),
    )
    run = pyrofl.fit(method, data, rounds=1, progress=False)
    return run.posterior(400)["w"][:, 0]


def posteriors() -> None:
    """Draw the draws of every guide over the contours of the exact posterior."""
    rows = (torch.tensor([0]),)
    data = Federation(torch.ones(1, 1), torch.tensor([Y]), rows, (rows[0][:0],))
    u, v = torch.meshgrid(torch.linspace(-3, 3, 200), torch.linspace(-3, 3, 200), indexing="xy")
    log_p = -(u**2 + v**2) / 2 - (Y - u - v**2) ** 2 / (2 * SD**2)
    figure, grid = plt.subplots(
        2, 3, figsize=(7.5, 5), layout="constrained", sharex=True, sharey=True
    )
    for axes, (name, family) in zip(grid.flat, GUIDES.items(), strict=True):
        w = draws_of(family, data)
        axes.contour(u, v, (log_p - log_p.max()).exp(), levels=[0.05, 0.3, 0.7], colors="0.6")
        axes.plot(w[:, 0], w[:, 1], "o", markersize=2 if name != "delta" else 6, color="C0")
        axes.set_title(f"guides.{name}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    grid[1, 1].set_xlabel("first weight")
    grid[0, 0].set_ylabel("second weight")
    figure.savefig(FOLDER / "guides.png", dpi=130)


if __name__ == "__main__":
    densities()
    posteriors()
