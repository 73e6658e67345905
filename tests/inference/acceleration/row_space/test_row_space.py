"""The first layer in the space of a client's rows: the same steps, and when they are taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pyro.distributions as dist
import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from promises import others_slow
from torch import Size, nn

from pyrofl.data import Batch
from pyrofl.inference.acceleration import grouped_training as training
from pyrofl.inference.acceleration import groups
from pyrofl.inference.acceleration.row_space import first_layer as layers
from pyrofl.inference.acceleration.row_space import rewriting
from pyrofl.inference.acceleration.row_space.first_layer import RowLayer, first_layer
from pyrofl.inference.acceleration.row_space.rewriting import pays, rewrite_for_few_rows
from pyrofl.inference.definition.elbo import TransformedLoss, elbo
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import adam, sgd
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import bernoulli
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import client_inputs
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.models import (
    apfl,
    ditto,
    fedavg,
    fedbabu,
    fedper,
    fedprox,
    guides,
    ifca,
    local,
    perfedavg,
    pfedme,
    pfedvem,
    scaffold,
)
from pyrofl.models.priors import by_name, fixed, proximal
from pyrofl.models.shared.meta_gradients import Maml
from pyrofl.nets import Network, build
from pyrofl.tensors import Tensors

TAKEN = {
    **{m.__name__.split(".")[-1]: m.build for m in (fedavg, fedbabu, fedper, local, pfedvem)},
    "decay": partial(fedavg.build, weight_decay=0.1),
    "apfl": partial(apfl.build, momentum=0.5),
    "fedprox": fedprox.build,
    "fedprox, a sum": lambda *args, **kwargs: summed(fedprox.build(*args, mu=0.01, **kwargs)),
    "fedprox with decay": partial(fedprox.build, mu=0.5, weight_decay=0.1, momentum=0.0),
    "ditto": ditto.build,
    "ditto with decay": partial(ditto.build, weight_decay=0.1, momentum=0.5),
    "pfedme": partial(pfedme.build, lr=0.01, steps=3),
    "pfedme with decay": partial(pfedme.build, lr=0.01, steps=2, momentum=0.5, weight_decay=0.1),
    "scaffold": scaffold.build,
    "scaffold with momentum": partial(scaffold.build, momentum=0.5, weight_decay=0.1, option="I"),
    "ifca": ifca.build,
    "perfedavg": perfedavg.build,
    "perfedavg, exact": partial(perfedavg.build, order="exact", momentum=0.5),
    "perfedavg, first": partial(perfedavg.build, order="first", weight_decay=0.1),
    "by name": partial(fedavg.build, prior=by_name({"head.*": fixed(), "*": proximal(0.3)})),
}


def short(method: Method) -> bool:
    """Say whether a phase of the method is cut short in the space of rows."""
    data = toys.blobs()
    received, private = client_inputs(
        method, data, first(method, data, 0), data.cohort(torch.arange(12)), 0
    )
    return any(
        rewrite_for_few_rows(method, phase, received, private | received, data)
        for phase in method.phases
    )


def without(method: Method) -> Method:
    """Hide what the model is, so that every phase runs as it is written."""
    return replace(method, model=lambda *args: method.model(*args))


@pytest.fixture
def always(monkeypatch) -> list[int]:
    """Let it always pay; return the number of rows of each product."""
    seen: list[int] = []
    apply = RowLayer.apply

    def counted(*given):
        seen.append(given[3].shape[1])  # products
        return apply(*given)

    monkeypatch.setattr(RowLayer, "apply", counted)
    monkeypatch.setattr(rewriting, "pays", lambda *_: True)
    return seen


WAYS = [(name, 5, 0) for name in TAKEN]
WAYS += [(name, *way) for name in ("fedavg", "pfedme") for way in ((None, 2000), (1, 0))]


@pytest.mark.parametrize(("name", "chunk_size", "worth"), others_slow(WAYS, WAYS[::4]))
def test_the_same_steps_are_made(name, chunk_size, worth, always, monkeypatch):
    monkeypatch.setattr(groups, "STEP_COST_ROWS", worth)  # 0: a group for every size
    monkeypatch.setattr(training, "ROW_SPACE_STEP_COST_ROWS", worth)
    method, data = TAKEN[name](toys.net("mlp:7,6"), batch=4), toys.blobs()
    cohort = bernoulli(0.5)
    one = list(federate(method, data, 2, participation=cohort, chunk_size=chunk_size))
    assert max(always) == max(toys.SIZES)
    assert 40 in always, "the longest client must have been trained in the space of its rows"
    monkeypatch.setattr(rewriting, "ENABLED", False)
    always.clear()
    other = federate(method, data, 2, participation=cohort, chunk_size=chunk_size)
    for short, long in zip(one, other, strict=True):
        toys.assert_same_round(short, long, rtol=1e-9, atol=1e-11)
    assert not always


@given(
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    epochs=st.integers(1, 4),
    batch=st.integers(1, 50),
    hidden=st.integers(1, 20),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=10, deadline=None)
def test_any_schedule_makes_the_same_steps(momentum, epochs, batch, hidden, bias, seed):
    layers = [nn.Flatten(), nn.Linear(8, hidden, bias), nn.Tanh(), nn.Linear(hidden, 5)]
    net, data = Network(nn.Sequential(*layers)), toys.blobs((3, 17, 1, 9))
    method = fedavg.build(net, momentum=momentum, epochs=epochs, batch=batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewriting, "pays", lambda *_: True)
        one = next(federate(method, data, 1, seed=seed))
    other = next(federate(without(method), data, 1, seed=seed))
    toys.assert_same_round(one, other, rtol=1e-8, atol=1e-10)


def test_the_weight_moves_along_the_rows_alone(always):
    state = next(federate(fedavg.build(toys.net()), data := toys.blobs(), 1))
    start = next(federate(fedavg.build(toys.net(), epochs=0), data, 1)).server["w/fc1.weight"]
    moved = state.message["w/fc1.weight"] - start
    assert always
    for own, change in zip(data.train, moved, strict=True):
        x = data.x[own]
        along = change @ torch.linalg.pinv(x) @ x
        torch.testing.assert_close(along, change, rtol=1e-8, atol=1e-10)
        assert len(own) >= 8 or torch.linalg.matrix_rank(change) <= len(own)


@pytest.mark.parametrize("outputs_alone", [True, False])
def test_rows_are_fetched_for_a_likelihood_that_looks_at_them(outputs_alone, always, monkeypatch):
    seen: list[int] = []
    real = layers.RowSpaceWeights.__call__

    def called(self, model, received, local, batch):
        seen.append(batch.x.shape[2] if batch.x.dim() > 2 else 0)
        return real(self, model, received, local, batch)

    def likelihood(outputs, x):
        return dist.Categorical(logits=outputs if outputs_alone else outputs * (1 + x[..., :1]))

    monkeypatch.setattr(layers.RowSpaceWeights, "__call__", called)
    method = fedavg.build(toys.net(), likelihood=likelihood)
    one = next(federate(method, toys.blobs(), 1, check=False))
    assert always
    assert {*seen} == ({0} if outputs_alone else {8})
    toys.assert_same_round(one, next(federate(without(method), toys.blobs(), 1)), rtol=1e-9)


def test_rows_of_others_in_the_padding_do_no_harm(always):
    data = toys.blobs((3, 20, 6), torch.float32)
    x = data.x.clone()
    x[0] = 3e38  # whose products overflow, also with other rows; padding shows row 0 of the table
    method, hurt = fedavg.build(toys.net()), replace(data, x=x)
    calm, harmed = (next(federate(method, d, 1)) for d in (data, hurt))
    assert len(harmed.rejected) == 1
    assert harmed.rejected[0].startswith("client 0: ")
    for n, v in harmed.message.items():
        torch.testing.assert_close(v, calm.message[n][1:])


def test_fine_tuning_makes_the_same_steps(always):
    method, data = fedavg.build(toys.net(), fine_tune=2, batch=4), toys.blobs(held_out=2)
    state = next(federate(without(method), data, 1))
    assert not always
    plain = without(method)
    for population in ("training", "held_out"):
        short, long = (
            evaluate(m, data, state, adaptation="fine_tune", population=population)
            for m in (method, plain)
        )
        assert always
        always.clear()
        toys.assert_same(dict(short.values), dict(long.values), rtol=1e-8, atol=1e-10)


def test_clients_that_make_no_step_keep_the_weight(always):
    method = fedavg.build(toys.net(), epochs=2)
    idle = replace(method, phases=tuple(replace(p, epochs=0) for p in method.phases))
    start, after = (next(federate(m, toys.blobs(), 1)) for m in (without(idle), idle))
    toys.assert_same(after.message, start.message)
    assert not always


def seen_otherwise(method: Method) -> Method:
    """Let steps read models through a view that is not linear."""

    def view(received: Tensors, local: Tensors) -> Tensors:
        return local | {n[4:]: v + 0.1 * v**3 for n, v in local.items() if n[:4] == "own/"}

    send, keep = method.phases
    assert isinstance(send.updates[0], GradientStep)
    sent = replace(send, updates=(replace(send.updates[0], optim=adam(0.01)),))
    (step,) = keep.updates
    assert isinstance(step, GradientStep)
    assert isinstance(step.loss, TransformedLoss)
    step = replace(step, loss=replace(step.loss, view=view))
    return replace(method, phases=(sent, replace(keep, updates=(step,))))


def summed(method: Method) -> Method:
    """Let losses be totals, so that priors pull clients as hard as their rows are many."""
    (phase,) = method.phases
    (step,) = phase.updates
    assert isinstance(step, GradientStep)
    step = replace(step, loss=elbo(), optim=sgd(0.001, 0.5))
    return replace(method, phases=(replace(phase, updates=(step,)),))


def optimized_by_adam(method: Method) -> Method:
    (phase,) = method.phases
    (step,) = phase.updates
    assert isinstance(step, GradientStep)
    return replace(method, phases=(replace(phase, updates=(replace(step, optim=adam(0.1)),)),))


def clipped(method: Method) -> Method:
    """Clip the gradients of the inner step, whose norms are those of the weights."""
    (phase,) = method.phases
    (step,) = phase.updates
    assert isinstance(step, GradientStep)
    assert isinstance(step.loss, Maml)
    step = replace(step, loss=replace(step.loss, clip=1.0))
    return replace(method, phases=(replace(phase, updates=(step,)),))


@pytest.mark.parametrize(
    "make",
    [
        lambda: fedavg.build(toys.net(), prior=fixed()),
        lambda: clipped(perfedavg.build(toys.net())),
        lambda: scaffold.build(toys.net(), prior=fixed()),
        lambda: fedprox.build(toys.net(), prior=dist.Laplace),
        lambda: seen_otherwise(ditto.build(toys.net())),
        lambda: fedavg.build(toys.net(), guide=guides.mean_field),
        lambda: fedavg.build(toys.net("softmax")),
        lambda: pfedvem.build(toys.net(), head="*", init_scale=0.1),
        lambda: pfedvem.build(toys.net(), head="fc1.*"),
        lambda: optimized_by_adam(fedavg.build(toys.net())),
    ],
    ids=[
        "prior",
        "clip",
        "scaffold",
        "laplace",
        "view",
        "guide",
        "softmax",
        "bayes",
        "first",
        "adam",
    ],
)
def test_where_the_steps_would_differ_none_is_cut_short(make: Callable[[], Method], always):
    method = make()
    assert not short(method)
    state = next(federate(method, toys.blobs(), 1, chunk_size=4))
    assert not always
    assert not state.rejected


def test_updates_that_may_read_rows_or_the_layer_are_left_alone(always):
    method = scaffold.build(toys.net(), batch=4)
    start, train, finish = method.phases
    step, count = train.updates

    def by_weight(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        return {"steps": local["steps"] + local["w/fc1.weight"].isfinite().flatten(1).any(1)}

    for update in (by_weight, lambda *args: count(*args)):
        phases = (start, replace(train, updates=(step, update)), finish)
        state = next(federate(replace(method, phases=phases), toys.blobs(), 1))
        assert not always
        toys.assert_same_round(state, next(federate(method, toys.blobs(), 1)), 1e-9, 1e-11)
        assert always
        always.clear()


def test_rows_that_are_no_vectors_or_of_16_bits_are_left_alone(always):
    layers = [nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5)]
    data = toys.blobs()
    for net, rows in (
        (Network(nn.Sequential(*layers)), replace(data, x=data.x.view(-1, 2, 4))),
        (toys.net(), replace(data, x=data.x.bfloat16())),
    ):
        state = next(federate(fedavg.build(net), rows, 1))
        assert not state.rejected
    assert not always


class Tripled(Network):
    """Not what its layers are."""

    def __call__(self, weights, x):
        return 3 * super().__call__(weights, x)


class Alike:
    """What behaves like a network."""

    def __init__(self, net: Network) -> None:
        self.shapes, self.init, self.run = net.shapes, net.init, net

    def __call__(self, weights, x):
        return self.run(weights, x)


def test_networks_that_compute_something_else_are_never_cut(always):
    layers = toys.net().module
    assert Tripled(layers).split("head.*") is None
    assert Network(layers).split("head.*") is not None
    states = [
        next(federate(fedavg.build(net), toys.blobs(), 1))
        for net in (Tripled(layers), Alike(Tripled(layers)), Alike(Network(layers)))
    ]
    assert not always
    toys.assert_same_round(states[0], states[1])
    heads, whole = pfedvem.build(Tripled(layers)), Tripled(layers)
    whole.split = lambda names: None
    found, expected = (next(federate(m, toys.blobs(), 1)) for m in (heads, pfedvem.build(whole)))
    toys.assert_same(found.client_states, expected.client_states)
    assert not torch.equal(states[0].server["w/fc1.weight"], states[2].server["w/fc1.weight"])


def test_nothing_of_it_stays_or_travels(always):
    method = fedavg.build(toys.net(), batch=4)
    method = replace(method, upload=lambda received, local: dict(local))
    for chunk in (None, 4):
        state = next(federate(method, toys.blobs(), 1, chunk_size=chunk))
        assert not state.rejected
        assert state.message.keys() == state.server.keys()
    assert always


def test_private_state_stays_whatever_its_name(always):
    method = fedavg.build(toys.net(), batch=4)

    def init_client(received, cohort, generator):
        return {"rows/own": cohort.ids[:, None].double()}

    state = next(federate(replace(method, init_client=init_client), toys.blobs(), 1))
    assert state.client_states.keys() == {"rows/own"}
    assert state.client_states["rows/own"][:, 0].tolist() == list(range(12))
    assert always


def test_who_replaces_a_part_gets_what_is_asked_for(always):
    method = fedavg.build(toys.net(), batch=4)
    assert short(method)
    (phase,) = method.phases

    def model(*args):
        method.model(*args)

    def guide(*args):
        method.guide(*args)

    others = [replace(method, model=model), replace(method, guide=guide)]
    moves = (*phase.updates, lambda received, local, batch: {})
    others.append(replace(method, phases=(replace(phase, updates=moves),)))
    plain = next(federate(without(method), toys.blobs(), 1))
    for other in others:
        assert not short(other)
        toys.assert_same_round(next(federate(other, toys.blobs(), 1)), plain)
    assert not always
    # Another schedule is another phase of the same steps.
    assert short(replace(method, phases=(replace(phase, epochs=1, batch=2),)))


@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_every_client_takes_its_own_way_whoever_is_beside_it(chunk_size, always, monkeypatch):
    monkeypatch.setattr(rewriting, "most_rows", lambda *_: 10)
    begun: list[list[int]] = []
    begin = layers.RowSpaceWeights.begin

    def counted(self, received, local, batch):
        begun.append(batch.mask.sum(1).tolist())
        return begin(self, received, local, batch)

    monkeypatch.setattr(layers.RowSpaceWeights, "begin", counted)
    method, data = fedavg.build(toys.net(), batch=4), toys.blobs()
    one, other = (
        next(federate(m, data, 1, chunk_size=chunk_size, check=False))
        for m in (method, without(method))
    )
    toys.assert_same_round(one, other, rtol=1e-8, atol=1e-10)
    assert sorted(n for some in begun for n in some) == sorted(n for n in toys.SIZES if n <= 10)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "epochs", "batch", "gain"),
    [  # times faster on two cores, 40 clients
        (50, 784, 100, 1, 10, 1.5),
        (50, 784, 100, 5, 10, 2.5),
        (50, 784, 100, 5, 50, 1.8),
        (50, 784, 100, 1, 50, 0.87),
        (100, 784, 100, 1, 10, 1.3),
        (200, 784, 100, 5, 10, 2.1),
        (200, 784, 100, 1, 50, 0.70),
        (250, 784, 100, 1, 10, 0.96),
        (250, 784, 100, 1, 50, 0.64),
        (250, 784, 200, 1, 10, 1.3),
        (250, 784, 30, 1, 10, 0.67),
        (400, 784, 100, 1, 10, 0.91),
        (200, 3072, 100, 5, 32, 2.5),
        (50, 170, 100, 1, 10, 0.94),
    ],
)
def test_it_is_done_where_it_was_measured_to_pay(rows, inputs, outputs, epochs, batch, gain):
    phase = Phase((GradientStep("*", adam(0.1), elbo()),), epochs, batch)
    assert pays(phase, Size((outputs, inputs)), rows) == (gain > 1)


def test_it_pays_less_with_more_rows_and_more_with_more_epochs():
    step = (GradientStep("*", adam(0.1)),)

    def at(rows: int, epochs: int) -> bool:
        return pays(Phase(step, epochs, 10), Size((100, 784)), rows)

    for epochs in range(1, 30):
        worth = [at(rows, epochs) for rows in range(1, 1000)]
        assert worth == sorted(worth, reverse=True)
        assert not any(worth[783:])
    assert all(not few or more for few, more in pairwise(at(240, e) for e in range(1, 30)))
    assert at(240, 5)
    assert not at(240, 1)
    assert not at(400, 20)  # though it would be faster: its X X' is larger than the layer
    assert not pays(Phase(step, lambda ids: ids, 10), Size((100, 784)), 1)
    assert not pays(Phase(step, 5, None), Size((100, 784)), 1)


def test_only_a_plain_linear_first_layer_is_cut_off():
    def of(*layers: nn.Module) -> layers.FirstLayer | None:
        return first_layer(Network(nn.Sequential(*layers)))

    plain = of(nn.Flatten(), nn.Linear(8, 4, bias=False), nn.ReLU(), nn.Linear(4, 3))
    assert plain is not None
    assert (plain.name, plain.bias, len(plain.below), len(plain.after)) == (
        "1.weight",
        None,
        1,
        1,
    )
    assert of(nn.Linear(8, 3)) is None
    assert of(nn.LayerNorm(8), nn.Linear(8, 3)) is None
    assert first_layer(build("cnn-pfedvem", (3, 32, 32), 10)) is None
    tied = nn.Linear(8, 8)
    assert of(tied, nn.ReLU(), tied, nn.Linear(8, 3)) is None
    hooked = nn.Linear(8, 4)
    hooked.register_forward_hook(lambda module, args, out: 2 * out)
    assert of(hooked, nn.Linear(4, 3)) is None
