"""Local training is each client's own, step for step what plain torch does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyro
import pytest
import torch
import toys
from checks import MEAN, TRAINED
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pyrofl.data import Batch, Federation
from pyrofl.inference.acceleration import grouped_training as training
from pyrofl.inference.acceleration import groups
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import adam, clipped, sgd
from pyrofl.inference.definition.programs import Program
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.training.phases import train
from pyrofl.inference.training.schedules import make_schedule
from pyrofl.models import fedavg, pfedvem
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, generator, role, spread_out, under

SEED, NUMBER = 11, 4
AT = {"seed": SEED, "number": NUMBER}


def together(
    method: Method, data: Federation, ids: list[int], phases: tuple[Phase, ...] | None = None
) -> tuple[Tensors, Tensors]:
    """Train some clients from the same random weights."""
    cohort = toys.who(data, *ids)
    start = under("w", toys.net().init(generator(9)))
    received = {n: v.to(data.dtype) for n, v in spread_out(start, len(ids)).items()}
    local, loss, *_ = train(
        method, received, dict(received), data, cohort, seed=SEED, number=NUMBER, phases=phases
    )
    return local, loss


def by_torch(
    data: Federation,
    client: int,
    optim: Callable[[list[Tensor]], torch.optim.Optimizer],
    epochs: int,
    batch: int | None,
    clip: float | None = None,
) -> Tensors:
    """Train one client with nothing but torch, on the same minibatches."""
    module = toys.net().module.to(data.dtype)
    weights = {n: v.to(data.dtype) for n, v in toys.net().init(generator(9)).items()}
    module.load_state_dict(weights)
    optimizer = optim(list(module.parameters()))
    order = stream(SEED, Stream.ORDER, NUMBER, data.names[client])
    schedule = make_schedule([data.train[client]], [epochs], batch, [order])
    for rows, mask in zip(schedule.rows[:, 0], schedule.mask[:, 0], strict=True):
        optimizer.zero_grad()
        cross_entropy(module(data.x[rows[mask]]), data.y[rows[mask]]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return under("w", {n: p.detach() for n, p in module.named_parameters()})


OPTIMS: dict[str, tuple[Any, Any, float | None]] = {
    "sgd": (sgd(0.1), lambda p: torch.optim.SGD(p, lr=0.1), None),
    "momentum": (
        sgd(0.1, 0.9, clip=0.4),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        0.4,
    ),
    "adam": (clipped(adam(0.02), 0.4), lambda p: torch.optim.Adam(p, lr=0.02), 0.4),
}


@pytest.mark.parametrize("batch", [None, 6])
@pytest.mark.parametrize("optim", OPTIMS)
def test_ragged_clients_train_as_plain_torch_would(blobs, optim, batch):
    ours, theirs, clip = OPTIMS[optim]
    method = fedavg.build(toys.net(), epochs=3, batch=batch)
    step = replace(method.phases[0].updates[0], optim=ours)
    local, _ = together(method, blobs, [0, 1, 3, 8], (Phase((step,), 3, batch),))
    for c, i in enumerate([0, 1, 3, 8]):
        alone = by_torch(blobs, i, theirs, 3, batch, clip)
        toys.assert_same({n: v[c] for n, v in local.items()}, alone, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("batch", [None, 6])
def test_groups_of_wide_networks_train_as_one(blobs, batch, monkeypatch):
    method = fedavg.build(toys.net(), epochs=3, batch=batch, lr=0.1, momentum=0.5)
    whole, loss = together(method, blobs, [0, 1, 3, 8])
    counts, split = list[int](), training.groups_of_wide

    def count(*given: Any) -> list[Tensor]:
        counts.append(len(split(*given)))
        return split(*given)

    monkeypatch.setattr(training, "groups_of_wide", count)
    monkeypatch.setattr(groups, "STEP_COST_PRODUCTS", 0)
    monkeypatch.setattr(groups, "CACHED_BYTES", 1)
    monkeypatch.setattr(training, "CACHED_STEPS", 0)
    parts, loss_of_parts = together(method, blobs, [0, 1, 3, 8])
    assert counts == [4, 4]
    toys.assert_same(parts, whole, rtol=1e-12, atol=1e-13)
    toys.assert_same(loss_of_parts, loss, rtol=1e-12, atol=1e-13)


def test_groups_fit_the_cache_if_their_steps_are_soon_recorded(blobs, monkeypatch):
    modified = list[int]()
    split = training.groups_of_wide

    def watch(sizes: Tensor, entries: int, size: int) -> list[Tensor]:
        modified.append(size)
        return split(sizes, entries, size)

    monkeypatch.setattr(training, "groups_of_wide", watch)
    own = fedavg.build(
        toys.net(), epochs=100, likelihood=lambda o, x: toys.half_square(o[..., 0], x)
    )
    for method in (fedavg.build(toys.net(), epochs=100), fedavg.build(toys.net(), epochs=1), own):
        together(method, blobs, [0, 1])
    weights = sum(shape.numel() for shape in toys.net().shapes.values())
    momentum = 2
    assert modified == [*(2 * [8 * momentum * weights]), 0, 0, 0, 0]


class Exact(nn.Module):
    """A network whose sums have one term each, so that rounding cannot differ."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.w


