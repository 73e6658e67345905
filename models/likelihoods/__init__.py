"""Likelihoods of responses, given the outputs of a network.

Each is a function of outputs [..., C, B, out] and rows x [C, B, *x] that returns a distribution
with batch shape [..., C, B].
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Annotated, Any

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution

from pyrofl.arguments import Count, Range, checked
from pyrofl.data.tables.source import LEARNED
from pyrofl.inference.definition.programs import Likelihood
from pyrofl.recipes import rebuildable

Finite = Annotated[float, Range(-inf, inf, open_low=True, open_high=True)]
Deviation = Annotated[float, Range(0, inf, open_low=True, open_high=True)]
# Classes below which torch is slow along the last axis, by up to 9 times: measured.
MAX_SLOW_CLASSES = 16


class Categorical(dist.Categorical):
    """Categorical distribution that normalizes logits [..., classes] in one pass instead of six."""

    def __init__(
        self,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if probs is not None or logits is None or not (logits.dim() and logits.is_floating_point()):
            super().__init__(probs, logits, validate_args=validate_args)
            return
        self.logits = self._param = normalized(logits)
        self._num_events = logits.shape[-1]
        Distribution.__init__(self, logits.shape[:-1], validate_args=validate_args)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Categorical:
        """Return the distribution expanded to another batch shape."""
        new: Categorical = self.__new__(type(self)) if _instance is None else _instance
        super().expand(torch.Size(batch_shape), new)  # type: ignore[no-untyped-call]
        return new


def normalized(logits: Tensor) -> Tensor:
    """Return normalized log probabilities [..., classes] of the given logits."""
    if logits.shape[-1] < MAX_SLOW_CLASSES:
        return logits.movedim(-1, 0).log_softmax(0).movedim(0, -1)
    return logits.log_softmax(-1)


def categorical(outputs: Tensor, x: Tensor) -> TorchDistribution:
    """Return a categorical likelihood; the network's outputs are one logit per class."""
    return Categorical(logits=outputs)


def bernoulli(outputs: Tensor, x: Tensor) -> TorchDistribution:
    """Return a Bernoulli likelihood; the network's output is the logit."""
    answer: TorchDistribution = dist.Bernoulli(logits=outputs.squeeze(-1))
    return answer


def poisson(outputs: Tensor, x: Tensor) -> TorchDistribution:
    """Return a Poisson likelihood; the network's output is the log rate."""
    return dist.Poisson(outputs.squeeze(-1).exp())


def normal_known_sd(outputs: Tensor, x: Tensor) -> TorchDistribution:
    """Return a normal likelihood with standard errors x[..., 0]; the network outputs the mean."""
    return dist.Normal(outputs.squeeze(-1), x[..., 0])


@rebuildable
@checked
def normal(scale: Deviation = 1.0) -> Likelihood:
    """Return a normal likelihood with fixed standard deviation; the network outputs the mean."""

    def likelihood(outputs: Tensor, x: Tensor) -> TorchDistribution:
        return dist.Normal(outputs.squeeze(-1), scale)

    return likelihood


class LeastSquares(dist.Normal):
    """Normal distribution whose log density has the gradient of least squares for the mean.

    log p and its gradient by the standard deviation s are exact. The gradient by the mean m is
    (y - m) / unit^2, not (y - m) / s^2: gradient steps of a fixed size then stay stable as s
    falls. The maximum of the likelihood is the same, as s is the same for all rows.
    """

    def __init__(
        self, loc: Tensor, scale: Tensor, unit: float = 1.0, validate_args: bool | None = None
    ) -> None:
        super().__init__(loc, scale, validate_args=validate_args)
        self.unit = unit

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> LeastSquares:
        """Return the distribution expanded to another batch shape."""
        new: LeastSquares = self.__new__(type(self)) if _instance is None else _instance
        new.unit = self.unit
        super().expand(torch.Size(batch_shape), new)  # type: ignore[no-untyped-call]
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density at `value`, with the least-squares gradient for the mean."""
        log_density: Tensor = dist.Normal(self.loc.detach(), self.scale).log_prob(value)
        squares = -0.5 * ((value - self.loc) / self.unit).square()
        return log_density + squares - squares.detach()


@rebuildable
@checked
def learned_normal(
    center: Finite = 0.0, scale: Deviation = 1.0, *, least_squares: bool = False
) -> Likelihood:
    """Return a normal likelihood with a learned standard deviation for each client.

    The network has two outputs, see `nets.with_noise`: the mean m and the log l of the noise's
    standard deviation, both for the standardized response. y is in its own unit, and so is the
    distribution: Normal(center + scale m, scale exp(l)).

    Args:
        center: mean of the response over training rows, in its own unit.
        scale: its standard deviation.
        least_squares: whether steps by the mean are those of least squares, see `LeastSquares`;
            for point estimates without a prior.

    Examples:
        >>> import torch
        >>> import pyrofl
        >>> from pyrofl import likelihoods, nets
        >>> from pyrofl.models import fedavg
        >>> y = torch.tensor([47_000.0, 50_000.0, 53_000.0, 50_000.0])
        >>> data = pyrofl.Federation.from_arrays({"bern": (torch.ones(4, 1), y)})
        >>> net = nets.with_noise(nets.build("softmax", (1,), outputs=1))
        >>> likelihood = likelihoods.learned_normal(float(y.mean()), float(y.std()))
        >>> run = pyrofl.fit(fedavg.build(net, likelihood=likelihood), data, 5, progress=False)
        >>> 47_000 < float(run.predict(torch.ones(1, 1), "bern").mean) < 53_000
        True
    """

    def likelihood(outputs: Tensor, x: Tensor) -> TorchDistribution:
        """Return the normal distribution of the responses, given two network outputs per row."""
        mean, deviation = center + scale * outputs[..., 0], scale * outputs[..., 1].exp()
        if least_squares:
            return LeastSquares(mean, deviation, scale)
        return dist.Normal(mean, deviation)

    return likelihood


@rebuildable
@checked
def binomial(trials: Count | None = None) -> Likelihood:
    """Return a binomial likelihood with a number of trials; the network's output is the logit.

    Without `trials`, each row has its number in x[..., 0].
    """

    def likelihood(outputs: Tensor, x: Tensor) -> TorchDistribution:
        return dist.Binomial(x[..., 0] if trials is None else trials, logits=outputs.squeeze(-1))

    return likelihood


PLAIN: dict[str, Likelihood] = {
    "categorical": categorical,
    "normal_known_sd": normal_known_sd,
    "bernoulli": bernoulli,
    "poisson": poisson,
}


def named(spec: str) -> Likelihood:
    """Return the likelihood with the given name, such as "poisson", "normal:0.5", "binomial:20".

    Without a number the normal has standard deviation 1, and the binomial takes its trials from the
    first column of x. "normal:learned" is `learned_normal` of a standardized response.

    Raises:
        ValueError: if there is no such likelihood, or the number does not suit it.
    """
    name, colon, number = spec.partition(":")
    try:
        if spec == LEARNED:
            return learned_normal()
        if name == "normal":
            return normal(float(number)) if colon else normal()
        if name == "binomial":
            return binomial(int(number)) if colon else binomial()
    except ValueError as error:
        raise ValueError(f"likelihood {spec!r} cannot be made: {error}") from error
    if colon or name not in PLAIN:
        raise ValueError(
            f"likelihood is {spec!r}; expected {LEARNED}, normal:SD, binomial:N or one of "
            f"{', '.join(PLAIN)}"
        )
    return PLAIN[name]
