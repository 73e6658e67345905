"""FedGVI: PVI with robust losses and other divergences, for contaminated data.

Mildner, Hamelijnck, Giampouras and Damoulas, "Federated Generalized Variational Inference: A Robust
Probabilistic Federated Learning Framework", ICML 2025.

    p(w)     = Normal(0, S)
    q(w)     = p(w) prod_j t_j(w)                      normal factors, as of PVI
    client   q_j = argmin  E_q[sum_i loss(y_i, p(. | x_i, w))] + D[q || q / t_j]
    server   t_j = t_j^(1 - damping) (q_j t_j / q)^damping

    loss     log     -log p(y)
             gce     (1 - p(y)^r) / r                  generalized cross-entropy, for classes
             beta    -p(y)^r / r + (integral or sum over k of p(k)^(1 + r)) / (1 + r)
    D        kl      KL divergence
             renyi   Renyi's divergence of order alpha

With the loss "log" and the divergence "kl" it is PVI; both losses tend to "log" as r does to 0, and
Renyi's divergence to the KL divergence as alpha does to 1. A row that the model finds impossible
has no influence on the parameters where r > 0, as the slope of the loss has the factor p(y)^r.

Use it where labels of some clients, or some labels of all, are wrong. It assumes normal factors.
Its posterior is not that of Bayes' rule.

Departures from the paper: those of `pvi`, with the first rounds of federated averaging and
adaptive damping. The paper's experiments also have the gamma loss and score matching, and further
divergences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor

from pyrofl.arguments import Count, Positive, PositiveShare, Whole, checked, described
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Likelihood, Prior, Supervised
from pyrofl.models import guides
from pyrofl.models.likelihoods import categorical
from pyrofl.models.pvi import STANDARD, network_programs
from pyrofl.models.pvi.mean_field import MeanField, network_pvi
from pyrofl.models.shared.activations import reason_against
from pyrofl.models.shared.unconstrained import of_network
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors

LossName = Literal["log", "gce", "beta"]
Divergence = Literal["kl", "renyi"]

RENYI = (
    "has Renyi's divergence of the guide from the cavity; the programs have the Kullback-Leibler "
    "divergence"
)
SEARCH_GRID = {
    "robustness": (0.1, 0.2, 0.5, 0.8),
    "divergence": ("kl", "renyi"),
    "lr": (0.003, 0.01, 0.03),
    "warm_start": (5, 10),
}


@rebuildable
@checked
def build(
    net: Network,
    *,
    loss: LossName = "gce",
    robustness: Positive = 0.8,
    divergence: Divergence = "renyi",
    renyi_order: Positive = 2.5,
    likelihood: Likelihood = categorical,
    prior: Prior = STANDARD,
    guide: guides.Family = guides.mean_field,
    warm_start: Whole = 5,
    damping: PositiveShare | None = None,
    init_scale: Positive = 0.5,
    num_particles: Count = 2,
    epochs: Whole = 20,
    batch: Count | None = None,
    lr: PositiveShare = 0.01,
) -> Method:
    """Build the FedGVI method (federated generalized variational inference).

    Args:
        net: the network, with linear layers or convolutions.
        loss: loss of a row, given the network's outputs: negative log likelihood, generalized
            cross-entropy, or density power loss.
        robustness: the loss's r; larger values ignore unlikely rows more. Without effect for "log".
        divergence: of the client's normal from its cavity.
        renyi_order: Renyi's alpha, other than 1.
        likelihood: of a row, given the network's outputs: categorical, Bernoulli or, with "log" and
            "beta", normal.
        prior: on the parameters; independent normals, such as dist.Normal(0.0, 1.0).
        guide: family of q(w), `mean_field`.
        warm_start: rounds of federated averaging with this loss before the first of FedGVI.
        damping: fraction of the update that the server applies; see `pvi.hierarchical`.
        init_scale: standard deviation of q(w) before round one; see `pvi.build` for its unit.
        num_particles: Monte Carlo samples, an even number.
        epochs: passes over the client's rows.
        batch: rows in a step; None takes all.
        lr: learning rate of Adam.

    Raises:
        ValueError: if num_particles is odd, renyi_order is 1, the prior is not normal, the network
            has no such layers, or the likelihood does not suit the loss.
    """
    if renyi_order == 1:
        raise ValueError("renyi_order is 1.0; expected another number, or divergence='kl'")
    sites = of_network(net, prior, init_scale)
    if not bool(sites[0].each("exact").all()):
        raise ValueError(
            "prior is not a normal with fixed moments; expected such as dist.Normal(0.0, 1.0)"
        )
    if guide is not guides.mean_field:
        raise ValueError(
            f"guide is {described(guide)}, not independent normals; expected mean_field"
        )
    if why := reason_against(net):
        raise ValueError(
            f"{why}, whose outputs this method draws; expected such layers, or the method pvi"
        )
    robust = likelihood if loss == "log" else Robust(likelihood, loss, robustness)
    model = Supervised(net, likelihood, prior)
    _, q, tilted = network_programs(net, robust, prior, sites[0], "diagonal")
    core = network_pvi(
        model,
        sites,
        covariance="diagonal",
        is_random=True,
        sampling="activations",
        warm_start=warm_start,
        damping=damping,
        init_scale=init_scale,
        num_particles=num_particles,
        optimizer="adam",
    )
    assert isinstance(core, MeanField)
    fields = {name: getattr(core, name) for name in core.__dataclass_fields__}
    fields["likelihood"] = robust
    general = Generalized(**fields, order=renyi_order if divergence == "renyi" else None)
    pair = general.pair(tilted, q, "" if divergence == "kl" else RENYI)
    return replace(general.method(epochs, batch, lr, pair=pair), name="fedgvi")


@dataclass(frozen=True)
class Generalized(MeanField):
    """Partitioned variational inference of a network, with KL or Renyi divergences."""

    order: float | None = field(kw_only=True)  # of Renyi's divergence; None: KL

    def divergence(
        self, mean: Tensor, log_root: Tensor, center: Tensor, precision: Tensor, log_det: Tensor
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Return means and variances [C, *p], and divergences [C] from the cavities."""
        if self.order is None:
            return super().divergence(mean, log_root, center, precision, log_det)
        variance = (2 * log_root).exp()
        means, variances = (self.named(v.split(self.site_sizes, -1)) for v in (mean, variance))
        pull = renyi(mean, variance, center, 1 / precision, self.order).sum(-1)
        return means, variances, pull