def test_one_client_of_one_row_is_sgd_to_the_last_bit():
    x, y = torch.tensor([[0.37], [-1.21]]), torch.tensor([0.9, 2.3])
    data = Federation(x, y, (torch.arange(2),), (torch.arange(0),))
    method = fedavg.build(
        Network(Exact()), likelihood=toys.half_square, epochs=7, batch=1, lr=0.1, momentum=0.9
    )
    *_, state = federate(method, data, 1, seed=SEED, server_state={"w/w": torch.tensor([0.2])})
    w = torch.tensor([0.2], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    order = stream(SEED, Stream.ORDER, 0, data.names[0])
    for rows in make_schedule([data.train[0]], [7], 1, [order]).rows[:, 0]:
        optimizer.zero_grad()
        (0.5 * (y[rows] - x[rows, 0] * w).square()).sum().backward()
        optimizer.step()
    assert torch.equal(state.server["w/w"], w.detach())


def test_gradients_may_lie_in_memory_as_they_like():
    # Fused optimizers of torch go through a parameter and its gradient in step, whatever strides.
    net = Network(nn.Linear(3, 3, bias=False))
    data = Federation(torch.eye(3), torch.zeros(3), (torch.arange(3),) * 2, (torch.arange(0),) * 2)
    target, calls = torch.randn(2, 3, 3, generator=generator(4)), []

    def loss(
        model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        calls.append(0)
        w = local["w/weight"]
        gap = [w - target, w.mT - target.mT, (w - target).clone(), w.mT.mT - target]
        part = gap[len(calls) % 4].square().mul(0.5)
        return (part.mT.contiguous() if len(calls) % 3 else part).sum((1, 2))

    step = GradientStep("w/*", sgd(0.1, 0.9), loss)
    method = replace(fedavg.build(net), phases=(Phase((step,), epochs=9),))
    w = torch.randn(3, 3, generator=generator(5))
    received = {"w/weight": w.expand(2, 3, 3)}
    local, *_ = train(method, received, received, data, data.cohort(torch.arange(2)), **AT)
    expected, speed = w.expand(2, 3, 3).clone(), torch.zeros(2, 3, 3)
    for _ in range(9):
        speed = 0.9 * speed + expected - target
        expected = expected - 0.1 * speed
    torch.testing.assert_close(local["w/weight"], expected)


def test_an_optimizer_is_given_gradients_that_lie_as_its_parameters_do():
    lying = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            ps = self.param_groups[0]["params"]
            lying.extend((p.stride(), p.grad.stride()) for p in ps)

    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        return Watched(params, lr=0.1)

    def loss(
        model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        w = local["w/weight"]
        rows = torch.ones(len(w), 2, 3)
        return (torch.bmm(rows, w.mT) if len(lying) % 2 else w + 0.0).sum((1, 2))

    net = Network(nn.Linear(3, 4, bias=False))
    data = Federation(torch.eye(3), torch.zeros(3), (torch.arange(3),) * 2, (torch.arange(0),) * 2)
    method = replace(
        fedavg.build(net), phases=(Phase((GradientStep("w/*", make, loss),), epochs=4),)
    )
    received = {"w/weight": torch.ones(2, 4, 3)}
    train(method, received, received, data, data.cohort(torch.arange(2)), **AT)
    assert len(lying) == 4
    assert all(p == grad for p, grad in lying)


def test_two_steps_may_move_one_tensor():
    data = toys.blobs((6, 9))
    target = torch.randn(2, 48, generator=generator(4), dtype=torch.float64)

    def pull(
        model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        gap = local["w/fc1.weight"].flatten(1) - target[: len(batch)]  # its gradient lies in order
        return 0.5 * gap.square().sum(1)

    def after(**options: Any) -> Tensors:
        make = sgd(0.1, 0.9, **options)
        moves = GradientStep("w/*", make), GradientStep("w/fc1.weight", make, pull)
        phases = (Phase(moves, epochs=3, batch=4),)
        return together(fedavg.build(toys.net()), data, [0, 1], phases)[0]

    toys.assert_same(after(), after(fused=False), terms=TRAINED)


# Full batches are padded in groups.


def counts(data: Federation, phases: tuple[Phase, ...], ids: list[int]) -> Tensors:
    """Run phases on clients that begin with the number of their place."""
    method, cohort = fedavg.build(toys.net()), toys.who(data, *ids)
    local = {"z": torch.tensor(ids).double(), "other": torch.ones(len(ids), 2).double()}
    return train(method, {}, local, data, cohort, phases=phases, **AT)[0]


@pytest.mark.parametrize("worth", [0, 10**9])
def test_what_is_known_of_rows_outlives_its_group(worth, monkeypatch):
    def label(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        cross = batch.mask[:, :, None] * batch.mask[:, None] * batch.y[:, None]
        return {"rows": (1.0 + batch.y) * batch.mask, "cross": cross}

    def pass_by(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        seen = (batch.take_rows(local["rows"]) - batch.y - 1) * batch.mask
        return {"z": local["z"] + seen.abs().sum(1)}

    def compare(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        seen = (local["rows"] - batch.y) * batch.mask
        return {"z": local["z"] + seen.sum(1) + (local["cross"].shape[1] - batch.y.shape[1])}

    monkeypatch.setattr(groups, "STEP_COST_ROWS", worth)
    data, ids = toys.blobs(), [8, 0, 3, 1]  # of several sizes, the largest not first
    phases = Phase((label,)), Phase((pass_by,), batch=2), Phase((compare,))
    local = counts(data, phases, ids)
    sizes = data.sizes[ids]
    assert local["z"].tolist() == (torch.tensor(ids) + sizes).tolist()
    assert local["rows"].shape == (4, int(sizes.max()))
    assert local["cross"].shape == (4, int(sizes.max()), int(sizes.max()))
    for c, i in enumerate(ids):
        expected = 1.0 + data.y[data.train[i]]
        assert torch.equal(local["rows"][c, : len(expected)], expected)
        assert not local["rows"][c, len(expected) :].any()


@pytest.mark.parametrize("worth", [0, 10**9])
def test_a_group_without_a_step_keeps_what_it_has(worth, monkeypatch):
    monkeypatch.setattr(groups, "STEP_COST_ROWS", worth)
    data, ids = toys.blobs(), [8, 0, 3, 1]

    def add(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        return {"z": local["z"] + 1}

    some = Phase((add,), epochs=lambda ids: 2 * (ids == 3).long())
    assert counts(data, (some,), ids)["z"].tolist() == [8, 0, 5, 1]

    def invent(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        return {"new": local["z"]}

    with pytest.raises(ValueError, match="a step in this phase would lack 'new'"):
        counts(data, (replace(some, updates=(invent,)),), ids)


def test_groups_may_differ_in_rows_only(monkeypatch):
    monkeypatch.setattr(groups, "STEP_COST_ROWS", 0)

    def odd(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        return {"odd": batch.x[:, 1:]}

    with pytest.raises(ValueError, match=r"'odd' has shapes .* they may only differ in"):
        counts(toys.blobs(), (Phase((odd,)),), [8, 0, 3, 1])


def test_moves_may_swap_tensors():
    def swap(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        return {"a": local["b"], "b": local["a"]}

    def add(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        return {"a": local["a"] + 1}

    data, ids = toys.blobs(), [0, 1]
    local = {"a": torch.zeros(2), "b": torch.full((2,), 10.0)}
    for epochs, a, b in (
        ([1, 1], [11, 11], [0, 0]),
        ([3, 2], [12, 1], [1, 11]),
        ([2, 1], [1, 11], [11, 0]),
    ):
        phase = Phase((swap, add), epochs=lambda ids, epochs=epochs: torch.tensor(epochs))
        found, *_ = train(
            fedavg.build(toys.net()),
            {},
            local,
            data,
            toys.who(data, *ids),
            phases=(phase,),
            **AT,
        )
        assert (found["a"].tolist(), found["b"].tolist()) == (a, b)
    assert local["a"].tolist() == [0, 0]


# Stragglers.


def epochs_of(ids: Tensor) -> Tensor:
    return ids % 4


@pytest.mark.parametrize("optim", OPTIMS)
def test_epochs_may_depend_on_the_client(blobs, optim):
    ours, theirs, clip = OPTIMS[optim]
    method = fedavg.build(toys.net())
    step = replace(method.phases[0].updates[0], optim=ours)
    ids = [1, 3, 4, 6, 8, 10]
    local, losses = together(method, blobs, ids, (Phase((step,), epochs_of, 6),))
    for c, i in enumerate(ids):
        alone = by_torch(blobs, i, theirs, i % 4, 6, clip)
        toys.assert_same({n: v[c] for n, v in local.items()}, alone, rtol=1e-9, atol=1e-11)
    worked = torch.tensor([i % 4 > 0 for i in ids])
    assert torch.equal(losses["w/*"] != 0, worked)


@pytest.mark.parametrize("chunk_size", [1, 3, 12])
def test_a_chunk_of_clients_without_a_step_reports_all_the_same(blobs, chunk_size):
    method = toys.trained(toys.FAMILIES["mean_field"], blobs, epochs=epochs_of)
    one, two = (toys.last(method, blobs, rounds=2, chunk_size=c) for c in (chunk_size, 12))
    toys.assert_same_round(one, two, rtol=1e-9, atol=1e-10)
    assert (one.loss["mu/* pi/*"][epochs_of(torch.arange(12)) == 0] == 0).all()


def test_nobody_makes_a_step(blobs):
    method = fedavg.build(toys.net(), epochs=0)
    first, second = federate(method, blobs, 2)
    assert torch.equal(first.loss["w/*"], torch.zeros(12, dtype=torch.float64))
    toys.assert_same(second.server, first.server, terms=MEAN)


@pytest.mark.parametrize("epochs", [torch.tensor([1, -1]), torch.tensor([1])])
def test_epochs_must_be_one_number_for_each_client(blobs, epochs):
    method = fedavg.build(toys.net())
    phase = Phase(method.phases[0].updates, lambda _: epochs)
    with pytest.raises(ValueError, match=r"epochs .* expected (integers >= 0|a tensor)"):
        together(method, blobs, [0, 1], (phase,))


def test_step_that_moves_nothing_is_refused(blobs):
    method = fedavg.build(toys.net())
    with pytest.raises(ValueError, match="no local tensor matches 'v/\\*'; expected patterns of"):
        together(method, blobs, [0], (Phase((GradientStep("v/*", sgd(0.1)),)),))


# Steps and closed forms.


def count_rows(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    seen = local.get("seen", torch.zeros(len(batch)))
    return {"seen": seen + batch.mask.sum(1), "visits": local.get("visits", 0 * seen) + 1}


def forget(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    return {"seen": torch.zeros(len(batch)), "visits": torch.zeros(len(batch))}


def halve(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    return {n: v / 2 for n, v in local.items()}


def late(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    return {"new": torch.ones(len(batch))} if len(batch) == 1 else {}


def test_closed_forms_run_on_every_minibatch(blobs):
    method = fedavg.build(toys.net())
    phases = (Phase((forget,)), Phase((count_rows,), epochs_of, 6))
    ids = [1, 2, 3, 4, 7]
    local, losses = together(method, blobs, ids, phases)
    sizes = blobs.sizes[ids]
    epochs = epochs_of(torch.tensor(ids))
    assert torch.equal(local["seen"], (sizes * epochs).float())
    assert torch.equal(local["visits"], ((sizes + 5) // 6 * epochs).float())
    assert losses == {}


def test_closed_form_may_exchange_two_tensors(blobs):
    def exchange(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        return {"a": local["b"], "b": local["a"]}

    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    method = fedavg.build(toys.net())
    for times, (first, second) in {1: (b, a), 2: (a, b), 3: (b, a)}.items():
        local, *_ = train(
            method,
            {},
            {"a": a, "b": b},
            blobs,
            toys.who(blobs, 0, 6),
            seed=0,
            number=0,
            phases=(Phase((exchange,), times),),
        )
        assert torch.equal(local["a"], first)
        assert torch.equal(local["b"], second)
    assert a.tolist() == [1, 2]


def test_closed_form_and_step_move_the_same_tensor_in_turn(blobs):
    method = fedavg.build(toys.net())
    step = replace(method.phases[0].updates[0], optim=sgd(0.1))
    both, _ = together(method, blobs, [0, 1], (Phase((step, halve), 2),))
    apart = tuple(Phase((m,)) for m in (step, halve, step, halve))
    turns, _ = together(method, blobs, [0, 1], apart)
    toys.assert_same(both, turns, terms=TRAINED)


def test_new_name_needs_every_client(blobs):
    method = fedavg.build(toys.net())
    with pytest.raises(ValueError, match="without a step in this phase would lack 'new'"):
        together(method, blobs, [0, 1], (Phase((late,), 1, 6),))


def test_step_may_be_repeated(blobs):
    method = fedavg.build(toys.net())
    step = replace(method.phases[0].updates[0], optim=sgd(0.1))
    thrice, loss = together(method, blobs, [0, 1], (Phase((replace(step, num_steps=3),)),))
    steps = together(method, blobs, [0, 1], (Phase((step,), 3),))
    toys.assert_same(thrice, steps[0], terms=TRAINED)
    toys.assert_same(loss, steps[1], rtol=1e-12)


def test_loss_is_the_mean_over_steps(blobs):
    method = fedavg.build(toys.net())
    step = replace(method.phases[0].updates[0], optim=sgd(0.0))
    local, loss = together(method, blobs, [0, 1], (Phase((step,), 3),))
    batch = blobs.batch(torch.tensor([0, 1]))
    weights = {n: v.unsqueeze(1) for n, v in role("w", local).items()}
    outputs = toys.net()(weights, batch.x)
    exact = torch.stack(
        [cross_entropy(outputs[c, :size], batch.y[c, :size]) for c, size in enumerate((3, 40))]
    )
    torch.testing.assert_close(loss["w/*"], exact, rtol=1e-12, atol=0)


def test_only_the_named_tensors_move(blobs):
    method = fedavg.build(toys.net())
    step = replace(method.phases[0].updates[0], names="w/head.*")
    local, _ = together(method, blobs, [0, 1], (Phase((step,), 2, 6),))
    start = under("w", toys.net().init(generator(9)))
    for n, v in local.items():
        assert torch.equal(v, start[n].double().expand_as(v)) == ("head" not in n)


def test_pyros_validation_is_given_back(blobs):
    was = pyro.settings.get("validate_distributions_pyro")
    together(fedavg.build(toys.net(), epochs=1), blobs, [0])
    assert pyro.settings.get("validate_distributions_pyro") == was


def test_two_steps_may_move_the_same_tensors(blobs):
    """Steps that take turns on one set of weights are one step taken twice."""
    net = toys.net()
    method = fedavg.build(net, momentum=0.0)
    (phase,) = method.phases
    (step,) = phase.updates
    twice = replace(method, phases=(replace(phase, updates=(step, step)),))
    repeated = replace(method, phases=(replace(phase, updates=(replace(step, num_steps=2),)),))
    toys.assert_same(
        toys.last(twice, blobs).server, toys.last(repeated, blobs).server, rtol=1e-9, atol=1e-12
    )


def test_tensors_of_a_round_are_freed_with_it(blobs):
    """None is in a reference cycle, where it would stay until the garbage is collected."""
    rounds = federate(pfedvem.build(toys.net()), blobs, 3, chunk_size=2)
    next(rounds)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        next(rounds)
        gc.collect()
        assert not [one for one in gc.garbage if isinstance(one, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
