"""Tests by trial calls whether user functions read data rows, and whether they are linear."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor

from pyrofl.inference.definition.elbo import Look
from pyrofl.inference.definition.method import ClosedFormUpdate
from pyrofl.inference.definition.programs import Likelihood
from pyrofl.inference.definition.user_code import users_code
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, generator

STAND_IN_SHAPE = 1, 3, 2  # of a tensor used instead of a weight


class Unread:
    """Placeholder argument that raises an error if a function reads any attribute of it."""

    def __getattribute__(self, name: str) -> Any:
        """Raise AttributeError for every attribute."""
        raise AttributeError(name)


def ignores_rows(likelihood: Likelihood, net: Network, x: Tensor) -> bool:
    """Return whether a likelihood depends only on a network's outputs, not on the inputs x."""
    weights = {n: x.new_zeros(1, 1, *shape) for n, shape in net.shapes.items()}
    try:
        likelihood(net(weights, x[None, :1]), cast("Tensor", Unread()))
    except Exception:  # of any kind, as the function is anybody's
        return False
    return True


def ignores(
    move: ClosedFormUpdate, names: Collection[str], received: Tensors, local: Tensors
) -> bool:
    """Return whether an update of the library depends neither on rows nor on some local tensors.

    A user's function may have side effects; so it is not tried.
    """
    if users_code(move)[0]:
        return False
    others = [
        {n: torch.full_like(v[:1], 1) for n, v in part.items() if n not in names}
        for part in (received, local)
    ]
    try:
        with torch.no_grad():
            changed = move(others[0], others[1], cast("Any", Unread()))
    except Exception:  # of any kind: it reads what is missing
        return False
    return not changed.keys() & {*names}


def sums(
    view: Look,
    name: str,
    names: Collection[str],
    fixed: Collection[str],
    received: Tensors,
    local: Tensors,
) -> set[str] | None:
    """Return names of tensors that a function combines linearly to tensor `name`; None otherwise.

    The sum must be entrywise.
    """
    g = generator(0)
    one, other = (
        {n: torch.randn(STAND_IN_SHAPE, generator=g).to(local[n]) for n in names} for _ in range(2)
    )
    usual = [
        {n: torch.full_like(v[:1], 0.3) for n, v in part.items()} for part in (received, local)
    ]

    def seen(values: Tensors) -> Tensor:
        return view(usual[0], usual[1] | values)[name]

    def same(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)

    try:
        with torch.no_grad():
            y, z = seen(one), seen(other)
            moved = seen(one | {n: usual[1][n] + 0.2 for n in fixed})
            both = seen({n: 2 * v - 3 * other[n] for n, v in one.items()})
            turned = seen({n: v.flip(1, 2) for n, v in one.items()})
            right = same(both, 2 * y - 3 * z) and same(turned, y.flip(1, 2)) and same(moved, y)
            none = {n: seen(one | {n: torch.zeros_like(y)}) for n in names}
    except Exception:  # of any kind, as the function is anybody's
        return None
    return {n for n, without in none.items() if not same(without, y)} if right else None
