"""FedEM: each client's data follow a personal mixture of K shared distributions.

Marfoq, Neglia, Bellet, Kameni and Vidal, "Federated Multi-Task Learning under a Mixture of
Distributions", NeurIPS 2021. The latent z_i is the index of the distribution row i is of:

    p(pi_j)              = Dirichlet(1, ..., 1)          flat on the simplex, personal
    p(z_i | pi_j)        = Categorical(pi_j)             summed out
    p(y_i | x_i, z_i, w) = Categorical(logits=net(x_i; w_{z_i}))
    q(pi_j)              = Delta, or a Dirichlet, see `guide`;  w_1 ... w_K have a flat prior

    client   q_ik = pi_jk p(y_i | x_i, w_k) / sum_k pi_jk p(y_i | x_i, w_k)         the E-step
             pi_jk = sum_i q_ik / n_j                                               the M-step
             w_jk = SGD from w_k on -1/n_j sum_i q_ik log p(y_i | x_i, w_k), q fixed
    server   w_k = sum_j n_j w_jk / sum_j n_j

A client predicts by sum_k pi_jk p(y | x, w_k). One component is FedAvg. IFCA is this where every
client has all rows in the component that fits them best. Who comes later finds its weights by the
first two lines on its own rows, w as received (`adapt`).

Use it where each client's rows are a blend of a few kinds, in shares of its own. It assumes that K
components suffice, and costs K times the work and the bytes.

Departures from the paper: none known. The text at hand ended with its introduction, so equations
have no numbers here; the steps are those of the authors' code. With guide="dirichlet" the client's
part is variational Bayes: q(pi_j) = Dirichlet(a + sum_i q_i), and log pi in the E-step is its mean.
"""

from __future__ import annotations

from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Generator, Size, Tensor

from pyrofl.arguments import Count, NotNegative, ShareBelowOne, Whole, checked, described
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.aggregator import Aggregator, by_size
from pyrofl.inference.definition.averages import Combine
from pyrofl.inference.definition.elbo import with_rows
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.prior_conversion import probe_prior
from pyrofl.inference.definition.programs import Likelihood, Prior, Program, as_prior
from pyrofl.models import guides
from pyrofl.models.guides import simplex
from pyrofl.models.likelihoods import Categorical, categorical
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, pick, role, under

FAMILIES: dict[str, guides.Family] = {"point": guides.delta, "dirichlet": simplex.dirichlet}


