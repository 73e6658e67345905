"""FedAvg: fixed points on quadratic clients, and plain torch as the reference."""

from __future__ import annotations

import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch import Tensor
from torch.nn.functional import cross_entropy
from toys import last

from pyrofl.data import Federation
from pyrofl.data.loaders.conjugate import ConjugateTask
from pyrofl.inference import reference
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.engine.state import client_inputs
from pyrofl.inference.training.schedules import make_schedule
from pyrofl.models import fedavg, guides, likelihoods, priors
from pyrofl.nets import Network, build
from pyrofl.tensors import Tensors, generator, role, under

PROMISES = {"fedavg": Promises(together="*", message=(toys.ALL, toys.ALL))}

ETA = 0.1  # step size on the clients' total losses, whose means are over two rows


def descent(steps: int) -> Method:
    """Build FedAvg with full-batch steps on a linear regression."""
    return fedavg.build(
        build("linear", (2,), 1),
        likelihood=likelihoods.normal(),
        epochs=steps,
        batch=None,
        lr=2 * ETA,
        momentum=0.0,
    )


def fixed_point(task: ConjugateTask, steps: int) -> Tensor:
    """Solve sum_j A_j (w - mu_j) = 0, with A_j what `steps` steps leave of the distance."""
    eye = torch.eye(2, dtype=torch.float64)
    a = eye - torch.linalg.matrix_power(eye - ETA * task.precision, steps)
    return torch.linalg.solve(a.sum(0), (a @ task.mean[..., None]).sum(0))[:, 0]


@pytest.mark.parametrize(
    ("steps", "point"), [(1, (0.3895, 1.3263)), (10, (0.0802, 1.1646)), (400, (0.0, 1.0))]
)
def test_local_steps_move_the_fixed_point(quadratic, steps, point):
    expected = fixed_point(quadratic, steps)
    close(expected, point, 5e-5)
    start = {"w/w": expected}
    stays = last(descent(steps), quadratic.federation, 1, server_state=start)
    close(stays.server["w/w"], expected, 1e-12)
    rounds = {1: 60, 10: 15, 400: 1}[steps]
    reached = last(descent(steps), quadratic.federation, rounds).server["w/w"]
    close(reached, expected, 1e-3)


def test_one_step_of_everybody_is_a_step_on_the_pooled_loss(tiny):
    net = build("softmax", (4,), 3)
    method = fedavg.build(net, epochs=1, batch=None, lr=0.5, momentum=0.0)
    start = method.init(generator(3), 3)
    state = last(method, tiny, 3, server_state=start)
    pooled = {n: v.double() for n, v in role("w", start).items()}
    for _ in range(3):
        pooled = descend(net, pooled, [(tiny.x, tiny.y)], lr=0.5, momentum=0.0)
    for n, value in role("w", state.server).items():
        close(value, pooled[n])


def test_all_rows_at_one_client_is_the_centralized_reference(tiny):
    # With one step a round it is what all clients do together.
    method = fedavg.build(build("mlp:5", (4,), 3), epochs=1, batch=None, lr=0.5, momentum=0.0)
    start = method.init(generator(3), 3)
    alone = last(method, reference.pooled(tiny), 3, server_state=start)
    together = last(method, tiny, 3, server_state=start)
    assert len(alone.trained) == 1
    for n, value in together.server.items():
        close(alone.server[n], value)


