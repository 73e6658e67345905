"""Guides with dependent parameters: full covariance, low rank, Gaussian copula and flows.

    w = mu + S f(e),    e standard normal,    S diagonal, exp(log_sd)

for each client, w and S of d entries, the number of all its parameters; f maps e one to one (the
low rank one: from d + r entries). The noise e is an auxiliary site, so clients train side by side,
each with its own covariance or flow. Local tensors are the means under `loc`, log_sd [C, d] and
those of f under `spread`; see `guides.Family`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from pyrofl.arguments import Count, Positive, checked
from pyrofl.data import Batch
from pyrofl.inference.definition.programs import Guide
from pyrofl.models.guides.basic import Family, Shapes
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, role, under

MAX_PARAMETERS = 2_000  # parameters of a client that a full covariance is made for
NUM_MOMENT_DRAWS = 1_024  # draws that moments of a copula, even ones, and of a flow are taken from


@checked
def full_covariance(
    shapes: Shapes, *, init_scale: Positive = 1.0, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Return a normal guide with full covariance, parametrized by a lower triangular matrix B.

    Standard normal noise e becomes f(e) = (I + B) e.

    The entries of B are below [C, d (d - 1) / 2], row by row; arguments as of any `Family`.

    Raises:
        ValueError: if there are more than 2,000 parameters.
    """
    d = _num_parameters(shapes)

    def f(spread_tensors: Tensors, e: Tensor) -> tuple[Tensor, Tensor]:
        return e + torch.einsum("...ij,...j->...i", _lower(spread_tensors), e), e.new_zeros(())

    def moments(spread_tensors: Tensors) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(spread_tensors["log_sd"]), 1 + _lower(spread_tensors).square().sum(
            -1
        )

    first = {"below": torch.zeros(d * (d - 1) // 2)}
    return _deviating(shapes, init_scale, (loc, spread), first, f, moments)


@checked
def copula(
    shapes: Shapes, *, init_scale: Positive = 1.0, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Return a Gaussian copula guide, with learned skewness and tail weight of each parameter.

    f(e) = sinh(a (arsinh y + skew)) with y = (I + B) e, each entry divided by its standard
    deviation, and a = exp(tanh tail) of each: more than 1 makes tails longer (Jones and Pewsey,
    "Sinh-arcsinh distributions", Biometrika 2009). It starts as the mean-field normal.

    Raises:
        ValueError: if there are more than 2,000 parameters.
    """
    d = _num_parameters(shapes)

    def marginal(spread_tensors: Tensors, y: Tensor) -> tuple[Tensor, Tensor]:
        """Transform standard normal entries y by sinh-arcsinh; return values and log Jacobian."""
        log_a = spread_tensors["tail"].tanh()
        inside = log_a.exp() * (y.asinh() + spread_tensors["skew"])
        grown = inside.cosh().log() + log_a - 0.5 * y.square().log1p()
        return inside.sinh(), grown.sum(-1)

    def f(spread_tensors: Tensors, e: Tensor) -> tuple[Tensor, Tensor]:
        """Transform noise e; return the values, and their log density minus that of e."""
        below = _lower(spread_tensors)
        sd = (1 + below.square().sum(-1)).sqrt()  # [..., d]
        transformed, grown = marginal(
            spread_tensors, (e + torch.einsum("...ij,...j->...i", below, e)) / sd
        )
        return transformed, sd.log().sum(-1) - grown

    def moments(spread_tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each standardized variable, by numerical quadrature."""
        even = (torch.arange(NUM_MOMENT_DRAWS).to(spread_tensors["skew"]) + 0.5) / NUM_MOMENT_DRAWS
        # [POINTS, 1, ...], to broadcast with [..., d].
        y = torch.special.ndtri(even).reshape(-1, *(1 for _ in spread_tensors["skew"].shape))
        transformed, _ = marginal(spread_tensors, y)
        return transformed.mean(0), transformed.var(0)

    first = {"below": torch.zeros(d * (d - 1) // 2), "skew": torch.zeros(d), "tail": torch.zeros(d)}
    return _deviating(shapes, init_scale, (loc, spread), first, f, moments)


@rebuildable
@checked
def low_rank(rank: Count = 5) -> Family:
    """Return a family of low-rank normal guides, with covariance S (I + V V') S.

    V has `rank` columns, and S is diagonal.

    The family is that of Pyro's AutoLowRankMultivariateNormal. V is factor [C, d, r], which starts
    at small cosines, as zeros would have no gradient.
    """

    @checked
    def family(
        shapes: Shapes, *, init_scale: Positive = 1.0, loc: str = "mu", spread: str = "pi"
    ) -> Guide:
        """Return a low-rank normal guide for latent sites with the given shapes."""
        d = _size(shapes)

        def f(spread_tensors: Tensors, e: Tensor) -> tuple[Tensor, Tensor]:
            """Transform independent noise to correlated noise; also return its log density."""
            alone, common = e.split([d, rank], -1)  # [..., d], [..., r]
            values = alone + torch.einsum("...ik,...k->...i", spread_tensors["factor"], common)
            zero, one = (
                torch.zeros_like(spread_tensors["log_sd"]),
                torch.ones_like(spread_tensors["log_sd"]),
            )
            joint = dist.LowRankMultivariateNormal(
                zero, spread_tensors["factor"], one, validate_args=False
            )
            return values, joint.log_prob(values)

        def moments(spread_tensors: Tensors) -> tuple[Tensor, Tensor]:
            return torch.zeros_like(spread_tensors["log_sd"]), 1 + spread_tensors[
                "factor"
            ].square().sum(-1)

        first = {"factor": 0.1 * _cosines(d, rank)}
        return _deviating(shapes, init_scale, (loc, spread), first, f, moments, rank)

    return family


@rebuildable
@checked
def flow(layers: Count = 2, hidden: Count = 16) -> Family:
    """Return a family of normalizing-flow guides: affine coupling layers of a normal (Real NVP).

    Such posteriors can be skewed and curved.

    In each layer half of the entries are scaled and shifted by a small network of the others, one
    network per client (Dinh, Sohl-Dickstein and Bengio, "Density estimation using Real NVP", ICLR
    2017). It starts as the mean-field normal, up to one in a thousand, as networks of zeros would
    have no gradient. Its point prediction is the image of e = 0; moments come from 1,024
    quasi-random draws.

    Args:
        layers: coupling layers, which transform alternating entries.
        hidden: width of the networks.

    Raises:
        ValueError: when made, if there are fewer than two parameters.
    """

    @checked
    def family(
        shapes: Shapes, *, init_scale: Positive = 1.0, loc: str = "mu", spread: str = "pi"
    ) -> Guide:
        """Return a normalizing-flow guide for latent sites with the given shapes."""
        d = _size(shapes)
        if d < 2:
            raise ValueError(f"a flow has {d} parameter to bend; expected at least 2")
        digits = (d - 1).bit_length()  # by those of their numbers, any two entries get to part
        still = [((torch.arange(d) >> (i // 2 % digits)) + i) % 2 for i in range(layers)]

        def f(spread_tensors: Tensors, e: Tensor) -> tuple[Tensor, Tensor]:
            """Apply all coupling layers to noise e; also return the change of its log density."""
            grown = e.new_zeros(())
            for i, mask in enumerate(still):
                keep = mask.to(e)
                inside = torch.einsum("...i,...ij->...j", e * keep, spread_tensors[f"in{i}"])
                h = (inside + spread_tensors[f"bias{i}"]).tanh()
                out = torch.einsum("...j,...jk->...k", h, spread_tensors[f"out{i}"])
                stretch, shift = ((1 - keep) * v for v in out.split(d, -1))  # [..., d] each
                stretch = stretch.tanh()  # by a factor of e at most, which keeps training tame
                e, grown = e * stretch.exp() + shift, grown + stretch.sum(-1)
            return e, -grown

        def moments(spread_tensors: Tensors) -> tuple[Tensor, Tensor]:
            """Return mean and variance of the transformed noise, by quasi-Monte Carlo draws."""
            like = spread_tensors["log_sd"]
            uniform = SobolEngine(d, scramble=True, seed=0).draw(NUM_MOMENT_DRAWS).to(like)
            e = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
            # [POINTS, ..., d]
            e = e.reshape(NUM_MOMENT_DRAWS, *(1 for _ in like.shape[:-1]), d).expand(
                NUM_MOMENT_DRAWS, *like.shape
            )
            drawn, _ = f(spread_tensors, e)
            return drawn.mean(0), drawn.var(0)

        sizes = {"in": (d, hidden), "bias": (hidden,), "out": (hidden, 2 * d)}
        first = {f"{n}{i}": torch.zeros(size) for n, size in sizes.items() for i in range(layers)}
        first |= {f"in{i}": _cosines(d, hidden) / d**0.5 for i in range(layers)}
        first |= {f"out{i}": 1e-3 * _cosines(hidden, 2 * d) / hidden**0.5 for i in range(layers)}
        return _deviating(shapes, init_scale, (loc, spread), first, f, moments)

    return family


def _deviating(
    shapes: Shapes,
    init_scale: float,
    roles: tuple[str, str],
    first: Tensors,
    f: Callable[[Tensors, Tensor], tuple[Tensor, Tensor]],
    moments: Callable[[Tensors], tuple[Tensor, Tensor]],
    rank: int = 0,
) -> Guide:
    """Return a guide that samples mean + S f(e), for noise e, scales S and a function f.

    f: own, e -> f(e) [..., C, 1, d], and what its log density lacks; moments: own -> mean and
    variance of f(e); rank: entries of e beyond d, whose own density then does not count.
    """
    loc, spread = roles

    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the guide's noise, and every latent site as a function of that noise."""
        spread_tensors = role(spread, local)
        log_sd = spread_tensors["log_sd"]
        with batch.clients():
            like = log_sd.new_zeros(*log_sd.shape[:-1], log_sd.shape[-1] + rank)
            step, log_density = f(
                spread_tensors, standard_noise(f"_{spread}", like, counted=not rank)
            )
            log_density = log_density - log_sd.sum(-1)
            for n, part in split_vectors(log_sd.exp() * step, shapes).items():
                value, axes = local[f"{loc}/{n}"] + part, len(shapes[n])
                pyro.sample(n, dist.Delta(value, log_density=log_density, event_dim=axes))
                log_density = torch.zeros_like(log_density)  # it counts once

    def start(center: Tensors, sd: Tensors | None = None) -> Tensors:
        """Return initial guide parameters, given means and optional standard deviations."""
        means = {n: center[n] for n in shapes}
        width = {
            n: torch.full_like(v, init_scale) if sd is None else sd[n] for n, v in means.items()
        }
        # [..., n] each
        flat = [v.reshape(*v.shape[: v.dim() - len(shapes[n])], -1) for n, v in width.items()]
        log_sd = torch.cat(flat, -1).log()
        rest = {n: v.to(log_sd).expand(*log_sd.shape[:-1], *v.shape) for n, v in first.items()}
        return under(loc, means) | under(spread, {"log_sd": log_sd, **rest})

    def both(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the guide's mean and variance of every latent site."""
        spread_tensors = role(spread, local)
        mean, variance = moments(spread_tensors)
        offset = split_vectors(spread_tensors["log_sd"].exp() * mean, shapes)
        spreads = split_vectors((2 * spread_tensors["log_sd"]).exp() * variance, shapes)
        return {n: local[f"{loc}/{n}"] + v for n, v in offset.items()}, spreads

    return Guide(program, start, both, f"{loc}/* {spread}/*")


def standard_noise(name: str, like: Tensor, counted: bool = True) -> Tensor:
    """Sample standard normal noise [..., n] as an auxiliary site, masked if not `counted`."""
    fn = dist.Normal(torch.zeros_like(like), torch.ones_like(like)).to_event(1)
    e: Tensor = pyro.sample(name, fn if counted else fn.mask(False), infer={"is_auxiliary": True})
    return e


def _num_parameters(shapes: Shapes) -> int:
    """Return the number of parameters; raise ValueError if too large for a full covariance."""
    d = _size(shapes)
    if d > MAX_PARAMETERS:
        raise ValueError(
            f"a full covariance of {d} parameters has {d * (d + 1) // 2} numbers per client; "
            f"expected at most {MAX_PARAMETERS} parameters, or low_rank"
        )
    return d


def _lower(spread_tensors: Tensors) -> Tensor:
    """Return strictly lower triangular matrices [..., d, d], given their entries."""
    d = spread_tensors["log_sd"].shape[-1]
    row, column = torch.tril_indices(d, d, -1)
    matrix = spread_tensors["below"].new_zeros(*spread_tensors["below"].shape[:-1], d, d)
    matrix[..., row, column] = spread_tensors["below"]
    return matrix


def _size(shapes: Shapes) -> int:
    return sum(shape.numel() for shape in shapes.values())


def split_vectors(value: Tensor, shapes: Shapes) -> Tensors:
    """Split vectors [..., d] into named tensors [..., *p]."""
    parts = value.split([shape.numel() for shape in shapes.values()], -1)
    return {
        n: part.reshape((*value.shape[:-1], *shape))
        for (n, shape), part in zip(shapes.items(), parts, strict=True)
    }


def _cosines(rows: int, columns: int) -> Tensor:
    """Return a matrix [rows, columns] of cosines, with orthogonal columns."""
    i, k = torch.arange(rows)[:, None] + 0.5, torch.arange(1, columns + 1)
    return torch.cos(math.pi * i * k / rows)
