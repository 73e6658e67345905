"""FedBE: the server samples global models, and distils their ensemble into the next one.

Chen and Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning", ICLR 2021.

    p(y | x, w) = Categorical(logits=net(x; w))           clients maximise it: q(w_i) = Delta
    p(w | D)    = Normal(mu, Sigma_diag) eq. 5, or eq. 7: gamma ~ Dirichlet(alpha),
                  w = sum_i gamma_i n_i w_i / sum_i gamma_i n_i

    client   w_i = SGD from w on the mean loss per row                                 eq. 1
    server   wbar = sum_i n_i w_i / n                                                  eq. 2
             teachers = {wbar} + {w_i} + {w^(m) ~ p(w | D)}: the letters A, C and S
             phat_u   = mean over teachers of p(y | x_u; w), squared and normalised    eq. 4
             w        = SWA from wbar on -1/U sum_u phat_u' log p(y | x_u; w)          algorithm 1

The x_u are unlabelled rows that the server holds, of the same kind or another. Its last teachers
stay there, as the view "ensemble": Bayesian model averaging, without distillation.

Related methods are settings:

    v-Distillation   teachers="C", distil="sgd"
    FedBE w/o SWA    distil="sgd"
    1-Ensemble       teachers="C", distil="none" and one round of many epochs, view "ensemble":
                     no client sees an average of models
    FedAvg whose ensemble is watched (figure 3)   distil="none"
    FedBE + FedProx, FedAvgM or SCAFFOLD          on="fedprox", ...: distillation starts from that
                     method's model; `distilled` puts it on any other

Departures from the paper: clients' rows are not augmented, the server's only by `augment`;
networks have GroupNorm instead of BatchNorm; defaults of the clients' training are FedAvg's here
(on CIFAR the paper has epochs=20, batch=40, weight_decay=1e-3, decay=True). The code scales the
standard deviation by 0.1 (`std_scale`), samples normalised updates around the previous model,
collects at a constant learning rate and divides the loss by the number of classes; here it is as
the paper has it, the start of SWA scaled to the number of steps. The code sharpens for every kind
of distillation, as here; the paper says so for v-Distillation alone.
"""

from __future__ import annotations

from typing import Literal, Unpack, cast

from torch import Tensor

from pyrofl.arguments import NotNegative, ShareBelowOne, checked
from pyrofl.inference.method import Method
from pyrofl.models import fedavg, fedavgm, fedprox, scaffold
from pyrofl.models.fedbe.ensembles import Teaching, distilled
from pyrofl.models.likelihoods import categorical
from pyrofl.nets import Network

Base = Literal["fedavg", "fedprox", "fedavgm", "scaffold"]


class Settings(Teaching, fedavg.Training, total=False):
    """The server's settings and the clients'."""


@checked
def build(
    net: Network,
    *,
    unlabelled: Tensor | None = None,
    on: Base = "fedavg",
    mu: NotNegative = 1e-3,
    server_momentum: ShareBelowOne = 0.9,
    **settings: Unpack[Settings],
) -> Method:
    """Build FedBE.

    Args:
        net: the network; all its parameters are shared.
        unlabelled: [U, *x], the server's rows.
        on: the method whose clients train and whose model distillation starts from.
        mu: of FedProx, per datum; the authors' code has 1e-3.
        server_momentum: of FedAvgM in its averaging form, whose rate is 1 - server_momentum.
        settings: of the server as of `ensembles.distilled`, of the clients as of `fedavg.build`,
            where `decay` is the paper's schedule of their learning rate.

    Raises:
        ValueError: as `distilled` and `fedavg.build`, or if there is a prior beside FedProx's.
    """
    teaching = {n: v for n, v in settings.items() if n in Teaching.__annotations__}
    training = cast("fedavg.Training", {n: v for n, v in settings.items() if n not in teaching})
    if on == "fedprox":
        if "prior" in training:
            raise ValueError("prior is given with on='fedprox'; expected mu, as that is its prior")
        method = fedprox.build(net, mu=mu, **cast("fedavg.CentredTraining", training))
    elif on == "fedavgm":
        lr = 1 - server_momentum
        method = fedavgm.build(net, server_lr=lr, server_momentum=server_momentum, **training)
    else:
        method = (fedavg if on == "fedavg" else scaffold).build(net, **training)
    likelihood = training.get("likelihood", categorical)
    return distilled(method, net, unlabelled, likelihood=likelihood, **cast("Teaching", teaching))
