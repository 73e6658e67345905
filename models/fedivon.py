"""FedIVON: federated averaging of normal posteriors by their precisions, trained with IVON.

Pal, Gupta, Sarwar and Rai, "Federated Learning with Uncertainty and Personalization via Efficient
Second-order Optimization", TMLR 2025.

    p(w)     = Normal(m0, S0^-1)                     S0 diagonal
    q(w)     = Normal(m, S^-1)                       the server's; of n rows
    q_j(w)   = Normal(m_j, S_j^-1)                   of n_j rows

    client   q_j = argmin E[-log p(D_j | w)] / temperature + KL(q_j || p)
             by steps of IVON, from the mean m and the precision S n_j / n
    server   S   = sum_j S_j
             m   = S^-1 sum_j S_j m_j
    test     q_j, after local steps from q, as personal model

A parameter is thus averaged by what each client knows of it. Clients keep no state, and a step
costs as much as one of Adam.

Use it for networks where few rounds of a normal posterior are wanted, of one model or of one for
each client. It assumes mean-field normals and clients that are alike: the server's posterior is the
product of the clients', which contain the prior once each, and with many local steps its mean is
not that of all rows.

Departures from the paper: where some clients report, sums are extrapolated to all. The released
code could not be read; the experiments' settings are not the defaults here.
"""

from __future__ import annotations

import torch
from torch import Generator

from pyrofl.arguments import Count, Positive, ShareBelowOne, Whole, checked
from pyrofl.data import Batch
from pyrofl.inference.definition.aggregator import Aggregator, uniform
from pyrofl.inference.definition.metadata import NOT_NEGATIVE, POSITIVE, SHARED, Metadata
from pyrofl.inference.definition.method import Method, Phase, as_received, as_trained
from pyrofl.inference.definition.programs import Likelihood, Prior
from pyrofl.models import guides
from pyrofl.models.fisher import STANDARD
from pyrofl.models.likelihoods import categorical
from pyrofl.models.shared.ivon import Ivon, independent_family
from pyrofl.models.shared.laplace import LaplaceCore
from pyrofl.models.shared.vectors import flatten_clients
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, pick, role

SEARCH_GRID = {
    "lr": (0.03, 0.1, 0.2),
    "temperature": (0.03, 0.1, 1.0),
    "init_scale": (0.2, 0.5),
}


@rebuildable
@checked
def build(
    net: Network,
    *,
    temperature: Positive = 0.1,
    init_scale: Positive = 0.5,
    fine_tune: Whole = 5,
    likelihood: Likelihood = categorical,
    prior: Prior = STANDARD,
    guide: guides.Family = guides.mean_field,
    epochs: Whole = 5,
    batch: Count | None = 10,
    lr: Positive = 0.1,
    beta1: ShareBelowOne = 0.9,
    beta2: ShareBelowOne = 0.999,
) -> Method:
    """Build the FedIVON method.

    Args:
        net: the network; all its parameters are shared and Bayesian.
        temperature: of the posterior: 1 is that of Bayes' rule, less makes it narrower.
        init_scale: standard deviation of clients' q_j(w) before round one; see `pvi.build` for its
            unit.
        fine_tune: local epochs before testing the personal model; 0 tests the global model alone.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters; independent normals.
        guide: family of q_j(w), `mean_field`.
        epochs: local epochs.
        batch: rows in a step; None takes all.
        lr: learning rate of natural gradients.
        beta1: decay rate of the average gradient.
        beta2: decay rate of the curvature.

    Raises:
        ValueError: if the prior is not normal, or the guide is another one.
    """
    core = LaplaceCore(net, likelihood, prior, independent_family(guide))
    ivon, of_prior = Ivon(core, lr, beta1, beta2, temperature), core.factor_of_prior

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize q with the network's random draw as mean; each client counts as one row."""
        draw = net.init(generator)
        each = {n: torch.full_like(v, init_scale / net.fan_in(n) ** 0.5) for n, v in draw.items()}
        mean, sd = core.layout.joined(draw), core.layout.joined(each)
        return core.guide_parameters(mean, sd / clients**0.5) | {
            "share": torch.tensor(1.0 / clients),
            "rows": torch.tensor(0.0),
        }

    def begin(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Start from the received mean and the client's part of the received precision."""
        share = torch.where(received["rows"] > 0, data.size / received["rows"], received["share"])
        goal = {n: v.to(data.size).expand(len(data), -1) for n, v in of_prior.items()}  # [C, d]
        mean, precision = flatten_clients(role("w", received)), core.precision(received)
        # At least the prior's, where a client has hardly any rows.
        precision = torch.maximum(precision * share[:, None], goal["precision"])
        return ivon.start(mean, precision, goal["precision"], goal, data)

    def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Store the client's normal."""
        precision = ivon.precision(local, data)
        sent = core.factor(precision, local["mean"]) | {"count": data.size}
        return sent | core.guide_parameters(local["mean"], precision.rsqrt())

    def product(server: Tensors, pooled: Tensors) -> Tensors:
        """Return the server's state with the product of the clients' normals."""
        clients = 1 / server["share"]
        total = {n: v * clients.to(v) for n, v in pooled.items()}
        return server | core.posterior(pick(total, "shift precision")) | {"rows": total["count"]}

    # Personal models have weights of their own: these are not shared by all clients.
    tensor_metadata = {
        n: v for n, v in core.metadata.tensors.items() if v is not SHARED or not fine_tune
    }
    tensor_metadata |= {"precision": POSITIVE, "count": NOT_NEGATIVE}
    phases = (Phase((begin,)), ivon.phase(epochs, batch), Phase((settle,)))
    again = (phases[0], ivon.phase(fine_tune, batch), phases[2]) if fine_tune else ()
    return Method(
        name="fedivon",
        init=init,
        model=core.model,
        guide=core.q,
        phases=phases,
        upload=lambda received, local: {n: local[n] for n in ("shift", "precision", "count")},
        aggregate=Aggregator({"*": uniform}, product),
        adapt=again,
        views={"global": as_received} | ({"personal": as_trained} if fine_tune else {}),
        metadata=Metadata(tensor_metadata, reads={"model": core.model, "guide": core.q}),
    )
