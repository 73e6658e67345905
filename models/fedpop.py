"""FedPop: each client's head is a random effect, sampled by a Langevin chain at the client.

Kotelevskii, Vono, Moulines and Durmus, "FedPop: A Bayesian Approach for Personalised Federated
Learning", NeurIPS 2022. The network is a shared base and a personal head z_j:

    p(z_j | beta)         = Normal(m, diag(s)^2)          beta = (m, s), the population
    p(y | x, base, z_j)   = Categorical(logits=head(base(x); z_j))
    z_j, in a chain with  p(z_j | D_j, base, beta) as its stationary law; q(z_j) is the normal with
                          the moments of its draws, to predict and to look at

    client   z_j    = z_j - g_j grad U(z_j) + (2 g_j temperature)^1/2 xi,   xi ~ Normal(0, I)
                      U(z) = -log p(D_j | base, z) - log p(z | beta)
             base_j = base_j - lr grad of -log p(D_j | base_j, z_j) / n_j   at the draws of z_j
    server   base   = sum_j n_j base_j / sum_j n_j
             m      = mean_j mean of z_j's draws,   s^2 = mean_j mean of (z_j - m)^2

A Langevin step is a gradient step of plain SGD and, as a second move, noise of the client's own.
Chains continue from round to round; the draws after `burn_in` epochs count, those of earlier rounds
less and less. The last line is the exact M-step: in a normal model its fixed point is the maximum
of the evidence. With temperature = 0 chains go down to the MAP of z_j, and s dies out.

Use it where personal heads are to be draws of a chain, not points. It assumes that heads are drawn
from one normal population, and needs steps enough for the chain to move.

Departures from the paper: clients make many steps on the base, one at each draw, and the server
averages, where the paper sums gradients at all draws and the server makes one step; chains see
minibatches. Draws of earlier rounds count by `memory`, as in stochastic approximation EM.
g_j = lr_head / n_j, so that one rate suits clients of all sizes. A client takes s for at least
g_j^1/2, under which its steps would overshoot m. Clients count evenly in m and s, being draws from
the population.
"""

from __future__ import annotations

from dataclasses import replace

import pyro
import pyro.distributions as dist
import torch
from torch import Generator
from torch.nn.functional import softplus

from pyrofl.arguments import Count, NotNegative, Positive, ShareBelowOne, Whole, checked
from pyrofl.data import Batch, Cohort
from pyrofl.inference.aggregation import Aggregator, by_size, uniform
from pyrofl.inference.definition.averages import Combine, get_rule
from pyrofl.inference.definition.elbo import elbo, with_guide
from pyrofl.inference.definition.metadata import (
    INCOMPARABLE,
    NOT_NEGATIVE,
    POSITIVE,
    Metadata,
    normals,
)
from pyrofl.inference.definition.method import (
    ClosedFormUpdate,
    GradientStep,
    Method,
    Phase,
    as_trained,
)
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.programs import Likelihood, Loss, of_network
from pyrofl.models import guides
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import PriorFamily, as_event, as_families
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, add_trailing_axes, pick, role, under

MIN_VARIANCE = 1e-8  # smallest variance of the population, and of a client's draws

