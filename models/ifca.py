"""IFCA: clustered federated learning; each client trains the cluster model that fits best.

Ghosh, Chung, Yin and Ramchandran, "An Efficient Framework for Clustered Federated Learning",
NeurIPS 2020.

    p(z_j), p(w_k)   flat                                     z_j is one of 1 ... K
    p(y | x, z_j, w) = Categorical(logits=net(x; w_{z_j}))
    q(z_j, w)        = Delta

    client   z_j = argmin_k L_j(w_k), the mean loss of all its rows
             w_j = SGD from w_{z_j}
    server   w_k = sum_{z_j = k} n_j w_j / sum_{z_j = k} n_j

One cluster is FedAvg. The server's step is that of pFedMB where every client puts all its weight
on one branch. A cluster that no client chose does not change.

Use it where clients fall into a few groups with tasks of their own. It assumes that the number of
groups is known and every client belongs to one; as many models come down in every round.

Departures from the paper: clients are weighted by size, as in FedAvg; the paper divides by the
number of clients of the cluster.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from pyrofl.arguments import Count, checked
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.aggregator import Aggregator
from pyrofl.inference.definition.metadata import Metadata, Rule
from pyrofl.inference.definition.method import Method, Phase, phase_and_step
from pyrofl.models import fedavg
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, pick, role, under

SEARCH_GRID = {"lr": (0.003, 0.01, 0.05, 0.1, 0.3), "momentum": (0.0, 0.9), "clusters": (2, 4)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    clusters: Count = 2,
    **training: Unpack[fedavg.Training],
) -> Method:
    """Build the IFCA method (iterative federated clustering algorithm).

    Args:
        net: the network; every cluster has all its parameters.
        clusters: K.
        training: as in `fedavg.build`, but lr is 0.05 unless given; `aggregation` is among the
            clients of a cluster, and `fine_tune` epochs are on a client's own copy.
    """
    settings: fedavg.Training = {"lr": 0.05, **training}
    base = fedavg.build(net, **settings)
    _, step = phase_and_step(base)

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize each cluster's model by an independent random draw."""
        starts = [base.init(generator, clients) for _ in range(clusters)]
        return under("cluster", {n: torch.stack([s[n] for s in starts]) for n in starts[0]})

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the client's cluster index with 0."""
        return {"cluster": torch.zeros_like(cohort.ids, dtype=torch.int32)}

    def model_of(received: Tensors, cluster: Tensor) -> Tensors:
        """Return the model of the cluster to which each client is assigned."""
        client = torch.arange(len(cluster), device=cluster.device)
        return {n: v[client, cluster.long()] for n, v in role("cluster", received).items()}

    def choose(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Assign the client to the cluster with the smallest loss, and copy its model."""
        scales, models = pick(received, "prior/*"), role("cluster", received)
        with torch.no_grad():
            losses = [
                step.loss(
                    base.model, base.guide, scales, {n: v[:, k] for n, v in models.items()}, data
                )
                for k in range(clusters)
            ]
        nearest = torch.stack(losses).argmin(0)  # [C]
        return {"cluster": nearest.int()} | model_of(received, nearest)

    def personal(received: Tensors, local: Tensors) -> Tensors:
        """Return the model of the client's cluster, fine-tuned by the client if requested."""
        return model_of(received, local["cluster"]) | local

    def upload(received: Tensors, local: Tensors) -> Tensors:
        """Send the client's cluster index z_j and its trained model w_j."""
        return {n: local[n] for n in ("cluster", *role("cluster", received))}

    def of_clusters(server: Tensors, message: Tensors) -> Tensors:
        """Repeat the client's model in its message for all clusters.

        The aggregation weights select cluster z_j.
        """
        return {
            f"cluster/{n}": v.unsqueeze(1).expand(-1, clusters, *v.shape[1:])  # [C, K, *p]
            for n, v in message.items()
            if f"cluster/{n}" in server
        }

    def by_choice(message: Tensors, cohort: Cohort) -> Tensor:
        """Return aggregation weights [C, K]: the row count for the client's cluster, else 0."""
        return cohort.size[:, None] * one_hot(message["cluster"].long(), clusters).to(cohort.size)

    begin = Phase((choose,))
    return replace(
        base,
        name="ifca",
        init=init,
        init_client=init_client,
        phases=(begin, *base.phases),
        upload=upload,
        metadata=Metadata(
            {"cluster": Rule(f"0 to {clusters - 1}", lambda k: (k >= 0) & (k < clusters))},
            reads={"model": base.model, "guide": base.guide},
        ),
        aggregate=Aggregator(
            {"cluster/*": by_choice},
            transform=of_clusters,
            rule=settings.get("aggregation", "mean"),
        ),
        adapt=(begin, *base.adapt),
        views={"personal": personal},
    )
