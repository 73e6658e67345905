"""SCAFFOLD: the fixed point that FedAvg misses, and control variates that are gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch import Tensor
from toys import last

from pyrofl.data import Federation
from pyrofl.data.loaders.conjugate import ConjugateTask
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import Stragglers, fixed
from pyrofl.inference.engine.state import RoundState
from pyrofl.models import fedavg, likelihoods, scaffold
from pyrofl.nets import build
from pyrofl.tensors import Tensors, pick, role

PROMISES = {"scaffold": Promises(together="*", message=(2 * toys.ALL, 2 * toys.ALL))}

POINT = (0.3895, 1.3263)  # minimum of the pooled loss
ROUNDS = 25

ETA = 0.05  # on the clients' total losses, whose means are over two rows


def descent(steps: int = 10, **options: object) -> Method:
    """Build SCAFFOLD with full-batch steps on a linear regression."""
    return scaffold.build(
        build("linear", (2,), 1),
        likelihood=likelihoods.normal(),
        epochs=steps,
        batch=None,
        lr=2 * ETA,
        **options,
    )


def minimum(task: ConjugateTask) -> tuple[Tensor, Tensor]:
    """Return where the pooled loss is smallest, and the clients' mean gradients there."""
    moment = (task.precision @ task.mean[..., None]).sum(0)
    point = torch.linalg.solve(task.precision.sum(0), moment)[:, 0]
    close(point, POINT, 5e-5)
    return point, (task.precision @ (point - task.mean)[..., None])[..., 0] / 2


@pytest.mark.parametrize("options", [{}, {"option": "I"}, {"momentum": 0.5}])
def test_the_minimum_of_the_pooled_loss_stays(quadratic, options):
    point, gradient = minimum(quadratic)
    private = {"own/w/w": gradient}
    there = RoundState(0, begun(point), private, torch.ones(2, dtype=torch.bool))
    (state,) = federate(descent(**options), quadratic.federation, 1, resume_from=there)
    close(state.server["w/w"], point, 1e-12)
    close(state.server["control/w/w"], [0.0, 0.0], 1e-12)
    close(state.client_states["own/w/w"], gradient, 1e-12)


def test_rounds_reach_it_where_fedavg_does_not(quadratic):
    point, gradient = minimum(quadratic)
    near = {"server_state": begun(point + 0.1)}
    state = last(descent(), quadratic.federation, ROUNDS, **near)
    close(state.server["w/w"], point, 1e-3)
    close(state.client_states["own/w/w"], gradient, 1e-2)
    plain = fedavg.build(
        build("linear", (2,), 1),
        likelihood=likelihoods.normal(),
        epochs=10,
        batch=None,
        lr=2 * ETA,
        momentum=0.0,
    )
    state = last(plain, quadratic.federation, ROUNDS, server_state={"w/w": point + 0.1})
    assert (state.server["w/w"] - point).norm() > 0.1


def test_a_part_of_the_clients_reaches_it_too(quadratic):
    point, _ = minimum(quadratic)
    state = last(
        descent(5),
        quadratic.federation,
        40,
        participation=fixed(1),
        server_state=begun(point + 0.1),
    )
    close(state.server["w/w"], point, 1e-2)


def cannot(*_: object) -> Tensors:
    raise AggregationError("not this time")


@pytest.mark.parametrize("every", [1, 2])
def test_the_common_control_is_the_mean_of_the_clients_own_whoever_is_lost(blobs, every):
    method = scaffold.build(toys.net(), epochs=1)
    stuck = replace(method, aggregate=cannot)
    lossy = {"stragglers": Stragglers(drop_rate=0.4), "participation": fixed(9)}
    for state in federate(lambda r: stuck if r % every else method, blobs, 6, **lossy):
        for n, own in role("own", state.client_states).items():
            close(state.server[f"control/{n}"], own.mean(0), 1e-15)
    assert state.client_states["own/w/fc1.weight"].any()
    assert not state.seen.all() or every == 1


