"""LR-BPFL: one shared network, and a low-rank Bayesian correction of its weights at each client.

Zhang, Liu, Simeone, Wang, Pezaros and Zhu, "Personalizing Low-Rank Bayesian Neural Networks Via
Federated Learning", AISTATS 2025. A weight W [out, in] of the network is shared and deterministic;
a client multiplies it, entry by entry, by a mask of rank R:

    W_j                = W * sum_r c_jr a_jr'          c_jr [out], a_jr [in], both personal
    p(a_jr), p(c_jr)   = Normal(R^-1/2, prior_scale^2) each entry; the mean of the mask is 1
    p(y | x, W, a, c)  = Categorical(logits=net(x; W_j))
    q(a_j), q(c_j)     = Normal, each entry            kept by the client

    client   on every minibatch: `steps` steps on q_j, then one on W, of
             E_q[-log p(D_j | W, a, c)] + kl KL[q_j || p]
    server   W = sum_j n_j W_j / sum_j n_j

Entries of W along further axes, as of a convolution's kernel, have one factor. Biases are shared
and have no mask. If the prior has no width all masks are 1, and this is FedAvg.

Use it where clients are small and differ in a few features or classes: q_j has 2 R (in + out)
numbers for each weight, where a posterior over the weight itself would have 2 in * out, and only W
is sent. It assumes that one network suits all clients, up to factors of its inputs and units.

Departures from the paper, of which we read the abstract, reviews and the authors' code, not the
full text. The rank is the same for all clients; the gates that choose it in the authors' code are
off by default and have no penalty. There the factors c_jr also multiply the biases. Their code
minimizes the divergence of the prior from q_j, not the reverse, with a weight of 0.1, which is the
default here; and the negative logarithm of the mean likelihood of 4 draws, not the mean of the
negative logarithms. It updates q_j and W in one step of SGD; here they alternate, and Adam updates
q_j, as SGD left its standard deviations where they began.
"""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Size, Tensor

from pyrofl.arguments import Count, NotNegative, Positive, ShareBelowOne, Whole, checked
from pyrofl.data import Batch, Cohort
from pyrofl.inference.aggregation import Aggregator, by_size
from pyrofl.inference.definition.averages import Combine
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.definition.method import GradientStep, Method, Phase, as_trained
from pyrofl.inference.definition.optim import adam, sgd
from pyrofl.inference.definition.programs import Likelihood
from pyrofl.models import guides
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import PriorFamily, as_event, as_families
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, pick, role, spread_out, under

SEARCH_GRID = {"lr_correction": (0.001, 0.003, 0.01, 0.03), "lr_base": (0.003, 0.01, 0.03, 0.1)}
ENDS = (("a", 1), ("c", 0))  # factors of a mask, and the axis of the weight that they belong to


