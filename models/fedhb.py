"""FedHB: a hierarchical Bayesian model whose global posterior the server updates in closed form.

Kim and Hospedales, "FedHB: Hierarchical Bayesian Federated Learning", 2023. Every weight is random:

    p(w_j | phi)    = Normal(mu, diag(sigma^2)),   phi = (mu, sigma^2)           "niw"
    p(phi)          = Normal(mu; 0, sigma^2 / count) inverse-gamma(sigma^2; df / 2, df spread^2 / 2)
    p(y | x, w_j)   = Categorical(logits=net(x; w_j))
    q(phi)          = of the same family, with m, l, n, psi for 0, count, df, df spread^2
    q(w_j)          = Normal(m_j, diag(v_j)), computed again in every round

    client   q_j = argmin E[-log p(D_j | w)] + KL[q_j || Normal(m, psi / n)]
             which is the expectation over q(phi) of KL[q_j || p(w | phi)], but for a number
    server   l = count + J,   n = df + J,   m = sum_j m_j / l
             psi = df spread^2 + sum_j (v_j + m_j^2) - l m^2          of J clients

and with K kinds of clients, each near one of K centers,

    p(w_j | phi)    = 1/K sum_k Normal(r_k, sigma^2 I),   p(r_k) = Normal(0, I)  "mixture"
    q(w_j), q(r_k)  = points

    client   w_j = argmin -log p(D_j | w) - log sum_k exp(-|w - r_k|^2 / (2 sigma^2)),  from the
             center under which its rows are likeliest
             c_jk = softmax_k of -|w_j - r_k|^2 / (2 sigma^2)
    server   r_k = sum_j c_jk w_j / (sigma^2 + sum_j c_jk)            one step of EM

Where some report, sums are J times their mean. The model for a client never seen has q(phi)
integrated out: Student's t, of which the guide takes mean and variance; of "mixture" it is the
heaviest center. Personal models are the client's, trained from there.

Use it where personal models and what is common to them are wanted together, with closed forms at
the server. It assumes that clients' weights scatter around one center, or around one of K.

Of the paper's text abstract and introduction could be read; no equation numbers, and the updates
above are worked out from the model. Departures from the paper: an independent normal-inverse-
Wishart of one dimension (normal-inverse-gamma) for each weight, where the paper states one of all;
q(w_j) has learned variances, where the paper's are dropout's; points have no spread at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Generator, Size, Tensor

from pyrofl.arguments import Count, NotNegative, Positive, Whole, checked, described
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.aggregator import (
    MIN_TOTAL_WEIGHT,
    Aggregator,
    Weight,
    uniform,
    weight_by,
)
from pyrofl.inference.definition.averages import Combine
from pyrofl.inference.definition.elbo import Look, elbo
from pyrofl.inference.definition.metadata import (
    NOT_NEGATIVE,
    SHARE_RULE,
    JointRule,
    Metadata,
    normals,
)
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import adam
from pyrofl.inference.definition.programs import Likelihood, Loss, Program, Supervised, flat
from pyrofl.models import guides
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import PriorFamily, as_event, as_families
from pyrofl.models.shared.activations import Activations, Sampling, is_chosen, reason_against
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, add_trailing_axes, pick, role, under

NO_MOMENTS = "its second moment is below its squared mean; expected moments of a distribution"

SEARCH_GRID = {"lr": (0.003, 0.01, 0.03, 0.1), "spread": (0.01, 0.03, 0.1, 0.3)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: PriorFamily = dist.Normal,
    guide: guides.Family = guides.mean_field,
    centers: Whole = 0,
    count: Positive = 1.0,
    df: Positive = 3.0,
    spread: Positive = 0.1,
    init_scale: Positive = 0.05,
    kl: Positive = 0.1,
    num_particles: Count = 2,
    sampling: Sampling = "auto",
    epochs: Whole = 5,
    batch: Count | None = 50,
    lr: NotNegative = 0.01,
    fine_tune: Whole = 5,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build the FedHB method (hierarchical Bayesian federated learning).

    Args:
        net: the network; all its parameters are random.
        likelihood: of a row, given the network's outputs.
        prior: location-scale family of p(w_j | phi) at the moments that clients receive, see
            `pyrofl.priors`; the
            closed forms are those of the normal.
        guide: family of q(w_j); `delta` with centers.
        centers: K of the mixture; 0 is the normal-inverse-Wishart prior.
        count: how many clients at 0 the prior of mu is worth.
        df: how many clients of deviation `spread` the prior of sigma^2 is worth.
        spread: of clients around mu, by the prior; with centers, sigma.
        init_scale: psi / n before round one, as a standard deviation: where clients start.
        kl: weight of the KL divergence; 1 is exact Bayes. The default was chosen on handwritten
            digits, as that of pFedBayes.
        num_particles: Monte Carlo samples of every loss.
        sampling: what a step draws, "weights" or "activations"; see `pfedbayes.build`. On
            handwritten digits the accuracy is 0.957 by activations, and 0.924 by weights.
        epochs: local epochs.
        batch: rows in a step; None takes all.
        lr: learning rate of Adam, which starts afresh each round; the loss is a mean over the rows.
        fine_tune: epochs before the personal model is tested.
        aggregation: how the server makes one of first and second moments, as in `fedavg.build`.

    Raises:
        ValueError: if there are centers, and the guide is not delta or the prior not normal; or if
            sampling is "activations", and guide, prior or network do not permit it.
    """
    families = as_families(prior, net.shapes)
    by_outputs = is_chosen(sampling, reason_against(net, guide, prior))
    if centers:
        if guide is not guides.delta or {*families.values()} != {dist.Normal}:
            raise ValueError(
                f"centers is {centers}, guide {described(guide)} and prior {described(prior)}; "
                "expected the guide delta and a normal prior, as what clients have in a mixture "
                "are points"
            )
        return Mixture(net, likelihood, centers, spread).method(
            epochs, batch, lr, fine_tune, aggregation
        )
    q = guides.build_guide(guide, net.shapes, init_scale=init_scale, loc="w", spread="spread")

    def of_population(
        name: str, shape: Size, received: Tensors, local: Tensors, data: Batch
    ) -> TorchDistribution:
        """Return the prior of a client's weights, given the received population moments."""
        width = received[f"log_scale/{name}"].exp()
        return as_event(families[name](received[f"loc/{name}"], width), len(shape))

    def init(generator: Generator, clients: int) -> Tensors:
        """Return the server's initial state: parameters drawn by the network's initialization."""
        start = net.init(generator)
        width = {n: torch.full_like(v, init_scale).log() for n, v in start.items()}
        counts = {"counted": torch.tensor(0.0), "server/clients": torch.tensor(float(clients))}
        return under("loc", start) | under("log_scale", width) | counts

    def begin(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Initialize the client's posterior with the received means and scales."""
        width = {n: v.exp() for n, v in role("log_scale", received).items()}
        return q.start(role("loc", received), width)

    def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Store the first and second moments of the client's posterior, to be sent."""
        mean, variance = q.moments(received, local, data)
        square = {n: variance[n] + v.square() for n, v in mean.items()}
        return under("mean", mean) | under("square", square)

    def update(server: Tensors, pooled: Tensors) -> Tensors:
        """Update the global posterior in closed form from the clients' averaged moments."""
        clients = server["server/clients"]
        counts = posterior_of(
            {n: v * clients for n, v in role("mean", pooled).items()},
            {n: v * clients for n, v in role("square", pooled).items()},
            float(clients),
            (count, df, spread),
        )
        return server | counts | {"counted": clients}

    def anyone(received: Tensors, local: Tensors) -> Tensors:
        """Return guide parameters with the Student's t moments of a new client's weights."""
        level, freedom = count + received["counted"], df + received["counted"]
        wider = ((level + 1) / level * freedom / (freedom - 2).clamp(min=1)).sqrt()
        wider = torch.where(received["counted"] > 0, wider, 1.0)
        width = role("log_scale", received)
        return local | q.start(
            role("loc", received),
            {n: add_trailing_axes(wider, v) * v.exp() for n, v in width.items()},
        )

    model = Supervised(net, likelihood, of_population)
    loss: Loss = elbo(num_particles if q.random else None, kl, mean=True)
    reads: dict[str, Program] = {"guide": q}
    if by_outputs:
        reads["model"] = model
        loss = Activations(net, likelihood, num_particles).negative_elbo(q, model.weights, kl)
    climb = GradientStep(q.names, adam(lr), loss)
    return Method(
        name="fedhb",
        init=init,
        model=model,
        guide=q,
        phases=(Phase((begin,)), Phase((climb,), epochs, batch), Phase((settle,))),
        upload=lambda received, local: {
            n: v for n, v in local.items() if n.startswith(("mean/", "square/"))
        },
        aggregate=Aggregator({"*": uniform}, update, aggregation),
        adapt=(Phase((begin,)), Phase((climb,), fine_tune, batch)) if fine_tune else (),
        views=views_of(anyone, fine_tune),
        metadata=Metadata(
            {
                "square/*": NOT_NEGATIVE,
                "mean/* square/*": JointRule(NO_MOMENTS, are_moments),
                **normals("loc", "log_scale", torch.exp),
            },
            reads=reads,
        ),
    )


def are_moments(server: Tensors, message: Tensors, cohort: Cohort) -> Tensor:
    """Return whether each client's first and second moments are those of a distribution, [C]."""
    mean, square = role("mean", message), role("square", message)
    least = {n: v.square() * (1 - 1e-5) for n, v in mean.items()}  # up to rounding
    return torch.stack([(square[n] >= v).flatten(1).all(1) for n, v in least.items()]).all(0)


@dataclass(frozen=True)
class Mixture:
    """Mixture variant of FedHB: each client's weights lie near one of K global centers."""

    net: Network
    likelihood: Likelihood
    num_centers: int
    sigma: float

    def method(
        self, epochs: int, batch: int | None, lr: float, fine_tune: int, aggregation: str | Combine
    ) -> Method:
        """Return the federated method of FedHB's mixture variant; arguments as in `build`."""
        model, q = (
            Supervised(self.net, self.likelihood, flat),
            guides.delta(self.net.shapes, loc="w"),
        )
        fit = elbo(kl=0.0)

        def init(generator: Generator, clients: int) -> Tensors:
            """Initialize the center of each mixture component by an independent draw."""
            each = [self.net.init(generator) for _ in range(self.num_centers)]
            loc = {n: torch.stack([one[n] for one in each]) for n in self.net.shapes}
            mass = torch.full((self.num_centers,), clients / self.num_centers)
            return under("loc", loc) | {"mass": mass, "server/clients": torch.tensor(1.0 * clients)}

        def choose(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Initialize the client's model at the mixture center with the largest likelihood."""
            at = [q.start(self.center(received, k)) for k in range(self.num_centers)]
            costs = [fit(model, q, received, local | one, data) for one in at]
            best = torch.stack(costs, 1).argmin(1)  # [C]
            return q.start(self.center(received, best))

        def near(
            model: Program, guide: Program, received: Tensors, local: Tensors, data: Batch
        ) -> Tensor:
            """Return each client's negative log posterior divided by its number of rows, [C]."""
            away = -torch.logsumexp(self.nearness(received, local), 1)
            return (fit(model, guide, received, local, data) + away) / data.size

        def tell(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Store the client's probabilities of belonging to each mixture component, [C, K]."""
            return {"kind": self.nearness(received, local).softmax(1)}

        def named(server: Tensors, message: Tensors) -> Tensors:
            """Repeat the client's model in its message for every mixture component.

            It is a view, no copy.
            """
            if "kind" not in message:  # the server's own
                return pick(message, "loc/* mass")
            # [C, K, *p]
            each = {
                n: v[:, None].expand(-1, self.num_centers, *v.shape[1:]) for n, v in message.items()
            }
            return under("loc", role("w", each)) | {"mass": message["kind"]}

        def update(server: Tensors, pooled: Tensors) -> Tensors:
            """Update the centers and masses of the mixture components by an EM step."""
            mass = pooled["mass"] * server["server/clients"]
            loc = centers_of(mass, role("loc", pooled), self.sigma)
            by_shape = {
                n: torch.where(add_trailing_axes(mass > MIN_TOTAL_WEIGHT, v), v, server[f"loc/{n}"])
                for n, v in loc.items()
            }
            return server | under("loc", by_shape) | {"mass": mass}

        def heaviest(received: Tensors, local: Tensors) -> Tensors:
            """Return guide parameters at the center of the mixture component of largest mass."""
            return local | q.start(self.center(received, received["mass"].argmax(1)))

        climb = GradientStep("w/*", adam(lr), near)
        weights: dict[str, Weight] = {"loc/*": weight_by("kind"), "mass": uniform}
        return Method(
            name="fedhb",
            init=init,
            model=model,
            guide=q,
            phases=(Phase((choose,)), Phase((climb,), epochs, batch), Phase((tell,))),
            upload=lambda received, local: pick(local, "w/* kind"),
            aggregate=Aggregator(weights, update, aggregation, named),
            adapt=(Phase((choose,)), Phase((climb,), fine_tune, batch)) if fine_tune else (),
            views=views_of(heaviest, fine_tune),
            metadata=Metadata({"kind": SHARE_RULE}, reads={"model": model, "guide": q}),
        )

    def center(self, received: Tensors, which: int | Tensor) -> Tensors:
        """Return one mixture component's center for each client, [C, *p], given its index.

        The index is the same for all clients, or a tensor [C].
        """
        clients = torch.arange(len(received["mass"]), device=received["mass"].device)
        return {n: v[clients, which] for n, v in role("loc", received).items()}

    def nearness(self, received: Tensors, local: Tensors) -> Tensor:
        """Return the log density of the client's model under each mixture component, [C, K].

        That is -|w_j - r_k|^2 / (2 sigma^2), up to a constant.
        """
        parts = [
            (local[f"w/{n}"][:, None] - v).flatten(2).square().sum(2)
            for n, v in role("loc", received).items()
        ]
        return -torch.stack(parts).sum(0) / (2 * self.sigma**2)


def views_of(anyone: Look, fine_tune: int) -> dict[str, Look]:
    """Return the models to evaluate: the global model and, with fine-tuning, the personal one."""

    def own(received: Tensors, local: Tensors) -> Tensors:
        """Return the client's trained parameters if it has any, else the global ones."""
        return local if any(n.startswith("w/") for n in local) else anyone(received, local)

    return ({"personal": own} if fine_tune else {}) | {"global": anyone}


def centers_of(mass: Tensor, mean: Tensors, sigma: float) -> Tensors:
    """Return MAP estimates of mixture centers [K, *p], given the components' masses and means."""
    share = mass / (sigma**2 + mass)
    return {n: add_trailing_axes(share, v) * v for n, v in mean.items()}


def posterior_of(
    sum_of_means: Tensors,
    sum_of_squares: Tensors,
    clients: float,
    prior: tuple[float, float, float],
) -> Tensors:
    """Return mean and log scale of the global posterior, given sums of the clients' moments.

    These are m and log (psi / n)^1/2.
    """
    count, df, spread = prior
    level, freedom = count + clients, df + clients
    mean = {n: v / level for n, v in sum_of_means.items()}
    psi = {n: df * spread**2 + sum_of_squares[n] - level * v.square() for n, v in mean.items()}
    width = {n: (v / freedom).log() / 2 for n, v in psi.items()}
    return under("loc", mean) | under("log_scale", width)
