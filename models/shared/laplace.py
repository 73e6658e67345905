"""Normal posteriors of a network's parameters by Laplace's approximation, summed over clients.

The likelihood of a client is approximated by a normal factor around its optimum w,

    t_j(w) = exp(s_j'w - w'F_j w / 2),    F_j = sum_i J_i' H_i J_i,    s_j = F_j w_j

J_i the slope of the outputs of row i and H_i the curvature of -log p(y_i | outputs): the Fisher
information of a categorical, normal, Bernoulli, binomial or Poisson likelihood, and the Gauss-
Newton matrix of any. Factors are natural parameters, as those of PVI: a product is a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor

from pyrofl.arguments import described
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.definition.elbo import elbo, with_guide
from pyrofl.inference.definition.metadata import (
    MODERATE,
    NOT_NEGATIVE,
    SHARED,
    JointRule,
    Metadata,
    MetadataByPattern,
    Moments,
)
from pyrofl.inference.definition.method import GradientStep, Phase
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.programs import Guide, Likelihood, Prior, Supervised
from pyrofl.models.guides import Family, delta, full_covariance, mean_field
from pyrofl.models.guides.correlated import split_vectors
from pyrofl.models.shared.curvature import diagonal, full_fisher, slopes, weight_of_each
from pyrofl.models.shared.gaussians import MAX_FULL, PARAMETERS, Normals
from pyrofl.models.shared.matrices import is_semidefinite
from pyrofl.models.shared.sites import Layout
from pyrofl.models.shared.unconstrained import of_network
from pyrofl.models.shared.vectors import flatten_clients
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, role, times, under

NEGATIVE = "precision is negative; expected the precision of a normal factor"
# Largest precision of a diagonal; with more, single precision soon has no number.
MAX_PRECISION = 1e12


@dataclass(frozen=True)
class LaplaceCore:
    """Laplace approximation of a network's posterior with a normal prior.

    Clients train "w/NAME" from the mean of q; "information" becomes their F_j.
    """

    net: Network
    likelihood: Likelihood
    prior: Prior
    guide: Family

    def __post_init__(self) -> None:
        """Validate the guide's family, the number of parameters and the prior."""
        if self.guide not in (mean_field, full_covariance):
            raise ValueError(
                f"guide is {described(self.guide)}; expected mean_field or full_covariance"
            )
        if not bool(self.layout.each("exact").all()):
            raise ValueError(
                "prior is not a normal with fixed moments, whose product with normal factors is "
                "one; expected such as dist.Normal(0.0, 1.0)"
            )
        if self.guide is full_covariance and self.layout.size > MAX_FULL:
            raise ValueError(
                f"a full covariance (guide full_covariance) of {self.layout.size} parameters; "
                f"expected at most {MAX_FULL}, or a diagonal one (guide mean_field)"
            )

    # The server

    def init(self, generator: Generator, clients: int) -> Tensors:
        """Initialize the posterior with the network's random draw as mean and the prior's sd."""
        sd = self.layout.each("sd")
        return self.guide_parameters(self.layout.joined(self.net.init(generator)).to(sd), sd)

    def posterior(self, factor: Tensors) -> Tensors:
        """Convert a normal factor to guide parameters; AggregationError if it is improper."""
        if not bool(self.normals.proper(factor["precision"])):
            raise AggregationError("the product of the factors is no distribution")
        return self.guide_parameters(*self.normals.moments(factor))

    def guide_parameters(self, mean: Tensor, root: Tensor) -> Tensors:
        """Return the guide parameters of a normal, given its mean and its covariance root or sd.

        The mean is [..., d].
        """
        center = split_vectors(mean, self.net.shapes)
        if not self.normals.full:
            return self.q.start(center, split_vectors(root, self.net.shapes))
        root = torch.diag_embed(root) if root.dim() == mean.dim() else root
        sd = root.diagonal(dim1=-2, dim2=-1)
        row, column = torch.tril_indices(self.layout.size, self.layout.size, -1)
        below = (root / sd[..., None])[..., row, column]
        return self.q.start(center) | {"spread/log_sd": sd.log(), "spread/below": below}

    @cached_property
    def factor_of_prior(self) -> Tensors:
        """Natural parameters of the normal prior on the network's parameters."""
        return self.normals.independent(*self.layout.prior())

    # A client

    def reset_information(self, received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Reset the Fisher information to zero, and store the mean weight of the rows."""
        center = flatten_clients(role("w", local))
        d = self.layout.size
        entries = d * (d + 1) // 2 if self.normals.full else d
        return {
            "information": center.new_zeros(*center.shape[:-1], entries),
            "each": weight_of_each(data),
        }

    def training_phases(
        self,
        epochs: int,
        batch: int | None,
        lr: float,
        momentum: float,
        strength: float = 0.0,
        clip: float | None = None,
    ) -> tuple[Phase, ...]:
        """Return training phases that compute the client's optimum and its Fisher information.

        These are w_j and F_j.

        With `strength`, w_j is the optimum under a prior, "prior/mean" and "prior/precision", to
        that power. As it may be much stiffer than the rows, it is no part of the gradient: after
        each step of SGD comes the proximal one, whose length is what momentum makes of lr, so that
        both together rest at the optimum, and no precision is too high.
        """

        def inform(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Add a minibatch's Fisher information to the client's sum."""
            rows = slopes(self.net, self.likelihood, role("w", local), data)
            return {
                "information": local["information"] + self.batch_information(rows, local["each"])
            }

        def tie(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Compute the matrix (I + c P)^-1 of the proximal steps."""
            precision, c = local["prior/precision"], lr * strength / (1 - momentum) / data.size
            if not self.normals.full:
                return {"hold": 1 / (1 + c[:, None] * precision)}
            eye = torch.eye(self.layout.size, dtype=c.dtype, device=c.device)
            whole = eye + c[:, None, None] * self.normals.matrix(precision)  # [C, d, d]
            return {"hold": torch.linalg.inv_ex(whole).inverse}

        def pull(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Apply the proximal step towards the prior mean m: m + (I + c P)^-1 (w - m)."""
            mean, hold = local["prior/mean"], local["hold"]
            away = flatten_clients(role("w", local)) - mean
            near = mean + (times(hold, away) if self.normals.full else hold * away)
            return under("w", split_vectors(near, self.net.shapes))

        step = GradientStep(
            "w/*", sgd(lr, momentum, clip), with_guide(self.point_guide, elbo(kl=0.0, mean=True))
        )
        climb = Phase((step, pull) if strength else (step,), epochs, batch)
        first = (Phase((tie,)),) if strength else ()
        return *first, climb, Phase((self.reset_information,)), Phase((inform,), 1, batch)

    def batch_information(self, rows: Iterator[Tensors], each: Tensor) -> Tensor:
        """Return the weighted Fisher information of a batch, as a packed precision matrix.

        It is computed from `slopes`, and the weight is `each`.
        """
        precision = self.normals.packed(full_fisher(rows)) if self.normals.full else diagonal(rows)
        precision = precision * each[:, None]
        return precision if self.normals.full else precision.clamp(max=MAX_PRECISION)

    def factor(self, precision: Tensor, mean: Tensor) -> Tensors:
        """Return natural parameters of a normal with the given mean and precision.

        The precision may be singular.
        """
        whole = self.normals.matrix(precision) if self.normals.full else None
        return {
            "shift": precision * mean if whole is None else times(whole, mean),
            "precision": precision,
        }

    def precision(self, q: Tensors) -> Tensor:
        """Return the precision [C, ...] of a normal, given its guide parameters."""
        if not self.normals.full:
            _, variance = self.q.moments(q, q, None)  # type: ignore[arg-type]
            return flatten_clients(variance).reciprocal().clamp(max=MAX_PRECISION)
        spread_tensors = role("spread", q)
        root = torch.diag_embed(spread_tensors["log_sd"].exp())
        row, column = torch.tril_indices(self.layout.size, self.layout.size, -1)
        root[..., row, column] = spread_tensors["below"] * spread_tensors["log_sd"].exp()[..., row]
        return self.normals.naturals(flatten_clients(role("w", q)), root)["precision"]

    def upload(self, received: Tensors, local: Tensors) -> Tensors:
        """Send the natural parameters of the client's normal factor."""
        return {n: local[n] for n in PARAMETERS}

    # What it is made of

    @cached_property
    def model(self) -> Supervised:
        """Pyro model with the prior on the parameters and the likelihood of the responses."""
        return Supervised(self.net, self.likelihood, self.prior)

    @cached_property
    def point_guide(self) -> Guide:
        """Point-estimate guide that is used while a client trains."""
        return delta(self.net.shapes, loc="w")

    @cached_property
    def q(self) -> Guide:
        """Guide of the network's normal posterior approximation."""
        return self.guide(self.net.shapes, loc="w", spread="spread")

    @cached_property
    def layout(self) -> Layout:
        """Layout of the network's parameters in one vector."""
        return of_network(self.net, self.prior, 1.0)[0]

    @cached_property
    def normals(self) -> Normals:
        """Operations on normal distributions of the network's parameters."""
        return Normals(self.layout.size, self.guide is full_covariance)

    @property
    def metadata(self) -> Metadata:
        """Metadata of the method's tensors, such as their constraints and moments.

        The model and the guide are read directly.
        """
        full = self.normals.full
        tensor_metadata: MetadataByPattern = {
            f"{self.layout.names}{' _spread' if full else ''}": SHARED,
            "w/* spread/*": Moments(self._moments),
            "shift precision": MODERATE,
            "precision": JointRule(NEGATIVE, self.sum_is_semidefinite) if full else NOT_NEGATIVE,
        }
        return Metadata(tensor_metadata, reads={"model": self.model, "guide": self.q})

    def sum_is_semidefinite(self, server: Tensors, message: Tensors, cohort: Cohort) -> Tensor:
        """Return whether a full precision and that of the prior have a semidefinite sum, [C]."""
        prior, sent = self.factor_of_prior["precision"], message["precision"].double()
        return is_semidefinite(self.normals.matrix(sent + prior.double().to(sent.device)))

    def _moments(self, q: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        """Return posterior mean and standard deviation of every network parameter."""
        one = {n: v[None] for n, v in q.items()}
        mean, variance = self.q.moments(one, one, None)  # type: ignore[arg-type]
        return {n: (v[0], variance[n][0].sqrt()) for n, v in mean.items()}
