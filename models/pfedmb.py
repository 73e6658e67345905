"""pFedMB: multi-branch layers, mixed by personal weights of each client.

Mori, Yoshiyama, Furukawa and Teranishi, "Personalized Federated Learning with Multi-branch
Architecture", IJCNN 2023. Layer l of client i is W_l^i = sum_b alpha_lb^i W_lb (eq. 1), whose
outputs are W_l^i x = sum_b alpha_lb^i (W_lb x) (eq. 2):

    p(alpha_l^i)      = Dirichlet(1, ..., 1)             flat on the simplex, personal
    p(y | x, alpha^i) = Categorical(logits=net(x; W^i))  W_lb has a flat prior and is a point
    q(alpha^i)        = Delta(softmax(a^i))              or a Dirichlet, see `guide`

    client   alpha^i = SGD from its last alpha^i on the mean loss per row, W as received   eq. 3
             W       = SGD from the received W, alpha^i as it is now                       eq. 4
    server   W_lb    = sum_i n_i alpha_lb^i W_lb^i / sum_i n_i alpha_lb^i                  eq. 5

The server's step minimizes sum_i n_i alpha_lb^i ||W_lb - W_lb^i||^2: an M-step with alpha as
responsibilities. One branch is FedAvg; corners of the simplex are clustered FedAvg (IFCA).

Use it where clients fall into unknown overlapping groups: each finds its mixture of branches. It
assumes that a few branches span what clients need; all of them travel. Before a test each client
repeats both of its steps on its own rows, as the paper fine-tunes all methods.

Departures from the paper, which does not specify how alpha stays on the simplex: here it is a
softmax, or projected after each step. Sums run over the clients that reported; the paper prints all
of them. A layer's bias belongs to its branches. A branch to which no reporting client gives weight
keeps its value. The paper has no global model: the view "global" mixes evenly, as a new client
does. Branches of small weight need not be sent, as it suggests, but they are still trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Generator, Size, Tensor

from pyrofl.arguments import Count, NotNegative, Positive, ShareBelowOne, Whole, checked, described
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.aggregator import Aggregator, Weight, by_size
from pyrofl.inference.definition.averages import Combine
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.metadata import SHARE_RULE, Metadata, WireCost
from pyrofl.inference.definition.method import GradientStep, Method, Phase, as_trained, send_all
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.programs import Likelihood, Prior, as_prior
from pyrofl.models import guides
from pyrofl.models.guides import simplex
from pyrofl.models.likelihoods import categorical
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, dense_bytes, pick, role, under

FAMILIES: Mapping[str, guides.Family] = {
    "softmax": simplex.softmax,
    "projection": guides.delta,
    "dirichlet": simplex.dirichlet,
}

SEARCH_GRID = {"lr": (0.03, 0.1, 0.3, 1.0), "lr_alpha": (0.3, 1.0, 3.0)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    branches: Count = 5,
    branched: str | None = None,
    shared: bool = False,
    likelihood: Likelihood = categorical,
    prior: Prior | None = None,
    concentration: Positive = 1.0,
    guide: Literal["softmax", "projection", "dirichlet"] | guides.Family = "softmax",
    init_scale: NotNegative = 0.2,
    num_particles: Count = 5,
    kl: NotNegative = 1.0,
    weighted: bool = True,
    drop: ShareBelowOne = 0.0,
    epochs: Whole = 5,
    batch: Count | None = 64,
    lr: NotNegative = 0.3,
    lr_alpha: NotNegative = 1.0,
    momentum: ShareBelowOne = 0.0,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build the pFedMB method (multi-branch layers).

    The defaults of epochs and batch are the paper's.

    The paper tunes branches and learning rates.

    Args:
        net: the network. A layer is a module that owns parameters.
        branches: B of every branched layer; the number of groups of clients, if there are groups.
        branched: patterns of the names that have branches; the rest is shared as in FedAvg.
            Default: layers with a weight of two axes or more, which leaves out normalization.
        shared: mix all layers by the same weights, as in the paper's pairs of clients.
        likelihood: of a row, given the network's outputs.
        prior: on "alpha" [L, B], on the simplex of its last axis, such as
            dist.Dirichlet(torch.full((B,), 2.0)); default a Dirichlet of `concentration`.
        concentration: of that Dirichlet; 1 is flat.
        guide: family of q(alpha), by name or as a function. "softmax" and "projection" are points,
            the latter (or `guides.delta`) alpha itself, put back on the simplex after each step.
        init_scale: of q(alpha) at the start, if it is a Dirichlet; see
            `pyrofl.models.guides.simplex`.
        num_particles: Monte Carlo samples of every loss, if q(alpha) is random.
        kl: weight of the KL divergence of q(alpha) from its prior; 1 is exact Bayes.
        weighted: average each branch by alpha (eq. 5), or by rows alone (eq. 6).
        drop: keep branches of which a client's weight is smaller at home; its other weights are
            scaled up for the server. Less than 1 / branches, so that one is always sent.
        epochs: local epochs E on alpha, and again on the branches.
        batch: rows in a step; None takes all.
        lr: learning rate of the branches; the loss is a mean over the rows.
        lr_alpha: learning rate of the parameters of q(alpha), on the same scale.
        momentum: of both optimizers, which start afresh each round.
        aggregation: how the server makes one of the clients' tensors, as in `fedavg.build`, each
            branch of a layer on its own, among the clients that give it any weight.

    Raises:
        ValueError: if no parameter matches `branched`, or arguments contradict each other; and in
            a round, if two branches of a layer are equal.
    """
    if drop and not (0 < drop < 1 / branches and weighted):
        raise ValueError(
            f"drop is {drop} with weighted={weighted}; expected 0 to 1/branches = {1 / branches:g},"
            " and 0 if branches are not weighted"
        )
    family = FAMILIES[guide] if isinstance(guide, str) else guide
    if family is guides.delta and (prior is not None or concentration != 1):
        raise ValueError(
            f"concentration is {concentration}, prior {described(prior)} for projected points; "
            "expected 1 and none, as the density of any other is 0 or infinite on the faces of "
            "the simplex"
        )
    layer = layers(net.select_params(branched or weighty(net.shapes)), shared)
    shape = Size((max(layer.values()) + 1, branches))
    q = guides.build_guide(
        family,
        {"alpha": shape},
        is_simplex=family is not guides.delta,
        init_scale=init_scale,
        loc="point",
        spread="a",
    )
    prior_of_alpha = (
        None
        if prior is None
        else as_prior(prior, {"alpha": shape}, constraints.simplex, may_be_learned=False)
    )

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the branch weights alpha^i of each client, then the responses of its rows."""
        with batch.clients():
            if prior_of_alpha is None:
                fn = dist.Dirichlet(batch.size.new_full(shape, concentration)).to_event(1)
            else:
                fn = prior_of_alpha("alpha", shape, received, local, batch)
            alpha = pyro.sample("alpha", fn)  # p(alpha^i)
            w = merge_branches(net, local, alpha)  # eq. 1
            with batch.rows():
                pyro.sample("y", likelihood(net(w, batch.x), batch.x), obs=batch.y)

    def softmax(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Set the branch weights alpha^i of each client to a point, the softmax of a^i."""
        with batch.clients():
            pyro.sample("alpha", dist.Delta(local["a/alpha"].softmax(-1), event_dim=2))

    if guide == "softmax":
        q = replace(q, program=softmax)

    def evenly(like: Tensor) -> Tensors:
        """Return guide parameters that give all branches of a layer equal weights."""
        return q.start({"alpha": like.new_full((len(like), *shape), 1 / branches)})

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize every branch of each layer by an independent random draw."""
        starts = [net.init(generator) for _ in range(branches)]
        stacked = {n: torch.stack([start[n] for start in starts]) for n in layer}  # [B, *p]
        refuse_twins(stacked, layer)
        rest = {n: v for n, v in starts[0].items() if n not in layer}
        return under("branch", stacked) | under("w", rest)

    def download(server: Tensors, cohort: Cohort) -> Tensors:
        """Send all branches of every layer to every client."""
        # Here too, because every state comes by, wherever it is from, before anybody trains on it.
        refuse_twins(role("branch", server), layer)
        return send_all(server, cohort)

    def stay(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Project branch weights onto the probability simplex, if optimized directly."""
        return {n: simplex.project(v) for n, v in pick(local, "point/*").items()}

    def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the branch weights to send; weights below `drop` are set to zero."""
        return {
            "alpha": simplex.drop_small_weights(q.moments(received, local, data)[0]["alpha"], drop)
        }

    def upload(received: Tensors, local: Tensors) -> Tensors:
        """Send the branch weights, and the branches with positive weights."""
        message = pick(local, "branch/* w/*")
        if not weighted:
            return message
        alpha = local["alpha"]
        sent, branch = (alpha > 0).to(alpha), role("branch", message)
        for n, v in branch.items():
            # [C, B, *p], 0 for branches with weight 0.
            message[f"branch/{n}"] = torch.einsum("cb,cb...->cb...", sent[:, layer[n]], v)
        return message | {"alpha": alpha}

    def by_alpha(at: int) -> Weight:
        """Return a function that computes a layer's aggregation weights, one for each branch.

        The weights are size times alpha (eq. 5), or size (eq. 6).
        """
        if not weighted:
            return lambda message, cohort: cohort.size[:, None].expand(-1, branches)
        return lambda message, cohort: cohort.size[:, None] * message["alpha"][:, at]  # [C, B]

    def unsent(name: str, tensors: Tensors) -> Tensor:
        """Return a tensor's message size in bytes, counting only branches that are sent."""
        value, total = tensors[name], dense_bytes({name: tensors[name]})
        if "alpha" in tensors:
            # Numbers of branches with weight 0, [C].
            at_home = (tensors["alpha"][:, layer[name.removeprefix("branch/")]] == 0).sum(1).cpu()
            total = total - at_home * value.shape[2:].numel() * value.element_size()
        return total

    def common(received: Tensors, local: Tensors) -> Tensors:
        """Return the global model, which mixes all branches with equal weights."""
        return local | received | evenly(next(iter(received.values())))

    def statistics(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Return the mean entropy of the branch weights and the mean number of sent branches."""
        alpha = q.moments(received, local, data)[0]["alpha"]
        entropy, is_kept = torch.special.entr(alpha), simplex.drop_small_weights(alpha, drop) > 0
        sums = {"alpha_entropy": entropy.sum(-1), "branches_kept": is_kept.sum(-1).to(alpha)}
        return {n: v.mean(-1) for n, v in sums.items()}  # over layers, [C, L] -> [C]

    of_layer = [[f"branch/{n}" for n in layer if layer[n] == at] for at in range(shape[0])]
    pools: dict[str, Weight] = {" ".join(n): by_alpha(at) for at, n in enumerate(of_layer)}
    samples = num_particles if q.random else None
    # A flat prior says nothing about a point, but its gradient is not defined on the faces.
    prior_counts = q.random or concentration != 1 or prior is not None
    # Eq. 3: alpha^i moves, and all branches are as received.
    mix = GradientStep(
        q.names, sgd(lr_alpha, momentum), elbo(samples, kl * prior_counts, mean=True)
    )
    moved = "branch/*" if len(layer) == len(net.shapes) else "branch/* w/*"
    # Eq. 4: the branches move, and alpha^i stays.
    learn = GradientStep(moved, sgd(lr, momentum), elbo(samples, 0.0, mean=True))
    mixing = (Phase((mix, stay), epochs, batch),) if branches > 1 else ()
    both = (*mixing, Phase((learn,), epochs, batch))
    return Method(
        name="pfedmb",
        init=init,
        download=download,
        init_client=lambda received, cohort, generator: evenly(cohort.size),
        model=model,
        guide=q,
        phases=(*both, Phase((settle,))),
        upload=upload,
        aggregate=Aggregator(pools | {"w/*": by_size}, rule=aggregation),
        adapt=both,
        views={"personal": as_trained, "global": common},
        metadata=Metadata(
            {"branch/*": WireCost(unsent)} | ({"alpha": SHARE_RULE} if weighted else {}),
            statistics=statistics,
            reads={"guide": q},
        ),
    )


def layers(names: Iterable[str], shared: bool = False) -> dict[str, int]:
    """Return the layer index of each parameter, from 0; all 0 if layers share branch weights.

    >>> layers(["conv.weight", "conv.bias", "head.weight"])
    {'conv.weight': 0, 'conv.bias': 0, 'head.weight': 1}
    """
    owner = {n: n.rpartition(".")[0] for n in names}
    number = {layer: 0 if shared else i for i, layer in enumerate(dict.fromkeys(owner.values()))}
    return {n: number[layer] for n, layer in owner.items()}


def weighty(shapes: Mapping[str, Size]) -> str:
    """Return parameter names of the layers with a weight of two or more axes, or "*" if none.

    >>> weighty({"norm.weight": Size([3]), "fc.weight": Size([2, 3]), "fc.bias": Size([2])})
    'fc.weight fc.bias'
    """
    owners = {n.rpartition(".")[0] for n, shape in shapes.items() if len(shape) > 1}
    return " ".join(n for n in shapes if n.rpartition(".")[0] in owners) or "*"


def merge_branches(net: Network, tensors: Tensors, alpha: Tensor) -> Tensors:
    """Mix branches [..., B, *p] of parameters with branch weights [..., L, B] (eq. 1).

    L is 1 if layers share alpha. The result is [..., *p].

    Leading axes broadcast; what has no branches is "w/NAME" [..., *p].
    """
    w = role("w", tensors)
    branched = [n for n in net.shapes if f"branch/{n}" in tensors]
    for n, at in layers(branched, shared=alpha.shape[-2] == 1).items():
        value, axis = tensors[f"branch/{n}"], -1 - len(net.shapes[n])
        if value.shape[axis] == 1:
            w[n] = value.squeeze(axis)  # nothing to mix: to the last bit as without branches
            continue
        rows = value.reshape(*value.shape[: axis + 1 or None], -1)
        mixed = torch.einsum("...b,...bp->...p", alpha[..., at, :], rows)  # [..., p]
        w[n] = mixed.reshape(*mixed.shape[:-1], *net.shapes[n])
    return w


def refuse_twins(branches: Tensors, layer: Mapping[str, int]) -> None:
    """Raise ValueError if two branches of a layer are equal, as training keeps them equal."""
    for number in set(layer.values()):
        layer_names = [n for n, at in layer.items() if at == number]
        count = len(branches[layer_names[0]])
        for a, b in combinations(range(count), 2):
            if all(torch.equal(branches[n][a], branches[n][b]) for n in layer_names):
                raise ValueError(
                    f"branches {a} and {b} of {', '.join(layer_names)} are equal and would "
                    "stay so; expected random starts that differ, or a `branched` without these "
                    "names"
                )
