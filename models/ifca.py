"""IFCA: several common models, of which every client trains the one that fits it best.

Ghosh, Chung, Yin and Ramchandran, "An Efficient Framework for Clustered Federated Learning",
NeurIPS 2020.

    p(z_j), p(w_k)   flat                                     z_j is one of 1 ... K
    p(y | x, z_j, w) = Categorical(logits=net(x; w_{z_j}))
    q(z_j, w)        = Delta

    client   z_j = argmin_k L_j(w_k), the mean loss of all its rows
             w_j = SGD from w_{z_j}
    server   w_k = sum_{z_j = k} n_j w_j / sum_{z_j = k} n_j

One cluster is FedAvg. The server's step is that of pFedMB where every client puts all its weight
on one branch. A cluster that nobody chose stays as it was.

Departures from the paper: clients are weighted by size, as in FedAvg; the paper divides by the
number of clients of the cluster.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Who
from pyrofl.inference.loop.messages import Rule
from pyrofl.inference.method import Method, Phase
from pyrofl.models import fedavg
from pyrofl.models.priors import Prior, flat
from pyrofl.models.shared.personal_copies import only_step
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, role, under


def build(
    net: Network,
    *,
    clusters: int = 2,
    prior: Prior = flat,
    **training: Unpack[fedavg.Training],
) -> Method:
    """Build IFCA.

    Args:
        net: the network; every cluster has all its parameters.
        clusters: K.
        prior: on the parameters; with the delta guide anything but `flat` gives MAP.
        training: as in `fedavg.build`, but lr is 0.05 unless given; `merge` is among the clients
            of a cluster, and `fine_tune` epochs are on a client's own copy.

    Raises:
        ValueError: if a number is out of its range.
    """
    if clusters < 1:
        raise ValueError(f"clusters is {clusters}; expected at least 1")
    settings: fedavg.Training = {"lr": 0.05, **training}
    base = fedavg.build(net, prior=prior, **settings)
    _, step = only_step(base)

    def init(generator: Generator, clients: int) -> Tensors:
        starts = [base.init(generator, clients) for _ in range(clusters)]
        return under("cluster", {n: torch.stack([s[n] for s in starts]) for n in starts[0]})

    def join(received: Tensors, who: Who, generator: Generator) -> Tensors:
        return {"cluster": torch.zeros_like(who.ids, dtype=torch.int32)}

    def model_of(received: Tensors, cluster: Tensor) -> Tensors:
        client = torch.arange(len(cluster), device=cluster.device)
        return {n: v[client, cluster.long()] for n, v in role("cluster", received).items()}

    def choose(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        with torch.no_grad():
            losses = [
                step.loss(base.model, base.guide, {}, model_of(received, each), data)
                for each in (torch.full_like(data.ids, k) for k in range(clusters))
            ]
        nearest = torch.stack(losses).argmin(0)
        return {"cluster": nearest.int()} | model_of(received, nearest)

    def merge(server: Tensors, message: Tensors, who: Who, generator: Generator) -> Tensors:
        new = {n: v.clone() for n, v in server.items()}
        models = {n: v for n, v in message.items() if n != "cluster"}
        for k in message["cluster"].unique().tolist():
            mine = message["cluster"] == k
            old = {n: v[k] for n, v in role("cluster", server).items()}
            members = Who(who.ids[mine], who.size[mine])
            moved = base.merge(old, {n: v[mine] for n, v in models.items()}, members, generator)
            for n, v in moved.items():
                new[f"cluster/{n}"][k] = v
        return new

    def personal(received: Tensors, local: Tensors) -> Tensors:
        return model_of(received, local["cluster"]) | local

    def upload(received: Tensors, local: Tensors) -> Tensors:
        return {n: local[n] for n in ("cluster", *role("cluster", received))}

    begin = Phase((choose,))
    return replace(
        base,
        init=init,
        join=join,
        phases=(begin, *base.phases),
        upload=upload,
        rules={"cluster": Rule(f"0 to {clusters - 1}", lambda k: (k >= 0) & (k < clusters))},
        merge=merge,
        fold=None,
        adapt=(begin, *base.adapt),
        views={"personal": personal},
    )
