"""pFedGP: a Gaussian process for each client on features of a shared network.

Achituve, Shamsian, Navon, Chechik and Fetaya, "Personalized Federated Learning With Gaussian
Processes", NeurIPS 2021. The process takes the place of the network's head, one function f_k for
each of its K outputs, with one kernel on z = base(x; w):

    p(f_k)       = GP(0, s^2 exp(-||z - z'||^2 / (2 l^2)))    or s^2 z'z / l^2, `kernel`
    p(y | x, f)  = Categorical(logits=f(x)), or any other likelihood of K numbers
    q(f | D_j)   = Laplace's approximation, which a normal likelihood makes the exact posterior
    p(w, s, l)   flat; q = Delta                              shared

    client   w, s, l = SGD from w, s, l on -E_q(f | half of the batch) log p(y | x, f) of the other
    server   w, s, l = sum_j n_j (w, s, l)_j / sum_j n_j

A client keeps its posterior of f, and sends nothing of it: of at most `rows` of them the
features z_i, and a normal site on f(x_i) with precision R_i R_i' and shift b_i, both from a Taylor
series of log p(y_i | f) where the posterior peaks. With these, P the kernel between the rows (the
same for all K) and B = I + R'PR,

    f(x) | D_j   has mean  k_x'(b - R B^-1 R'P b)  and covariance  s_x^2 I - k_x' R B^-1 R' k_x

Before a test (`adapt`) that is repeated with the features of the received w, which is all that a
new client needs. The view "personal" without it is the client's model as it left its training.

Use it where clients have few rows, and probabilities of predictions matter. It assumes that one
representation suits all, and few enough rows for a matrix of them.

Departures from the paper: of several classes it makes a tree of binary ones with Polya-Gamma
variables and Gibbs draws; here all classes are one softmax and Laplace (Rasmussen and Williams,
"Gaussian Processes for Machine Learning", 2006, section 3.5). There is a client's subset of rows,
but none of its two kinds of inducing points. The objective is the predictive likelihood of the
authors' code, with half of a batch to learn from, by Jensen's bound; its gradient takes the
curvatures R as given. s and l are learned, from s^2 = 8 and l = 1 as in that code; a batch is 32
rows, where it takes all. Only the paper's first page was at hand, so equations have no numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Size, Tensor

from pyrofl.arguments import Count, NotNegative, Positive, ShareBelowOne, Whole, checked, described
from pyrofl.data import Batch, Cohort
from pyrofl.data.batch import share
from pyrofl.inference.definition.aggregator import Aggregator, by_size
from pyrofl.inference.definition.averages import Combine
from pyrofl.inference.definition.elbo import elbo, with_rows
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.programs import Likelihood, Prior, Program, as_prior, flat
from pyrofl.models import guides
from pyrofl.models.likelihoods import categorical
from pyrofl.models.pfedgp.processes import Kernel, lower, predicted, sites
from pyrofl.models.shared.linear_head import split_head, without_noise
from pyrofl.models.shared.personal_copies import as_personal, start_own
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, role, under

SPREADS = ("log_length", "log_scale")  # log l and log s, which are trained as w is


SEARCH_GRID = {"lr": (0.01, 0.03, 0.05, 0.1), "length": (0.5, 1.0, 2.0)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    kernel: Literal["rbf", "linear"] = "rbf",
    length: Positive = 1.0,
    init_scale: Positive = 8.0**0.5,
    rows: Count = 50,
    likelihood: Likelihood = categorical,
    prior: Prior = flat,
    guide: guides.Family = guides.delta,
    num_particles: Count = 5,
    epochs: Whole = 1,
    batch: Count | None = 32,
    lr: NotNegative = 0.05,
    momentum: ShareBelowOne = 0.9,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build the pFedGP method (personal Gaussian processes on a shared network).

    Args:
        net: the network, a sequential one whose head is one fully connected layer: in its place
            comes a Gaussian process on what the layers below make of a row. Without layers below
            it is one on the row itself.
        kernel: "rbf", or "linear", with which f is a linear head with a normal prior.
        length: l at the start, the distance of features within which f is much the same.
        init_scale: s at the start, the standard deviation of f.
        rows: most rows of a client that its process is given, evenly spaced; the work before a
            test grows as (rows K)^3.
        likelihood: of a row, given K numbers.
        prior: on w, log s and log l; as in `fedavg.build`.
        guide: family of q(w, s, l), which are points.
        num_particles: Monte Carlo samples of f in every loss.
        epochs: local epochs.
        batch: rows in a step, of which every second is learned from and the rest is predicted;
            None takes all.
        lr: learning rate; the loss is a mean over the rows.
        momentum: of SGD, which starts afresh each round.
        aggregation: how the server makes one of the clients', as in `fedavg.build`.

    Raises:
        ValueError: if the network has another head, or `guide` is another family.
    """
    if guide is not guides.delta:
        raise ValueError(
            f"guide is {described(guide)}; expected guides.delta, as the network is a point and f "
            "is random"
        )
    whole, (net, noise) = net, without_noise(net)
    base, features, outputs = split_head(net)
    below = {n: shape for n, shape in whole.shapes.items() if n in noise}
    below |= {} if base is None else base.shapes
    shapes = {**below, **dict.fromkeys(SPREADS, Size(()))}
    points = guide(below, loc="w")
    prior_of = as_prior(prior, shapes, may_be_learned=False)
    process = Kernel(kernel)
    # What stands in the place of the head has its names.
    first, *_, last = (*net.select_params(net.head), *net.select_params(net.head))
    names_of = {"z": f"z/{first}", "shift": f"shift/{last}", "root": f"root/{last}"}
    homes = {n: f"w/{n}" for n in below}
    homes |= {n: f"{n}/{at}" for n, at in zip(SPREADS, (first, last), strict=True)}

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize the network's base by a random draw, and the kernel parameters."""
        start = zip(SPREADS, (length, init_scale), strict=True)
        begun = {homes[n]: torch.tensor(v, dtype=torch.float64).log() for n, v in start}
        return begun | (points.start(whole.init(generator)) if below else {})

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the client's Gaussian process without training rows, as zeros."""
        sizes = {"z": (features,), "shift": (outputs,), "root": (outputs, outputs)}
        none = {n: cohort.size.new_zeros(len(cohort.ids), rows, *s) for n, s in sizes.items()}
        return start_own(received, cohort, generator) | {names_of[n]: v for n, v in none.items()}

    def run(local: Tensors, x: Tensor) -> Tensor:
        """Return the network's features [C, B, features] of rows x."""
        return x.flatten(2) if base is None else base(role("w", local), x)

    def spreads(local: Tensors) -> list[Tensor]:
        """Return the kernel's parameters: log length scale log l and log amplitude log s."""
        return [local[homes[n]] for n in SPREADS]

    def answer(f: Tensor, local: Tensors, x: Tensor) -> dist.TorchDistribution:
        """Return the likelihood p(y | x, f), given Gaussian process values f [..., C, B, K]."""
        more = [local[homes[n]].expand(*f.shape[:-1], 1) for n in noise]
        return likelihood(torch.cat([f, *more], -1) if more else f, x)

    def model(received: Tensors, local: Tensors, data: Batch) -> None:
        """Define the Pyro model: Gaussian process prior of f(x), and likelihood p(y | x, f)."""
        with data.clients():
            for n, shape in shapes.items():
                pyro.sample(n, prior_of(n, shape, received, local, data))
            with data.rows():
                sd = process.diagonal(run(local, data.x), *spreads(local)).sqrt().unsqueeze(-1)
                # [C, B, K], with the standard deviations [C, B, 1].
                apart = dist.Normal(torch.zeros_like(sd), sd).expand((*sd.shape[:2], outputs))
                f = pyro.sample("f", apart.to_event(1))
                pyro.sample("y", answer(f, local, data.x), obs=data.y)

    def recall(received: Tensors, local: Tensors, data: Batch) -> None:
        """Define the Gaussian process posterior of f(x), given stored training rows."""
        points(received, local, data)
        with data.clients():
            for n, value in zip(SPREADS, spreads(local), strict=True):
                pyro.sample(n, dist.Delta(value))
        head = {n: local[name].squeeze(1) for n, name in names_of.items()}  # [C, rows, ...]
        z, own_z = run(local, data.x), head.pop("z")
        among, across = (process(own_z, other, *spreads(local)) for other in (own_z, z))
        mean, spread = predicted(among, across, process.diagonal(z, *spreads(local)), **head)
        with data.clients(), data.rows():
            at_rows = dist.MultivariateNormal(mean, scale_tril=lower(spread))
            pyro.sample("f", at_rows, infer={"is_auxiliary": True})  # no site of the posterior

    def learned(local: Tensors, x: Tensor, y: Tensor, count: Tensor) -> Tensors:
        """Return Laplace's approximation to the Gaussian process posterior at training rows.

        The rows x are [C, N, *x].
        """
        local = with_rows(local, len(x))
        z = run(local, x) * (count > 0).unsqueeze(2)
        with torch.no_grad():
            shift, root = sites(
                lambda f: answer(f, local, x).log_prob(y),
                process(z, z, *spreads(local)),
                count,
                outputs,
            )
        return {names_of["z"]: z, names_of["shift"]: shift, names_of["root"]: root}

    inner = elbo(num_particles, 0.0, mean=True)
    q = replace(points, program=recall, random=True, points="")

    def predictive(
        model: Program, guide: Program, received: Tensors, local: Tensors, data: Batch
    ) -> Tensor:
        """Return the loss per row of predicting half of a batch from the other half, [C].

        The negative log priors count divided by the client's number of rows.
        """
        head, query = data.split(2)
        counts = head.counts / share(head.size, head.mask)  # a half stands for itself alone
        half = local | learned(local, head.x, head.y, counts)
        cost = inner(model, guide, received, half, query)
        down, up = (with_rows(t, len(data)) for t in (received, local))
        for n, shape in shapes.items():
            before = prior_of(n, shape, down, up, data).log_prob(up[homes[n]])
            cost = cost - before.reshape(len(data)) / data.size
        return cost

    def remember(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Store the features and the Gaussian process posterior at the client's training rows.

        These are computed with the current network.
        """
        count = data.mask.sum(1)
        place = spaced_rows(count, rows)
        client_index = torch.arange(len(data), device=place.device)[:, None]
        mask = torch.arange(rows, device=place.device) < count[:, None]  # [C, rows]
        with torch.no_grad():
            count = data.counts[client_index, place] * mask
            said = learned(local, data.x[client_index, place], data.y[client_index, place], count)
        return said | under("own", {n: local[n] for n in received})

    keep = Phase((remember,))
    step = GradientStep(" ".join(homes.values()), sgd(lr, momentum), predictive)
    return Method(
        name="pfedgp",
        init=init,
        init_client=init_client,
        model=model,
        guide=q,
        phases=(Phase((step,), epochs, batch), keep),
        aggregate=Aggregator({"*": by_size}, rule=aggregation),
        adapt=(keep,),
        views={"personal": as_personal},
        metadata=Metadata(
            reads={"model": model, "guide": q},
            pair="its loss predicts half of its rows from a Gaussian process given the other half, "
            "and no guide has parameters of its own for f; use run.predict or run.posterior",
        ),
    )


def spaced_rows(size: Tensor, most: int) -> Tensor:
    """Return `most` evenly spaced row indices for each client, [C, most], given row counts [C].

    A client with fewer rows gets all of them, the last one repeated.

    >>> spaced_rows(torch.tensor([6, 2]), 3)
    tensor([[0, 2, 4],
            [0, 1, 1]])
    """
    place, size = torch.arange(most, device=size.device), size.unsqueeze(1)
    return torch.where(size > most, place * size // most, torch.minimum(place, size - 1))
