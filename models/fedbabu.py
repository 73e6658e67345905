"""FedBABU: clients train all layers but the head together, and fine-tune on their own rows.

Oh, Kim and Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification",
ICLR 2022.

    p(b)           flat
    p(h)           = Delta(h_0), one random head for all, until a client is tested
    p(y | x, b, h) = Categorical(logits=head(base(x; b); h))
    q              = Delta(b_j)

    client   b_j = SGD from b with h_0 fixed, on the mean loss per row
    server   b   = sum_j n_j b_j / sum_j n_j
    test     h_j (or b_j, or both) = SGD from h_0 (b), `fine_tune` epochs

h_0 is drawn by all clients from the common seed, so it need not travel. The personal model as it is
after training, without tuning, is the paper's global model.

Use it where clients hold classes in other shares and can be tuned before use: only the base learns
in training. It assumes that one representation suits all.

Departures from the paper: defaults of the training are FedAvg's here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Unpack

from pyrofl.arguments import checked
from pyrofl.inference.definition.method import Method
from pyrofl.models import fedavg
from pyrofl.models.shared.base_and_head import head_and_base_patterns, make_personal, train_only
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable

TunedLayers = Literal["head", "base", "all"]

SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "momentum": (0.0, 0.9)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    head: str | None = None,
    tune: TunedLayers = "all",
    **training: Unpack[fedavg.Training],
) -> Method:
    """Build FedBABU: FedAvg with a fixed random head, fine-tuned by each client before evaluation.

    Args:
        net: the network.
        head: patterns of the names that are not trained; default the network's head.
        tune: what trains before a test.
        training: as in `fedavg.build`, but `fine_tune` is 5 unless given.

    Raises:
        ValueError: if `head` matches no parameter or all.
    """
    head_names, rest = head_and_base_patterns(net, head, requires_both=True)
    settings: fedavg.Training = {"fine_tune": 5, **training}
    method = make_personal(fedavg.build(net, **settings), head_names)
    (train,) = method.phases
    chosen = {"head": head_names, "base": rest, "all": "*"}[tune]
    adapt = tuple(train_only(phase, chosen) for phase in method.adapt)
    return replace(method, name="fedbabu", phases=(train_only(train, rest),), adapt=adapt)