def renyi(mean: Tensor, variance: Tensor, center: Tensor, spread: Tensor, order: float) -> Tensor:
    """Return the elementwise Renyi divergence of N(mean, variance) from N(center, spread).

    It is log(integral of q^order p^(1 - order)) / (order (order - 1)), and infinite where
    order * spread + (1 - order) * variance is not positive; a large number there leads optimizers
    back. With a the order, v and s the variances and u = a s + (1 - a) v, the log is

        (a log s + (1 - a) log v - log u - a (1 - a) (mean - center)^2 / u) / 2
    """
    mixed = order * spread + (1 - order) * variance
    mixed = torch.where(mixed > 0, mixed, torch.finfo(mixed.dtype).eps * spread)
    logs = order * spread.log() + (1 - order) * variance.log() - mixed.log()
    return ((mean - center).square() / mixed + logs / (order * (order - 1))) / 2


@dataclass(frozen=True)
class Robust:
    """Likelihood with a robust loss in place of the negative log density."""

    likelihood: Likelihood
    loss: LossName
    robustness: float

    def __call__(self, outputs: Tensor, x: Tensor) -> TorchDistribution:
        """Return a distribution of the responses with minus the robust loss as log density."""
        fn = self.likelihood(outputs, x)
        kinds: tuple[Any, ...] = (torch.distributions.Categorical, torch.distributions.Bernoulli)
        if self.loss == "beta":
            kinds = (*kinds, torch.distributions.Normal)
        if not isinstance(fn, kinds):
            raise ValueError(
                f"the likelihood is {type(fn).__name__}, and loss is {self.loss!r}; expected "
                f"{', '.join(kind.__name__ for kind in kinds)}, or loss='log'"
            )
        return LossDistribution(fn, LOSSES[self.loss], self.robustness)


def gce(fn: Any, y: Tensor, r: float) -> Tensor:
    """Return the generalized cross-entropy loss of responses (Zhang and Sabuncu, 2018)."""
    return -torch.expm1(r * fn.log_prob(y)) / r


def density_power(fn: Any, y: Tensor, r: float) -> Tensor:
    """Return the density power loss of responses, up to a constant (Basu et al., 1998)."""
    if isinstance(fn, torch.distributions.Normal):
        whole = (fn.scale * (2 * torch.pi) ** 0.5) ** -r / (1 + r) ** 0.5
    else:
        logits = fn.logits
        if isinstance(fn, torch.distributions.Bernoulli):
            logits = torch.stack([logits, torch.zeros_like(logits)], -1)
        whole = (logits.log_softmax(-1) * (1 + r)).exp().sum(-1)  # [..., C, B]
    power: Tensor = -torch.expm1(r * fn.log_prob(y)) / r + whole / (1 + r)
    return power


LOSSES: dict[str, Callable[[Any, Tensor, float], Tensor]] = {"gce": gce, "beta": density_power}


class LossDistribution(TorchDistribution):
    """Unnormalized distribution of responses, with a negative loss as its log density."""

    arg_constraints = {}  # noqa: RUF012 (as in Pyro's distributions)

    def __init__(self, fn: Any, loss: Callable[[Any, Tensor, float], Tensor], r: float) -> None:
        """Store the distribution of the responses, the loss function and its parameter r."""
        super().__init__(fn.batch_shape, fn.event_shape, validate_args=False)
        self.fn, self.loss, self.r = fn, loss, r

    @property
    def support(self) -> Any:
        """Support of the distribution, the same as that of the responses' distribution."""
        return self.fn.support

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> LossDistribution:
        """Return the distribution expanded to another batch shape."""
        return LossDistribution(self.fn.expand(torch.Size(batch_shape)), self.loss, self.r)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw responses from the likelihood that the loss is computed from."""
        value: Tensor = self.fn.sample(torch.Size(sample_shape))
        return value

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the unnormalized log density of responses: minus their loss."""
        return -self.loss(self.fn, value, self.r)
