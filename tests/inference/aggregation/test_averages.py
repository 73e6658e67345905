"""Closed-form server updates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys
from checks import close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyrofl.inference.definition.aggregator import descend
from pyrofl.inference.definition.averages import average, blend, weighted_mean
from pyrofl.inference.definition.optim import adam, sgd
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.start import first
from pyrofl.models import pfedvem
from pyrofl.tensors import Tensors, generator


def values(clients: int, seed: int) -> torch.Tensor:
    return torch.randn(clients, 3, 2, generator=generator(seed), dtype=torch.float64)


weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(lambda w: sum(w) > 1e-3)


@given(weight=weights, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_a_mean_is_the_sum_of_shares(weight, seed):
    value = values(len(weight), seed)
    found = weighted_mean(value, torch.tensor(weight, dtype=torch.float64))
    expected = sum(w * v for w, v in zip(weight, value, strict=True)) / sum(weight)
    torch.testing.assert_close(found, expected)
    slack = 1e-12 * value.abs().max()
    assert (found >= value.amin(0) - slack).all()
    assert (found <= value.amax(0) + slack).all()


@given(weight=weights, factor=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
def test_a_mean_ignores_the_unit_of_weights_and_the_order_of_clients(weight, factor, seed):
    value, weight = values(len(weight), seed), torch.tensor(weight, dtype=torch.float64)
    order = torch.randperm(len(weight), generator=generator(seed))
    found = weighted_mean(value, weight)
    torch.testing.assert_close(weighted_mean(value, factor * weight), found)
    torch.testing.assert_close(weighted_mean(value[order], weight[order]), found)


def test_a_client_without_weight_does_not_count():
    value = values(3, 0)
    torch.testing.assert_close(weighted_mean(value, torch.tensor([0.0, 2.0, 0.0])), value[1])


def test_single_precision_stays_so():
    found = weighted_mean(values(2, 0).float(), torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([1.0, 2.0, 3.0], r"weight has shape \(3,\); expected one per client of \(2, 3, 2\)"),
        ([[1.0], [2.0]], r"weight has shape \(2, 1\)"),
        ([1.0, -0.5], r"weights are \[1.0, -0.5\]"),
        ([0.0, 0.0], "with a positive sum"),
        ([1.0, float("inf")], "expected finite"),
        ([1.0, float("nan")], "expected finite"),
    ],
)
def test_weights_that_make_no_mean_are_refused(weight, message):
    with pytest.raises(ValueError, match=message):
        weighted_mean(values(2, 0), torch.tensor(weight))


def test_a_message_is_averaged_tensor_by_tensor():
    message = {"a": values(4, 0), "b/c": values(4, 1)[:, 0, 0]}
    weight = torch.tensor([1.0, 0.0, 2.0, 5.0])
    found = average(message, weight)
    assert set(found) == set(message)
    for n, value in message.items():
        torch.testing.assert_close(found[n], weighted_mean(value, weight))


@given(keep=st.floats(0, 1))
@settings(deadline=None, max_examples=25)
def test_a_blend_goes_part_of_the_way(keep):
    old = {"a": values(1, 0), "b": values(1, 1)}
    new = {"a": values(1, 2)}
    found = blend(old, new, keep)
    assert set(found) == {"a"}
    torch.testing.assert_close(found["a"], new["a"] + keep * (old["a"] - new["a"]))


def test_a_blend_that_keeps_nothing_needs_nothing_old():
    new = {"a": values(1, 2)}
    assert torch.equal(blend({}, new, 0.0)["a"], new["a"])


def stepped(make, steps: int, **start: Tensor) -> tuple[Tensors, Tensors]:
    """Step both ways along the same gradients: ours with its memory in a dict, torch's own."""
    gradients = [
        {n: torch.randn(v.shape, generator=generator(i), dtype=v.dtype) for n, v in start.items()}
        for i in range(steps)
    ]
    ours = dict(start)
    theirs = {n: v.clone()[None].requires_grad_() for n, v in start.items()}
    optimizer = make(list(theirs.values()))
    for gradient in gradients:
        ours |= descend(make, ours, gradient)
        for n, p in theirs.items():
            p.grad = gradient[n][None]
        optimizer.step()
    return ours, {n: p.detach()[0] for n, p in theirs.items()}


@pytest.mark.parametrize(
    "make",
    [sgd(0.3), sgd(0.3, 0.9, weight_decay=0.1), sgd(0.3, 0.9, clip=0.5), adam(0.1)],
    ids=["sgd", "momentum", "clipped", "adam"],
)
def test_the_server_steps_as_torch_does(make):
    start = {
        "a/w": torch.ones(3, 2, dtype=torch.float64),
        "a/b": torch.tensor(2.0, dtype=torch.float64),
    }
    ours, theirs = stepped(make, 4, **start)
    for n, value in theirs.items():
        close(ours[n], value)
    assert all(n.startswith("server/optim/") for n in ours.keys() - start.keys())
    assert torch.equal(start["a/w"], torch.ones(3, 2, dtype=torch.float64))


def test_the_server_steps_rightly_wherever_its_tensors_lie():
    w, slope = torch.arange(6.0).view(2, 3), torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]])
    make = sgd(0.5, 0.9)
    once = descend(make, {"w": w}, {"w": slope.mT})
    torch.testing.assert_close(once["w"], w - 0.5 * slope.mT)
    stored = {n: v.mT.contiguous().mT if v.dim() == 2 else v for n, v in once.items()}
    twice = descend(make, stored, {"w": slope.mT})
    torch.testing.assert_close(twice["w"], w - 0.5 * 2.9 * slope.mT)


def test_the_server_may_step_more_than_before():
    make, server = sgd(0.5, 0.9), {"a": torch.zeros(2), "b": torch.zeros(2)}
    server |= descend(make, server, {"a": torch.ones(2)})
    server |= descend(make, server, {"a": torch.ones(2), "b": torch.ones(2)})
    torch.testing.assert_close(server["a"], torch.full((2,), -1.45))
    torch.testing.assert_close(server["b"], torch.full((2,), -0.5))


def test_two_groups_remember_apart():
    start = {"a": torch.zeros(1), "b": torch.zeros(1), "a_b": torch.zeros(1)}
    ones = {n: torch.ones(1) for n in start}
    server = dict(start)
    for _ in range(2):
        server |= descend(sgd(1.0, 0.5), server, {"a": ones["a"]}, "server/x")
        server |= descend(sgd(1.0, 0.9), server, {"b": ones["b"], "a_b": ones["b"]}, "server/y")
    # Momentum m: steps 1 and 1 + m.
    close(torch.cat([server["a"], server["b"], server["a_b"]]), [-2.5, -2.9, -2.9], 1e-6)


def test_confidences_too_large_to_be_summed_leave_the_server_as_it_is():
    method = pfedvem.build(toys.net(), head_epochs=1, base_epochs=1)

    def upload(received: Tensors, local: Tensors) -> Tensors:
        return method.upload(received, local) | {"tau": torch.full_like(local["tau"], 3e38)}

    data = toys.blobs().to("cpu", torch.float32)
    for keep in (True, False):
        lying = replace(method, upload=upload)
        (state,) = federate(lying, data, 1, keep_messages=keep, chunk_size=3)
        assert state.rejected[0].startswith("the server: weights are [3e+38"[:25])
        toys.assert_same(state.server, first(lying, data, 0).server)
