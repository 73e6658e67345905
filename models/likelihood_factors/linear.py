"""Sufficient statistics of linear models: factors that are exact, whatever the noise variance is.

If a response is Normal(c + D v, sigma) with v = (u, e), and sigma depends on shared variables
alone, the log likelihood of a client is, with weights W of its rows and r = y - c,

    -(v' P v - 2 h' v + s) / (2 sigma^2) - n log sigma,   P = D'WD, h = D'Wr, s = r'Wr, n = tr W

If the standard deviations of the rows are known, W contains their inverse squares, and sigma = 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pyrofl.data import Batch
from pyrofl.models.likelihood_factors.structure import (
    DERIVATIVE_TOLERANCE,
    Response,
    Structure,
    blank,
    random_points,
)
from pyrofl.tensors import Tensors, generator

LINEARITY_DISTANCES = 1.0, 30.0, 1e3, 1e6  # distances at which a linear mean is still linear


def with_linear_mask(structure: Structure, batch: Batch) -> Structure:
    """Return the structure with the mask of the linear variables, if the model is linear."""
    u, eta = random_points(structure, batch)
    u = u[:, :1].expand_as(u).clone().requires_grad_()  # [S, C, d]
    with torch.enable_grad():
        response = structure.evaluate(u, eta, batch).response
        if response is None or structure.mixed:
            return structure
        total = response.sd.sum() + 0 * u.sum()
        (slope,) = torch.autograd.grad(total, u)
    new = replace(structure, linear=slope.abs().sum((0, 1))[structure.reads] == 0)
    return new if is_linear(new, batch) else structure


def is_linear(structure: Structure, batch: Batch) -> bool:
    """Return whether the responses of clients are as the mask of linear variables states."""
    u, eta = random_points(structure, batch)
    u = u[:, :1].expand_as(u)  # [S, C, d]
    with torch.no_grad():
        response = structure.evaluate(u, eta, batch).response
        server = structure.evaluate(u[:, :1], eta[:, :1] * 0, blank(batch)).response
    if response is None or server is None:
        return False
    # Known standard deviations may differ by row; unknown ones must be those of the server.
    expected = response.sd[:1] if has_constant_noise(structure) else server.sd
    alike = torch.allclose(response.sd, expected.expand_as(response.sd), rtol=DERIVATIVE_TOLERANCE)
    return alike and _has_linear_mean(structure, u[:2, 0], batch)


def has_constant_noise(structure: Structure) -> bool:
    """Return whether no variable rules the noise variance of a linear model."""
    return structure.linear is not None and bool(structure.linear.all())


def is_exact_after_one_round(structure: Structure, dtype: torch.dtype) -> bool:
    """Return whether factors of a type are exact after one round."""
    precise = dtype == torch.float64 or has_constant_noise(structure)  # squares of responses cancel
    return structure.linear is not None and precise


def statistics(structure: Structure, batch: Batch) -> Tensors:
    """Return shift h [C, n], precision P [C, n, n], square s [C] and count n [C] of the clients."""
    n = len(structure.reads) + structure.client_sites.size
    points = torch.cat([torch.zeros(1, n), torch.eye(n)]).double()
    response = _response(structure, structure.shared_sites.prior()[0].double(), points, batch)
    d = (response.mean[1:] - response.mean[0]).movedim(0, -1)  # [C, B, n]
    weight, off = response.weight[0], response.value[0] - response.mean[0]
    if has_constant_noise(structure):
        weight = torch.where(weight > 0, weight / response.sd[0].square(), 0.0)
    off = torch.where(weight > 0, off, 0.0)
    weighted = torch.where(weight[..., None] > 0, d, 0.0) * weight[..., None]  # [C, B, n]
    return {
        "shift": torch.einsum("cbi,cb->ci", weighted, off),
        "precision": torch.einsum("cbi,cbj->cij", weighted, d.nan_to_num()),
        "square": (weight * off.square()).sum(-1),
        "count": weight.sum(-1),
    }


def _has_linear_mean(structure: Structure, u: Tensor, batch: Batch) -> bool:
    """Return whether the mean of the response is linear, and equal for two variances [2, d].

    The standard deviation must not depend on the linear variables.
    """
    n = len(structure.reads) + structure.client_sites.size
    a, b = torch.randn(2, n, generator=generator("linear")).double()
    # Far points on both sides find kinks, as of abs, relu and clamp.
    times = torch.tensor([s * v for v in LINEARITY_DISTANCES for s in (-1.0, 1.0)], dtype=a.dtype)
    points = torch.cat([torch.stack([0 * a, a, b, a + b]), times[:, None] * a])  # [S, n]
    response, same = (_response(structure, middle, points, batch) for middle in u)
    one, other = response.mean, same.mean
    size = DERIVATIVE_TOLERANCE * (1 + one[:4].abs().amax(0))
    straight = (one[3] - one[1] - one[2] + one[0]).abs() <= size
    expected = one[0] + times.view(-1, *[1] * (one.dim() - 1)) * (one[1] - one[0])
    far = DERIVATIVE_TOLERANCE * (1 + one[4:].abs() + expected.abs())
    straight &= ((one[4:] - expected).abs() <= far).all(0)
    straight &= ((response.sd - response.sd[0]).abs() <= DERIVATIVE_TOLERANCE * response.sd[0]).all(
        0
    )
    return bool(straight.all()) and bool(((one - other).abs() <= size).all())


def _response(structure: Structure, u: Tensor, v: Tensor, batch: Batch) -> Response:
    """Return the response at points v [S, n], with other shared variables as in u [d]."""
    reads, linear = structure.reads, structure.linear
    assert linear is not None
    points = u.expand(len(v), len(batch), -1).clone()
    points[..., reads[linear]] = v[:, None, : len(reads)][..., linear]
    e = v[:, None, len(reads) :].expand(-1, len(batch), -1)  # [S, C, m]
    with torch.no_grad():
        roots = structure.evaluate(points, torch.zeros_like(e), batch).roots
        eta = torch.linalg.solve(roots, e[..., None])[..., 0]
        response = structure.evaluate(points, eta, batch).response
    assert response is not None
    return Response(*(value.expand(len(v), *batch.mask.shape) for value in response))
