"""FedLap: variational Bayes over clients by Laplace approximations, as an ADMM; and FedLap-Cov.

Swaroop, Khan and Doshi-Velez, "Connecting Federated ADMM to Bayes", ICLR 2025.

    p(w)     = Normal(m0, S0)                        S0 diagonal
    q(w)     = p(w) prod_j t_j(w) = Normal(m, S^-1),  t_j(w) = exp(v_j'w - w'V_j w / 2)

    client   w_j = argmin -log p(D_j | w) + v_j'w - w'V_j w / 2 + (w - m)'S(w - m) / 2
             F_j = Fisher information of its rows at w_j; 0 in FedLap
             v_j = v_j + damping (S_j w_j - S m),    S_j = S - V_j + F_j
             V_j = V_j + damping (F_j - V_j)
    server   S   = S0^-1 + sum_j V_j,    m = S^-1 (S0^-1 m0 + sum_j v_j)

A client minimizes its loss under its cavity q / t_j. FedLap (covariance "none") has V_j = 0 and is
federated ADMM with dual variables v_j, without a posterior. FedLap-Cov learns a normal posterior.
With `newton` a client sets its factor by the expansion of its log likelihood about w_j, which is
also right where w_j is no optimum,

             v_j = v_j + damping (F_j w_j + grad log p(D_j | w_j) - v_j)

In a normal linear model with full covariances and damping 1 the posterior is exact after one round:
without `newton` if clients train to the end, and with it from any w_j.

Use it where clients keep state and differ: the dual variables correct the drift of local training,
and the covariances weight them by what they know. It assumes that clients return in later rounds.
Predict with the mean of a network's posterior: single draws are poor, as weights that the rows do
not determine have the variance of the prior.

Departures from the paper: the authors' code trains with Adam, and that of FedLap penalizes the norm
of w - m instead of its square; here each step of SGD on the loss is followed by a proximal step
on the squared distance from the cavity's mean, which is stable for any precision.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from pyrofl.arguments import (
    Count,
    NotNegative,
    Positive,
    PositiveShare,
    ShareBelowOne,
    Whole,
    checked,
    described,
)
from pyrofl.data import Batch
from pyrofl.inference.definition.aggregator import Aggregator, WeightedSum, uniform
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.metadata import MODERATE
from pyrofl.inference.definition.method import Method, Phase, as_received
from pyrofl.inference.definition.programs import Likelihood, Prior
from pyrofl.models import guides
from pyrofl.models.fisher import STANDARD
from pyrofl.models.likelihoods import categorical
from pyrofl.models.scaffold import gradient
from pyrofl.models.shared.client_factors import ClientFactors
from pyrofl.models.shared.laplace import LaplaceCore
from pyrofl.models.shared.vectors import flatten_clients
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, pick, role, under

Covariance = Literal["none", "diagonal", "full"]

SEARCH_GRID = {
    "lr": (0.003, 0.01, 0.03),
    "damping": (0.03, 0.1, 0.2),
    "covariance": ("none", "diagonal"),
}


@rebuildable
@checked
def build(
    net: Network,
    *,
    covariance: Covariance = "diagonal",
    newton: bool = False,
    damping: PositiveShare = 0.1,
    likelihood: Likelihood = categorical,
    prior: Prior = STANDARD,
    guide: guides.Family = guides.mean_field,
    epochs: Whole = 5,
    batch: Count | None = 10,
    lr: NotNegative = 0.01,
    momentum: ShareBelowOne = 0.9,
    clip: Positive | None = 10.0,
) -> Method:
    """Build FedLap-Cov or, with covariance="none", FedLap.

    Args:
        net: the network; all its parameters are shared.
        covariance: of the posterior: "diagonal"; "full", with a few hundred parameters; or "none",
            for a point estimate.
        newton: compute factors by the gradient at w_j, instead of taking w_j as an optimum.
        damping: fraction of the change that a client applies to its factor.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters; independent normals.
        guide: `mean_field` stands for the normal q(w), `delta` for covariance="none".
        epochs: local epochs.
        batch: rows in a step; None takes all.
        lr: learning rate; the loss is a mean over the rows.
        momentum: of SGD, which starts afresh each round.
        clip: largest norm of a gradient.

    Raises:
        ValueError: if the prior is not normal, the guide is another one, newton is set for a point
            estimate, or a full covariance is too large.
    """
    if guide not in (guides.mean_field, guides.delta):
        raise ValueError(
            f"guide is {described(guide)}; expected mean_field or delta, see covariance for others"
        )
    is_point = covariance == "none" or guide is guides.delta
    if is_point and newton:
        raise ValueError(
            "newton needs the covariance of each client's factor, and a point estimate has none; "
            "expected covariance 'diagonal' or 'full', or newton=False"
        )
    family = guides.full_covariance if covariance == "full" else guides.mean_field
    core = LaplaceCore(net, likelihood, prior, family)
    factors = ClientFactors(core, is_point)
    names = [f"w/{n}" for n in net.shapes]

    def begin(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the mean and the precision of the client's cavity q / t_j."""
        q = factors.received(received)
        cavity = q | {n: q[n] - local[f"own/{n}"] for n in factors.names}
        prior = {"mean": core.normals.moments(cavity)[0], "precision": cavity["precision"]}
        return pick(received, "w/*") | under("prior", prior)

    def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the change of the client's factor, and its normal, the cavity times the new one.

        The factor's shift is F w plus the gradient of the log likelihood at w, which is equal to
        the cavity's pull P (w - m) where w is the optimum.
        """
        w, precision, mean = (
            flatten_clients(role("w", local)),
            local["prior/precision"],
            local["prior/mean"],
        )
        information = local.get("information", torch.zeros_like(precision))
        pull = core.factor(precision, w - mean)["shift"]
        if newton:
            slope = gradient(core.model, core.point_guide, elbo(kl=0.0), names, local, local, data)
            pull = -flatten_clients(slope)
        new = core.factor(information, w)
        new["shift"] = new["shift"] + pull
        change = {n: damping * (new[n] - local[f"own/{n}"]) for n in factors.names}
        tilted = {n: v + new[n] for n, v in core.factor(precision, mean).items()}
        q = {} if is_point else core.guide_parameters(*core.normals.moments(tilted))
        return q | factors.changed(local, change)

    kinds = factors.metadata.tensors
    sent = {n: v for n, v in kinds.items() if n != "shift precision"} | {"change/*": MODERATE}
    train = core.training_phases(epochs, batch, lr, momentum, 1.0, clip)
    return Method(
        name="fedlap",
        init=factors.init,
        model=core.model,
        guide=core.point_guide if is_point else core.q,
        phases=(Phase((begin,)), *(train[:2] if is_point else train), Phase((settle,))),
        init_client=factors.init_client,
        upload=factors.upload,
        aggregate=Aggregator({"*": WeightedSum(uniform)}, factors.applied),
        views={"global": as_received},
        metadata=replace(factors.metadata, tensors=sent),
    )
