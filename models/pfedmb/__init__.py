"""pFedMB: every layer has several branches, which each client mixes by weights of its own.

Mori, Yoshiyama, Furukawa and Teranishi, "Personalized Federated Learning with Multi-branch
Architecture", IJCNN 2023. Layer l of client i is W_l^i = sum_b alpha_lb^i W_lb (eq. 1):

    p(alpha_l^i)      = Dirichlet(1, ..., 1)             flat on the simplex, personal
    p(y | x, alpha^i) = Categorical(logits=net(x; W^i))  W_lb has a flat prior and is a point
    q(alpha^i)        = Delta(softmax(a^i))              or a Dirichlet, see `guide`

    client   alpha^i = SGD from its last alpha^i on the mean loss per row, W as received   eq. 3
             W       = SGD from the received W, alpha^i as it is now                       eq. 4
    server   W_lb    = sum_i n_i alpha_lb^i W_lb^i / sum_i n_i alpha_lb^i                  eq. 5

The server's step minimises sum_i n_i alpha_lb^i ||W_lb - W_lb^i||^2: an M-step with alpha as
responsibilities. One branch is FedAvg; corners of the simplex are clustered FedAvg (IFCA).

Departures from the paper, which does not say how alpha stays on the simplex: here it is a softmax,
or projected after each step. Sums run over the clients that reported; the paper prints all of
them. A layer's bias belongs to its branches. The paper has no global model: the view "global"
mixes evenly, as a newcomer does. Branches of small weight may stay at home, as it suggests, but
they are still trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Size, Tensor

from pyrofl.data import Batch, Who
from pyrofl.inference.elbo import elbo
from pyrofl.inference.loop.messages import SHARE
from pyrofl.inference.method import Method, Phase, Step, as_trained, send_all
from pyrofl.inference.optim import sgd
from pyrofl.inference.servers.averages import average, standing_for
from pyrofl.inference.servers.robust import Combine, combining, mean
from pyrofl.models import guides
from pyrofl.models.guides import simplex
from pyrofl.models.likelihoods import Likelihood, categorical
from pyrofl.models.pfedmb.branches import layers, merged, refuse_twins, weighty
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, dense, pick, role, under

Posterior = Literal["softmax", "projection", "dirichlet"]

FAMILIES: Mapping[str, guides.Family] = {
    "softmax": simplex.softmax,
    "projection": guides.delta,
    "dirichlet": simplex.dirichlet,
}

UNUSED = 1e-12  # a branch that clients weigh less than this, in rows, stays as it was


def build(
    net: Network,
    *,
    branches: int = 5,
    branched: str | None = None,
    shared: bool = False,
    likelihood: Likelihood = categorical,
    concentration: float = 1.0,
    guide: Posterior | guides.Family = "softmax",
    scale: float = 0.2,
    draws: int = 5,
    kl: float = 1.0,
    weighted: bool = True,
    drop: float = 0.0,
    epochs: int = 5,
    batch: int | None = 64,
    lr: float = 0.3,
    lr_alpha: float = 1.0,
    momentum: float = 0.0,
    merge: str | Combine = "mean",
) -> Method:
    """Build pFedMB; epochs and batch are the paper's, which tuned branches and learning rates.

    Args:
        net: the network. A layer is a module that owns parameters.
        branches: B of every branched layer; the number of groups of clients, if there are groups.
        branched: patterns of the names that have branches; the rest is shared as in FedAvg.
            Default: layers with a weight of two axes or more, which leaves out normalisation.
        shared: mix all layers by the same weights, as in the paper's pairs of clients.
        likelihood: of a row, given the network's outputs.
        concentration: of the Dirichlet prior on alpha; 1 is flat.
        guide: family of q(alpha), by name or as a function. "softmax" and "projection" are points,
            the latter (or `guides.delta`) alpha itself, put back on the simplex after each step.
        scale: of q(alpha) at the start, if it is a Dirichlet; see `pyrofl.models.guides.simplex`.
        draws: Monte Carlo samples of every loss, if q(alpha) is random.
        kl: weight of the KL divergence of q(alpha) from its prior; 1 is exact Bayes.
        weighted: average each branch by alpha (eq. 5), or by rows alone (eq. 6).
        drop: keep branches of which a client's weight is smaller at home; its other weights are
            scaled up for the server. Less than 1 / branches, so that one is always sent.
        epochs: local epochs E on alpha, and again on the branches.
        batch: rows in a step; None takes all.
        lr: learning rate of the branches; the loss is a mean over the rows.
        lr_alpha: learning rate of the parameters of q(alpha), on the same scale.
        momentum: of both optimisers, which start afresh each round.
        merge: how the server makes one of the clients' tensors, as in `fedavg.build`, each branch
            of a layer on its own, among the clients that give it any weight.

    Raises:
        ValueError: if no parameter matches `branched`, a number is out of its range, or arguments
            contradict each other; and in a round, if two branches of a layer are equal.
    """
    if branches < 1 or not concentration > 0 or not kl >= 0:
        raise ValueError(
            f"branches is {branches}, concentration {concentration}, kl {kl}; expected at least 1, "
            "a positive number and >= 0"
        )
    if drop and not (0 < drop < 1 / branches and weighted):
        raise ValueError(
            f"drop is {drop} with weighted={weighted}; expected 0 to 1/branches = {1 / branches:g},"
            " and 0 if branches are not weighted"
        )
    if isinstance(guide, str) and guide not in FAMILIES:
        raise ValueError(f"guide is {guide!r}; expected one of {get_args(Posterior)}, or a family")
    combine = combining(merge)
    family = FAMILIES[guide] if isinstance(guide, str) else guide
    if family is guides.delta and concentration != 1:
        raise ValueError(
            f"concentration is {concentration} for projected points; expected 1, as the density "
            "of any other is 0 or infinite on the faces of the simplex"
        )
    layer = layers(net.matching(branched or weighty(net.shapes)), shared)
    rest = [n for n in net.shapes if n not in layer]
    shape = Size((max(layer.values()) + 1, branches))
    q = family({"alpha": shape}, scale=scale, loc="point", spread="a")

    def evenly(like: Tensor) -> Tensors:
        return q.start({"alpha": like.new_full((len(like), *shape), 1 / branches)})

    def init(generator: Generator, clients: int) -> Tensors:
        starts = [net.init(generator) for _ in range(branches)]
        stacked = {n: torch.stack([start[n] for start in starts]) for n in layer}
        refuse_twins(stacked, layer)
        return under("branch", stacked) | under("w", {n: starts[0][n] for n in rest})

    def download(server: Tensors, who: Who) -> Tensors:
        # Here too, because every state comes by, wherever it is from, before anybody trains on it.
        refuse_twins(role("branch", server), layer)
        return send_all(server, who)

    def join(received: Tensors, who: Who, generator: Generator) -> Tensors:
        return evenly(who.size)

    def model(received: Tensors, local: Tensors, data: Batch) -> None:
        flat = dist.Dirichlet(data.size.new_full(shape, concentration)).to_event(1)
        with data.clients():
            w = merged(net, local, pyro.sample("alpha", flat))
            with data.rows():
                pyro.sample("y", likelihood(net(w, data.x), data.x), obs=data.y)

    def stay(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Project alpha, where it is a parameter itself."""
        return {n: simplex.project(v) for n, v in pick(local, "point/*").items()}

    def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        return {"alpha": simplex.trimmed(q.moments(received, local, data)[0]["alpha"], drop)}

    def upload(received: Tensors, local: Tensors) -> Tensors:
        message = pick(local, "alpha branch/* w/*")
        if not weighted:
            return {n: v for n, v in message.items() if n != "alpha"}
        sent = (message["alpha"] > 0).to(message["alpha"])
        branch = {
            n: torch.einsum("cb,cb...->cb...", sent[:, layer[n]], v)
            for n, v in role("branch", message).items()
        }
        return message | under("branch", branch)

    def mixed(old: Tensors, message: Tensors, who: Who) -> Tensors:
        new: Tensors = {}
        for at in range(shape[0]):
            before = {n: old[n] for n in (f"branch/{n}" for n in layer if layer[n] == at)}
            share = message["alpha"][:, at] if weighted else who.size.new_ones(1, branches)
            new |= aggregate(before, message, who.size[:, None] * share, combine)
        return new

    def fold(message: Tensors, who: Who) -> tuple[Tensors, Who]:
        new = mixed({n: v[0] for n, v in message.items()}, message, who)
        return standing_for(who, new | average(pick(message, "alpha w/*"), who.size))

    def update(server: Tensors, message: Tensors, who: Who, generator: Generator) -> Tensors:
        alike = combine(pick(message, "w/*"), who.size, server)
        return server | mixed(server, message, who) | alike

    def weigh(tensors: Tensors) -> Tensor:
        total = dense(tensors)
        if "alpha" in tensors:
            for n, value in role("branch", tensors).items():
                at_home = (tensors["alpha"][:, layer[n]] == 0).sum(1).cpu()
                total -= at_home * value.shape[2:].numel() * value.element_size()
        return total

    def common(received: Tensors, local: Tensors) -> Tensors:
        return local | received | evenly(next(iter(received.values())))

    def statistics(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        alpha = q.moments(received, local, data)[0]["alpha"]
        kept = simplex.trimmed(alpha, drop) > 0
        return {
            "alpha_entropy": torch.special.entr(alpha).sum(-1).mean(-1),
            "branches_kept": kept.sum(-1).to(alpha).mean(-1),
        }

    samples = draws if q.random else None
    # A flat prior says nothing about a point, but its gradient is not defined on the faces.
    prior_counts = q.random or concentration != 1
    mix = Step(q.names, sgd(lr_alpha, momentum), elbo(samples, kl * prior_counts, mean=True))
    learn = Step("branch/* w/*", sgd(lr, momentum), elbo(samples, 0.0, mean=True))
    mixing = (Phase((mix, stay), epochs, batch),) if branches > 1 else ()
    both = (*mixing, Phase((learn,), epochs, batch))
    return Method(
        init=init,
        download=download,
        join=join,
        model=model,
        guide=q.program,
        phases=(*both, Phase((settle,))),
        upload=upload,
        merge=update,
        fold=fold if merge == "mean" else None,
        adapt=both,
        views={"personal": as_trained, "global": common},
        statistics=statistics,
        weigh=weigh,
        rules={"alpha": SHARE},
    )


def aggregate(old: Tensors, message: Tensors, weight: Tensor, combine: Combine = mean) -> Tensors:
    """Average a layer's branches over clients (eq. 5); one that nobody uses stays as it was.

    Args:
        old: [B, *p], the names of the layer.
        message: [C, B, *p] by these names, and others.
        weight: [C, B], rows times alpha.
        combine: instead of the mean.
    """
    found = []
    for b in range(weight.shape[1]):
        before = {n: v[b] for n, v in old.items()}
        sent = {n: message[n][:, b] for n in old}
        used = weight[:, b].sum() >= UNUSED
        found.append(combine(sent, weight[:, b], before) if used else before)
    return {n: torch.stack([one[n] for one in found]) for n in old}
