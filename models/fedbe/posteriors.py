"""Posteriors of a global model, given the clients' models (FedBE, section 3.3).

Chen and Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning", ICLR 2021.
Both are Pyro programs of which `sample` draws, `log_prob` scores and `to_arviz` exports. They run
on the CPU, where a generator gives the same draws whatever the clients' device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Generator, Size, Tensor

from pyrofl.arguments import NotNegative, Positive, checked
from pyrofl.inference.aggregation.averages import average, weighted_mean
from pyrofl.inference.posteriors.export import inference_data
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, seeded

Posterior = Callable[[], Tensors]
"""A Pyro program that samples one global model: name -> [*p]."""


@checked
def gaussian(models: Tensors, size: Tensor, std_scale: NotNegative = 1.0) -> Posterior:
    """Fit independent normals to the clients' models: p(w) = Normal(mu, Sigma_diag), eq. 5.

        mu = sum_i n_i w_i / n        Sigma_diag = sum_i n_i (w_i - mu)^2 / n

    Sites are the parameters. One on which all clients agree gets the smallest standard deviation
    whose square is a number.

    Args:
        models: [C, *p], the clients' parameters.
        size: [C], their training rows.
        std_scale: multiplies the standard deviation: 1 is the paper's, the authors' code has 0.1.
    """
    return independent(*mean_and_sd(models, size, std_scale))


def mean_and_sd(models: Tensors, size: Tensor, std_scale: float = 1.0) -> tuple[Tensors, Tensors]:
    """Return mean and standard deviation across client models, weighted by row count, [*p] each."""
    size = size.cpu()
    mean = average({n: v.cpu() for n, v in models.items()}, size)
    sd = {}
    for n, v in models.items():
        variance = weighted_mean((v.cpu() - mean[n]).square(), size)
        sd[n] = (std_scale * variance.sqrt()).clamp(min=torch.finfo(v.dtype).tiny ** 0.5)
    return mean, sd


def independent(mean: Tensors, sd: Tensors) -> Posterior:
    """Return a Pyro program that samples parameters from independent normals."""

    def program() -> Tensors:
        """Draw the network's parameters from independent normal distributions."""
        return {
            n: pyro.sample(n, dist.Normal(v.cpu(), sd[n].cpu()).to_event(v.dim()))
            for n, v in mean.items()
        }

    return program


@checked
def dirichlet(models: Tensors, size: Tensor, alpha: Positive = 0.5) -> Posterior:
    """Return a posterior over averages of the clients' models with Dirichlet weights (eq. 7).

        gamma ~ Dirichlet(alpha, ..., alpha)    w = sum_i gamma_i n_i w_i / sum_i gamma_i n_i

    The site "gamma" is random, the parameters are deterministic ones. Where sizes differ, the mean
    of w is not the clients' weighted average.

    Args:
        models: [C, *p], the clients' parameters.
        size: [C], their training rows.
        alpha: towards 0 a draw is one of the clients, towards infinity their average.
    """
    rows = size.cpu().double()

    def program() -> Tensors:
        """Draw the clients' Dirichlet weights, and return the weighted average of their models."""
        gamma = pyro.sample("gamma", dist.Dirichlet(torch.full_like(rows, alpha)))
        share = gamma * rows / (gamma * rows).sum(-1, keepdim=True)
        mixed = {n: torch.tensordot(share.to(v.dtype), v.cpu(), 1) for n, v in models.items()}
        return {
            n: pyro.deterministic(n, v, event_dim=models[n].dim() - 1) for n, v in mixed.items()
        }

    return program


def sample(posterior: Posterior, draws: int, generator: Generator) -> Tensors:
    """Draw S samples of all sites of a posterior, given as a Pyro program: site name -> [S, *p].

    The global random state is left as it was.
    """
    seed = int(torch.randint(2**62, (), generator=generator))
    with seeded(seed), torch.no_grad(), pyro.plate("draws", draws):
        nodes: Mapping[str, Any] = poutine.trace(posterior).get_trace().nodes
    return {n: v["value"] for n, v in nodes.items() if v["type"] == "sample" and n != "draws"}


def sample_each(
    shapes: Mapping[str, Size], posterior: Posterior, draws: int, generator: Generator
) -> Tensors:
    """Draw S samples of a posterior by S runs of its Pyro program: site name -> [S, *p].

    Its sites count, and what it returns where that is a dict; ValueError if a parameter of these
    shapes is not among them. The global random state is left as it was.
    """

    def once() -> Tensors:
        """Run the posterior's program once; return its sites' values and its returned dict."""
        nodes: Mapping[str, Any] = poutine.trace(posterior).get_trace().nodes
        returned = nodes["_RETURN"]["value"]
        sites = {n: v["value"] for n, v in nodes.items() if v["type"] == "sample"}
        return {**sites, **(returned if isinstance(returned, dict) else {})}

    seed = int(torch.randint(2**62, (), generator=generator))
    with seeded(seed), torch.no_grad():
        runs = [once() for _ in range(draws)]
    for run, (n, shape) in product(runs, shapes.items()):
        if n not in run or run[n].shape != shape:
            found = f"{n} of shape {list(run[n].shape)}" if n in run else f"no site {n}"
            raise ValueError(
                f"posterior gives {found}; expected {list(shape)}, as the network has it"
            )
    every = [n for n in runs[0] if all(n in run for run in runs)] if runs else []
    return {n: torch.stack([torch.as_tensor(run[n]) for run in runs]) for n in every}


def log_prob(posterior: Posterior, values: Tensors) -> Tensor:
    """Return the log density [S] of S samples under a posterior, given as a Pyro program."""
    with pyro.plate("draws", len(next(iter(values.values())))):
        trace = poutine.trace(poutine.condition(posterior, data=values)).get_trace()
    trace.compute_log_prob()  # deterministic sites have 0
    sites = [site for site in trace.nodes.values() if site["type"] == "sample"]
    return torch.stack(torch.broadcast_tensors(*(site["log_prob"] for site in sites))).sum(0)


def to_arviz(net: Network, values: Tensors, clients: Sequence[str]) -> Any:
    """Return posterior samples as an ArviZ InferenceData with named dimensions.

    Args:
        net: names the axes.
        values: name -> [S, *p].
        clients: names of the clients, the labels of "gamma".
    """
    axes = {n: ("client",) if n == "gamma" else net.dims(n) for n in values}
    return inference_data(
        {"posterior": {n: v[None] for n, v in values.items()}},
        {n: ("chain", "draw", *own) for n, own in axes.items()},
        {"client": clients} if "gamma" in values else {},
    )
