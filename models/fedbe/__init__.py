"""FedBE: the server samples an ensemble of global models and distills it into the next one.

Chen and Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning", ICLR 2021.

    p(y | x, w) = Categorical(logits=net(x; w))           clients maximize it: q(w_i) = Delta
    p(w | D)    = Normal(mu, Sigma_diag) eq. 5, or eq. 7: gamma ~ Dirichlet(alpha),
                  w = sum_i gamma_i n_i w_i / sum_i gamma_i n_i                        eq. 6
    p(y | x, D) = integral of p(y | x, w) p(w | D) dw                                  eq. 3

    client   w_i = SGD from w on the mean loss per row                                 eq. 1
    server   wbar = sum_i n_i w_i / n                                                  eq. 2
             teachers = {wbar} + {w_i} + {w^(m) ~ p(w | D)}: the letters A, C and S
             phat_u   = mean over teachers of p(y | x_u; w), which estimates eq. 3     eq. 4
             w        = SWA from wbar on -1/U sum_u phat_u' log p(y | x_u; w)          algorithm 1

The x_u are unlabeled rows that the server holds, of the same kind or another. Its last teachers
stay there, as the view "ensemble": Bayesian model averaging, without distillation. The draws of
`posterior` and `to_arviz` are new ones of p(w | D), with gamma where there is one; model="global"
gives the student, a point.

Related methods are settings:

    v-Distillation   teachers="C", distil="sgd", whose phat_u are squared and normalized
    FedBE w/o SWA    distil="sgd"
    1-Ensemble       teachers="C", distil="none" and one round of many epochs, view "ensemble":
                     no client sees an average of models
    FedAvg whose ensemble is watched (figure 3)   distil="none"
    FedBE + FedProx, FedAvgM or SCAFFOLD          on="fedprox", ...: distillation starts from that
                     method's model; `with_distillation` puts it on any other

Use it where the server has unlabeled rows of the same kind and clients' models disagree: an
ensemble of sampled models teaches the next one. It assumes that good models lie around the mean of
the clients'.

Departures from the paper: clients' rows are not augmented, the server's only by `augment`;
networks have GroupNorm instead of BatchNorm; defaults of the clients' training are FedAvg's here
(on CIFAR the paper has epochs=20, batch=40, weight_decay=1e-3, decay=True). The code scales the
standard deviation by 0.1 (`std_scale`), samples normalized updates around the previous model,
collects at a constant learning rate and divides the loss by the number of classes; here it is as
the paper has it, the start of SWA scaled to the number of steps. Probabilities are squared for
v-Distillation alone, as in the paper, where the code does so for every kind: on digits with two
major classes per client students of squared ones end 3 points below the average they start from,
those of plain ones 2 above. The learning rate of distillation is three times the paper's 1e-3, with
the same ratio at the end of a cycle (`distil_lr=1e-3, distil_lr_end=4e-4` is the paper's). The
ensemble is softer than the average of near-converged clients, and a student that is trained to its
end loses to FedAvg: on digits with five classes per client (20 rounds, ten seeds), accuracy differs
from FedAvg's by -0.6 points at ten times the paper's rate, by +0.2 here and by +0.3 at the paper's.
With two major classes per client and five rounds these are +2.3, +1.3 and +0.4. A network of
convolutions overfits few unlabeled rows: with 600 images its students end 3 points below the
average at either rate, with 2,400 one point (`examples/papers/fedbe`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, TypedDict, Unpack, cast

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.arguments import Count, NotNegative, Positive, ShareBelowOne, Whole, checked
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.averages import average
from pyrofl.inference.definition.metadata import Monitor
from pyrofl.inference.definition.method import Method, View
from pyrofl.inference.definition.programs import Guide, Likelihood, as_prior, flat, of_network
from pyrofl.models import fedavg, fedavgm, fedprox, priors, scaffold
from pyrofl.models.fedbe.posteriors import Posterior, mean_and_sd, sample, sample_each
from pyrofl.models.likelihoods import categorical
from pyrofl.models.shared import distillation
from pyrofl.models.shared.kept_models import members
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, join_up, role, spread_out, under

Base = Literal["fedavg", "fedprox", "fedavgm", "scaffold"]
ServerPosterior = Literal["gaussian", "dirichlet"]
Fit = Callable[[Tensors, Tensor], Posterior]
Distil = Literal["swa", "sgd", "none"]

TEAMS = ("A", "C", "S", "AC", "AS", "CS", "ACS")
HELD = "server/teacher"  # role of the last teachers, [M', *p]
KNOWN = "server/posterior"  # role of what the last p(w | D) was fitted to, or its moments


AGREED, LOST = "server/agreement", "server/agreement_lost"  # of the last distillation
WATCHED = {
    AGREED: Monitor(),
    LOST: Monitor(
        high=0.05,
        why="after distillation the student agrees with its teachers on fewer unlabeled rows than "
        "the average it began with; expected another distil_lr, or more distil_epochs",
    ),
}


class Teaching(TypedDict, total=False):
    """Settings of the ensemble distillation at the server; see `with_distillation`."""

    posterior: ServerPosterior | Fit
    std_scale: float
    alpha: float
    samples: int
    teachers: str
    distil: Distil
    sharpen: bool | None
    distil_epochs: int
    distil_batch: int
    distil_lr: float
    distil_lr_end: float
    distil_momentum: float
    distil_weight_decay: float
    cycle: int
    swa_start: float
    augment: distillation.Augment | None


class FedBESettings(Teaching, fedavg.Training, total=False):
    """Settings of the server's distillation and of the clients' local training."""


SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "distil_lr": (0.001, 0.003, 0.01)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    server_data: Tensor | None = None,
    on: Base = "fedavg",
    mu: NotNegative = 1e-3,
    server_momentum: ShareBelowOne = 0.9,
    **settings: Unpack[FedBESettings],
) -> Method:
    """Build the FedBE method (Bayesian model ensemble, distilled at the server).

    Args:
        net: the network; all its parameters are shared.
        server_data: [U, *x], the server's rows.
        on: the method whose clients train and whose model distillation starts from.
        mu: of FedProx, per datum; the authors' code has 1e-3.
        server_momentum: of FedAvgM in its averaging form, whose rate is 1 - server_momentum.
        settings: of the server as of `with_distillation`, of the clients as of `fedavg.build`,
            where `decay` is the paper's schedule of their learning rate.

    Raises:
        ValueError: as `with_distillation` and `fedavg.build`, or for a prior other than FedProx's.
    """
    likelihood = settings.get("likelihood", categorical)
    prior = priors.proximal(mu) if on == "fedprox" else settings.get("prior", flat)
    shapes, prior_of = net.shapes, as_prior(prior, net.shapes)

    @of_network(net, likelihood, prior_of)
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the client's parameters w_i from their prior, then the responses of its rows."""
        with batch.clients():
            w = {n: pyro.sample(n, prior_of(n, shapes[n], received, local, batch)) for n in shapes}
            with batch.rows():
                pyro.sample("y", likelihood(net(w, batch.x), batch.x), obs=batch.y)

    def points(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Set the client's parameters to the point w_i, which maximizes the likelihood."""
        with batch.clients():
            for n, shape in shapes.items():
                pyro.sample(n, dist.Delta(local[f"w/{n}"], event_dim=len(shape)))

    teaching = {n: v for n, v in settings.items() if n in Teaching.__annotations__}
    training = cast("fedavg.Training", {n: v for n, v in settings.items() if n not in teaching})
    if on == "fedprox":
        if "prior" in training:
            raise ValueError("prior is given with on='fedprox'; expected mu, as that is its prior")
        method = fedprox.build(net, mu=mu, **cast("fedavg.CenteredTraining", training))
    elif on == "fedavgm":
        lr = 1 - server_momentum
        method = fedavgm.build(net, server_lr=lr, server_momentum=server_momentum, **training)
    else:
        method = (fedavg if on == "fedavg" else scaffold).build(net, **training)
    q = cast("Guide", method.guide)
    if settings.get("guide") is None:
        q = replace(q, program=points)
    method = replace(method, model=model, guide=q)
    return with_distillation(
        method, net, server_data, likelihood=likelihood, **cast("Teaching", teaching)
    )


@checked
def with_distillation(
    method: Method,
    net: Network,
    server_data: Tensor | None = None,
    *,
    likelihood: Likelihood = categorical,
    of: str = "w",
    posterior: ServerPosterior | Fit = "gaussian",
    std_scale: NotNegative = 1.0,
    alpha: Positive = 0.5,
    samples: Whole = 10,
    teachers: str = "SAC",
    distil: Distil = "swa",
    sharpen: bool | None = None,
    distil_epochs: Whole = 20,
    distil_batch: Count = 128,
    distil_lr: NotNegative = 3e-3,
    distil_lr_end: NotNegative = 1.2e-3,
    distil_momentum: ShareBelowOne = 0.9,
    distil_weight_decay: NotNegative = 0.0,
    cycle: Count = 25,
    swa_start: ShareBelowOne = distillation.SWA_START_SHARE,
    augment: distillation.Augment | None = None,
) -> Method:
    """Extend a federated method: after aggregation, its server distills an ensemble of models.

    The result of the distillation becomes the global model.

    Args:
        method: its server and its messages hold the whole network under one role.
        net: the network.
        server_data: [U, *x], the server's rows; only distil="none" does without.
        likelihood: of a row, given the network's outputs; with finitely many answers.
        of: the role of the network's parameters.
        posterior: p(w | D), from which the samples are drawn; or your own function, from
            the clients' models [C, *p] and sizes [C] to any Pyro program that samples one model:
            its sites, or what it returns, are the parameters [*p]. It runs once for each model.
        std_scale: of the gaussian: multiplies its standard deviation (the authors' code: 0.1).
        alpha: of the dirichlet.
        samples: M, drawn in every round.
        teachers: S for the samples, A for the clients' average, C for the clients' models.
        distil: "swa"; "sgd" for the last iterate at a constant rate; "none" leaves the method's
            own model, with the ensemble.
        sharpen: square the ensemble's probabilities, as the authors' code does for all teachers;
            None does so for v-Distillation, teachers="C", as in the paper.
        distil_epochs: over the unlabeled rows.
        distil_batch: rows in a step; the loss is their mean.
        distil_lr: learning rate, of SWA at the start of a cycle.
        distil_lr_end: learning rate of SWA at the end of a cycle.
        distil_momentum: of SGD.
        distil_weight_decay: of SGD, towards zero.
        cycle: steps in a cycle of SWA.
        swa_start: share of the steps after which SWA begins to collect.
        augment: changes the unlabeled rows of every step at random, not the targets.

    Raises:
        ValueError: if a setting is out of its range, the unlabeled rows are missing or do not fit
            the network, or the likelihood has infinitely many answers.
    """
    if "".join(sorted(teachers)) not in TEAMS or samples < (teachers == "S"):
        raise ValueError(
            f"teachers is {teachers!r} with {samples} samples; expected some of the letters S, A "
            "and C, each once, and an ensemble that is not empty"
        )
    rows = (
        None
        if distil == "none"
        else distillation.check_unlabeled_rows(net, server_data, likelihood)
    )
    fits: dict[str, Fit] = {
        "gaussian": partial(gaussian, std_scale=std_scale),
        "dirichlet": partial(dirichlet, alpha=alpha),
    }
    fit = posterior if callable(posterior) else fits[posterior]
    draw = partial(sample_each, net.shapes) if callable(posterior) else sample
    square = teachers == "C" if sharpen is None else sharpen

    def team(models: Tensors, size: Tensor, rng: Generator) -> Tensors:
        """Return the chosen teacher models [M', *p]: average, client models, posterior samples."""
        teacher_models = []
        if "A" in teachers:
            teacher_models.append({n: v[None] for n, v in average(models, size).items()})  # eq. 2
        if "C" in teachers:
            teacher_models.append(models)
        if "S" in teachers and samples:
            drawn = draw(fit(models, size), samples, rng)
            teacher_models.append({n: drawn[n].to(v) for n, v in models.items()})
        return join_up(teacher_models)

    def student(
        start: Tensors, ensemble: Tensors, server_data: Tensor, rng: Generator
    ) -> tuple[Tensors, Tensors]:
        """Distill an ensemble into one student model (algorithm 1); also return their agreement."""
        like = next(iter(start.values()))
        x = server_data.to(like.device, like.dtype if server_data.is_floating_point() else None)
        target = distillation.predictions(net, ensemble, x, likelihood).mean(0)  # eq. 4
        taught = distillation.distil(
            net,
            start,
            x,
            distillation.sharpened(target) if square else target,
            rng,
            likelihood=likelihood,
            swa=distil == "swa",
            epochs=distil_epochs,
            batch=distil_batch,
            lr=distil_lr,
            lr_end=distil_lr_end,
            cycle=cycle,
            swa_start=swa_start,
            momentum=distil_momentum,
            weight_decay=distil_weight_decay,
            augment=augment,
        )
        before, after = (
            distillation.agreement(net, w, x, target, likelihood) for w in (start, taught)
        )
        return taught, {AGREED: after, LOST: before - after}

    def aggregate(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        """Aggregate all messages, and distill an ensemble of teachers into the global model."""
        merged = method.aggregate(server, message, cohort, generator)
        models, start = ({n: v[f"{of}/{n}"] for n in net.shapes} for v in (message, merged))
        ensemble = team(models, cohort.size, generator)
        if rows is not None:
            taught, more_tensors = student(start, ensemble, rows, generator)
            merged = merged | under(of, taught) | more_tensors
        merged = {n: v for n, v in merged.items() if not n.startswith(f"{KNOWN}/")}
        return merged | under(f"{HELD}/{of}", ensemble) | under(KNOWN, check_name(models, cohort))

    def check_name(models: Tensors, cohort: Cohort) -> Tensors:
        """Return the tensors that define the server's posterior p(w | D) of the global model."""
        if posterior == "gaussian":
            mean, sd = mean_and_sd(models, cohort.size, std_scale)
            return under("mean", mean) | under("sd", sd)
        order = cohort.ids.argsort()
        said = {"ids": cohort.ids, "rows": cohort.size} | under("model", models)
        return {n: v[order] for n, v in said.items()}

    def drawn(server: Tensors, draws: int, generator: Generator) -> tuple[Tensors, Tensors]:
        """Draw parameters, and any Dirichlet weights of clients, from the server's posterior.

        The weights gamma are 0 for clients that are not among those of the posterior.
        """
        held = role(KNOWN, server)
        if not held:  # before round one
            start = {n: server[f"{of}/{n}"] for n in net.shapes}
            return {n: v.expand(draws, *v.shape) for n, v in start.items()}, {}
        if posterior == "gaussian":
            return sample(independent(role("mean", held), role("sd", held)), draws, generator), {}
        drawn_models = draw(fit(role("model", held), held["rows"]), draws, generator)
        if posterior != "dirichlet":
            return drawn_models, {}
        gamma, ids = drawn_models.pop("gamma"), held["ids"].cpu()
        every = gamma.new_zeros(draws, int(ids.max()) + 1)
        return drawn_models, {"gamma": every.index_copy(1, ids, gamma)}

    def with_teachers(server: Tensors, cohort: Cohort) -> Tensors:
        """Send the global model and the last round's teacher models to each client."""
        held = under("teacher", role(HELD, server))
        return method.download(server, cohort) | spread_out(held, len(cohort.ids))

    ensemble = View(members, with_teachers, drawn)
    metadata = method.metadata
    if rows is not None:
        metadata = metadata.extend(WATCHED, reads={**metadata.reads, "model": method.model})
    return replace(
        method,
        name="fedbe",
        aggregate=aggregate,
        views={**method.views, "ensemble": ensemble},
        metadata=metadata,
    )


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


def independent(mean: Tensors, sd: Tensors) -> Posterior:
    """Return a Pyro program that samples parameters from independent normals."""

    def program() -> Tensors:
        """Sample w from p(w | D), independent normals (eq. 5)."""
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
        """Sample w from p(w | D), an average of the w_i with Dirichlet weights (eq. 7)."""
        gamma = pyro.sample("gamma", dist.Dirichlet(torch.full_like(rows, alpha)))
        share = gamma * rows / (gamma * rows).sum(-1, keepdim=True)  # [J]
        mixed = {n: torch.tensordot(share.to(v.dtype), v.cpu(), 1) for n, v in models.items()}
        return {
            n: pyro.deterministic(n, v, event_dim=models[n].dim() - 1) for n, v in mixed.items()
        }

    return program
