"""Distillation: pseudo-labels, SWA's schedule, and students against plain torch."""

from __future__ import annotations

import pytest
import torch
from checks import close
from torch import Tensor
from torch.nn.functional import cross_entropy

from pyrofl.models import likelihoods
from pyrofl.models.shared.distillation import (
    averaging_steps,
    cyclical,
    distil,
    predictions,
    sharpened,
)
from pyrofl.nets import Network, build
from pyrofl.tensors import Tensors, generator

X = torch.randn(50, 4, generator=generator(1), dtype=torch.float64)


def network(spec: str = "mlp:5") -> tuple[Network, Tensors, Tensors]:
    """Return a network, one set of weights and three others."""
    net = build(spec, (4,), 3)
    start = {n: v.double() for n, v in net.init(generator(2)).items()}
    drawn = {
        n: torch.randn(3, *s, generator=generator(3), dtype=torch.float64)
        for n, s in net.shapes.items()
    }
    return net, start, drawn


def test_two_teachers_by_hand():
    net = build("softmax", (2,), 2)
    weight = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 2.0], [0.0, 0.0]]]).double()
    models = {"head.weight": weight, "head.bias": torch.zeros(2, 2).double()}
    found = predictions(net, models, torch.tensor([[1.0, 1.0], [2.0, 0.0]]).double())
    # Logits of the first class: 1 and 2; 2 and 0.
    close(found[:, :, 0], [[0.7310586, 0.8807971], [0.8807971, 0.5]], 1e-7)
    close(found.sum(-1), torch.ones(2, 2))
    close(found.mean(0)[:, 0], [0.8059279, 0.6903985], 1e-7)


def test_predictions_of_many_rows_are_those_of_few():
    net, _, models = network()
    rows = X.repeat(11, 1)  # more than are predicted at once
    whole = predictions(net, models, rows)
    assert whole.shape == (3, 550, 3)
    close(whole[:, :50], whole[:, 500:])


def test_sharpening():
    probs = torch.rand(20, 4, generator=generator(4), dtype=torch.float64)
    probs /= probs.sum(1, keepdim=True)
    close(sharpened(probs), probs.square() / probs.square().sum(1, keepdim=True))
    close(sharpened(probs).sum(1), torch.ones(20))
    close(sharpened(probs, 1.0), probs)
    assert torch.equal(sharpened(probs).argmax(1), probs.argmax(1))
    one_hot = torch.eye(4).double()[probs.argmax(1)]
    close(sharpened(probs, 1e-5), one_hot, 1e-9)
    close(sharpened(one_hot), one_hot)


def test_the_papers_schedule():
    assert averaging_steps(1580, 25) == list(range(275, 1576, 25))
    assert len(averaging_steps(1580, 25)) == 53
    assert cyclical(1, 25, 1e-3, 4e-4) == pytest.approx(9.76e-4)
    assert cyclical(25, 25, 1e-3, 4e-4) == cyclical(275, 25, 1e-3, 4e-4) == pytest.approx(4e-4)
    assert cyclical(26, 25, 1e-3, 4e-4) == cyclical(1, 25, 1e-3, 4e-4)


def test_a_short_budget_starts_sooner_and_a_shorter_one_takes_the_end():
    assert averaging_steps(316, 25) == list(range(75, 301, 25))
    assert averaging_steps(24, 25) == [24]
    assert averaging_steps(0, 25) == [0]


@pytest.mark.parametrize("swa", [True, False])
def test_students_against_plain_torch(swa):
    net, start, models = network()
    target = predictions(net, models, X).mean(0)
    options = {"epochs": 6, "batch": 20, "lr": 0.5, "lr_end": 0.2, "cycle": 4, "momentum": 0.9}
    found = distil(net, start, X, target, generator(5), swa=swa, **options)
    w = {n: v.clone().requires_grad_() for n, v in start.items()}
    optimizer = torch.optim.SGD(w.values(), 0.5, 0.9)
    rng, i, kept = generator(5), 0, []
    for _ in range(6):
        for rows in torch.randperm(50, generator=rng).split(20):
            i += 1
            if swa:
                share = ((i - 1) % 4 + 1) / 4
                optimizer.param_groups[0]["lr"] = 0.5 * (1 - share) + 0.2 * share
            optimizer.zero_grad()
            cross_entropy(net.apply(w, X[rows]), target[rows]).backward()
            optimizer.step()
            if swa and i in (4, 8, 12, 16):  # of 18 steps, after the first 2
                kept.append({n: v.detach().clone() for n, v in w.items()})
    expected = {n: torch.stack([k[n] for k in kept]).mean(0) for n in w} if swa else w
    for n, value in expected.items():
        close(found[n], value.detach())


@pytest.mark.parametrize("swa", [True, False])
def test_who_learns_from_itself_stays(swa):
    net, start, _ = network()
    target = predictions(net, {n: v[None] for n, v in start.items()}, X)[0]
    found = distil(net, start, X, target, generator(5), swa=swa, lr=0.1, lr_end=0.1, batch=16)
    for n, value in start.items():
        close(found[n], value, 1e-10)
    nobody = distil(net, start, X, target[:, [1, 2, 0]], generator(5), swa=swa, epochs=0)
    for n, value in start.items():
        assert torch.equal(nobody[n], value)


def test_students_come_near_their_teachers():
    net, start, models = network()
    target = predictions(net, models, X).mean(0)

    def gap(weights: Tensors) -> float:
        mine = predictions(net, {n: v[None] for n, v in weights.items()}, X)[0]
        return float((mine - target).square().mean())

    found = distil(net, start, X, target, generator(5), epochs=60, lr=0.1, lr_end=0.04, batch=10)
    assert gap(found) < 0.1 * gap(start)


def test_rows_are_augmented_and_targets_are_not():
    net, start, models = network()
    target = predictions(net, models, X).mean(0)

    def noisy(x: Tensor, rng: torch.Generator) -> Tensor:
        return x + torch.randn(x.shape, generator=rng, dtype=x.dtype)

    plain, one, other = (
        distil(net, start, X, target, generator(5), epochs=2, batch=16, **options)
        for options in ({}, {"augment": noisy}, {"augment": noisy})
    )
    assert not torch.equal(plain["head.bias"], one["head.bias"])
    assert torch.equal(one["head.bias"], other["head.bias"])


def test_yes_or_no_can_be_learned_and_measurements_cannot():
    net = build("mlp:5", (4,), 1)
    start = {n: v.double() for n, v in net.init(generator(2)).items()}
    models = {n: v[None] for n, v in start.items()}
    both = predictions(net, models, X, likelihoods.bernoulli)[0]
    close(both[:, 1], net.apply(start, X)[:, 0].sigmoid())
    close(both.sum(1), torch.ones(50))
    options = {"likelihood": likelihoods.bernoulli, "lr": 1.0, "epochs": 40}
    found = distil(net, start, X, both[:, [1, 0]], generator(5), **options)
    assert (net.apply(found, X)[:, 0] * net.apply(start, X)[:, 0]).mean() < 0
    with pytest.raises(ValueError, match="likelihood is Normal; expected one with finitely many"):
        predictions(net, models, X, likelihoods.normal())


def test_groupnorm_students_learn():
    net = build("cnn-fedbe-gn", (1, 18, 18), 3)
    start = net.init(generator(2))
    x = torch.randn(6, 1, 18, 18, generator=generator(3))
    target = torch.eye(3)[torch.arange(6) % 3]
    found = distil(net, start, x, target, generator(5), epochs=1)
    assert set(found) == set(net.shapes)
    assert not torch.equal(found["norm1.weight"], start["norm1.weight"])
