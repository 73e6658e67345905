"""PVI by draws of layers' outputs: the mean-field optimum of linear models, and warm starts."""

from __future__ import annotations

import math

import pytest
import torch
import toys
from checks import close
from regressions import PRIOR, TASK, posterior
from torch import Tensor, nn

import pyrofl
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fraction
from pyrofl.models import guides, likelihoods, priors, pvi, virtual
from pyrofl.models.shared.gaussians import Normals
from pyrofl.nets import Network, build

NET = Network(nn.Sequential(nn.Linear(3, 1, bias=False)))
WEIGHTS = {"prior": PRIOR, "likelihood": likelihoods.normal()}


def q_of(server: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the server's posterior."""
    return Normals(3, full=False).moments(server)


def optimum() -> tuple[Tensor, Tensor]:
    """Return the best independent normals: the exact mean, and conditional sds."""
    mean, covariance = posterior()
    return mean, torch.linalg.inv(covariance).diagonal().rsqrt()


def test_natural_gradients_reach_the_mean_field_optimum_with_few_clients_in_a_round():
    method = pvi.build(
        NET, **WEIGHTS, optimizer="natural", num_particles=128, epochs=30, damping=0.3, warm_start=2
    )
    *_, state = federate(method, TASK.federation, 60, participation=fraction(0.6))
    (mean, sd), (best, width) = q_of(state.server), optimum()
    assert float(((mean - best) / width).abs().max()) < 1e-3
    # Of 128 draws for each of 9 to 24 rows and 30 steps, whose noise a round averages.
    assert float((sd / width - 1).abs().max()) < 4e-3


@pytest.mark.slow
def test_minibatches_leave_the_optimum_where_it_is():
    method = pvi.build(
        NET, **WEIGHTS, optimizer="natural", num_particles=16, epochs=40, batch=5, warm_start=2
    )
    means, widths = [], []
    for t, state in enumerate(federate(method, TASK.federation, 60), 1):
        if t > 20:
            mean, sd = q_of(state.server)
            means.append(mean)
            widths.append(sd)
    best, width = optimum()
    # Proposals of successive rounds turn back at the optimum; standard errors are of 40 rounds
    # with an autocorrelation of about 5.
    for found, expected in ((means, best), (widths, width)):
        draws = torch.stack(found)
        error = draws.std(0) * (5 / len(draws)) ** 0.5
        assert ((draws.mean(0) - expected).abs() < 4 * error + 1e-3 * width).all()


@pytest.mark.parametrize("batch", [None, 5])
def test_adam_comes_close(batch):
    method = pvi.build(NET, **WEIGHTS, num_particles=16, damping=0.3, batch=batch)
    *_, state = federate(method, TASK.federation, 40)
    (mean, sd), (best, width) = q_of(state.server), optimum()
    assert float(((mean - best) / width).abs().max()) < 0.25
    assert float((sd / width - 1).abs().max()) < 0.1


def test_a_client_alone_trains_as_in_a_chunk():
    data, net = toys.blobs(), build("mlp:6", (toys.FEATURES,), toys.CLASSES)
    method = pvi.build(net, batch=4, epochs=3, warm_start=1)
    states = [toys.last(method, data, 3, chunk_size=k) for k in (1, 5)]
    for name, value in states[0].server.items():
        close(states[1].server[name], value, 1e-4)


def test_warm_rounds_average_means_over_rows_and_keep_widths():
    data, net = toys.blobs(), build("mlp:6", (toys.FEATURES,), toys.CLASSES)
    method = pvi.build(net, epochs=4, warm_start=2)
    states = list(federate(method, data, 3))
    size = sum(shape.numel() for shape in net.shapes.values())
    normals = Normals(size, full=False)
    first = states[0]
    assert [float(s.server["warm_rounds"]) for s in states] == [1, 0, 0]
    means = first.message["shift"] / first.message["precision"]
    rows = data.sizes[: data.clients].to(means)
    mean, sd = normals.moments(first.server)
    close(mean, (rows[:, None] * means).sum(0) / rows.sum(), 1e-5)
    fans = torch.cat([torch.full((s.numel(),), net.fan_in(n)) for n, s in net.shapes.items()])
    close(sd, 0.5 / fans.to(sd).sqrt(), 1e-5)
    # The factors are equal, and give q together with the prior, N(0, 1).
    for state in states[:2]:
        parts = state.server["server/precision"]
        close(parts, parts[:1].expand_as(parts), 1e-6)
        close(1 + parts.sum(0), state.server["precision"], 1e-3)
    assert not states[1].client_states["moved"].any()
    assert states[2].client_states["moved"].all()
    _, after = normals.moments(states[2].server)
    assert not torch.isclose(after, sd).any()


def test_a_warm_start_gives_better_predictions_after_few_rounds():
    data, net = toys.blobs(), build("mlp:6", (toys.FEATURES,), toys.CLASSES)
    nll = {}
    for warm in (0, 3):
        run = pyrofl.fit(pvi.build(net, warm_start=warm), data, 6, seed=0, progress=False)
        assert run.status.kind != "diverged"
        nll[warm] = run.evaluate().mean("nll")
    assert nll[3] < math.log(toys.CLASSES)
    assert nll[3] < nll[0]


def test_private_parameters_start_narrow_and_keep_a_posterior_of_their_own():
    data, net = toys.blobs(), build("mlp:6", (toys.FEATURES,), toys.CLASSES)
    method = virtual.build(net, warm_start=1, epochs=5)
    run = pyrofl.fit(method, data, 6, seed=0, progress=False)
    assert run.evaluate().mean("nll") < math.log(toys.CLASSES)
    draws = run.posterior(200)["head.weight"]
    assert bool((draws.std(0) > 0.01).all())
    assert bool((draws.std(0) < 3).all())
    assert not torch.allclose(draws.mean(0)[0], draws.mean(0)[1], atol=0.05)


WRONG = {
    "full": ({"covariance": "full"}, "covariance is 'full'"),
    "prior": ({"prior": priors.student_t(4.0)}, "prior is not a normal"),
    "layers": ({"net": build("mean", (1,), 1)}, "neither linear layers nor convolutions"),
    "delta": ({"guide": guides.delta}, "the guide is delta"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_drawn_is_refused_or_drawn_as_weights(case):
    options, reason = WRONG[case]
    options = {"net": build("linear", (3,), 1) if case == "full" else NET, **options}
    net = options.pop("net")
    usual = {"likelihood": likelihoods.normal(), **options}
    with pytest.raises(ValueError, match=reason):
        pvi.build(net, **usual, sampling="activations")
    with pytest.raises(ValueError, match="warm_start is 3, but"):
        pvi.build(net, **usual, warm_start=3)
    with pytest.raises(ValueError, match="optimizer is 'adam', but"):
        pvi.build(net, **usual, optimizer="adam")
    assert "restart" not in str(pvi.build(net, **usual))


def test_draws_are_even():
    with pytest.raises(ValueError, match="num_particles is 3; expected an even number"):
        pvi.build(NET, num_particles=3)
