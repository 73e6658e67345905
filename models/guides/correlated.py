"""Guides whose parameters depend on each other: full covariance, low rank, and a flow.

All draw standard normal noise e of d entries for each client, d the number of all its parameters,
and map it one to one (the low rank one: from d + r entries) to the sites. The noise is an
auxiliary site, so clients train side by side, each with its own covariance or flow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pyro
import pyro.distributions as dist
import torch
from torch import Size, Tensor
from torch.quasirandom import SobolEngine

from pyrofl.data import Batch
from pyrofl.inference.programs import Guide
from pyrofl.models.guides.basic import Family
from pyrofl.tensors import Tensors, under

LARGEST = 2_000  # parameters of a client that a full covariance is made for
POINTS = 1_024  # quasi-random draws that moments of a flow are taken from


def full_covariance(
    shapes: Mapping[str, Size], *, scale: float = 1.0, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Let parameters be jointly normal: w = mu + S (I + B) e, with S diagonal and B lower.

    Args:
        shapes: of the sites, by name; d parameters in all.
        scale: standard deviation at the start.
        loc: role of the means, [C, *p].
        spread: role of the rest: log_sd [C, d], the logarithm of S; below [C, d (d - 1) / 2], the
            entries of B below its diagonal, row by row.

    Raises:
        ValueError: if scale is not positive, or there are more than 2,000 parameters.
    """
    d = sum(shape.numel() for shape in shapes.values())
    if d > LARGEST:
        raise ValueError(
            f"a full covariance of {d} parameters has {d * (d + 1) // 2} numbers per client; "
            f"expected at most {LARGEST} parameters, or low_rank"
        )
    row, column = torch.tril_indices(d, d, -1)

    def lower(local: Tensors) -> Tensor:
        below = local[f"{spread}/below"]
        matrix = below.new_zeros(*below.shape[:-1], d, d)
        matrix[..., row, column] = below
        return matrix

    def move(local: Tensors) -> tuple[Tensor, Tensor]:
        e = _noise(f"_{spread}", local[f"{spread}/log_sd"])
        log_sd = local[f"{spread}/log_sd"]
        step = e + torch.einsum("...ij,...j->...i", lower(local), e)
        return log_sd.exp() * step, -log_sd.sum(-1)

    def variance(local: Tensors) -> Tensor:
        inner = 1 + lower(local).square().sum(-1)
        return (2 * local[f"{spread}/log_sd"]).exp() * inner

    none = torch.zeros(len(row))
    return _shifted(shapes, scale, (loc, spread), {"below": none}, move, variance)


def low_rank(rank: int = 5) -> Family:
    """Return a family whose covariance is S (I + V V') S, with S diagonal and V of `rank` columns.

    The family is that of Pyro's AutoLowRankMultivariateNormal. Its parameters are log_sd [C, d] and
    factor [C, d, r]; the latter starts at small cosines, as zeros would have no gradient.

    Raises:
        ValueError: if rank is less than 1.
    """
    if rank < 1:
        raise ValueError(f"rank of the guide is {rank}; expected at least 1")

    def family(
        shapes: Mapping[str, Size], *, scale: float = 1.0, loc: str = "mu", spread: str = "pi"
    ) -> Guide:
        d = sum(shape.numel() for shape in shapes.values())

        def move(local: Tensors) -> tuple[Tensor, Tensor]:
            sd, factor = local[f"{spread}/log_sd"].exp(), local[f"{spread}/factor"]
            like = sd.new_zeros(*sd.shape[:-1], d + rank)
            e, common = _noise(f"_{spread}", like, counted=False).split([d, rank], -1)
            step = sd * (e + torch.einsum("...ik,...k->...i", factor, common))
            joint = dist.LowRankMultivariateNormal(
                torch.zeros_like(sd), sd[..., None] * factor, sd.square(), validate_args=False
            )
            return step, joint.log_prob(step)

        def variance(local: Tensors) -> Tensor:
            inner = 1 + local[f"{spread}/factor"].square().sum(-1)
            return (2 * local[f"{spread}/log_sd"]).exp() * inner

        start = {"factor": 0.1 * _cosines(d, rank)}
        return _shifted(shapes, scale, (loc, spread), start, move, variance)

    return family


