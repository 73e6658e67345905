"""FedAMP: each client receives an average of models that weights similar clients more.

Huang, Chu, Zhou, Wang, Liu, Pei and Zhang, "Personalized Cross-Silo Federated Learning on Non-IID
Data", AAAI 2021.

    p(w_j | u_j)  = Normal(u_j, alpha I / (lambda n_j))
    p(y | x, w_j) = Categorical(logits=net(x; w_j))
    q(w_j)        = Delta(w_j)                            so each client finds its MAP

    client   w_j = SGD from its last w_j on the mean loss per row
                   plus lambda / (2 alpha) ||w_j - u_j||^2
    server   u_j = sum_i xi_ji w_i, a model for each client, where the weights sum to one:

    "exponential"  xi_ji = alpha A'(||w_j - w_i||^2) for i other than j, A(d) = 1 - exp(-d / sigma)
    "cosine"       xi_ji = (1 - xi_jj) exp(sigma cos(w_j, w_i)) / sum_i exp(sigma cos(w_j, w_i)),
                   xi_jj fixed (HeurFedAMP, for deep networks)

With the former both steps go down one objective, sum_j L_j(w_j) + lambda / 2 sum_{i<j} A(||w_i -
w_j||^2), in turns: where they stand still its gradient is zero, whatever alpha is. The server
needs every model apart, so that neither sums of messages nor noise in sums will do.

Use it where some clients are alike, but it is unknown which: each is drawn towards those whose
models are near its own. It assumes that clients keep state, and a server that may see every model
apart.

Departures from the paper: a client without a stored model receives the mean of all stored ones; a
client that does not take part is mixed by its last model. Where the weights of the others pass one,
which the paper's small alpha rules out, they are scaled to it. The text at hand ended with its
introduction, so equations have no numbers here; A is that of common code, where alpha and sigma are
1 each. `strength` (lambda / alpha), alpha and sigma here were chosen on handwritten digits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Unpack

import pyro.distributions as dist
import torch
from torch import Generator, Tensor
from torch.nn.functional import cosine_similarity

from pyrofl.arguments import NotNegative, Positive, Range, checked
from pyrofl.data import Cohort
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.definition.method import Method, as_trained
from pyrofl.models import fedavg
from pyrofl.models.priors import PriorFamily, proximal
from pyrofl.models.shared import kept_models
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, role, under

Part = Annotated[float, Range(0, 1)]


SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "strength": (0.3, 1.0, 3.0)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    attention: Literal["exponential", "cosine"] = "cosine",
    strength: NotNegative = 1.0,
    alpha: Positive = 1.0,
    sigma: Positive = 10.0,
    self_weight: Part = 0.5,
    prior: PriorFamily = dist.Normal,
    **training: Unpack[fedavg.SgdOptions],
) -> Method:
    """Build the FedAMP method (attentive message passing between similar clients).

    Args:
        net: the network; every client has all its parameters for itself.
        attention: how the server weighs clients' models, see above; "cosine" is HeurFedAMP.
        strength: lambda / alpha, of the pull between w_j and u_j, per datum.
        alpha: of "exponential": how far u_j goes to the others.
        sigma: of "exponential": squared distance within which clients are alike; of "cosine": how
            much more the most similar weigh.
        self_weight: of "cosine": xi_jj.
        prior: location-scale family of p(w_j | u_j), such as dist.Laplace; see `pyrofl.priors`.
        training: of w_j, as in `fedavg.build`, without `aggregation`.

    Raises:
        ValueError: if there is `aggregation`, as every client has a mean of its own.
    """
    if "aggregation" in training:
        aggregation = dict(training)["aggregation"]
        raise ValueError(
            f"aggregation is {aggregation!r}; expected none, as every client has a mean of its own"
        )
    base = fedavg.build(net, prior=proximal(strength, prior, loc="cloud/w"), **training)

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize the models of all clients with the same random draw."""
        return kept_models.begin(base.init(generator, clients), clients)

    def weigh(models: Tensor, heard: Tensor, me: int) -> Tensor:
        """Return the weights [J] with which one client averages all clients' models [J, D]."""
        others = heard.clone()
        others[me] = 0
        if attention == "exponential":
            return by_distance(models, others, me, alpha, sigma)
        return by_angle(models, others, me, self_weight, sigma)

    def download(server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client a weighted average of all clients' models stored at the server."""
        held, even = role(kept_models.MODEL, server), kept_models.evenly(server)
        models, heard = (
            torch.cat([v.reshape(len(v), -1) for v in held.values()], 1),  # [J, D]
            server[kept_models.HEARD],
        )
        is_reported = kept_models.is_heard(server, cohort.ids).tolist()
        ids = zip(cohort.ids.tolist(), is_reported, strict=True)
        xi = [weigh(models, heard, i) if seen else even for i, seen in ids]
        return under("cloud", kept_models.combine_models(server, torch.stack(xi)))  # xi [C, J]

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the client's model with the weighted average that it received."""
        return role("cloud", received)

    def upload(received: Tensors, local: Tensors) -> Tensors:
        """Send the client's trained model parameters w_j."""
        return {n: local[n] for n in role("cloud", received)}

    return replace(
        base,
        name="fedamp",
        init=init,
        download=download,
        init_client=init_client,
        upload=upload,
        aggregate=kept_models.keep,
        views={"personal": as_trained},
        metadata=Metadata(kept_models.TENSORS),
    )


def by_distance(models: Tensor, others: Tensor, me: int, alpha: float, sigma: float) -> Tensor:
    """Return averaging weights that decrease with the distance between two clients' models.

    Other clients i have weight alpha A'(||w_j - w_i||^2), and client j has 1 minus their sum.

    >>> models = torch.tensor([[0.0], [1.0], [3.0]])
    >>> by_distance(models, torch.tensor([0.0, 1.0, 1.0]), 0, alpha=1.0, sigma=2.0)
    tensor([0.6912, 0.3033, 0.0056])
    """
    squared = (models - models[me]).square().sum(1)  # [J]
    near = others * alpha / sigma * (-squared / sigma).exp()
    xi = near / near.sum().clamp(min=1)
    return xi.index_fill(0, torch.tensor(me, device=xi.device), float(1 - xi.sum()))


def by_angle(models: Tensor, others: Tensor, me: int, own: float, sigma: float) -> Tensor:
    """Return averaging weights that increase with the cosine similarity of clients' models.

    Those of other clients are proportional to exp(sigma cos(w_j, w_i)); the client itself has
    `own`.
    """
    cosine = torch.stack([cosine_similarity(v, models[me], 0) for v in models])
    xi = torch.where(others > 0, sigma * cosine, -torch.inf).softmax(0) * (1 - own)
    xi = xi if bool(others.any()) else torch.zeros_like(others)
    return xi.index_fill(0, torch.tensor(me, device=xi.device), float(1 - xi.sum()))
