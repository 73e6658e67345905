"""Ensembles at the server, and methods that go on from what an ensemble has taught.

Chen and Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning", ICLR 2021,
algorithm 1 for any method whose clients send whole networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypedDict

from torch import Generator, Tensor

from pyrofl.arguments import Count, CountOrNone, NotNegative, Positive, ShareBelowOne, checked
from pyrofl.data import Who
from pyrofl.inference.method import Method, View
from pyrofl.inference.programs import Likelihood, built_for
from pyrofl.inference.servers.averages import average
from pyrofl.models.fedbe import distillation
from pyrofl.models.fedbe.posteriors import Posterior, dirichlet, gaussian, sample
from pyrofl.models.likelihoods import categorical
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, join_up, role, spread_out, under

Family = Literal["gaussian", "dirichlet"]
Fit = Callable[[Tensors, Tensor], Posterior]
Distil = Literal["swa", "sgd", "none"]

TEAMS = ("S", "A", "C", "SA", "AC", "SC", "SAC")

HELD = "server/teacher"  # role of the last teachers, [M', *p]


class Teaching(TypedDict, total=False):
    """What FedBE hands on to `distilled`, which explains it."""

    posterior: Family | Fit
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


@checked
def distilled(
    method: Method,
    net: Network,
    unlabelled: Tensor | None = None,
    *,
    likelihood: Likelihood = categorical,
    of: str = "w",
    posterior: Family | Fit = "gaussian",
    std_scale: NotNegative = 1.0,
    alpha: Positive = 0.5,
    samples: CountOrNone = 10,
    teachers: str = "SAC",
    distil: Distil = "swa",
    sharpen: bool = True,
    distil_epochs: CountOrNone = 20,
    distil_batch: Count = 128,
    distil_lr: NotNegative = 1e-3,
    distil_lr_end: NotNegative = 4e-4,
    distil_momentum: ShareBelowOne = 0.9,
    cycle: Count = 25,
    augment: distillation.Augment = distillation.as_it_is,
) -> Method:
    """Let the server of a method go on from its merged model by distillation.

    Args:
        method: its server and its messages hold the whole network under one role.
        net: the network.
        unlabelled: [U, *x], the server's rows; only distil="none" does without.
        likelihood: of a row, given the network's outputs; with finitely many answers.
        of: the role of the network's parameters.
        posterior: p(w | D), from which the samples are drawn; or a function of one's own, from
            the clients' models [C, *p] and sizes [C] to a Pyro program that samples one model.
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
    if sorted(teachers) not in (sorted(t) for t in TEAMS) or samples < (teachers == "S"):
        raise ValueError(
            f"teachers is {teachers!r} with {samples} samples; expected some of the letters S, A "
            "and C, each once, and no negative number of samples nor an empty ensemble"
        )

    def fitted(models: Tensors, size: Tensor) -> Posterior:
        """Return p(w | D), from which the samples are drawn."""
        if callable(posterior):
            return posterior(models, size)
        if posterior == "gaussian":
            return gaussian(models, size, std_scale)
        return dirichlet(models, size, alpha)

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
        """Return what the ensemble has taught (algorithm 1)."""
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

    @built_for(**({} if rows is None else {"model": method.model}))
    def merge(server: Tensors, message: Tensors, who: Who, generator: Generator) -> Tensors:
        """Distil the ensemble, for which all messages are needed, as teachers."""
        merged = method.merge(server, message, who, generator)
        models = {n: role(of, message)[n] for n in net.shapes}
        ensemble = team(models, who.size, generator)
        if distil != "none":
            start = {n: role(of, merged)[n] for n in net.shapes}
            merged = merged | under(of, student(start, ensemble, generator))
        return merged | under(f"{HELD}/{of}", ensemble)

    def with_teachers(server: Tensors, who: Who) -> Tensors:
        """Send the last teachers too."""
        held = under("teacher", role(HELD, server))
        return method.download(server, who) | spread_out(held, len(who.ids))

    ensemble = View(members, with_teachers)
    return replace(method, merge=merge, views={**method.views, "ensemble": ensemble})


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
