"""PredBayes: distills a compromise between product and mixture of the clients' predictions.

Hasan, Zhang, Guo, Chen and Poupart, "Calibrated One Round Federated Learning with Bayesian
Inference in the Predictive Space", AAAI 2024.

    p(w_j)        = Normal(0, 1), or another `prior`
    p(y | x, w_j) = Categorical(logits=net(x; w_j))
    q(w_j)        = Delta, along a Langevin chain

    client   w_j1 ... w_jS = a chain's states, some epochs apart, after SGD from w
    server   p_j(y | x) = sum_s p(y | x, w_js) / S                 of J clients
             product    ~ prod_j p_j                               a Bayesian committee machine
             mixture    = sum_j p_j / J
             p_beta     ~ product^beta mixture^(1 - beta)
             w          = SGD from the mean of all w_js on -1/U sum_u p_beta log p(. | x_u; w)

The x_u are unlabeled rows that the server holds. The product is too sure where clients know the
same things; beta is given, or found on rows of the server's with labels (`tuning`), where the mean
log loss of p_beta is convex in it. The paper makes one round; here another may follow, from w.
`ensemble` predicts by p_beta itself, from the messages of a round. The mixture alone, beta = 0, is
FedBE's ensemble of its clients' models, with draws of their posteriors in their place.

Use it where one round has to do and the server has rows without labels. It assumes that these are
like the clients' rows, and clients that can run a chain.

Departures from the paper: the chain is Langevin's with a constant step where theirs is a cyclical
one with momentum (`temperature=0` leaves SGD); the student starts at the mean of all states, where
theirs starts at one client's last; there is no regression. The authors' code gives the formulas
above for a uniform prior predictive; of the paper's text the first page was at hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Generator, Tensor

from pyrofl.arguments import Count, NotNegative, Share, ShareBelowOne, Whole, checked, described
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.averages import average
from pyrofl.inference.definition.metadata import INCOMPARABLE, Metadata
from pyrofl.inference.definition.method import Method, Phase, phase_and_step
from pyrofl.inference.definition.programs import Likelihood
from pyrofl.models import fedavg, guides
from pyrofl.models.fedpop import langevin
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import fixed
from pyrofl.models.shared import distillation
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, role, under

MAX_HALVINGS = 50  # of the interval in which beta is looked for


SEARCH_GRID = {"lr": (0.01, 0.05, 0.1), "chain_lr": (0.005, 0.05), "beta": (0.0, 0.5, 1.0)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    server_data: Tensor | None = None,
    beta: Share = 0.5,
    tuning: tuple[Tensor, Tensor] | None = None,
    samples: Count = 5,
    thin: Count = 1,
    temperature: NotNegative = 1.0,
    chain_lr: NotNegative = 0.05,
    distil_epochs: Whole = 50,
    distil_batch: Count = 64,
    distil_lr: NotNegative = 0.05,
    distil_momentum: ShareBelowOne = 0.9,
    **training: Unpack[fedavg.LocalTrainingOptions],
) -> Method:
    """Build the beta-PredBayes method (one-round Bayesian combination of predictions).

    Args:
        net: the network; all its parameters are shared.
        server_data: [U, *x], the server's rows.
        beta: 1 for the product, 0 for the mixture.
        tuning: x [V, *x] and y [V], rows of the server's with labels on which beta is found in
            every round, instead of the one given.
        samples: S.
        thin: epochs between two of them.
        temperature: of the chain; 1 is the posterior.
        chain_lr: step of the chain, on the loss as a mean over rows.
        distil_epochs: over the unlabeled rows.
        distil_batch: rows in a step; the loss is their mean.
        distil_lr: learning rate.
        distil_momentum: of SGD.
        training: of the clients before the chain, as in `fedavg.build`, without `aggregation`; lr
            is 0.05 unless given.

    Raises:
        ValueError: if the unlabeled rows are missing or do not fit the network, the likelihood has
            infinitely many answers, `guide` is another family than the delta, or there is a
            `aggregation`.
    """
    if "aggregation" in training:
        aggregation = dict(training)["aggregation"]
        raise ValueError(
            f"aggregation is {aggregation!r}; expected none, as predictions are put together"
        )
    if training.get("guide") not in (None, guides.delta):
        aggregation = described(training["guide"])
        raise ValueError(
            f"guide is {aggregation}; expected guides.delta, as a chain draws the samples"
        )
    settings: fedavg.LocalTrainingOptions = {"lr": 0.05, "prior": fixed(), **training}
    likelihood = settings.get("likelihood", categorical)
    rows = distillation.check_unlabeled_rows(net, server_data, likelihood)
    base = fedavg.build(net, **settings)
    burn_in, step = phase_and_step(base)

    def keeping(s: int) -> Phase:
        def keep(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Store the chain's current parameters as posterior sample number s."""
            return under(f"sample/{s}", {n: local[n] for n in received})

        return Phase((keep,))

    def upload(received: Tensors, local: Tensors) -> Tensors:
        """Send all S stored posterior samples, [C, S, *p]."""
        each = [role(f"sample/{s}", local) for s in range(samples)]
        kept = {n: torch.stack([e[f"w/{n}"] for e in each], 1) for n in net.shapes}  # [C, S, *p]
        return under("sample", kept)

    def aggregate(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        """Distill the combined predictions of all messages into one model."""
        models = role("sample", message)
        like = next(iter(models.values()))
        share = torch.tensor(beta).to(like)
        if tuning is not None:
            x, y = tuning[0].to(like), tuning[1].to(like.device)
            share = tune_beta(each_predicts(net, models, x, likelihood), y)
        x = rows.to(like.device, like.dtype if rows.is_floating_point() else None)
        student = distillation.distil(
            net,
            average({n: v.mean(1) for n, v in models.items()}, cohort.size),
            x,
            interpolate_predictions(each_predicts(net, models, x, likelihood), share).exp(),
            generator,
            likelihood=likelihood,
            swa=False,
            epochs=distil_epochs,
            batch=distil_batch,
            lr=distil_lr,
            momentum=distil_momentum,
        )
        return under("w", student) | {"server/beta": share}

    def init(generator: Generator, clients: int) -> Tensors:
        """Return the server's initial state: a randomly initialized model, and beta."""
        return base.init(generator, clients) | {"server/beta": torch.tensor(beta)}

    chain = replace(burn_in, updates=langevin("w", chain_lr, step.loss, temperature), epochs=thin)
    drawn = tuple(phase for s in range(samples) for phase in (chain, keeping(s)))
    return replace(
        base,
        name="predbayes",
        init=init,
        phases=(burn_in, *drawn),
        upload=upload,
        aggregate=aggregate,
        metadata=Metadata({"w/*": INCOMPARABLE}, reads={"model": base.model}),
    )


def each_predicts(
    net: Network, models: Tensors, x: Tensor, likelihood: Likelihood = categorical
) -> Tensor:
    """Return each client's predicted probabilities [J, U, K], averaged over its samples."""
    clients = len(next(iter(models.values())))
    flat = {n: v.flatten(0, 1) for n, v in models.items()}  # [J S, *p]
    probabilities = distillation.predictions(net, flat, x, likelihood)
    return probabilities.reshape(clients, -1, *probabilities.shape[1:]).mean(1)


def interpolate_predictions(each: Tensor, beta: Tensor | float) -> Tensor:
    """Interpolate between product and mixture of the clients' predictions [J, U, K].

    The result is log p_beta [U, K].

    >>> each = torch.tensor([[[0.8, 0.2]], [[0.5, 0.5]]])
    >>> [interpolate_predictions(each, beta).exp() for beta in (1.0, 0.0)]
    [tensor([[0.8000, 0.2000]]), tensor([[0.6500, 0.3500]])]
    """
    product, mixture = log_extremes(each)
    return (beta * product + (1 - beta) * mixture).log_softmax(-1)


def log_extremes(each: Tensor) -> tuple[Tensor, Tensor]:
    """Return log probabilities [U, K] of the product and of the mixture of predictions."""
    log_each = each.clamp(min=torch.finfo(each.dtype).tiny).log()
    return log_each.sum(0).log_softmax(-1), log_each.logsumexp(0).log_softmax(-1)


def tune_beta(each: Tensor, y: Tensor) -> Tensor:
    """Find by bisection the beta in [0, 1] with the smallest mean log loss at labels y [U]."""
    product, mixture = log_extremes(each)
    gap = product - mixture
    low, high = gap.new_tensor(0.0), gap.new_tensor(1.0)
    for _ in range(MAX_HALVINGS):
        middle = (low + high) / 2
        mean = (interpolate_predictions(each, middle).exp() * gap).sum(-1)
        rises = bool((mean - gap.gather(1, y[:, None]).squeeze(1)).mean() > 0)
        low, high = (low, middle) if rises else (middle, high)
    return (low + high) / 2


def ensemble(
    net: Network,
    message: Tensors,
    x: Tensor,
    beta: float | Tensor,
    likelihood: Likelihood = categorical,
) -> Tensor:
    """Return the combined probabilities [U, K] of rows x, given the clients' messages."""
    return interpolate_predictions(
        each_predicts(net, role("sample", message), x, likelihood), beta
    ).exp()
