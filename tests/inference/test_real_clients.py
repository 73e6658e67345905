"""What only several clients with their own ids and rows show, before round one."""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import promises
import pyro
import pytest
import torch
import toys
from torch import Generator, Tensor

import pyrofl
from pyrofl import models
from pyrofl.data import Batch, Cohort, Federation
from pyrofl.inference.aggregation import Aggregator, by_size
from pyrofl.inference.definition.aggregator import with_server_step
from pyrofl.inference.definition.method import GradientStep, Method, send_all
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.user_code import users_code
from pyrofl.inference.engine.start import first
from pyrofl.inference.validation import validate
from pyrofl.inference.validation.client_trials import refuse_dependent_clients, trial_federation
from pyrofl.inference.validation.variants import with_other_padding
from pyrofl.models import fedavg, pvi
from pyrofl.tensors import Tensors


def method(**changes: Any) -> Method:
    return replace(fedavg.build(toys.net(), batch=8, epochs=2), **changes)


def with_loss(change: Callable[[Tensor, Batch], Tensor], batch: int | None = 8) -> Method:
    base = method()
    (phase,) = base.phases
    (step,) = phase.updates
    assert isinstance(step, GradientStep)

    def loss(model: Any, guide: Any, received: Tensors, local: Tensors, data: Batch) -> Tensor:
        return change(step.loss(model, guide, received, local, data), data)

    own = replace(phase, updates=(replace(step, loss=loss),), batch=batch)
    return replace(base, phases=(own,))


def with_weights(change: Callable[[Tensor], Tensor]) -> Method:
    """Change the weights that the loss of FedAvg reads."""
    base = method()
    (phase,) = base.phases
    (step,) = phase.updates

    def loss(model: Any, guide: Any, received: Tensors, local: Tensors, data: Batch) -> Tensor:
        own = {n: change(v) if n == "w/head.weight" else v for n, v in local.items()}
        found: Tensor = step.loss(model, guide, received, own, data)
        return found

    return replace(base, phases=(replace(phase, updates=(replace(step, loss=loss),)),))


def with_outputs(change: Callable[[Tensor, Tensor], Tensor], batch: int | None = 8) -> Method:
    def likelihood(outputs: Tensor, x: Tensor) -> Any:
        return pyro.distributions.Categorical(logits=change(outputs, x))

    base = fedavg.build(toys.net(), batch=8, epochs=2, likelihood=likelihood)
    (phase,) = base.phases
    return replace(base, phases=(replace(phase, batch=batch),))


def mixed(value: Tensor, some: bool) -> Tensor:
    return value + 0.5 * value.mean() if some else value


def of_cohort(server: Tensors, cohort: Cohort) -> Tensors:
    factor = cohort.size.mean() / 20
    return {n: factor * v for n, v in send_all(server, cohort).items()}


def of_clients(server: Tensors, cohort: Cohort) -> Tensors:
    sent = send_all({n: v for n, v in server.items() if n != "server/own"}, cohort)
    return sent | {"w/head.bias": sent["w/head.bias"] + server["server/own"][cohort.ids].mean()}