def equal(tiny: Federation) -> Federation:
    return replace(tiny, train=tuple(torch.arange(12).split(4)))


def test_with_frozen_controls_it_is_fedavg(tiny):
    net = build("mlp:5", (4,), 3)
    options = {"batch": 2, "lr": 0.01, "momentum": 0.9}
    method = scaffold.build(net, **options)
    begin, train, _ = method.phases

    def keep(received, local, data):
        return {f"change/{n}": torch.zeros_like(v) for n, v in pick(local, "w/*").items()}

    frozen = replace(method, phases=(begin, train, Phase((keep,))))
    plain = fedavg.build(net, **options)
    for one, other in zip(
        federate(frozen, equal(tiny), 3), federate(plain, equal(tiny), 3), strict=True
    ):
        for n, value in other.server.items():
            close(one.server[n], value)
        assert torch.equal(one.loss["w/*"], other.loss["w/*"])


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"option": "I"}])
def test_after_one_step_the_control_is_the_gradient_at_the_start(quadratic, options):
    start = torch.tensor([0.2, -0.3], dtype=torch.float64)
    state = last(descent(1, **options), quadratic.federation, 1, server_state=begun(start))
    gradient = (quadratic.precision @ (start - quadratic.mean)[..., None])[..., 0] / 2
    close(state.client_states["own/w/w"], gradient)
    close(state.message["change/w/w"], gradient)
    close(state.server["control/w/w"], gradient.mean(0))


def begun(start: Tensor) -> Tensors:
    zero = torch.zeros_like(start)
    return {"w/w": start, "control/w/w": zero, "server/clients": torch.tensor(2)}


def test_the_second_option_takes_the_mean_of_the_gradients_on_the_way(quadratic):
    start, own, common = (torch.tensor(v).double() for v in ([0.2, -0.3], [1.0, 2.0], [-1.0, 0.5]))
    server = begun(start) | {"control/w/w": common}
    method = descent(3, momentum=0.5)
    private = {"own/w/w": own.expand(2, 2).clone()}
    state = RoundState(0, server, private, torch.ones(2, dtype=torch.bool))
    (state,) = federate(method, quadratic.federation, 1, resume_from=state)
    for j in range(2):
        w, speed, seen = start, torch.zeros(2, dtype=torch.float64), []
        for _ in range(3):
            seen.append(quadratic.precision[j] @ (w - quadratic.mean[j]) / 2)
            speed = 0.5 * speed + seen[-1] - own + common
            w = w - 2 * ETA * speed
        close(state.message["w/w"][j], w)
        weights = torch.tensor([1.75, 1.5, 1.0], dtype=torch.float64)
        expected = torch.tensordot(weights / weights.sum(), torch.stack(seen), 1)
        close(state.client_states["own/w/w"][j], expected)


def test_the_server_counts_clients_evenly_and_shares_by_all_of_them(tiny):
    method = scaffold.build(build("mlp:5", (4,), 3), batch=2, server_lr=0.5)
    before, state = federate(method, tiny, 2, participation=fixed(2))
    for n, value in pick(state.server, "w/*").items():
        close(value, (before.server[n] + state.message[n].mean(0)) / 2)
        change = state.message[f"change/{n}"].mean(0)
        close(state.server[f"control/{n}"], before.server[f"control/{n}"] + 2 / 3 * change)


def test_a_client_without_steps_keeps_its_control(tiny):
    def epochs(ids: Tensor) -> Tensor:
        return (ids != 1).long()

    method = scaffold.build(build("mlp:5", (4,), 3), batch=2, epochs=epochs)
    state = last(method, tiny, 2)
    for n in pick(state.server, "w/*"):
        assert not state.client_states[f"own/{n}"][1].any()
        assert bool(state.client_states[f"own/{n}"][0].any())