def test_one_client_is_stochastic_gradient_descent(tiny):
    alone = Federation(tiny.x, tiny.y, (torch.arange(12),), (torch.arange(12),))
    net = build("mlp:5", (4,), 3)
    method = fedavg.build(net, epochs=3, batch=5, lr=0.1, momentum=0.9)
    start = method.init(generator(3), 1)
    state = last(method, alone, 2, seed=4, server_state=start)
    expected = {n: v.double() for n, v in role("w", start).items()}
    for number in range(2):
        order = stream(4, Stream.ORDER, number, alone.names[0])
        steps = make_schedule([torch.arange(12)], [3], 5, [order])
        batches = [
            (tiny.x[rows[0, mask[0]]], tiny.y[rows[0, mask[0]]])
            for rows, mask in zip(steps.rows, steps.mask, strict=True)
        ]
        assert [len(y) for _, y in batches] == [5, 5, 2] * 3
        expected = descend(net, expected, batches, lr=0.1, momentum=0.9)
    for n, value in role("w", state.server).items():
        close(value, expected[n])


def descend(
    net: Network,
    start: Tensors,
    batches: list[tuple[Tensor, Tensor]],
    lr: float,
    momentum: float,
    decay: float = 0.0,
) -> Tensors:
    params = {n: v.clone().requires_grad_() for n, v in start.items()}
    optimizer = torch.optim.SGD(params.values(), lr, momentum, weight_decay=decay)
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(net.apply(params, x), y).backward()
        optimizer.step()
    return {n: v.detach() for n, v in params.items()}


def test_clients_count_by_their_rows(tiny):
    method = fedavg.build(build("mlp:5", (4,), 3), batch=2)
    state = last(method, tiny, 1)
    share = torch.tensor([3, 5, 4], dtype=torch.float64) / 12
    for n, value in state.server.items():
        close(value, torch.tensordot(share, state.message[n], 1))


def test_only_reporters_train_and_count(tiny):
    method = fedavg.build(build("mlp:5", (4,), 3))
    state = last(method, tiny, 1, participation=fixed(1))
    assert len(state.trained) == 1
    for n, value in state.server.items():
        close(value, state.message[n][0])


def test_a_normal_prior_is_weight_decay(tiny):
    alone = Federation(tiny.x, tiny.y, (torch.arange(12),), (torch.arange(12),))
    net = build("mlp:5", (4,), 3)
    options = {"epochs": 7, "batch": None, "lr": 0.1}
    method = fedavg.build(net, prior=priors.fixed(scale=0.5), **options)
    start = method.init(generator(3), 1)
    state = last(method, alone, 1, server_state=start)
    weights = {n: v.double() for n, v in role("w", start).items()}
    rows = [(tiny.x, tiny.y)] * 7
    expected = descend(net, weights, rows, 0.1, 0.9, decay=1 / (12 * 0.5**2))
    for n, value in role("w", state.server).items():
        close(value, expected[n])


def test_fine_tuning_is_offered_as_the_personal_model(tiny):
    net = build("mlp:5", (4,), 3)
    plain, tuned = fedavg.build(net, batch=2), fedavg.build(net, batch=2, fine_tune=3)
    assert plain.adapt == ()
    assert set(plain.views) == {"global"}
    assert [phase.epochs for phase in tuned.adapt] == [3]
    assert set(tuned.views) == {"global", "personal"}
    one, other = (last(method, tiny, 2) for method in (plain, tuned))
    for n, value in one.server.items():
        assert torch.equal(value, other.server[n])
    received, private = client_inputs(tuned, tiny, one, tiny.cohort(torch.arange(3)), seed=0)
    trained = {n: v + 1 for n, v in received.items()}
    for n, value in received.items():
        assert torch.equal(tuned.views["global"](received, private | trained)[n], value)
        assert torch.equal(tuned.views["personal"](received, private | trained)[n], value + 1)


def test_with_a_normal_guide_variational_parameters_are_averaged(tiny):
    net = build("mlp:5", (4,), 3)
    method = fedavg.build(net, guide=guides.mean_field, prior=priors.fixed(), num_particles=2)
    state = last(method, tiny, 2)
    assert set(state.server) == set(under("w", net.shapes) | under("spread", net.shapes))
    for n, value in state.server.items():
        close(value, torch.tensordot(torch.tensor([3.0, 5, 4]).double() / 12, state.message[n], 1))
