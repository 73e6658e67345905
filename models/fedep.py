"""FedEP: expectation propagation with one factor of the posterior for each client.

Guo, Greengard, Wang, Gelman, Kim and Xing, "Federated Learning as Variational Inference: A Scalable
Expectation Propagation Approach", ICLR 2023.

    p(w)        = Normal(m0, S0)                     S0 diagonal
    p(y | x, w) = Categorical(logits=net(x; w))
    q(w)        = p(w) prod_j t_j(w)                 normal factors, diagonal or full

    client   tilted_j(w) = p(D_j | w) q(w) / t_j(w),  q / t_j the cavity, which it is sent
             q_j = the normal with moments of tilted_j, by one of
               laplace    its mode by SGD, and there the precision of the cavity + the Fisher
                          information of the rows
               langevin   draws of a Langevin chain, as SGLD where batches are small
               nuts       draws of Pyro's No-U-Turn sampler, for few parameters and rows
               natural    natural gradients of KL[q_j || tilted_j] instead of moments
    server   t_j = t_j^(1 - damping) (q_j t_j / q)^damping

"natural" is PVI, and the server is PVI's in all (see `pvi`): it keeps the factors, adapts the
damping, and halves a step after which q would be no distribution. In a normal linear model one
round of damping 1 makes the exact posterior, whatever the moments come from.

With `stateless` no client keeps its factor: all use the mean one, t = (q / p)^(1 / J),

    server   t = t^(1 - damping) (prod over those who reported of q_j t / q)^(damping / reported)

so the server needs a mean alone, and clients may be too many to remember. With full factors that is
exact where factors are; with diagonal ones clients that differ leave a bias in the mean.

Draws estimate the moments of the tilted distribution, most of which is the cavity where clients are
many: the factor's moments are then noise, unless there are many draws.

Use it where the posterior of one model is wanted and clients can afford moments of their own, by
draws or by curvature. It assumes factors that a normal can stand for.

Of the paper's text the abstract and introduction could be read, and its code; no equation numbers.
Departures from the paper: the paper's covariances of chains are shrunk towards a multiple of the
identity and scaled by the number of rows, here they are as drawn; with `langevin` and more
variables than draws take the diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from torch import Tensor

from pyrofl.arguments import (
    Count,
    Positive,
    PositiveShare,
    ShareBelowOne,
    Whole,
    checked,
)
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.aggregator import Aggregator, uniform
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.definition.elbo import elbo, with_guide
from pyrofl.inference.definition.metadata import INCOMPARABLE, LocalPair, Rule
from pyrofl.inference.definition.method import Method, Phase, View, keep_nothing, send_all
from pyrofl.inference.definition.programs import Likelihood, Prior, Program
from pyrofl.models import guides
from pyrofl.models.fedpop import langevin
from pyrofl.models.fisher import STANDARD
from pyrofl.models.guides.correlated import split_vectors
from pyrofl.models.likelihoods import categorical
from pyrofl.models.pvi import network_programs
from pyrofl.models.pvi.mean_field import MeanField
from pyrofl.models.pvi.partitioned import Partitioned
from pyrofl.models.pvi.server import MAX_HALVINGS, Covariance
from pyrofl.models.shared.activations import Sampling, is_chosen, reason_against
from pyrofl.models.shared.gaussians import PARAMETERS, draw_count
from pyrofl.models.shared.laplace import LaplaceCore
from pyrofl.models.shared.vectors import flatten_clients
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, generator, pick, role, seeded, under

Moments = Literal["laplace", "langevin", "nuts", "natural"]
MIN_VARIANCE = 1e-10  # smallest variance of draws


SEARCH_GRID = {"lr": (0.003, 0.01, 0.03), "init_scale": (0.1, 0.3, 1.0), "momentum": (0.0, 0.9)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: Prior = STANDARD,
    guide: guides.Family = guides.mean_field,
    moments: Moments = "laplace",
    stateless: bool = False,
    damping: PositiveShare | None = 0.1,
    init_scale: Positive = 0.3,
    num_particles: Count = 100,
    sampling: Sampling = "weights",
    burn_in: Whole = 5,
    epochs: Whole = 5,
    batch: Count | None = 10,
    lr: Positive = 0.01,
    momentum: ShareBelowOne = 0.9,
) -> Method:
    """Build the FedEP method (federated expectation propagation).

    Args:
        net: the network; all its parameters are shared and Bayesian.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters; independent normals, such as dist.Normal(0.0, 1.0).
        guide: `mean_field` for diagonal factors, or `full_covariance`.
        moments: where those of the tilted distribution come from, see above.
        stateless: clients keep no factors.
        damping: share of the way that factors are moved. None adapts it, see `pvi.hierarchical`;
            if stateless, it is J^-1/2 for J clients. Normal models take 1; of networks moments are
            rough, and on handwritten digits None swings from round to round (accuracy .10 to .86).
        init_scale: standard deviation of q(w) before round one; chosen on handwritten digits.
        num_particles: draws of nuts, after as many to warm up, or samples of natural gradients,
            an even number.
        sampling: what natural gradients draw, "weights" or "activations"; see `pfedbayes.build`.
        burn_in: epochs of the chain of langevin before its draws count.
        epochs: local epochs: of SGD, of draws of langevin, or of natural gradients.
        batch: rows in a step; None takes all. Nuts always does.
        lr: learning rate, at most 1 for natural gradients; the loss is a mean over the rows.
        momentum: of SGD.

    Raises:
        ValueError: if the prior is not normal, the guide another one, lr or num_particles do not
            suit natural gradients, or sampling is "activations", and moments, guide or network do
            not permit it.
    """
    core = LaplaceCore(net, likelihood, prior, guide)
    size = core.layout.size
    covariance: Covariance = "full" if core.normals.full else "diagonal"
    if moments == "natural" and lr > 1:
        raise ValueError(f"lr is {lr}, of natural gradients; expected at most 1")
    samples = draw_count(num_particles, size, covariance) if moments == "natural" else 2

    def start(source: torch.Generator) -> tuple[Tensor, Tensor]:
        center = core.layout.joined(net.init(source))
        return center, torch.full_like(center, init_scale)

    layouts = core.layout, type(core.layout)(())
    why = f"moments is {moments!r}" if moments != "natural" else reason_against(net, guide)
    parts: Any = (core.model, *layouts, covariance, samples, damping, start)
    pvi = Partitioned(*parts)
    if is_chosen(sampling, why):
        own: Any = {"own_sd": torch.zeros(0), "warm_start": 0, "optimizer": "natural"}
        pvi = MeanField(*parts, net=net, likelihood=likelihood, **own)
    _, q, tilted_model = network_programs(net, likelihood, prior, core.layout, covariance)
    pair = pvi.pair(tilted_model, q)
    method = replace(pvi.method(epochs, batch, min(lr, 1.0), pair=pair), name="fedep")
    if moments != "natural":
        tilted = Tilted(core, method.guide)
        phases = {
            "laplace": partial(tilted.by_mode, epochs, batch, lr, momentum),
            "langevin": partial(tilted.by_chain, burn_in, epochs, batch, lr),
            "nuts": partial(tilted.by_nuts, num_particles),
        }
        wanders = {"w/*": INCOMPARABLE} if moments == "langevin" else {}
        method = replace(method, phases=phases[moments](), metadata=method.metadata.extend(wanders))
    return without_factors(method, core, damping) if stateless else method


@dataclass(frozen=True)
class Tilted:
    """Tilted distribution of expectation propagation: a client's likelihood times its cavity."""

    core: LaplaceCore
    guide: Program

    def by_mode(
        self, epochs: int, batch: int | None, lr: float, momentum: float
    ) -> tuple[Phase, ...]:
        """Return training phases that fit a normal at the tilted distribution's mode.

        The precision is the curvature there.
        """

        def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Set the client's normal approximation: mode as mean, curvature as precision."""
            precision = received["precision"] + local["information"]
            factor = self.core.factor(precision, flatten_clients(role("w", local)))
            return self.with_root(*self.core.normals.moments(factor))

        train = self.core.training_phases(epochs, batch, lr, momentum, 1.0)
        return Phase((self.begin,)), *train, Phase((settle,))

    def by_chain(
        self, burn_in: int, epochs: int, batch: int | None, lr: float
    ) -> tuple[Phase, ...]:
        """Return training phases that fit a normal to a Langevin chain's draws, by moments."""
        steps = langevin("w", lr, self.loss)

        def collect(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Add the Langevin chain's current draw to the sums of first and second moments."""
            u = flatten_clients(role("w", local)) - local["center"]
            # [C, d, d], or [C, d] of the diagonal.
            square = u[..., None] * u[:, None] if self.core.normals.full else u.square()
            return {
                "sum": local["sum"] + u,
                "squares": local["squares"] + square,
                "drawn": local["drawn"] + 1,
            }

        def nothing(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Reset the Langevin chain's sums of moments to zero after the burn-in."""
            u = flatten_clients(role("w", local))
            full = self.core.normals.full
            squares = torch.zeros_like(u[..., None] * u[:, None] if full else u)
            return {
                "center": u,
                "sum": torch.zeros_like(u),
                "squares": squares,
                "drawn": torch.zeros_like(data.size),
            }

        def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Set the client's normal approximation to mean and covariance of its draws."""
            count = local["drawn"][:, None]
            mean = local["sum"] / count
            if self.core.normals.full:
                second = local["squares"] / count[..., None] - mean[..., None] * mean[:, None]
            else:
                second = local["squares"] / count - mean.square()
            return self.with_root(local["center"] + mean, self.root(second))

        counted = Phase((*steps, collect), epochs, batch)
        chain = Phase((self.begin,)), Phase(steps, burn_in, batch), Phase((nothing,))
        return *chain, counted, Phase((settle,))

    def by_nuts(self, draws: int) -> tuple[Phase, ...]:
        """Return a training phase that fits a normal to NUTS draws of the tilted distribution."""

        def sampled(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Sample each client's tilted distribution by NUTS, and fit a normal to the draws.

            Each client has its own random stream.
            """
            with data.clients():
                zero = torch.zeros_like(data.size, dtype=torch.float64)[:, None]
                noise = pyro.sample("_seed", dist.Normal(zero, torch.ones_like(zero)))
            samples = []
            start = self.core.normals.moments(pick(received, "shift precision"))[0]
            for c, key in enumerate(noise.view(torch.int64).flatten().tolist()):
                energy = partial(self.energy, received, data.select_clients(torch.tensor([c])), c)
                source = int(torch.randint(2**62, (), generator=generator("nuts", str(key))))
                with seeded(source), poutine.block(), torch.enable_grad():
                    kernel = NUTS(potential_fn=energy)
                    chain = MCMC(
                        kernel,
                        draws,
                        draws,
                        {"u": start[c].detach()},
                        disable_progbar=True,
                    )
                    chain.run()
                samples.append(chain.get_samples()["u"])
            u = torch.stack(samples)  # [C, draws, d]
            mean, away = u.mean(1), u - u.mean(1, keepdim=True)
            full = self.core.normals.full
            second = away.mT @ away / (draws - 1) if full else u.var(1)  # [C, d, d] or [C, d]
            return self.with_root(mean, self.root(second))

        return (Phase((sampled,)),)

    def energy(self, received: Tensors, data: Batch, c: int, at: Tensors) -> Tensor:
        """Return the negative log density of a client's tilted distribution at a point u [d].

        It is known up to a constant.
        """
        w = {n: v[None, None] for n, v in split_vectors(at["u"], self.core.net.shapes).items()}
        rows = self.core.likelihood(self.core.net(w, data.x), data.x).log_prob(data.y)
        cavity = {n: received[n][c] for n in PARAMETERS}
        half = self.core.factor(cavity["precision"] / 2, at["u"])["shift"]
        return -(rows * data.counts).sum() - (at["u"] * (cavity["shift"] - half)).sum()

    def loss(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, data: Batch
    ) -> Tensor:
        """Return the tilted distribution's negative log density divided by the row count, [C]."""
        fit = with_guide(self.core.point_guide, elbo(kl=0.0, mean=True))
        away = flatten_clients(role("w", local)) - local["prior/mean"]
        pull = self.core.factor(received["precision"], away)["shift"]
        held: Tensor = 0.5 * (away * pull).sum(-1) / data.size
        return fit(model, guide, received, local, data) + held

    def begin(self, received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Initialize the client's parameters at the mean of the received cavity distribution."""
        mean, _ = self.core.normals.moments(pick(received, "shift precision"))
        prior = {"mean": mean, "precision": received["precision"]}
        return under("w", split_vectors(mean, self.core.net.shapes)) | under("prior", prior)

    def root(self, second: Tensor) -> Tensor:
        """Return the Cholesky root of a full covariance, or the square root of variances.

        The root is NaN if the covariance is not positive definite.
        """
        if not self.core.normals.full:
            return second.clamp(min=MIN_VARIANCE).sqrt()
        found, info = torch.linalg.cholesky_ex(second)
        return torch.where((info == 0)[:, None, None], found, torch.nan)

    def with_root(self, mean: Tensor, root: Tensor) -> Tensors:
        """Return a normal's mean and covariance root as the tensors that the guide reads."""
        moved = torch.ones(len(mean), dtype=torch.bool, device=mean.device)
        return {"mean": mean, "root": root, "moved": moved}


def without_factors(method: Method, core: LaplaceCore, damping: float | None) -> Method:
    """Return the stateless variant of FedEP, in which all clients share one mean factor."""

    def init(source: torch.Generator, clients: int) -> Tensors:
        """Initialize the server's posterior approximation, and store 1 / number of clients."""
        share = torch.tensor(1 / clients, dtype=torch.float64)
        return pick(method.init(source, clients), "shift precision") | {"server/share": share}

    def others(server: Tensors) -> Tensors:
        """Return the natural parameters of the cavity: the posterior without one mean factor.

        That is q / t.
        """
        prior = core.factor_of_prior
        share = server["server/share"]
        return {n: torch.lerp(server[n], prior[n].to(share), share) for n in PARAMETERS}

    def cavity(server: Tensors, cohort: Cohort) -> Tensors:
        """Send the cavity (posterior q divided by the mean factor t) to each client."""
        return send_all(others(server), cohort)

    def merged(server: Tensors, pooled: Tensors) -> Tensors:
        """Update the server's posterior q by a damped step, halved until q is proper."""
        share, other_factors = server["server/share"], others(server)
        rate = float(share.sqrt()) if damping is None else damping
        prior = {n: v.to(share) for n, v in core.factor_of_prior.items()}
        goal = {n: prior[n] + (pooled[n] - other_factors[n]) / share for n in PARAMETERS}
        for _ in range(MAX_HALVINGS):
            q = {n: server[n] + rate * (goal[n] - server[n]) for n in PARAMETERS}
            if bool(core.normals.proper(q["precision"])):
                return server | q
            rate /= 2
        raise AggregationError(f"q is no distribution after {MAX_HALVINGS} halvings of the damping")

    def read(received: Tensors, local: Tensors) -> Tensors:
        """Add mean and covariance root of the received posterior to the local tensors."""
        mean, root = core.normals.moments(pick(received, "shift precision"))
        return local | {"mean": mean, "root": root}

    def anew(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Initialize the client's state in every round, as it is not kept between rounds."""
        return method.init_client(received, data.cohort, generator(0))

    pair = method.metadata.pair
    assert isinstance(pair, LocalPair)

    def start(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Return the tensors from which all clients start in every round."""
        return pair.start(received, local | anew(received, local, data), data)

    # What is sent is no change of what the server has, but a distribution as well.
    left = ("shift", "precision")
    other_factors = method.metadata.tensors
    marks = {n: v for n, v in other_factors.items() if "server/" not in n and n not in left}
    marks["precision"] = Rule("a precision of a normal distribution", core.normals.proper)
    return replace(
        method,
        init=init,
        init_client=keep_nothing,
        phases=(Phase((anew,)), *method.phases),
        download=cavity,
        aggregate=Aggregator({"*": uniform}, merged),
        views={"global": View(read, send_all)},
        metadata=replace(
            method.metadata, tensors=marks, pair=replace(pair, download=None, start=start)
        ),
    )
