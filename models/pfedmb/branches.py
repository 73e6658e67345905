"""Layers with several branches, which a client's weights mix into one (pFedMB, CondConv)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

import torch
from torch import Size, Tensor

from pyrofl.nets import Network
from pyrofl.tensors import Tensors, role


def layers(names: Iterable[str], shared: bool = False) -> dict[str, int]:
    """Number the layers that own these parameters, from 0 in order; all 0 if alpha is shared.

    >>> layers(["conv.weight", "conv.bias", "head.weight"])
    {'conv.weight': 0, 'conv.bias': 0, 'head.weight': 1}
    """
    owner = {n: n.rpartition(".")[0] for n in names}
    number = {layer: 0 if shared else i for i, layer in enumerate(dict.fromkeys(owner.values()))}
    return {n: number[layer] for n, layer in owner.items()}


def weighty(shapes: Mapping[str, Size]) -> str:
    """Return patterns of the layers that own a parameter of two axes or more; else of all.

    >>> weighty({"norm.weight": Size([3]), "fc.weight": Size([2, 3]), "fc.bias": Size([2])})
    'fc.weight fc.bias'
    """
    owners = {n.rpartition(".")[0] for n, shape in shapes.items() if len(shape) > 1}
    return " ".join(n for n in shapes if n.rpartition(".")[0] in owners) or "*"


def merged(net: Network, tensors: Tensors, alpha: Tensor) -> Tensors:
    """Mix the branches of every layer: sum_b alpha_lb W_lb (eq. 1), a network of P parameters.

    Args:
        net: the network.
        tensors: "branch/NAME" [..., B, *p] and, of what has no branches, "w/NAME" [..., *p].
        alpha: weights [..., L, B], with L = 1 if all layers share them. Leading axes broadcast.

    Returns:
        Every parameter of the network by its name, [..., *p].
    """
    w = role("w", tensors)
    branched = [n for n in net.shapes if f"branch/{n}" in tensors]
    for n, at in layers(branched, shared=alpha.shape[-2] == 1).items():
        value, axis = tensors[f"branch/{n}"], -1 - len(net.shapes[n])
        if value.shape[axis] == 1:
            w[n] = value.squeeze(axis)  # nothing to mix: to the last bit as without branches
            continue
        rows = value.reshape(*value.shape[: axis + 1 or None], -1)
        mixed = torch.einsum("...b,...bp->...p", alpha[..., at, :], rows)
        w[n] = mixed.reshape(*mixed.shape[:-1], *net.shapes[n])
    return w


def refuse_twins(branches: Tensors, layer: Mapping[str, int]) -> None:
    """Refuse branches that are equal: with equal weights they have equal gradients for ever.

    Args:
        branches: [B, *p] by name.
        layer: the number of each name's layer.

    Raises:
        ValueError: if two branches agree in all parameters that are mixed by the same weights.
    """
    for number in set(layer.values()):
        mine = [n for n, at in layer.items() if at == number]
        count = len(branches[mine[0]])
        for a, b in combinations(range(count), 2):
            if all(torch.equal(branches[n][a], branches[n][b]) for n in mine):
                raise ValueError(
                    f"branches {a} and {b} of {', '.join(mine)} are equal and would stay so; "
                    "expected random starts that differ, or a `branched` without these names"
                )
