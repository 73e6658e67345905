"""Ditto: FedAvg plus a personal model per client, penalized for its distance to the global one.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization",
ICML 2021.

    p(v_j | w)    = Normal(w, I / (lambda n_j))          the term lambda/2 ||v_j - w||^2
    p(y | x, v_j) = Categorical(logits=net(x; v_j))
    q(v_j)        = Delta(v_j)                           so each client finds its MAP

    client   w_j = SGD from w on the mean loss per row                   as FedAvg
             v_j = SGD from its last v_j on that plus lambda/2 ||v_j - w||^2
    server   w   = sum_j n_j w_j / sum_j n_j

FedProx with the proximal model kept at home and FedAvg's sent: lambda = 0 is Local and FedAvg,
and as lambda grows v_j becomes w.

Use it for a common model and personal ones: lambda controls how far these may go from
it. It assumes that clients keep state between rounds, and doubles their work.

Departures from the paper: the server weighs clients by size, as FedAvg does. A client that is met
later than in round one starts v_j at the w that it receives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack, cast

import pyro
import pyro.distributions as dist

from pyrofl.arguments import NotNegative, Whole, checked
from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import On, TransformedLoss
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.definition.method import Method, as_received, phase_and_step
from pyrofl.inference.definition.programs import Guide, as_prior, of_network
from pyrofl.models import fedavg
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import PriorFamily, proximal
from pyrofl.models.shared.personal_copies import as_personal, start_own
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors

SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "strength": (0.1, 1.0, 10.0)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    strength: NotNegative = 1.0,
    prior: PriorFamily = dist.Normal,
    own_epochs: Whole | None = None,
    **training: Unpack[fedavg.CenteredTraining],
) -> Method:
    """Build the Ditto method: FedAvg and a regularized personal model for each client.

    Args:
        net: the network; all its parameters are shared, and personal a second time.
        strength: lambda, of the pull to the received model, per datum: the prior's variance is
            1 / (lambda n_j).
        prior: location-scale family that is centered at the received model, such as dist.Laplace;
            see `pyrofl.priors`.
        own_epochs: local epochs on v_j; default as many as on w_j.
        training: of both models, as in `fedavg.build`; `fine_tune` epochs are on v_j.
    """
    likelihood = training.get("likelihood", categorical)
    shapes, around_w = net.shapes, as_prior(proximal(strength, prior), net.shapes)

    @of_network(net, likelihood, around_w)
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the personal v_j around the received w, then the responses of its rows."""
        with batch.clients():
            # p(v_j | w); it is flat where lambda is 0
            v = {n: pyro.sample(n, around_w(n, shapes[n], received, local, batch)) for n in shapes}
            with batch.rows():
                pyro.sample("y", likelihood(net(v, batch.x), batch.x), obs=batch.y)

    def points(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Set the personal parameters to the point v_j, with which `as_personal` replaces w_j."""
        with batch.clients():
            for n, shape in shapes.items():
                pyro.sample(n, dist.Delta(local[f"w/{n}"], event_dim=len(shape)))

    common = fedavg.build(net, **training)
    q = cast("Guide", common.guide)
    if training.get("guide") is None:
        q = replace(q, program=points)
    train, step = phase_and_step(common)
    send = replace(step, loss=On(step.loss, common.model, common.guide))
    keep = replace(step, names="own/*", loss=TransformedLoss(step.loss, as_personal))
    epochs = train.epochs if own_epochs is None else own_epochs
    return replace(
        common,
        name="ditto",
        init_client=start_own,
        model=model,
        guide=q,
        phases=(replace(train, updates=(send,)), replace(train, updates=(keep,), epochs=epochs)),
        adapt=tuple(replace(phase, updates=(keep,)) for phase in common.adapt),
        views={"personal": as_personal, "global": as_received},
        metadata=Metadata(reads={"model": model, "guide": q}),
    )