SEARCH_GRID = {"lr_head": (0.01, 0.03, 0.1, 0.3, 1.0), "lr_base": (0.001, 0.003, 0.01, 0.03, 0.1)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    head: str | None = None,
    likelihood: Likelihood = categorical,
    prior: PriorFamily = dist.Normal,
    guide: guides.Family | None = None,
    init_scale: Positive = 0.2,
    temperature: NotNegative = 1.0,
    memory: ShareBelowOne = 0.8,
    burn_in: Whole = 2,
    epochs: Count = 5,
    batch: Count | None = 10,
    lr_head: Positive = 0.1,
    lr_base: NotNegative = 0.01,
    momentum: ShareBelowOne = 0.9,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build the FedPop method (personal heads as random effects).

    Args:
        net: the network; its parameters split in base and head.
        head: patterns of the names that are personal, the rest is shared; "*" makes the whole
            network random. Default: the network's head.
        likelihood: of a row, given the network's outputs.
        prior: location-scale family of the population, see `pyrofl.priors`. The M-step is
            exact for the normal; for others it sets m and s by the same moments.
        guide: family that stands for the draws instead of the guide below, which is
            `guides.mean_field`; one that can be started at given moments.
        init_scale: s before round one.
        temperature: of the chain; 1 is exact Bayes.
        memory: share of its weight that a draw keeps from one round to the next; 0 forgets those
            of earlier rounds.
        burn_in: epochs of the chain before its draws count.
        epochs: epochs in which they count and the base trains.
        batch: rows in a step; None takes all.
        lr_head: n_j g_j, learning rate of the chain; the loss is a mean over the rows.
        lr_base: learning rate; the loss is a mean over the rows.
        momentum: of the base's optimizer.
        aggregation: how the server makes one of the clients' bases, means and squares, each on its
            own, as in `fedavg.build`. Other than "mean" distances from m are aggregated:
            rules that leave out the largest make s too narrow, the median of normal ones by a
            third.

    Raises:
        ValueError: if no parameter matches `head`.
    """
    shapes = net.select_params(net.head if head is None else head)
    rest = [n for n in net.shapes if n not in shapes]
    point = guides.delta(shapes, loc="z")
    families = as_families(prior, shapes)

    @of_network(net, likelihood, points="base")
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample each client's head z_j from the population, then the responses of its rows."""
        # Under this scale, steps of the chain would overshoot the mean of the population.
        least = (lr_head / batch.size).sqrt()[:, None]  # [C, 1]
        with batch.clients():
            head = {}
            for n, shape in shapes.items():  # p(z_j | beta)
                mean, sd = received[f"loc/{n}"], received[f"log_scale/{n}"].exp()
                sd = sd.maximum(add_trailing_axes(least, sd))
                head[n] = pyro.sample(n, as_event(families[n](mean, sd), len(shape)))
            with batch.rows():
                outputs = net(role("base", local) | head, batch.x)
                pyro.sample("y", likelihood(outputs, batch.x), obs=batch.y)

    def mean_field(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample each client's head from the normal with the moments of its chain's draws."""
        with batch.clients():
            for n, shape in shapes.items():
                mu, sd = local[f"mu/{n}"], softplus(local[f"pi/{n}"])
                pyro.sample(n, dist.Normal(mu, sd).to_event(len(shape)))

    q = guides.build_guide(guide or guides.mean_field, shapes, loc="mu", spread="pi")
    if guide is None:
        q = replace(q, program=mean_field)

    def init(generator: Generator, clients: int) -> Tensors:
        """Return the server's initial state: parameters drawn by the network's initialization."""
        start = net.init(generator)
        loc = {n: start[n] for n in shapes}
        base = under("base", {n: start[n] for n in rest})
        return base | population(
            loc, {n: torch.full_like(v, init_scale**2) for n, v in loc.items()}
        )

    def population(loc: Tensors, variance: Tensors) -> Tensors:
        """Return the population's means and log standard deviations as named server tensors."""
        width = {n: v.clamp(min=MIN_VARIANCE).log() / 2 for n, v in variance.items()}
        return under("loc", loc) | under("log_scale", width)

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the client's Langevin chain at the population mean of the heads."""
        center = role("loc", received)
        spread = {n: v.exp() for n, v in role("log_scale", received).items()}
        none = under("squares", {n: torch.zeros_like(v) for n, v in center.items()})
        none |= under("average", center) | {"draws": torch.zeros_like(cohort.size)}
        return point.start(center) | q.start(center, spread) | none

    def forget(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Down-weight the draws of earlier rounds by the factor `memory`."""
        return {n: memory * v for n, v in pick(local, "squares/* draws").items()}

    def collect(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Add the current draw of the client's head to the mean and the sum of squared deviations.

        By Welford's recursion: a difference of sums would lose a small spread around a large mean.
        """
        draws, average, squares = local["draws"] + 1, {}, {}
        for n, z in role("z", local).items():
            change = z - local[f"average/{n}"]
            average[n] = local[f"average/{n}"] + change / add_trailing_axes(draws, z)
            squares[n] = local[f"squares/{n}"] + change * (z - average[n])
        return under("average", average) | under("squares", squares) | {"draws": draws}

    def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the moments about the population's mean, and the normal guide, of the draws."""
        mean, loc = role("average", local), role("loc", received)
        variance = {
            n: v / add_trailing_axes(local["draws"], v) for n, v in role("squares", local).items()
        }
        width = {n: v.clamp(min=MIN_VARIANCE).sqrt() for n, v in variance.items()}
        square = {n: v + (mean[n] - loc[n]).square() for n, v in variance.items()}
        return under("mean", mean) | under("square", square) | q.start(mean, width)

    def upload(received: Tensors, local: Tensors) -> Tensors:
        """Send the base, the mean of the head's draws, and their mean squared distance from m."""
        return pick(local, "base/* mean/* square/*")

    def by_server_names(server: Tensors, message: Tensors) -> Tensors:
        """Rename the tensors of clients' messages to the names used in the server's state."""
        square, log_scale = role("square", message), role("log_scale", message)
        old = under("log_scale", {n: (2 * v).exp() for n, v in log_scale.items()})
        loc = under("loc", role("mean", message)) | under("log_scale", square)
        return pick(message, "base/*") | loc | old

    def update(server: Tensors, pooled: Tensors) -> Tensors:
        """Update the shared base, and the population's mean and variance (M-step)."""
        loc, square, old = role("loc", pooled), role("log_scale", pooled), role("loc", server)
        variance = {n: square[n] - (v - old[n]).square() for n, v in loc.items()}
        return server | pick(pooled, "base/*") | population(loc, variance)

    combine = get_rule(aggregation)

    def robust(server: Tensors, message: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Aggregate messages by a robust rule: base, population mean, and variance about it."""
        even = torch.ones_like(cohort.size)
        base = combine(role("base", message), cohort.size, role("base", server))
        mean, square = role("mean", message), role("square", message)
        old = role("loc", server)
        loc = combine(mean, even, old)
        variance = {n: square[n] - (v - old[n]).square() for n, v in mean.items()}
        distance = {n: v + (mean[n] - loc[n]).square() for n, v in variance.items()}  # from loc
        width = {n: (2 * v).exp() for n, v in role("log_scale", server).items()}
        return server | under("base", base) | population(loc, combine(distance, even, width))

    def common(received: Tensors, local: Tensors) -> Tensors:
        """Return the global model: shared base, and head with the population's distribution."""
        width = {n: v.exp() for n, v in role("log_scale", received).items()}
        return local | received | q.start(role("loc", received), width)

    chain = langevin("z", lr_head, with_guide(point, elbo(mean=True)), temperature)
    move_base = GradientStep(
        "base/*", sgd(lr_base, momentum), with_guide(point, elbo(kl=0.0, mean=True))
    )
    weights = {"base/*": by_size, "loc/* log_scale/*": uniform}
    return Method(
        name="fedpop",
        init=init,
        init_client=init_client,
        model=model,
        guide=q,
        phases=(
            Phase(chain, burn_in, batch),
            Phase((forget,)),
            Phase((*chain, collect, *((move_base,) if rest else ())), epochs, batch),
            Phase((settle,)),
        ),
        upload=upload,
        aggregate=Aggregator(weights, update, transform=by_server_names)
        if aggregation == "mean"
        else robust,
        views={"personal": as_trained, "global": common},
        metadata=Metadata(
            {
                "square/*": POSITIVE if q.random and temperature else NOT_NEGATIVE,
                "z/*": INCOMPARABLE,
                **normals("loc", "log_scale", torch.exp),
            },
            reads={"guide": q},
        ),
    )


def langevin(
    name: str, lr: float, loss: Loss, temperature: float = 1.0
) -> tuple[GradientStep, ClosedFormUpdate]:
    """Return the two updates of a Langevin step: a gradient step and Gaussian noise.

    That is z - g_j grad U(z) + (2 g_j temperature)^1/2 xi, with xi ~ Normal(0, I).

    Args:
        name: role of the local tensors that move.
        lr: n_j g_j. As g_j goes to 0, the chain's law is exp(-U / temperature). For a normal law of
            variance v it has the right mean, and variance v / (1 - g_j / (2 v)).
        loss: U / n_j, a mean over the client's rows.
        temperature: 0 leaves gradient descent.
    """

    def shake(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Add the Gaussian noise of a Langevin step to the local tensors."""
        moved, width = {}, (2 * lr * temperature / data.size).sqrt()
        with data.clients():  # the noise of a site is the client's own
            for n, v in role(name, local).items():
                zero = torch.zeros_like(v).unsqueeze(1)  # [C, 1, *p]
                fn = dist.Normal(zero, torch.ones_like(zero)).to_event(v.dim() - 1)
                moved[n] = v + add_trailing_axes(width, v) * pyro.sample(f"_noise/{n}", fn).squeeze(
                    1
                )
        return under(name, moved)

    return GradientStep(f"{name}/*", sgd(lr), loss), shake