def flow(layers: int = 2, hidden: int = 16) -> Family:
    """Return a family that bends a normal by affine coupling layers: skewed, curved posteriors.

    In each layer half of the entries are scaled and shifted by a small network of the others, one
    network per client (Dinh, Sohl-Dickstein and Bengio, "Density estimation using Real NVP", ICLR
    2017). It starts as the mean-field normal. Its point prediction is the image of e = 0; moments
    come from 1,024 quasi-random draws.

    Args:
        layers: that take turns in which entries they move.
        hidden: width of the networks.

    Raises:
        ValueError: if a number is less than 1; when made, if there are fewer than two parameters.
    """
    if layers < 1 or hidden < 1:
        raise ValueError(f"layers is {layers}, hidden {hidden}; expected at least 1 of each")

    def family(
        shapes: Mapping[str, Size], *, scale: float = 1.0, loc: str = "mu", spread: str = "pi"
    ) -> Guide:
        d = sum(shape.numel() for shape in shapes.values())
        if d < 2:
            raise ValueError(f"a flow has {d} parameter to bend; expected at least 2")
        digits = (d - 1).bit_length()  # by those of their numbers, any two entries get to part
        still = [((torch.arange(d) >> (i // 2 % digits)) + i) % 2 for i in range(layers)]

        def bend(local: Tensors, e: Tensor) -> tuple[Tensor, Tensor]:
            grown = e.new_zeros(())
            for i, mask in enumerate(still):
                keep = mask.to(e)
                inside = torch.einsum("...i,...ij->...j", e * keep, local[f"{spread}/in{i}"])
                h = (inside + local[f"{spread}/bias{i}"]).tanh()
                out = torch.einsum("...j,...jk->...k", h, local[f"{spread}/out{i}"])
                stretch, shift = ((1 - keep) * v for v in out.split(d, -1))
                stretch = stretch.tanh()  # by a factor of e at most, which keeps training tame
                e, grown = e * stretch.exp() + shift, grown + stretch.sum(-1)
            return e, grown

        def move(local: Tensors) -> tuple[Tensor, Tensor]:
            log_sd = local[f"{spread}/log_sd"]
            e, grown = bend(local, _noise(f"_{spread}", log_sd))
            return log_sd.exp() * e, -log_sd.sum(-1) - grown

        def draws(local: Tensors) -> Tensor:
            known = next(iter(local.values()))
            uniform = SobolEngine(d, scramble=True, seed=0).draw(POINTS).to(known)
            log_sd = local[f"{spread}/log_sd"]
            e = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
            e = e.reshape(POINTS, *(1 for _ in log_sd.shape[:-1]), d)
            return log_sd.exp() * bend(local, e.expand(POINTS, *log_sd.shape))[0]

        sizes = {"in": (d, hidden), "bias": (hidden,), "out": (hidden, 2 * d)}
        start = {f"{n}{i}": torch.zeros(size) for n, size in sizes.items() for i in range(layers)}
        start |= {f"in{i}": _cosines(d, hidden) / d**0.5 for i in range(layers)}
        both = (lambda v: draws(v).var(0), lambda v: draws(v).mean(0))
        return _shifted(shapes, scale, (loc, spread), start, move, *both)

    return family


Move = Callable[[Tensors], tuple[Tensor, Tensor]]
"""local -> deviation from the mean [..., C, 1, d], and what is missing of its log density."""


def _shifted(
    shapes: Mapping[str, Size],
    scale: float,
    roles: tuple[str, str],
    first: Tensors,
    move: Move,
    variance: Callable[[Tensors], Tensor],
    offset: Callable[[Tensors], Tensor] | None = None,
) -> Guide:
    """Make a guide of random deviations from a mean.

    Args:
        shapes: of the sites.
        scale: standard deviation at the start.
        roles: of the means and of all else.
        first: start of parameters besides log_sd, without the client's axis.
        move: draws the deviation.
        variance: of the deviation, [..., d].
        offset: its mean, [..., d]; default 0.
    """
    if not scale > 0:
        raise ValueError(f"scale of the guide is {scale}; expected a positive number")
    loc, spread = roles

    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            step, log_density = move(local)
            for n, part in _parted(step, shapes).items():
                value, axes = local[f"{loc}/{n}"] + part, len(shapes[n])
                pyro.sample(n, dist.Delta(value, log_density=log_density, event_dim=axes))
                log_density = torch.zeros_like(log_density)  # it counts once

    def start(centre: Tensors, sd: Tensors | None = None) -> Tensors:
        means = {n: centre[n] for n in shapes}
        width = {n: torch.full_like(v, scale) if sd is None else sd[n] for n, v in means.items()}
        log_sd = _joined(width, shapes).log()
        lead = log_sd.shape[:-1]
        rest = {n: v.to(log_sd).expand(*lead, *v.shape) for n, v in first.items()}
        return under(loc, means) | under(spread, {"log_sd": log_sd, **rest})

    def moments(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        mean = {n: local[f"{loc}/{n}"] for n in shapes}
        if offset is not None:
            mean = {n: mean[n] + v for n, v in _parted(offset(local), shapes).items()}
        return mean, _parted(variance(local), shapes)

    return Guide(program, start, moments, f"{loc}/* {spread}/*")


def _noise(name: str, like: Tensor, counted: bool = True) -> Tensor:
    """Sample standard normal noise as an auxiliary site, whose density may be left out."""
    zero = torch.zeros_like(like)
    fn = dist.Normal(zero, torch.ones_like(zero)).to_event(1)
    e: Tensor = pyro.sample(name, fn if counted else fn.mask(False), infer={"is_auxiliary": True})
    return e


def _joined(tensors: Tensors, shapes: Mapping[str, Size]) -> Tensor:
    """Lay tensors [..., *p] side by side: [..., d]."""
    flat = [v.reshape(*v.shape[: v.dim() - len(shapes[n])], -1) for n, v in tensors.items()]
    return torch.cat(flat, -1)


def _parted(value: Tensor, shapes: Mapping[str, Size]) -> Tensors:
    """Undo `_joined`."""
    parts = value.split([shape.numel() for shape in shapes.values()], -1)
    return {
        n: part.reshape(*value.shape[:-1], *shape)
        for (n, shape), part in zip(shapes.items(), parts, strict=True)
    }


def _cosines(rows: int, columns: int) -> Tensor:
    """Return rows x columns numbers between -1 and 1, the columns orthogonal."""
    i, k = torch.arange(rows)[:, None] + 0.5, torch.arange(1, columns + 1)
    return torch.cos(math.pi * i * k / rows)
