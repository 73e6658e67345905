"""FedEM: its steps by hand, and as EM of a mixture of regressions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from promises import Promises
from pyro.distributions import TorchDistribution
from torch import Size, Tensor, nn
from toys import crossed, last

from pyrofl.data import Batch, Federation
from pyrofl.data.loaders.conjugate import conjugate
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.models import fedavg, fedem, guides, likelihoods, priors
from pyrofl.nets import Network, build
from pyrofl.tensors import Tensors

K = 3


def two_of_each(
    name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
) -> TorchDistribution:
    """Have seen a row of each component."""
    return dist.Dirichlet(batch.size.new_full(shape, 2.0))


PROMISES = {
    "fedem": Promises(
        sites={"pi": ("pi_dim_0",)},
        message=(K * toys.ALL, K * toys.ALL),
        any_number="component/*",
        prior=two_of_each,
    )
}

SLOPE = Network(nn.Linear(1, 1, bias=False))
LINES: dict[str, object] = {"likelihood": likelihoods.normal(1.0), "components": 2}


def lines(y: list[list[float]]) -> Federation:
    """Return clients with rows x = 1 and these y."""
    each = [torch.tensor(v, dtype=torch.float64) for v in y]
    return conjugate([torch.ones(len(v), 1) for v in each], each).federation


def begun(method: Method, data: Federation, *slopes: float) -> RoundState:
    """Start components at lines of these slopes."""
    start = torch.tensor(slopes, dtype=torch.float64).reshape(-1, 1, 1)
    return first(method, data, 0, {"component/weight": start})


def test_a_round_by_hand():
    data = lines([[0.0, 0.0, 2.0], [1.0]])
    method = fedem.build(SLOPE, **LINES, epochs=1, batch=None, lr=0.5, momentum=0.0)
    state = run_round(method, data, begun(method, data, 0.0, 2.0), *[torch.arange(2)] * 2)
    near, far = 0.880797, 0.119203  # 1 / (1 + exp(-2)): y on one line, two away from the other
    close(state.client_states["weight/pi"][0], [(2 * near + far) / 3, (2 * far + near) / 3], 1e-6)
    close(state.client_states["weight/pi"][1], [0.5, 0.5])
    # One step of 1/2 down the mean of q_ik (y_i - w_k)^2 / 2.
    own = [[0.5 * far * 2 / 3, 2 - 0.5 * 2 * far * 2 / 3], [0.25, 1.75]]
    close(state.message["component/weight"].flatten(1), own, 1e-6)
    mean = (3 * np.array(own[0]) + np.array(own[1])) / 4
    close(state.server["component/weight"].flatten(), mean, 1e-6)


def test_with_a_dirichlet_the_weights_are_variational_bayes():
    data = lines([[0.0, 0.0, 2.0]])
    method = fedem.build(SLOPE, **LINES, guide="dirichlet", prior=two_of_each, epochs=0)
    state = begun(method, data, 0.0, 2.0)
    for _ in range(2):
        state = run_round(method, data, state, *[torch.arange(1)] * 2)
    log_pi = np.zeros(2)
    for _ in range(2):
        p = np.exp(log_pi - np.array([[0.0, 2.0], [0.0, 2.0], [2.0, 0.0]]))
        count = 2 + (p / p.sum(1, keepdims=True)).sum(0)
        log_pi = torch.digamma(torch.tensor(count)).numpy()
    close(state.client_states["log_count/pi"][0], np.log(count))
    drawn = evaluate(method, data, state, part="train", draws=1000).mean("nll")
    assert drawn == pytest.approx(evaluate(method, data, state, part="train").mean("nll"), abs=0.05)


def test_it_is_em_of_a_mixture_of_regressions():
    rng = np.random.default_rng(3)
    x, kind = rng.standard_normal(60), rng.integers(0, 2, 60)
    y = np.where(kind, 3 * x, -x) + rng.standard_normal(60)
    task = conjugate([torch.from_numpy(x)[:, None]], [torch.from_numpy(y)])
    # Full batches until the components are at the least squares of their rows.
    method = fedem.build(SLOPE, **LINES, epochs=400, batch=None, lr=0.5, momentum=0.0)
    state = begun(method, task.federation, 0.5, 1.0)
    pi, w, likelihood = np.full(2, 0.5), np.array([0.5, 1.0]), []
    for _ in range(6):
        p = pi * np.exp(-0.5 * (y[:, None] - x[:, None] * w) ** 2)
        likelihood.append(np.log(p.sum(1)).sum())
        q = p / p.sum(1, keepdims=True)
        pi, w = q.mean(0), (q * (x * y)[:, None]).sum(0) / (q * x[:, None] ** 2).sum(0)
        state = run_round(method, task.federation, state, *[torch.arange(1)] * 2)
        close(state.client_states["weight/pi"][0], pi, 1e-9)
        close(state.server["component/weight"].flatten(), w, 1e-9)
    assert (np.diff(likelihood) > 0).all()
    told = evaluate(method, task.federation, state, part="train").mean("nll")
    density = (pi * np.exp(-0.5 * (y[:, None] - x[:, None] * w) ** 2) / np.sqrt(2 * np.pi)).sum(1)
    assert told == pytest.approx(-np.log(density).mean(), abs=1e-9)


def test_one_component_is_fedavg(tiny):
    net = build("mlp:5", (4,), 3)
    one = last(fedem.build(net, components=1, batch=2, lr=0.1), tiny, 3)
    plain = last(fedavg.build(net, batch=2, lr=0.1), tiny, 3)
    for n, value in plain.server.items():
        close(one.server[n.replace("w/", "component/")][0], value)


def test_who_comes_later_finds_the_weights_that_fit_its_rows_best():
    data = replace(lines([[0.0, 2.0], [0.3, 0.8, 0.1, 1.9]]), held_out=1)
    method = fedem.build(SLOPE, **LINES, adapt_steps=500)
    state = begun(method, data, 0.0, 2.0)
    _, local = prepared(method, data, state, data.cohort(torch.tensor([1])), adaptation="fine_tune")
    assert isinstance(local, dict)
    pi = local["weight/pi"][0]
    y = torch.tensor([0.3, 0.8, 0.1, 1.9], dtype=torch.float64)
    p = torch.exp(-0.5 * (y[:, None] - torch.tensor([0.0, 2.0])).square())
    # Where the slope of the log likelihood along each weight is n, it is highest.
    close((p / (p * pi).sum(1, keepdim=True)).sum(0), [4.0, 4.0], 1e-6)


@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson", "normal:0.5", "categorical"])
def test_a_mixture_says_of_a_row_what_its_components_say_on_average(likelihood):
    fn = likelihoods.named(likelihood)
    outputs = torch.randn(2, 3, 4, 5 if likelihood == "categorical" else 1)
    weight = torch.rand(7, 2, 1, 4)
    weight = weight / weight.sum(-1, keepdim=True)
    each, y = fn(outputs, torch.zeros(2, 3, 1, 1)), torch.ones(2, 3)
    found = fedem.mixture(weight, each)
    expected = (weight * each.log_prob(y.unsqueeze(2)).exp()).sum(-1)
    close(found.log_prob(y).exp(), expected, 1e-6)
    assert found.batch_shape == (7, 2, 3)


def test_clients_of_two_kinds_are_told_apart():
    data, method, plain = crossed(), fedem.build(toys.net()), fedavg.build(toys.net(), lr=0.05)
    state = last(method, data, 12)
    pi = state.client_states["weight/pi"]
    apart = (pi[0::2].mean(0) - pi[1::2].mean(0)).abs().max()
    assert apart > 0.5
    common = evaluate(plain, data, last(plain, data, 12)).mean("accuracy")
    assert evaluate(method, data, state).mean("accuracy") > common + 0.2


def test_what_em_cannot_fit_is_refused(tiny):
    net = build("mlp:5", (4,), 3)
    with pytest.raises(ValueError, match="guide is mean_field; expected 'point' or 'dirichlet'"):
        fedem.build(net, guide=guides.mean_field)
    with pytest.raises(ValueError, match=r"prior is Normal.*weights that sum to one; expected"):
        fedem.build(net, prior=priors.fixed())

    def sparse(name: str, shape: Size, *_: object) -> Tensor:
        return dist.Dirichlet(torch.full(shape, 0.5, dtype=torch.float64))

    with pytest.raises(
        ValueError, match=r"Dirichlet of 0.5, which has no mode; expected 1 or more"
    ):
        fedem.build(net, prior=sparse)
    assert not last(fedem.build(net, prior=sparse, guide="dirichlet"), tiny, 1).rejected
