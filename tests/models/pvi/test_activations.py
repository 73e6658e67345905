"""Losses by draws of layers' outputs: closed forms of linear models, and those of drawn weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyro.distributions as dist
import pytest
import torch
import toys
from regressions import PRIOR, TASK, posterior
from torch import Tensor, nn

from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.method import GradientStep, Method
from pyrofl.inference.definition.programs import Loss, Supervised
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import bernoulli, fraction
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import client_inputs
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.inference.training.noise import ClientNoise
from pyrofl.inference.training.schedules import make_schedule
from pyrofl.models import fedabml, fedep, fedhb, guides, likelihoods, pfedbayes, priors
from pyrofl.models.likelihoods import categorical
from pyrofl.models.shared.activations import Activations
from pyrofl.models.shared.gaussians import Normals
from pyrofl.nets import Network, build
from pyrofl.tensors import Tensors, generator, pick, under

LINE = Network(nn.Sequential(nn.Linear(3, 1, bias=False)))
WEIGHT, NORMAL = "0.weight", likelihoods.normal()
IDS = torch.arange(5)
METHODS: dict[str, tuple[Any, dict[str, object]]] = {
    "pfedbayes": (pfedbayes, {}),
    "pfedbayes, noise": (pfedbayes, {"noise": 0.5, "num_particles": 3}),
    "fedhb": (fedhb, {}),
    "fedabml": (fedabml, {}),
    "fedabml, unrolled": (fedabml, {"meta_grad": "unrolled", "steps": 2}),
    "fedep": (fedep, {"moments": "natural", "lr": 0.3, "num_particles": 4}),
    "fedep, stateless": (
        fedep,
        {"moments": "natural", "lr": 0.3, "num_particles": 4, "stateless": True},
    ),
}


def minibatch(width: int | None) -> Batch:
    """Return all rows of five clients, or their first minibatches of at most `width` rows."""
    data = TASK.federation
    if width is None:
        return data.batch(IDS)
    rows = [data.train[i] for i in IDS]
    schedule = make_schedule(rows, [1] * 5, width, [generator(1, int(i)) for i in IDS])
    return data.gather(data.cohort(IDS), schedule.rows[0], schedule.mask[0])


def moments(net: Network, clients: int) -> tuple[Tensors, Tensors]:
    """Return means and variances of the weights of some clients."""
    rng = generator(3)
    draw = {n: torch.randn(2, clients, *s, generator=rng).double() for n, s in net.shapes.items()}
    return {n: 0.5 * v[0] for n, v in draw.items()}, {n: (v[1] - 1).exp() for n, v in draw.items()}


def repeated(loss: Any, at: Tensors, clients: int, repeats: int) -> Tensor:
    """Return draws of the loss and its gradients, [repeats, C, 1 + entries]."""
    found = []
    with ClientNoise([generator(5, c) for c in range(clients)]):
        for _ in range(repeats):
            leaves = {n: v.detach().requires_grad_() for n, v in at.items()}
            value = loss(leaves)
            slopes = torch.autograd.grad(value.sum(), list(leaves.values()))
            found.append(torch.cat([value.detach()[:, None], *(v.flatten(1) for v in slopes)], 1))
    return torch.stack(found)


def assert_expected(draws: Tensor, exact: Tensor, other: Tensor | float = 0.0) -> None:
    """Check that the mean of draws is exact within four standard errors."""
    error = (draws.var(0) / len(draws) + other).sqrt()
    assert ((draws.mean(0) - exact).abs() <= 4 * error + 1e-9 * exact.abs().max()).all()


@pytest.mark.parametrize("width", [None, 5, 10])
@pytest.mark.parametrize("particles", [1, 3, 4])
def test_loss_and_gradient_are_those_of_the_normal_linear_model(width, particles):
    batch, (mean, variance) = minibatch(width), moments(LINE, 5)
    outputs = Activations(LINE, NORMAL, particles)
    at = under("mean", mean) | under("variance", variance)

    def loss(leaves: Tensors) -> Tensor:
        m, v = (pick_of(leaves, kind) for kind in ("mean", "variance"))
        return outputs.expected(m, v, batch)

    draws = repeated(loss, at, 5, 300)
    share = batch.size / batch.mask.sum(1)  # a minibatch stands for all rows
    counts = batch.mask * share[:, None]
    m, v = mean[WEIGHT][:, 0], variance[WEIGHT][:, 0]
    gap = batch.y - (batch.x @ m[..., None])[..., 0]
    constant = torch.tensor(2 * torch.pi).double().log()
    spread = (batch.x.square() @ v[..., None])[..., 0]
    value = (counts * (gap.square() + spread + constant)).sum(1, keepdim=True) / 2
    by_mean = -(counts * gap)[:, None] @ batch.x
    by_variance = counts[:, None] @ batch.x.square() / 2
    assert_expected(draws, torch.cat([value, by_mean[:, 0], by_variance[:, 0]], 1))
    if particles == 4:  # mirrored draws leave no noise in the gradient of the mean
        assert float(draws[..., 1:4].std(0).max()) < 1e-9 * float(by_mean.abs().max())


def pick_of(leaves: Tensors, kind: str) -> Tensors:
    """Return the tensors of a role by their own names."""
    return {n.removeprefix(f"{kind}/"): v for n, v in pick(leaves, f"{kind}/*").items()}


def test_a_network_has_the_expected_loss_of_drawn_weights_and_steadier_gradients():
    data, net = toys.blobs((5, 12, 8)), toys.net()
    batch, (mean, variance) = data.batch(torch.arange(3)), moments(net, 3)
    q = guides.log_mean_field(net.shapes)
    model = Supervised(net, categorical, priors.flat)
    at = q.start(mean, {n: 0.3 * v.sqrt() for n, v in variance.items()})
    outputs = Activations(net, categorical, 2)

    def by_outputs(leaves: Tensors) -> Tensor:
        return outputs.expected(*q.moments({}, leaves, batch), batch)

    def by_weights(leaves: Tensors) -> Tensor:
        return elbo(2, kl=0.0)(model, q, {}, leaves, batch)

    one, other = (repeated(loss, at, 3, 500) for loss in (by_outputs, by_weights))
    assert_expected(one, other.mean(0), other.var(0) / len(other))
    assert float(one[:, :, 1:].var(0).sum()) < 0.5 * float(other[:, :, 1:].var(0).sum())


def loss_of(method: Method) -> Loss:
    """Return the loss of the first gradient step of a method."""
    updates = (move for phase in method.phases for move in phase.updates)
    return next(move for move in updates if isinstance(move, GradientStep)).loss


@pytest.mark.parametrize("width", [None, 5])
@pytest.mark.parametrize("case", ["pfedbayes", "pfedbayes, noise", "fedhb", "fedabml"])
def test_a_methods_loss_is_that_of_drawn_weights(case, width):
    module, options = METHODS[case]
    batch, (mean, variance) = minibatch(width), moments(LINE, 5)
    usual = {"likelihood": NORMAL, "kl": 0.7, "init_scale": 0.4} | options
    # Sigma points are exact for quadratic functions: six of three weights.
    methods = [
        module.build(LINE, **usual | {"sampling": s, "num_particles": k})
        for s, k in (("activations", 2), ("weights", 6))
    ]
    state = first(methods[0], TASK.federation, 0)
    received, private = client_inputs(
        methods[0], TASK.federation, state, TASK.federation.cohort(IDS), 0
    )
    own = methods[0].guide.start(mean, {n: v.sqrt() for n, v in variance.items()})
    own = under("own", own) if module is pfedbayes else own
    local = received | private | own

    def energy(method: Method) -> Any:
        return lambda leaves: loss_of(method)(
            method.model, method.guide, received, local | leaves, batch
        )

    draws = repeated(energy(methods[0]), own, 5, 300)
    leaves = {n: v.detach().requires_grad_() for n, v in own.items()}
    with toys.SigmaPoints():
        value = energy(methods[1])(leaves)
    slopes = torch.autograd.grad(value.sum(), list(leaves.values()))
    exact = torch.cat([value.detach()[:, None], *(v.flatten(1) for v in slopes)], 1)
    assert_expected(draws, exact)


@pytest.mark.parametrize("batch", [None, 5])
def test_natural_gradients_reach_the_mean_field_optimum(batch):
    method = fedep.build(
        LINE,
        likelihood=NORMAL,
        prior=PRIOR,
        moments="natural",
        sampling="activations",
        lr=0.3,
        damping=0.3,
        num_particles=128,
        epochs=30,
        batch=batch,
    )
    rounds = 60 if batch is None else 30
    states = list(
        federate(method, TASK.federation, rounds, participation=fraction(0.6), chunk_size=2)
    )
    exact, covariance = posterior()
    sd = torch.linalg.inv(covariance).diagonal().rsqrt()
    q = [Normals(3, full=False).moments(state.server) for state in states[rounds // 2 :]]
    if batch is None:
        mean, width = q[-1]
        assert float(((mean - exact) / sd).abs().max()) < 1e-3
        assert float((width / sd - 1).abs().max()) < 4e-3
        return
    for found, expected in ((0, exact), (1, sd)):
        draws = torch.stack([one[found] for one in q])
        error = draws.std(0) * (5 / len(draws)) ** 0.5  # of rounds with correlated proposals
        assert ((draws.mean(0) - expected).abs() < 4 * error + 1e-3 * sd).all()


@pytest.mark.parametrize("case", METHODS)
def test_clients_train_alone_as_in_a_chunk_and_predictions_get_better(case):
    module, options = METHODS[case]
    data = toys.blobs((5, 12, 8, 3))
    method = module.build(toys.net(), sampling="activations", **{"epochs": 2, "batch": 4} | options)
    runs = [
        list(federate(method, data, 3, participation=bernoulli(0.6), chunk_size=k)) for k in (1, 2)
    ]
    for one, other in zip(*runs, strict=True):
        toys.assert_same_round(one, other, rtol=1e-8, atol=1e-9)
    states = [first(method, data, 0), toys.last(method, data, 3)]
    before, after = (evaluate(method, data, state).mean("nll") for state in states)
    assert after < before


@pytest.mark.parametrize("case", METHODS)
def test_another_model_is_refused(case):
    module, options = METHODS[case]
    method = module.build(LINE, likelihood=NORMAL, sampling="activations", **options)
    with pytest.raises(ValueError, match=r"^model was replaced"):
        replace(method, model=Supervised(LINE, NORMAL, priors.flat))


ALL = ("pfedbayes", "fedhb", "fedabml", "fedep")
WRONG: dict[str, tuple[tuple[str, ...], dict[str, object], str]] = {
    "guide": (ALL, {"guide": guides.full_covariance}, "guide is full_covariance"),
    "point": (ALL[:3], {"guide": guides.delta}, "guide is delta"),
    "prior": (ALL[:3], {"prior": dist.Laplace}, "prior is Laplace, not dist.Normal"),
    "layers": (ALL, {"net": build("linear", (3,), 1)}, "neither linear layers nor convolutions"),
    "moments": (ALL[3:], {"moments": "laplace"}, "moments is 'laplace'"),
}


@pytest.mark.parametrize(("name", "case"), [(n, case) for case in WRONG for n in WRONG[case][0]])
def test_what_cannot_be_drawn_is_refused_or_drawn_as_weights(name, case):
    module, own = METHODS[name]
    settings = {"net": LINE, "likelihood": NORMAL, **own, **WRONG[case][1]}
    net = settings.pop("net")
    with pytest.raises(ValueError, match=f"^sampling is 'activations', but .*{WRONG[case][2]}"):
        module.build(net, **settings, sampling="activations")
    module.build(net, **settings, sampling="auto")