SEARCH_GRID = {"lr": (0.01, 0.03, 0.05, 0.1), "components": (2, 3, 5)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    components: Count = 3,
    likelihood: Likelihood = categorical,
    prior: Prior | None = None,
    guide: Literal["point", "dirichlet"] | guides.Family = "point",
    epochs: Whole = 5,
    batch: Count | None = 10,
    lr: NotNegative = 0.05,
    momentum: ShareBelowOne = 0.9,
    adapt_steps: Count = 20,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build the FedEM method (a mixture of shared component models, fitted by EM).

    Args:
        net: the network; every component has all its parameters.
        components: K.
        likelihood: of a row, given a component's outputs.
        prior: on "pi" [K]: dist.Dirichlet(torch.full((K,), 2.0)), or a function that returns a
            Dirichlet. Default a flat one.
        guide: family of q(pi): "point" for its mode, the paper's where the prior is flat, or
            "dirichlet".
        epochs: local epochs on the components, after one E-step and the weights' M-step.
        batch: rows in a step; None takes all.
        lr: learning rate; the loss is a mean over the rows, each counted by its q_ik.
        momentum: of SGD, which starts afresh each round.
        adapt_steps: E-steps and M-steps of the weights before a test of clients that come later.
        aggregation: how the server makes one component of the clients', as in `fedavg.build`.

    Raises:
        ValueError: if `guide` is another family, or the prior no Dirichlet or, where the guide is
            a point, one below 1, which has no mode.
    """
    family = FAMILIES[guide] if isinstance(guide, str) else guide
    if family not in FAMILIES.values():
        raise ValueError(
            f"guide is {described(family)}; expected 'point' or 'dirichlet', which EM can fit"
        )
    shape = Size((components,))
    prior_of = (
        None
        if prior is None
        else as_prior(prior, {"pi": shape}, constraints.simplex, may_be_learned=False)
    )
    if prior_of is not None and (fn := probe_prior(prior_of, "pi", shape)) is not None:
        concentration(fn, has_mode=family is guides.delta)
    q = family({"pi": shape}, loc="weight", spread="log_count")

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize the model of each mixture component by an independent random draw."""
        starts = [net.init(generator) for _ in range(components)]
        return under("component", {n: torch.stack([s[n] for s in starts]) for n in net.shapes})

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the client's mixture weights: equal for all components."""
        even = torch.full_like(cohort.size, 1 / components)[:, None].expand(-1, components)
        return {"log_count/pi": torch.zeros_like(even)} if q.random else {"weight/pi": even}

    def fits(local: Tensors, data: Batch) -> TorchDistribution:
        """Return each row's response distribution under each mixture component, [C, B, K]."""
        # Components are run like further clients, so that their gradients are not put together.
        # [C K, 1, *p], and rows [C, K, B, *x].
        w = {n: v.squeeze(1).flatten(0, 1)[:, None] for n, v in role("component", local).items()}
        x = data.x.unsqueeze(1).expand(-1, components, *data.x.shape[1:])
        outputs = torch.unflatten(net(w, x.flatten(0, 1)), 0, x.shape[:2]).transpose(1, 2)
        return likelihood(outputs, data.x.unsqueeze(2))

    def check_name(received: Tensors, local: Tensors, data: Batch) -> TorchDistribution:
        """Return the prior distribution p(pi_j) of the client's mixture weights."""
        if prior_of is None:
            return dist.Dirichlet(data.size.new_ones(shape))
        return prior_of("pi", shape, received, local, data)

    def model(received: Tensors, local: Tensors, data: Batch) -> None:
        """Define the Pyro model: a prior on mixture weights, and a mixture of likelihoods.

        That is p(pi_j) p(y | x, pi_j), with the indicators z summed out.
        """
        with data.clients():
            pi = pyro.sample("pi", check_name(received, local, data))
            with data.rows():
                pyro.sample("y", mixture(pi, fits(local, data)), obs=data.y)

    def log_density(local: Tensors, data: Batch) -> Tensor:
        """Return each row's log likelihood under each mixture component, [C, B, K]."""
        return fits(with_rows(pick(local, "component/*"), len(data)), data).log_prob(
            data.y.unsqueeze(2)
        )

    def expect(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Update the rows' component responsibilities (E-step) and mixture weights (M-step)."""
        with torch.no_grad():
            share = responsibilities(log_weight(local), log_density(local, data))
        share = share * data.mask.unsqueeze(2)  # [C, B, K]
        before = check_name(with_rows(received, len(data)), with_rows(local, len(data)), data)
        count = (share * data.counts.unsqueeze(2)).sum(1)  # [C, K]
        return {"rows/q": share, **weigh(before, count)}

    def log_weight(local: Tensors) -> Tensor:
        """Return log mixture weights [C, K], or their mean if their posterior is a Dirichlet."""
        if not q.random:
            return local["weight/pi"].log()
        count = local["log_count/pi"].exp()
        return count.digamma() - count.sum(-1, keepdim=True).digamma()

    def weigh(before: TorchDistribution, count: Tensor) -> Tensors:
        """Return the mixture weights' posterior parameters, given prior and row counts [C, K]."""
        count = count + concentration(before, not q.random).expand(len(count), 1, -1)[:, 0]
        if q.random:
            return {"log_count/pi": count.log()}
        return {"weight/pi": (count - 1) / (count.sum(-1, keepdim=True) - components)}

    def complete(
        model: Program, guide: Program, received: Tensors, local: Tensors, data: Batch
    ) -> Tensor:
        """Return the expected negative log likelihood per row [C], given responsibilities.

        That is the mean over rows of -sum_k q_ik log p(y_i | x_i, w_k).
        """
        cost = -(data.take_rows(local["rows/q"]) * log_density(local, data)).sum(2)
        return (torch.where(data.mask, cost, 0) * data.counts).sum(1) / data.size

    def personal(received: Tensors, local: Tensors) -> Tensors:
        """Return the client's mixture weights and the parameters of all components."""
        return local

    return Method(
        name="fedem",
        init=init,
        init_client=init_client,
        model=model,
        guide=q,
        phases=(
            Phase((expect,)),
            Phase((GradientStep("component/*", sgd(lr, momentum), complete),), epochs, batch),
        ),
        aggregate=Aggregator({"component/*": by_size}, rule=aggregation),
        adapt=(Phase((expect,), adapt_steps),),
        views={"personal": personal},
        metadata=Metadata(reads={"model": model, "guide": q}),
    )


def responsibilities(log_weight: Tensor, log_density: Tensor) -> Tensor:
    """Return component responsibilities [C, B, K], given log weights and log likelihoods.

    The log weights are [C, K].

    >>> weight, density = torch.tensor([[0.5, 0.5]]), torch.tensor([[[0.9, 0.1], [0.2, 0.6]]])
    >>> responsibilities(weight.log(), density.log())
    tensor([[[0.9000, 0.1000],
             [0.2500, 0.7500]]])
    """
    return (log_weight.unsqueeze(1) + log_density).softmax(-1)


def mixture(weight: Tensor, fn: TorchDistribution) -> TorchDistribution:
    """Return the mixture of K distributions, given their mixture weights.

    The batch shape of the distributions is [C, B, K], and weights are [..., C, 1, K].
    """
    mixture: TorchDistribution
    if isinstance(fn, dist.Categorical):
        mixture = Categorical(logits=(weight.log().unsqueeze(-1) + fn.logits).logsumexp(-2))
    elif isinstance(fn, dist.Bernoulli):
        mixture = dist.Bernoulli(probs=(weight * fn.probs).sum(-1).clamp(0, 1))
    else:
        whole = torch.broadcast_shapes(weight.shape, fn.batch_shape)
        component = dist.Categorical(probs=weight.expand(whole))
        mixture = dist.MixtureSameFamily(component, fn.expand(whole))
    return mixture


def concentration(prior: TorchDistribution, has_mode: bool) -> Tensor:
    """Return the concentration [..., K] of a Dirichlet prior; raise ValueError if it is invalid.

    >>> concentration(dist.Dirichlet(torch.ones(2)), has_mode=True)
    tensor([1., 1.])
    """
    if not isinstance(prior, dist.Dirichlet):
        kind = type(prior).__name__
        raise ValueError(
            f"prior of pi is a {kind}; expected a Dirichlet, for which steps are closed"
        )
    if has_mode and bool((prior.concentration < 1).any()):
        least = float(prior.concentration.min())
        raise ValueError(
            f"prior of pi is a Dirichlet of {least:g}, which has no mode; expected 1 or more, or "
            "guide='dirichlet'"
        )
    return prior.concentration
