"""Fisher information of networks' parameters, from the derivatives of each row's outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.definition.programs import Likelihood
from pyrofl.models.shared.vectors import flatten_clients
from pyrofl.nets import Network
from pyrofl.nets.network import Forward
from pyrofl.tensors import Tensors


def weight_of_each(data: Batch) -> Tensor:
    """Return the mean weight of each client's rows, [C]; it is 1 if rows have no weights.

    `data` must hold all rows of the clients.
    """
    return data.size / data.mask.sum(1).clamp(min=1)


def slopes(
    net: Network | Forward, likelihood: Likelihood, w: Tensors, data: Batch
) -> Iterator[Tensors]:
    """Yield factors R of a batch's Fisher information, one per network output; F = sum R R'.

    Times `weight_of_each` of all rows, the F of an epoch of minibatches add up to the client's.

    Args:
        net: the network, or a function of w [C B, 1, *p] and x [C B, 1, *x], each row a client.
        likelihood: of a row, given the network's outputs, one number or one axis of them.
        w: where, [C, *p].
        data: the rows, [C, B]; padding counts nothing.

    Yields:
        [C, B, *p], for each output.
    """
    clients, width = data.mask.shape

    def alone(value: Tensor) -> Tensor:
        """Reshape a tensor so that every row is a separate client, for per-row gradients."""
        return value.reshape(clients * width, 1, *value.shape[2:])  # [C B, 1, ...]

    each = {
        n: alone(v.detach()[:, None].expand(clients, width, *v.shape[1:])).requires_grad_()
        for n, v in w.items()
    }
    x, y = alone(data.x), alone(data.y)
    outputs = net(each, x)
    root = _root_of_curvature(likelihood, outputs.detach(), x, y)
    counts = data.mask.to(root)  # not `data.counts`, by which a minibatch stands for all rows
    if data.weights is not None:
        counts = counts * data.weights.sqrt()
    here = counts.reshape(-1, *(1 for _ in root.shape[1:]))  # [C B, 1, ...]
    root = torch.where(here > 0, root * here, 0.0)
    for k, one in enumerate(root.unbind(-1)):
        gradients = torch.autograd.grad(
            outputs, list(each.values()), one, retain_graph=k + 1 < root.shape[-1]
        )
        yield {
            n: v.view(clients, width, *w[n].shape[1:]) for n, v in zip(each, gradients, strict=True)
        }


def diagonal(rows: Iterator[Tensors]) -> Tensor:
    """Return the diagonal [C, d] of the clients' Fisher information, from `slopes`.

    That is the sum of squared slopes.

    Only the slopes of one output are in memory.
    """
    curvature: Tensors = {}
    for one in rows:
        for n, v in one.items():
            total = curvature.setdefault(n, torch.zeros_like(v[:, 0]))
            for row in v.unbind(1):  # a fifth of the time of v.square().sum(1), and less memory
                total.addcmul_(row, row)
    return flatten_clients(curvature)


def full_fisher(rows: Iterator[Tensors]) -> Tensor:
    """Return the clients' full Fisher information matrices [C, d, d], from `slopes`."""
    # [C, B K, d], for K outputs of a row.
    root = torch.cat([torch.cat([v.flatten(2) for v in one.values()], -1) for one in rows], 1)
    return root.mT @ root


def _root_of_curvature(likelihood: Likelihood, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return roots [..., K, K] of the Hessian of -log p(y | outputs), negative part removed."""
    at = outputs.requires_grad_()
    slope = torch.autograd.grad(-likelihood(at, x).log_prob(y).sum(), at, create_graph=True)[0]
    if not slope.requires_grad:
        return torch.zeros_like(torch.diag_embed(outputs.detach()))
    curves = [
        torch.autograd.grad(part.sum(), at, retain_graph=True, materialize_grads=True)[0]
        for part in slope.unbind(-1)
    ]
    curve = torch.stack(curves, -1)
    good = curve.isfinite().all(-1).all(-1)[..., None, None]
    # In double precision and units of the largest, as where all but one are 0 it may not converge.
    unit = curve.abs().amax((-1, -2), keepdim=True).clamp(min=torch.finfo(curve.dtype).tiny)
    even = torch.where(good, curve / unit, 0.0).double()
    values, vectors = torch.linalg.eigh((even + even.mT) / 2)
    root = (vectors * values.clamp(min=0).sqrt()[..., None, :]).to(curve)
    return torch.where(good, root * unit.sqrt(), torch.nan)