@rebuildable
@checked
def build(
    net: Network,
    *,
    corrected: str = "*",
    rank: Count = 2,
    likelihood: Likelihood = categorical,
    prior: PriorFamily = dist.Normal,
    guide: guides.Family = guides.mean_field,
    prior_scale: Positive = 0.1,
    init_scale: Positive = 0.05,
    kl: NotNegative = 0.1,
    num_particles: Count = 4,
    steps: Count = 1,
    epochs: Whole = 5,
    batch: Count | None = 10,
    lr_correction: NotNegative = 0.003,
    lr_base: NotNegative = 0.03,
    momentum: ShareBelowOne = 0.9,
    fine_tune: Whole = 0,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build LR-BPFL (personal low-rank Bayesian corrections).

    Args:
        net: the network; all its parameters are shared.
        corrected: patterns of the weights with corrections; those of one axis have none.
        rank: R, of each mask.
        likelihood: of a row, given the network's outputs.
        prior: location-scale family of the factors a and c.
        guide: family of q_j.
        prior_scale: standard deviation of the prior, and of the factors' random start.
        init_scale: standard deviation of q_j before round one.
        kl: weight of the KL divergence; 1 is exact Bayes.
        num_particles: Monte Carlo samples of every loss.
        steps: on q_j for each step on W.
        epochs: local epochs.
        batch: rows in a step; None takes all.
        lr_correction: learning rate of Adam for q_j, which starts again in every round.
        lr_base: learning rate of SGD for W; the loss is a mean over the rows.
        momentum: of SGD, which starts again in every round.
        fine_tune: epochs of steps on q_j before testing, with W as received.
        aggregation: how the server makes one W of the clients', as in `fedavg.build`.

    Raises:
        ValueError: if no parameter matches `corrected`, or none of them has two axes.
    """
    chosen = {n: s for n, s in net.select_params(corrected).items() if len(s) > 1}
    if not chosen:
        candidates = (
            ", ".join(n for n, s in net.shapes.items() if len(s) > 1) or "weights of two axes"
        )
        raise ValueError(
            f"no weight of two axes matches {corrected!r}; expected some of {candidates}"
        )
    shapes = {f"{n}.{end}": Size((rank, s[at])) for n, s in chosen.items() for end, at in ENDS}
    center = rank**-0.5
    q = guides.build_guide(guide, shapes, init_scale=init_scale, loc="mu", spread="pi")
    families = as_families(prior, shapes)
    point = guide(shapes, init_scale=1e-6, loc="mu", spread="pi")  # the shared network's masks

    def init(generator: Generator, clients: int) -> Tensors:
        """Return initial weights W drawn by the network's own initialization."""
        return under("base", net.init(generator))

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the means of q_j by one draw of the prior, the same for all clients."""
        w = next(iter(received.values()))
        noise = {n: torch.randn(s, generator=generator).to(w) for n, s in shapes.items()}
        start = {n: center + prior_scale * v for n, v in noise.items()}
        return q.start(spread_out(start, len(cohort.ids)))

    def model(received: Tensors, local: Tensors, data: Batch) -> None:
        """Define the model p(a, c) p(y | x, W, a, c)."""
        base = role("base", local)
        one = torch.ones_like(data.size)[:, None]
        with data.clients():
            factors = {}
            for n, shape in shapes.items():
                loc = one[..., None, None].expand(*one.shape, *shape)  # [C, 1, *p]
                fn = families[n](center * loc, prior_scale * loc)
                factors[n] = pyro.sample(n, as_event(fn, len(shape)))
            w = base | {n: base[n] * mask(factors, n, len(s)) for n, s in chosen.items()}
            with data.rows():
                pyro.sample("y", likelihood(net(w, data.x), data.x), obs=data.y)

    def common(received: Tensors, local: Tensors) -> Tensors:
        """Return the shared network, with masks of 1."""
        w = next(iter(received.values()))
        ones = {n: w.new_full((len(w), *s), center) for n, s in shapes.items()}
        return local | received | point.start(ones)

    samples = num_particles if q.random else None
    correct = GradientStep(q.names, adam(lr_correction), elbo(samples, kl, mean=True), steps)
    move = GradientStep("base/*", sgd(lr_base, momentum), elbo(samples, kl=0.0, mean=True))
    return Method(
        name="lrbpfl",
        init=init,
        init_client=init_client,
        model=model,
        guide=q,
        phases=(Phase((correct, move), epochs, batch),),
        upload=lambda received, local: pick(local, "base/*"),
        aggregate=Aggregator({"*": by_size}, rule=aggregation),
        adapt=(Phase((correct,), fine_tune, batch),) if fine_tune else (),
        views={"personal": as_trained, "global": common},
        metadata=Metadata(reads={"guide": q}),
    )


def mask(factors: Tensors, name: str, axes: int) -> Tensor:
    """Return the mask of a weight: sum over r of c_r a_r', of [..., R, n] each."""
    product = factors[f"{name}.c"].mT @ factors[f"{name}.a"]
    return product.reshape(*product.shape, *(1,) * (axes - 2))
