"""FedFomo: clients combine other clients' models that perform well on validation rows.

Zhang, Sapra, Fidler, Yeung and Alvarez, "Personalized Federated Learning with First Order Model
Optimization", ICLR 2021.

    p(w_j)        flat
    p(y | x, w_j) = Categorical(logits=net(x; w_j))
    q(w_j)        = Delta(w_j)

    client   a_i = max(0, (V_j(b_j) - V_j(w_i)) / ||w_i - b_j||), for its own w_j and the M received
             b_j <- b_j + sum_i a_i (w_i - b_j) / sum_i a_i
             w_j = SGD from b_j on the mean loss of the training rows without validation rows
    server   P_ji += a_i / sum_i a_i;  each client's next M are those of largest P_ji, each of the
             M with probability `explore` any other

V_j is the mean loss of the held-back rows, and b_j where client j stood after its last such step:
w_j is what it has made of b_j since. The server needs every model apart, so that neither sums of
messages nor noise in sums will do. A round begins with the weighing, on models of the rounds
before, as in the authors' code.

Use it where clients may see one another's models and have rows to judge them by. It assumes that
some of these models help, and costs the bytes of every requested model.

Departures from the paper and the code: where no model is better than b_j the client starts at
its own w_j instead of b_j, and one with few rows holds none back (`least`): by one or two rows it
would go back to b_j again and again, and on handwritten digits 20 rounds ended at 0.82 instead of
0.91. P sums weights >= 0 (the code adds negative ones); `explore` stays as it is (the code
decreases it from 0.3); the validation rows are every fifth of a client in their order. Who comes
later starts at the mean of the models that all others value most. Of the paper's text the first
page was at hand, so equations have no numbers here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Unpack

import torch
from torch import Generator, Tensor

from pyrofl.arguments import Count, Range, Share, checked
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.metadata import PER_CLIENT, SHARE_RULE, Metadata, MetadataByPattern
from pyrofl.inference.definition.method import Method, Phase, as_trained, phase_and_step
from pyrofl.inference.definition.programs import Program
from pyrofl.models import fedavg
from pyrofl.models.shared import kept_models
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, add_trailing_axes, pick, role, sum_per_client, under

OpenShare = Annotated[float, Range(0, 1, open_low=True, open_high=True)]

AFFINITY, CHOSEN, WELCOME = "server/affinity", "server/chosen", "server/welcome"


SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "downloads": (3, 5, 10)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    downloads: Count | None = 5,
    explore: Share = 0.3,
    held_back: OpenShare = 0.2,
    least: Count = 10,
    **training: Unpack[fedavg.LocalTrainingOptions],
) -> Method:
    """Build the FedFomo method (federated first-order model optimization).

    Args:
        net: the network; every client has all its parameters for itself.
        downloads: M, models that a client receives per round, or those of all others if they are
            fewer; None: of all others, and the server keeps no P.
        explore: probability that one of the M is chosen at random.
        held_back: share of a client's training rows that are kept for V_j.
        least: clients with fewer validation rows than this train and validate on all rows.
        training: of w_j, as in `fedavg.build`, without `aggregation`; `fine_tune` are the epochs
            after the weighing before a test, as many as in a round unless given.

    Raises:
        ValueError: if there is `aggregation`, as every client has a mean of its own.
    """
    if "aggregation" in training:
        aggregation = dict(training)["aggregation"]
        raise ValueError(
            f"aggregation is {aggregation!r}; expected none, as every client has a mean of its own"
        )
    base = fedavg.build(net, **training)
    train, step = phase_and_step(base)

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize the server: the same random model for all clients, and zero affinities."""
        server = kept_models.begin(base.init(generator, clients), clients)
        if downloads is None:
            return server
        none = torch.zeros(clients, min(downloads, clients), dtype=torch.long)
        return server | {
            AFFINITY: torch.zeros(clients, clients),
            CHOSEN: none,
            WELCOME: none[0],
        }

    def download(server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client M stored models, with flags that mark those of other clients.

        A client that has sent no model has no flag.
        """
        held, ids = role(kept_models.MODEL, server), cohort.ids
        among = torch.arange(len(server[kept_models.HEARD]), device=ids.device)
        chosen = among.expand(len(ids), -1)  # [C, J]
        if downloads is not None:
            neighbors = server[CHOSEN][ids.clamp(max=len(among) - 1)]
            chosen = torch.where(
                add_trailing_axes(ids < len(among), neighbors), neighbors, server[WELCOME]
            )
        good = kept_models.is_heard(server, chosen) & (chosen != ids[:, None])
        at = chosen.clamp(max=len(among) - 1)
        sent = under("other", {n: v[at] for n, v in held.items()})
        return sent | {"known": good.to(server[kept_models.HEARD])}

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the client's model at the mean of the models that it received."""
        received_models, others = received["known"], role("other", received)
        received_models = torch.where(
            received_models.any(1, keepdim=True), received_models, first_of(received_models)
        )
        weight = received_models / received_models.sum(1, keepdim=True)  # [C, M]
        mean = {n: weighted_sum(weight, v) for n, v in others.items()}
        return mean | under("base", mean)

    def approach(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Move the client's parameters towards received models with smaller validation loss."""
        here, others = role("base", local), role("other", received)
        judged = replace(data, mask=data.mask & is_judge(data, held_back, least))

        def loss(model: Tensors) -> Tensor:
            with torch.no_grad():
                return step.loss(base.model, base.guide, pick(received, "prior/*"), model, judged)

        before, losses = loss(here), [{n: local[n] for n in here}]
        losses += [
            {n: v[:, m] for n, v in others.items()} for m in range(received["known"].shape[1])
        ]
        # [C, 1 + M], of the client's own model first.
        gains = torch.stack([gain(before - loss(w), here, w) for w in losses], 1)
        received_models = torch.cat([torch.ones_like(before)[:, None], received["known"]], 1)
        weight = gains * received_models
        weight = torch.where(weight.any(1, keepdim=True), weight, first_of(received_models))
        weight = weight / weight.sum(1, keepdim=True)
        models = {n: torch.stack([w[n] for w in losses], 1) for n in here}  # [C, 1 + M, *p]
        away = {n: v - here[n][:, None] for n, v in models.items()}
        there = {n: v + weighted_sum(weight, away[n]) for n, v in here.items()}
        return there | under("base", there) | {"weight": weight[:, 1:]}

    def learned(
        model: Program, guide: Program, received: Tensors, local: Tensors, data: Batch
    ) -> Tensor:
        """Return the mean loss of the client's training rows, without its validation rows, [C]."""
        held = is_judge(data, held_back, least) & (data.size * held_back >= least)[:, None]
        rest = replace(data, mask=data.mask & ~held)
        return step.loss(model, guide, received, local, rest)

    def upload(received: Tensors, local: Tensors) -> Tensors:
        """Send the client's model and, if downloads are limited, its weights for other models."""
        message = {n: local[n] for n in role("other", received)}
        return message if downloads is None else message | {"weight": local["weight"]}

    def aggregate(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        """Store each message as its client's model, and choose each client's next downloads."""
        server = kept_models.keep(server, message, cohort, generator)
        if downloads is None:
            return server
        chosen, table = server[CHOSEN], server[AFFINITY]
        rows = table[cohort.ids].scatter_add(1, chosen[cohort.ids], message["weight"])
        table = table.index_copy(0, cohort.ids, rows)
        order = torch.randperm(len(table), generator=generator).to(table.device)
        score = torch.cat([table, table.sum(0, keepdim=True)])
        random = torch.rand(score.shape, generator=generator).to(score)
        often = torch.rand(score.shape[0], chosen.shape[1], generator=generator).to(score) < explore
        often[-1] = False
        open_to = (server[kept_models.HEARD] > 0).repeat(len(score), 1)
        open_to.fill_diagonal_(False)
        picked = choose_downloads(score[:, order], random[:, order], often, open_to[:, order])
        return server | {AFFINITY: table, CHOSEN: order[picked[:-1]], WELCOME: order[picked[-1]]}

    moves = (replace(step, loss=learned),)
    go = Phase((approach,))
    judged: MetadataByPattern = {f"{AFFINITY} {CHOSEN}": PER_CLIENT, "weight": SHARE_RULE}
    return replace(
        base,
        name="fedfomo",
        init=init,
        download=download,
        init_client=init_client,
        phases=(go, replace(train, updates=moves)),
        upload=upload,
        aggregate=aggregate,
        adapt=(go, *(replace(phase, updates=moves) for phase in base.adapt or base.phases)),
        views={"personal": as_trained},
        metadata=Metadata(
            {**kept_models.TENSORS, **({} if downloads is None else judged)},
            reads={"model": base.model, "guide": base.guide},
        ),
    )


def is_judge(data: Batch, share: float, least: int) -> Tensor:
    """Return a bool mask [C, B] of the rows that are used for validation."""
    width = data.mask.shape[1]
    at = torch.arange(width, device=data.ids.device) if data.at is None else data.at
    every = ((at + 1) * share).floor() > (at * share).floor()
    return every | (data.size * share < least)[:, None]


def gain(better: Tensor, here: Tensors, there: Tensors) -> Tensor:
    """Return the decrease in loss from one model to another, per unit distance, [C]; at least 0."""
    away = sum_per_client({n: (there[n] - v).square() for n, v in here.items()}).sqrt()
    return torch.where((better > 0) & (away > 0), better / away, 0)


def first_of(weight: Tensor) -> Tensor:
    """Return one-hot weights [C, M] that select the first of M models."""
    return torch.eye(weight.shape[1]).to(weight)[0].expand_as(weight)


def weighted_sum(weight: Tensor, values: Tensor) -> Tensor:
    """Sum values [C, M, *p] of M models, multiplied by weights [C, M]; return [C, *p]."""
    return (weight.reshape(*weight.shape, *(1 for _ in values.shape[2:])) * values).sum(1)


def choose_downloads(score: Tensor, random: Tensor, often: Tensor, open_to: Tensor) -> Tensor:
    """Choose M columns in each row, by largest score or at random; return their indices [R, M].

    Args:
        score: [R, J].
        random: [R, J], random scores that replace the others where `often` [R, M] is true.
        often: see there.
        open_to: [R, J] bool, what may be chosen; where that is not enough, others come last.
    """
    left, chosen_ids = open_to.clone(), []
    for by_chance in often.unbind(1):
        value = torch.where(by_chance[:, None], random, score)
        chosen_ids.append(value.masked_fill(~left, -torch.inf).argmax(1))
        left[torch.arange(len(left)), chosen_ids[-1]] = False
    return torch.stack(chosen_ids, 1)
