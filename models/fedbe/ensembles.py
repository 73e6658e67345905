"""Ensembles at the server, and methods that go on from what an ensemble has taught.

Chen and Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning", ICLR 2021,
algorithm 1 for any method whose clients send whole networks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypedDict, get_args

import torch
from torch import Generator, Tensor

from pyrofl.data import Who
from pyrofl.inference.method import Method
from pyrofl.inference.optim import sgd
from pyrofl.inference.servers.averages import average
from pyrofl.models.fedbe import distillation
from pyrofl.models.fedbe.posteriors import Posterior, dirichlet, gaussian, sample
from pyrofl.models.likelihoods import Likelihood, categorical
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, join_up, role, spread_out, under

Family = Literal["gaussian", "dirichlet"]
Distil = Literal["swa", "sgd", "none"]

TEAMS = ("S", "A", "C", "SA", "AC", "SC", "SAC")

HELD = "server/teacher"  # role of the last teachers, [M', *p]


class Teaching(TypedDict, total=False):
    """What FedBE hands on to `distilled`, which explains it."""

    posterior: Family
    std_scale: float
    alpha: float
    samples: int
    teachers: str
    distil: Distil
    sharpen: bool
    distil_epochs: int
    distil_batch: int
    distil_lr: float
    distil_lr_end: float
    distil_momentum: float
    cycle: int
    augment: distillation.Augment


def distilled(
    method: Method,
    net: Network,
    unlabelled: Tensor | None = None,
    *,
    likelihood: Likelihood = categorical,
    of: str = "w",
    posterior: Family = "gaussian",
    std_scale: float = 1.0,
    alpha: float = 0.5,
    samples: int = 10,
    teachers: str = "SAC",
    distil: Distil = "swa",
    sharpen: bool = True,
    distil_epochs: int = 20,
    distil_batch: int = 128,
    distil_lr: float = 1e-3,
    distil_lr_end: float = 4e-4,
    distil_momentum: float = 0.9,
    cycle: int = 25,
    augment: distillation.Augment = distillation.as_it_is,
) -> Method:
    """Let the server of a method go on from its merged model by distillation.

    Args:
        method: its server and its messages hold the whole network under one role.
        net: the network.
        unlabelled: [U, *x], the server's rows; only distil="none" does without.
        likelihood: of a row, given the network's outputs; with finitely many answers.
        of: the role of the network's parameters.
        posterior: p(w | D), from which the samples are drawn.
        std_scale: of the gaussian: multiplies its standard deviation (the authors' code: 0.1).
        alpha: of the dirichlet.
        samples: M, drawn in every round.
        teachers: S for the samples, A for the clients' average, C for the clients' models.
        distil: "swa"; "sgd" for the last iterate at a constant rate; "none" leaves the method's
            own model, beside the ensemble.
        sharpen: square the ensemble's probabilities.
        distil_epochs: over the unlabelled rows.
        distil_batch: rows in a step; the loss is their mean.
        distil_lr: learning rate, of SWA at the start of a cycle.
        distil_lr_end: learning rate of SWA at the end of a cycle.
        distil_momentum: of SGD.
        cycle: steps in a cycle of SWA.
        augment: changes the unlabelled rows of every step at random, not the targets.

    Raises:
        ValueError: if a setting is out of its range, the unlabelled rows are missing or do not fit
            the network, or the likelihood has infinitely many answers.
    """
    for name, value, known in (("posterior", posterior, Family), ("distil", distil, Distil)):
        if value not in get_args(known):
            raise ValueError(f"{name} is {value!r}; expected one of {', '.join(get_args(known))}")
    if sorted(teachers) not in (sorted(t) for t in TEAMS) or samples < (teachers == "S"):
        raise ValueError(
            f"teachers is {teachers!r} with {samples} samples; expected some of the letters S, A "
            "and C, each once, and no negative number of samples nor an empty ensemble"
        )
    if distil_epochs < 0 or distil_batch < 1 or cycle < 1 or distil_lr_end < 0:
        raise ValueError(
            f"distil_epochs is {distil_epochs}, distil_batch {distil_batch}, cycle {cycle}, "
            f"distil_lr_end {distil_lr_end}; expected >= 0, >= 1, >= 1 and >= 0"
        )
    sgd(distil_lr, distil_momentum)  # refuses what it cannot take

    def fitted(models: Tensors, size: Tensor) -> Posterior:
        if posterior == "gaussian":
            return gaussian(models, size, std_scale)
        return dirichlet(models, size, alpha)

    fitted({}, torch.ones(1))  # likewise
    rows = None if distil == "none" else _fitting(net, unlabelled, likelihood)

    def team(models: Tensors, size: Tensor, rng: Generator) -> Tensors:
        """Return the teachers, [M', *p]: the average first, then the clients, then the samples."""
        found = []
        if "A" in teachers:
            found.append({n: v[None] for n, v in average(models, size).items()})
        if "C" in teachers:
            found.append(models)
        if "S" in teachers and samples:
            drawn = sample(fitted(models, size), samples, rng)
            found.append({n: drawn[n].to(v) for n, v in models.items()})
        return join_up(found)

    def student(start: Tensors, ensemble: Tensors, rng: Generator) -> Tensors:
        assert rows is not None
        like = next(iter(start.values()))
        x = rows.to(like.device, like.dtype if rows.is_floating_point() else None)
        target = distillation.predictions(net, ensemble, x, likelihood).mean(0)
        return distillation.distil(
            net,
            start,
            x,
            distillation.sharpened(target) if sharpen else target,
            rng,
            likelihood=likelihood,
            swa=distil == "swa",
            epochs=distil_epochs,
            batch=distil_batch,
            lr=distil_lr,
            lr_end=distil_lr_end,
            cycle=cycle,
            momentum=distil_momentum,
            augment=augment,
        )

    def merge(server: Tensors, message: Tensors, who: Who, generator: Generator) -> Tensors:
        merged = method.merge(server, message, who, generator)
        models = {n: role(of, message)[n] for n in net.shapes}
        ensemble = team(models, who.size, generator)
        if distil != "none":
            start = {n: role(of, merged)[n] for n in net.shapes}
            merged = merged | under(of, student(start, ensemble, generator))
        return merged | under(f"{HELD}/{of}", ensemble)

    def deploy(server: Tensors, who: Who) -> Tensors:
        held = under("teacher", role(HELD, server))
        return method.deployed.download(server, who) | spread_out(held, len(who.ids))

    views = {**method.views, "ensemble": members}
    return replace(method, merge=merge, fold=None, deploy=deploy, views=views)


def members(received: Tensors, local: Tensors) -> list[Tensors]:
    """Return the ensemble: what is received, with each teacher in turn; before round one alone."""
    held = role("teacher", received)
    count = next(iter(held.values())).shape[1] if held else 0
    known = local | received
    return [known | {n: v[:, m] for n, v in held.items()} for m in range(count)] or [known]


def _fitting(net: Network, unlabelled: Tensor | None, likelihood: Likelihood) -> Tensor:
    """Return the unlabelled rows after a trial with one of them."""
    if unlabelled is None or not len(unlabelled):
        raise ValueError(
            "unlabelled is missing; expected rows [U, *x] for the server to distil on, such as "
            "Federation.unlabelled (on the command line: --server-data)"
        )
    dtype = unlabelled.dtype if unlabelled.is_floating_point() else None
    weights = {n: p.detach().to(unlabelled.device, dtype) for n, p in net.module.named_parameters()}
    try:
        outputs = net.apply(weights, unlabelled[:1])
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ValueError(
            f"unlabelled has shape {tuple(unlabelled.shape)}; expected rows that the network "
            f"takes: {error}"
        ) from error
    distillation.log_answers(outputs, unlabelled[:1], likelihood)
    return unlabelled