def with_own(server: Tensors, message: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
    own = server["server/own"].clone()
    own[cohort.ids] = message["w/head.bias"][:, 0]
    return {n: v.mean(0) for n, v in message.items()} | {"server/own": own}


def personal(generator: Generator, clients: int) -> Tensors:
    return method().init(generator, clients) | {"server/own": torch.zeros(clients)}


MIXING = {
    "mixing from three clients on": with_loss(lambda v, b: mixed(v, len(b) > 2)),
    "mixing for some ids": with_loss(lambda v, b: mixed(v, bool((b.ids > 3).any()))),
    "means of sizes": with_loss(lambda v, b: v * b.size / b.size.max()),
    "padded width": with_loss(lambda v, b: v / b.x.shape[1]),
    "padded width of all rows": with_loss(lambda v, b: v / b.x.shape[1], None),
    "branch on all rows": with_outputs(lambda o, x: o * (2 if bool((x > 2).any()) else 1)),
    "tensor of all rows": with_outputs(lambda o, x: torch.where((x > 9).any(), o, 2 * o)),
    "branch on all rows of each step": with_outputs(
        lambda o, x: o * (2 if bool((x < -2).any()) else 1), None
    ),
    "branch on the rows of a client": with_outputs(
        lambda o, x: torch.where((x > 3).flatten(1).any(1)[:, None, None], o, 2 * o)
    ),
    "branch in the loss": with_loss(lambda v, b: v * (2 if bool((b.x > 2).any()) else 1)),
    "download with the cohort's mean size": method(download=of_cohort),
    "download with the cohort's mean": method(
        download=of_clients, init=personal, aggregate=with_own
    ),
}


@pytest.mark.parametrize("what", MIXING)
def test_results_that_depend_on_other_clients_or_rows_are_refused(what):
    with pytest.raises(ValueError, match=r"depends? on"):
        pyrofl.validate_method(MIXING[what], toys.blobs())


def test_epochs_by_position_are_refused():
    (phase,) = method().phases

    def validate(epochs: Callable[[Tensor], Tensor]) -> None:
        pyrofl.validate_method(method(phases=(replace(phase, epochs=epochs),)), toys.blobs())

    with pytest.raises(ValueError, match=r"epochs gives the client of id \d+ . epochs, or"):
        validate(lambda ids: 1 + torch.arange(len(ids)))
    with pytest.raises(ValueError, match="depends on its id alone"):
        validate(lambda ids: torch.full_like(ids, len(ids)))
    validate(lambda ids: 1 + ids % 3)


class Half(torch.autograd.Function):
    """The identity, of which half the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


def hooked(value: Tensor) -> Tensor:
    copy = value * 1.0
    copy.register_hook(lambda grad: 0.5 * grad)
    return copy


PARTIAL = {"detach": lambda t: 2 * t - t.detach(), "hook": hooked, "function": Half.apply}


@pytest.mark.parametrize("how", PARTIAL)
def test_a_gradient_that_is_not_the_derivative_is_said(how):
    with pytest.warns(UserWarning, match=r"'w/\*' has a gradient that is not its derivative"):
        pyrofl.validate_method(with_weights(PARTIAL[how]), toys.blobs())


@pytest.mark.parametrize("guide", ["point", "mean field", "gamma"])
def test_right_gradients_are_not_warned_of(guide):
    from pyrofl.models import guides

    base = fedavg.build(toys.net(), guide=guides.mean_field, num_particles=2)
    (phase,) = (base if guide == "mean field" else method()).phases
    (step,) = phase.updates

    def loss(*given: Any) -> Tensor:
        extra = torch.zeros(())
        if guide == "gamma":
            with given[-1].clients():
                ones = torch.ones(len(given[-1]), 1)
                extra = pyro.sample("g", pyro.distributions.Gamma(ones, 1.0))
        return step.loss(*given) * 3 + 0 * extra.sum()

    own = base if guide == "mean field" else method()
    found = replace(own, phases=(replace(phase, updates=(replace(step, loss=loss),)),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pyrofl.validate_method(found, toys.blobs())


def test_responses_far_from_zero_are_not_warned_of():
    """Terms of the loss are 1e16 and cancel, so that finite differences have rounding errors."""

    def model(received: Any, local: Any, batch: Any) -> None:
        with batch.clients():
            mu = pyro.sample("mu", pyro.distributions.Normal(0.0, 1e10))
            with batch.rows():
                pyro.sample("y", pyro.distributions.Normal(mu, 1.0), obs=batch.y)

    y = 1e8 + torch.arange(1.0, 5.0).double()
    rows = list(torch.arange(4).split(2))
    data = Federation(torch.zeros(4, 1).double(), y, rows, [r[:0] for r in rows])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pyrofl.validate_method(pvi.hierarchical(model, data, shared="mu"), data)


def test_a_loss_of_ids_is_said():
    own = with_loss(lambda v, b: v * (1 + (b.ids == 1)))
    with pytest.warns(UserWarning, match=r"depends on batch.ids, the positions of clients"):
        pyrofl.validate_method(own, toys.blobs())


def remembering() -> Aggregator:
    memory: dict[str, Tensor] = {}

    def step(server: Tensors, pooled: Tensors) -> Tensors:
        for name, value in pooled.items():
            memory[name] = 0.9 * memory.get(name, torch.zeros_like(value)) + value - server[name]
        return {n: server[n] + memory[n] for n in pooled}

    return Aggregator({"*": by_size}, server_step=step)


def iterating() -> Any:
    rates = iter([1.0 / n for n in range(1, 100)])

    def aggregate(server: Tensors, message: Tensors, cohort: Cohort, source: Generator) -> Tensors:
        rate = next(rates)
        return {n: server[n] + rate * (v.mean(0) - server[n]) for n, v in message.items()}

    return aggregate


def drawing() -> Any:
    source = torch.Generator().manual_seed(0)

    def step(server: Tensors, pooled: Tensors) -> Tensors:
        return {n: v + torch.randn(v.shape, generator=source) for n, v in pooled.items()}

    return Aggregator({"*": by_size}, server_step=step)


def optimizing() -> Any:
    made: list[Any] = []

    def step(server: Tensors, pooled: Tensors) -> Tensors:
        params = [torch.nn.Parameter(v.clone()) for v in server.values()]
        made[:] = made or [sgd(1.0, 0.9)(params), params]
        for p, (name, value) in zip(made[1], server.items(), strict=True):
            p.grad = value - pooled[name]
        made[0].step()
        return {n: p.detach().clone() for n, p in zip(server, made[1], strict=True)}

    return with_server_step(Aggregator({"*": by_size}), step)


@pytest.mark.parametrize("make", [remembering, iterating, drawing, optimizing])
def test_memory_of_the_server_outside_its_state_is_refused(make):
    with pytest.raises(ValueError, match="other numbers in a second call with the same messages"):
        pyrofl.validate_method(method(aggregate=make()), toys.blobs())


def test_a_server_step_that_writes_into_the_state_is_refused():
    def step(server: Tensors, pooled: Tensors) -> Tensors:
        for name, value in pooled.items():
            server[name].lerp_(value, 0.5)
        return server

    own = method(aggregate=Aggregator({"*": by_size}, server_step=step))
    with pytest.raises(ValueError, match=r"server_step writes into 'w/.*' in place; expected"):
        pyrofl.validate_method(own, toys.blobs())


METHODS = [name for _, name, _ in pkgutil.iter_modules(models.__path__)]
BUILT = [name for name in METHODS if hasattr(import_module(f"pyrofl.models.{name}"), "build")]


@pytest.mark.parametrize("name", promises.others_slow(BUILT))
def test_the_librarys_methods_pass(name):
    """Before a fit, only methods with functions of a user are validated on several clients."""
    module = import_module(f"pyrofl.models.{name}")
    own = module.build(toys.net(), **promises.of(name).settings)
    assert users_code(own)[0] == ""
    data, ids = toys.blobs(), torch.tensor([0, 5, 7, 11])
    few, start = with_other_padding(trial_federation(data, ids)), first(own, data, 0).server
    refuse_dependent_clients(own, few, ids, start)


def test_a_method_of_the_library_runs_once_with_few_rows(monkeypatch):
    calls = []
    monkeypatch.setattr(validate, "refuse_dependent_clients", lambda *_: calls.append(1))
    pyrofl.validate_method(fedavg.build(toys.net()), toys.blobs())
    assert not calls
    pyrofl.validate_method(with_loss(lambda loss, batch: loss), toys.blobs())
    assert calls
