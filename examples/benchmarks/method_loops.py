"""One client at a time, as good research code does it, for six more methods.

The arithmetic is that of `pyrofl.models.scaffold`, `ifca`, `perfedavg`, `fedem`, `pvi` and
`metavd` at their defaults, step for step, for an MLP with one hidden layer; see `proximal_loop`.
The components of FedEM run as one wide layer, layers with random weights draw their outputs, and
what does not change in a round, such as the squares of the rows, is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from good_loop import MOMENTUM, Weights, _descend, _minibatches
from proximal_loop import _copied, _gradient, _step
from torch import Tensor
from torch.nn.functional import cross_entropy, leaky_relu, linear
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam

from pyrofl.data import Federation
from pyrofl.models.guides.dropout import LOG_BOUND, MIN_SD
from pyrofl.models.metavd import DECAY, MAX_GRADIENT_NORM
from pyrofl.nets.reparametrized import MIN_SQUARED_NORM
from pyrofl.tensors import generator

PARTS = 3  # of a minibatch of Per-FedAvg


def scaffold(
    data: Federation, start: Weights, epochs: int = 5, batch: int = 10, lr: float = 0.01
) -> Iterator[Weights]:
    """Run SCAFFOLD (option II), yielding the weights after each round."""
    weights, control = start, [torch.zeros_like(w) for w in start]
    controls = [[torch.zeros_like(w) for w in start] for _ in range(data.clients)]
    while True:
        total, changes = ([torch.zeros_like(w) for w in start] for _ in range(2))
        for own_control, rows in zip(controls, data.train, strict=False):
            own, steps = _copied(weights), 0
            drift = torch._foreach_sub(control, own_control)
            for x, y in _minibatches(data, rows, epochs, batch):
                gradient = _gradient(own, x, y)
                torch._foreach_add_(gradient, drift)
                _step(own, gradient, lr)
                steps += 1
            with torch.no_grad():
                change = torch._foreach_sub(weights, own)
                torch._foreach_div_(change, lr * steps)
                torch._foreach_sub_(change, control)
                torch._foreach_add_(own_control, change)
                torch._foreach_add_(changes, change, alpha=1 / data.clients)
                torch._foreach_add_(total, own, alpha=1 / data.clients)
        weights = total
        torch._foreach_add_(control, changes)
        yield weights


def ifca(
    data: Federation,
    starts: Sequence[Weights],
    epochs: int = 5,
    batch: int = 10,
    lr: float = 0.05,
) -> Iterator[list[Weights]]:
    """Run IFCA, yielding the weights of the clusters after each round."""
    clusters = list(starts)
    tables = [(data.x[rows].flatten(1), data.y[rows]) for rows in data.train[: data.clients]]
    while True:
        totals = [[torch.zeros_like(w) for w in one] for one in clusters]
        sizes = [0] * len(clusters)
        for (x, y), rows in zip(tables, data.train, strict=False):
            with torch.no_grad():
                losses = [cross_entropy(_network(x, one), y) for one in clusters]
            k = int(torch.stack(losses).argmin())
            own = _trained(data, clusters[k], rows, epochs, batch, lr)
            torch._foreach_add_(totals[k], own, alpha=len(rows))
            sizes[k] += len(rows)
        clusters = [
            [w / size for w in total] if size else before
            for before, total, size in zip(clusters, totals, sizes, strict=True)
        ]
        yield clusters


def perfedavg(
    data: Federation,
    start: Weights,
    epochs: int = 5,
    batch: int = 10,
    lr: float = 0.1,
    inner_lr: float = 0.05,
) -> Iterator[Weights]:
    """Run the Hessian-free Per-FedAvg, yielding the weights after each round."""
    weights = start
    while True:
        total, rows = [torch.zeros_like(w) for w in start], 0
        for mine in data.train[: data.clients]:
            own = _copied(weights)
            for x, y in _minibatches(data, mine, epochs, PARTS * batch):
                parts = [slice(i, None, PARTS) if i < len(y) else [i % len(y)] for i in range(3)]
                first, second, third = ((x[part], y[part]) for part in parts)
                inner = _gradient(own, *first)
                with torch.no_grad():
                    near = torch._foreach_add(own, inner, alpha=-inner_lr)
                outer = _gradient([w.requires_grad_() for w in near], *second)
                slopes = torch.autograd.grad(_loss(own, *third), own, create_graph=True)
                curved = torch.autograd.grad(slopes, own, outer)
                torch._foreach_add_(outer, curved, alpha=-inner_lr)
                _step(own, outer, lr)
            torch._foreach_add_(total, [w.detach() for w in own], alpha=len(mine))
            rows += len(mine)
        weights = [part / rows for part in total]
        yield weights


def fedem(
    data: Federation,
    starts: Sequence[Weights],
    epochs: int = 5,
    batch: int = 10,
    lr: float = 0.05,
) -> Iterator[Weights]:
    """Run FedEM, yielding the weights of all components, stacked, after each round."""
    components, k = [torch.stack(each) for each in zip(*starts, strict=True)], len(starts)
    shares = torch.full((data.clients, k), 1 / k, dtype=data.x.dtype)
    while True:
        total, rows = [torch.zeros_like(w) for w in components], 0
        for c, mine in enumerate(data.train[: data.clients]):
            with torch.no_grad():
                x, y = data.x[mine].flatten(1), data.y[mine]
                q = (shares[c].log() - _component_losses(x, y, components)).softmax(-1)
                shares[c] = q.mean(0)
            own = [w.clone().requires_grad_() for w in components]
            optimizer = SGD(own, lr, MOMENTUM, fused=True)
            for _ in range(epochs):
                order = torch.randperm(len(mine))
                parts = (v[order].split(batch) for v in (x, y, q))
                for some, labels, weight in zip(*parts, strict=True):
                    costs = _component_losses(some, labels, own)
                    _descend((weight * costs).sum() / len(labels), own, optimizer)
            torch._foreach_add_(total, [w.detach() for w in own], alpha=len(mine))
            rows += len(mine)
        components = [part / rows for part in total]
        yield components


def pvi(
    data: Federation,
    start: Weights,
    epochs: int = 20,
    lr: float = 0.01,
    scale: float = 0.5,
    damping: float = 0.1,
) -> Iterator[Tensor]:
    """Run mean-field PVI by local reparametrization, yielding the mean of q after each round."""
    shapes = [w.shape for w in start]
    loc = torch.cat([w.flatten() for w in start])
    fans = [w.shape[1] for w in (start[0], start[2]) for _ in ("weight", "bias")]
    sd = [torch.full_like(w, scale / fan**0.5) for w, fan in zip(start, fans, strict=True)]
    sd = torch.cat([v.flatten() for v in sd])
    q = [loc / sd.square(), 1 / sd.square()]  # shift and precision
    ahead = [q[0], q[1] - 1]
    factors = [[v / data.clients for v in ahead] for _ in range(data.clients)]
    tables = [(data.x[rows].flatten(1), data.y[rows]) for rows in data.train[: data.clients]]
    squares = [x.square() for x, _ in tables]
    states: list[Weights] = []  # mean and log standard deviation of every client
    while True:
        total = [torch.zeros_like(v) for v in q]
        for c, (x, y) in enumerate(tables):
            shift, precision = (v - f for v, f in zip(q, factors[c], strict=True))
            center, constant = shift / precision, precision.log().sum()
            if len(states) == c:  # the first round starts from the cavity
                states.append([center.clone(), -precision.log() / 2])
            own = [v.requires_grad_() for v in states[c]]
            optimizer = Adam(own, lr, fused=True)
            for _ in range(epochs):
                mean, log_root = own
                variance = (2 * log_root).exp()
                parts = zip(_named(mean, shapes), _named(variance, shapes), strict=True)
                fit = _expected(x, squares[c], y, [*parts])
                gap = (mean - center).square()
                scaled = torch.dot(precision, variance + gap)
                pull = (scaled - len(mean) - constant) / 2 - log_root.sum()
                _descend(fit + pull, own, optimizer)
            states[c] = [v.detach() for v in own]
            new = (-2 * states[c][1]).exp()
            for i, v in enumerate((states[c][0] * new, new)):
                change = damping * (v - q[i])
                factors[c][i] += change
                total[i] += change
        torch._foreach_add_(q, total)
        yield q[0] / q[1]


def metavd(
    data: Federation,
    start: Weights,
    psi: Weights,
    embeddings: Tensor,
    epochs: int = 5,
    batch: int = 64,
    draws: int = 3,
    lr: float = 0.07,
    clip: float = 5.0,
    beta: float = 10.0,
    rates: tuple[float, float] = (0.9, 0.09),
) -> Iterator[Weights]:
    """Run MetaVD on Reptile, yielding theta after each round.

    The hypernetwork has weights and biases `psi` and a row of `embeddings` for every client.
    """
    theta = [w.clone().requires_grad_() for w in start]
    psi, embeddings = (
        [v.clone().requires_grad_() for v in psi],
        embeddings.clone().requires_grad_(),
    )
    optimizers = [
        SGD(theta, rates[0], 0.9),
        SGD(psi, rates[1], 0.6, weight_decay=DECAY),
        SGD([embeddings], rates[1], 0.3, weight_decay=DECAY),
    ]
    sizes = data.sizes[: data.clients].to(data.x.dtype)
    shares = sizes / sizes.sum()
    while True:
        spreads = _spreads(psi, embeddings).view(-1, *start[0].shape)
        sent = spreads.detach()
        means, found = [torch.zeros_like(w) for w in start], torch.empty_like(sent)
        precision = torch.zeros_like(start[0])
        for c, rows in enumerate(data.train[: data.clients]):
            own = _copied([w.detach() for w in theta])
            s = sent[c].clone().requires_grad_()
            for x, y in _minibatches(data, rows, epochs, batch):
                loss = _dropout_loss(own, s, x, y, draws, beta)
                grads = torch.autograd.grad(loss, [*own, s])
                length = torch.stack([g.norm() for g in grads]).norm()
                step = lr * (clip / (length + 1e-6)).clamp(max=1)
                with torch.no_grad():
                    for w, g in zip([*own, s], grads, strict=True):
                        w.sub_(g.mul_(step))
            found[c] = s.detach()
            with torch.no_grad():
                weight = shares[c] / (s.clamp(-LOG_BOUND, LOG_BOUND).exp() + 1e-10)
                means[0].addcmul_(weight, own[0])
                precision.add_(weight)
                torch._foreach_add_(means[1:], own[1:], alpha=float(shares[c]))
        means[0].div_(precision)
        gap = (sent - found).mul_(shares[:, None, None])
        slopes = torch.autograd.grad(spreads, [*psi, embeddings], gap)
        grads = [w.detach() - v for w, v in zip(theta, means, strict=True)]
        for w, g in zip([*theta, *psi, embeddings], [*grads, *slopes], strict=True):
            w.grad = g
        clip_grad_norm_([*theta, *psi, embeddings], MAX_GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
        yield [w.detach() for w in theta]


def hypernetwork(clients: int, outputs: int, width: int = 200) -> tuple[Weights, Tensor]:
    """Draw weights and biases of a hypernetwork with three hidden layers, and embeddings."""
    g, length, psi = generator(0), 1 + clients // 4, Weights()
    for a, b in pairwise([length, width, width, width, outputs]):
        psi.append((2 / (a + b)) ** 0.5 * torch.randn(b, a, generator=g))
        psi.append(1e-3 * torch.randn(b, generator=g))
    return psi, torch.randn(clients, length, generator=g)


def _spreads(psi: Weights, embeddings: Tensor) -> Tensor:
    value = embeddings
    for i in range(0, len(psi), 2):
        value = linear(leaky_relu(value, 0.1) if i else value, psi[i], psi[i + 1])
    first = 2 * torch.tensor(MIN_SD, dtype=torch.float64).log().item()
    return value.clamp(-LOG_BOUND, LOG_BOUND) + first


def _dropout_loss(
    weights: Weights, s: Tensor, x: Tensor, y: Tensor, draws: int, beta: float
) -> Tensor:
    """Return the mean cross entropy over draws and rows, and the divergence."""
    w1, b1, w2, b2 = weights
    variance = s.clamp(-LOG_BOUND, LOG_BOUND).exp()
    sd = (linear(x.square(), variance) + MIN_SQUARED_NORM).sqrt()
    noise = torch.randn(len(x), draws, len(b1)).movedim(1, 0)
    hidden = torch.addcmul(linear(x, w1, b1), sd, noise).relu()
    logits = linear(hidden, w2, b2).flatten(0, 1)
    pull = (w1.detach().square() / variance).log1p().sum() * (beta / (2 * w1.numel()))
    return cross_entropy(logits, y.repeat(draws)) + pull


def _trained(
    data: Federation, weights: Weights, rows: Tensor, epochs: int, batch: int, lr: float
) -> Weights:
    """Return the weights after SGD with momentum on the rows of a client."""
    own = _copied(weights)
    optimizer = SGD(own, lr, MOMENTUM, fused=True)
    for x, y in _minibatches(data, rows, epochs, batch):
        _descend(_loss(own, x, y), own, optimizer)
    return [w.detach() for w in own]


def _network(x: Tensor, weights: Weights) -> Tensor:
    w1, b1, w2, b2 = weights
    return linear(linear(x, w1, b1).relu(), w2, b2)


def _loss(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(_network(x, weights), y)


def _component_losses(x: Tensor, y: Tensor, weights: Weights) -> Tensor:
    """Return the cross entropy of every row under every component, [B, K]."""
    w1, b1, w2, b2 = weights
    hidden = linear(x, w1.flatten(0, 1), b1.flatten()).relu().unflatten(-1, b1.shape)
    # In this order the gradient of w2 is contiguous, as the fused optimizer expects.
    logits = torch.baddbmm(b2[..., None], w2, hidden.permute(1, 2, 0))
    return cross_entropy(logits, y.expand(len(w1), -1), reduction="none").T


def _named(vector: Tensor, shapes: Sequence[torch.Size]) -> Weights:
    parts = vector.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _expected(x: Tensor, squares: Tensor, y: Tensor, moments: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the cross entropy summed over rows, of two mirrored draws of all outputs."""
    (w1, v1), (b1, s1), (w2, v2), (b2, s2) = moments
    noise = torch.randn(len(x), len(b1)), torch.randn(len(x), len(b2))
    noise = tuple(torch.stack([v, -v]) for v in noise)
    sd = (linear(squares, v1, s1) + MIN_SQUARED_NORM).sqrt()
    hidden = torch.addcmul(linear(x, w1, b1), sd, noise[0]).relu()
    sd = (linear(hidden.square(), v2, s2) + MIN_SQUARED_NORM).sqrt()
    logits = torch.addcmul(linear(hidden, w2, b2), sd, noise[1])
    return cross_entropy(logits.flatten(0, 1), y.repeat(2), reduction="sum") / 2
