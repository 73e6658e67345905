"""Draws, densities and export of FedBE's posteriors of a global model, which are Pyro programs.

They run on the CPU, where a generator gives the same draws whatever the clients' device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Generator, Size, Tensor

from pyrofl.inference.definition.averages import average, weighted_mean
from pyrofl.inference.posteriors.export import inference_data
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, seeded

Posterior = Callable[[], Tensors]
"""A Pyro program that samples one global model: name -> [*p]."""


def mean_and_sd(models: Tensors, size: Tensor, std_scale: float = 1.0) -> tuple[Tensors, Tensors]:
    """Return mean and standard deviation across client models, weighted by row count, [*p] each."""
    size = size.cpu()
    mean = average({n: v.cpu() for n, v in models.items()}, size)
    sd = {}
    for n, v in models.items():
        variance = weighted_mean((v.cpu() - mean[n]).square(), size)
        sd[n] = (std_scale * variance.sqrt()).clamp(min=torch.finfo(v.dtype).tiny ** 0.5)
    return mean, sd


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
            description = f"{n} of shape {list(run[n].shape)}" if n in run else f"no site {n}"
            raise ValueError(
                f"posterior gives {description}; expected {list(shape)}, as the network has it"
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
