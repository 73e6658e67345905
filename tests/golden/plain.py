"""What all papers' plain implementations share: three clients, constant noise, and descent.

Nothing of the library is used here, so that one mistake cannot be in both. All is in float64, as
`make.py` asks for, one client after the other, one row of arithmetic for each formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Tensors = dict[str, Tensor]

SIZES = (5, 7, 3)
FEATURES, CLASSES, HIDDEN = 4, 3, (4, 3)
REPORTS = ((0, 2), (1, 2), (0, 1, 2), (0, 1))  # who is heard, round by round
SHOWN = (1, 4)  # rounds whose end is kept


def rows() -> tuple[Tensor, Tensor]:
    """Return the rows of all clients, one client after the other: x [N, 4] and y [N]."""
    rng = np.random.default_rng(19)
    y = rng.integers(0, CLASSES, sum(SIZES))
    x = rng.normal(size=(CLASSES, FEATURES))[y] + rng.normal(size=(len(y), FEATURES))
    return torch.from_numpy(x), torch.from_numpy(y)


def of_client(j: int) -> tuple[Tensor, Tensor]:
    """Return the rows of one client."""
    x, y = rows()
    return x.split(SIZES)[j], y.split(SIZES)[j]


TABLE = torch.from_numpy(np.random.default_rng(20).normal(size=600))


def noise(*shape: int) -> Tensor:
    """Return the constant noise of any draw: the first numbers of one table."""
    return TABLE[: torch.Size(shape).numel()].reshape(shape)


def start(seed: int = 21) -> Tensors:
    """Return a network 4-4-3-3: name -> parameter."""
    rng = np.random.default_rng(seed)
    widths = (FEATURES, *HIDDEN, CLASSES)
    found: Tensors = {}
    for name, a, b in zip(("fc1", "fc2", "head"), widths, widths[1:], strict=False):
        found[f"{name}.weight"] = torch.from_numpy(rng.normal(size=(b, a)) / a**0.5)
        found[f"{name}.bias"] = torch.from_numpy(0.1 * rng.normal(size=b))
    return found


def features(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return what the network has before its head."""
    for name in ("fc1", "fc2"):
        x = (x @ w[f"{name}.weight"].T + w[f"{name}.bias"]).relu()
    return x


def outputs(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the logits of rows [N, 4]."""
    return features(w, x) @ w["head.weight"].T + w["head.bias"]


def loss_sum(w: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the sum over rows of -log p(y | x, w)."""
    return cross_entropy(outputs(w, x), y, reduction="sum")


def batches(epochs: int, batch: int, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield minibatches in the order of the rows, the last of an epoch as short as it is."""
    for _ in range(epochs):
        yield from zip(x.split(batch), y.split(batch), strict=True)


def slopes(loss: Tensor, at: Tensors) -> Tensors:
    """Return the gradient."""
    return dict(zip(at, torch.autograd.grad(loss, list(at.values())), strict=True))


class Momentum:
    """SGD with heavy-ball momentum, written out: v <- m v + g + decay w, w <- w - lr v."""

    def __init__(self, lr: float, momentum: float = 0.0, decay: float = 0.0) -> None:
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.velocity: Tensors = {}

    def step(self, w: Tensors, g: Tensors) -> Tensors:
        """Return w after a step along g."""
        for n, v in g.items():
            v = v + self.decay * w[n]
            self.velocity[n] = self.momentum * self.velocity[n] + v if n in self.velocity else v
        return {n: (v - self.lr * self.velocity[n]).detach() for n, v in w.items()}


def leaves(w: Tensors) -> Tensors:
    """Return copies by which one can differentiate."""
    return {n: v.detach().clone().requires_grad_() for n, v in w.items()}


def descend(w: Tensors, optimizer: Momentum, loss: Callable[[Tensors], Tensor]) -> Tensors:
    """Make one step on a loss."""
    at = leaves(w)
    return optimizer.step(w, slopes(loss(at), at))


def mean_by(weights: Tensor, values: list[Tensors]) -> Tensors:
    """Return sum_j weights_j values_j / sum_j weights_j."""
    share = weights / weights.sum()
    return {n: sum(s * v[n] for s, v in zip(share, values, strict=True)) for n in values[0]}


def sizes_of(cohort: tuple[int, ...]) -> Tensor:
    """Return n_j of some clients."""
    return torch.tensor([float(SIZES[j]) for j in cohort])


def named(prefix: str, values: Tensors) -> Tensors:
    """Put a role in front of names."""
    return {f"{prefix}/{n}": v for n, v in values.items()}


def stacked(prefix: str, values: list[Tensors]) -> Tensors:
    """Stack what each client has: [J, *p]."""
    return named(prefix, {n: torch.stack([v[n] for v in values]) for n in values[0]})
