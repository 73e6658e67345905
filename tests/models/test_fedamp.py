"""FedAMP: its weights by hand, and where it stands still."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys
from checks import close
from promises import Promises
from toys import crossed, last

from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.models import fedamp, fedavg, fedprox, likelihoods, local
from pyrofl.nets import build
from pyrofl.tensors import role

SENT = frozenset(f"w/{n}" for n in toys.net().shapes)
PROMISES = {"fedamp": Promises(message=(toys.ALL, toys.ALL), sent=SENT)}
HEARD = torch.tensor([1.0, 1.0, 1.0])


def linear(strength: float, **options: object) -> Method:
    """Build FedAMP for y = x'w + Normal(0, 1) of two rows, over which the loss is a mean."""
    usual: dict[str, object] = {
        "attention": "exponential",
        "strength": strength / 2,
        "likelihood": likelihoods.normal(),
        "epochs": 100,
        "batch": None,
        "lr": 0.3,
        "momentum": 0.0,
    }
    return fedamp.build(build("linear", (2,), 1), **(usual | options))


def test_weights_by_hand():
    models = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    xi = fedamp.by_distance(models, HEARD - torch.eye(3)[0], 0, alpha=0.5, sigma=2.0)
    near, far = 0.25 * 0.606531, 0.25 * 0.135335  # alpha / sigma exp(-1 / 2), exp(-4 / 2)
    close(xi, [1 - near - far, near, far], 1e-6)
    everybody = fedamp.by_distance(models, HEARD - torch.eye(3)[0], 0, alpha=50.0, sigma=2.0)
    close(everybody, [0.0, near / (near + far), far / (near + far)], 1e-6)
    turned = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    xi = fedamp.by_angle(turned, HEARD - torch.eye(3)[0], 0, own=0.4, sigma=1.0)
    e = 2.718282
    close(xi, [0.4, 0.6 / (1 + e), 0.6 * e / (1 + e)], 1e-6)
    close(fedamp.by_angle(turned, torch.zeros(3), 0, own=0.4, sigma=1.0), [1.0, 0.0, 0.0])


def test_each_client_solves_its_own_pull_to_its_cloud_model(quadratic):
    method, data = linear(2.0, sigma=4.0, alpha=0.5), quadratic.federation
    begun = last(method, data, 2)
    sent = method.download(begun.server, data.cohort(torch.arange(2)))["cloud/w/w"]
    w = begun.message["w/w"]
    xi = 0.5 / 4 * torch.exp(-(w[0] - w[1]).square().sum() / 4)
    close(sent, torch.stack([w[0] + xi * (w[1] - w[0]), w[1] + xi * (w[0] - w[1])]))
    state = run_round(method, data, begun, *[torch.arange(2)] * 2)
    exact, _ = quadratic.posterior(sent, torch.tensor([2.0, 2.0]))
    close(state.message["w/w"], exact, 1e-9)


@pytest.mark.parametrize("alpha", [0.3, 1.2])
def test_it_stands_still_where_the_papers_objective_does(quadratic, alpha):
    pull, sigma = 1.5, 3.0  # lambda, so that the strength is lambda / alpha
    method = linear(pull / alpha, alpha=alpha, sigma=sigma, epochs=5)
    w = last(method, quadratic.federation, 120).message["w/w"].clone().requires_grad_()
    off = w - quadratic.mean
    fit = 0.5 * torch.einsum("ci,cij,cj->", off, quadratic.precision, off)
    near = 1 - torch.exp(-(w[0] - w[1]).square().sum() / sigma)
    # Halves, as the paper's A' leaves out the 2 of the square's derivative.
    (slope,) = torch.autograd.grad(fit + pull / 2 * sigma / sigma * near, w)
    close(slope, torch.zeros(2, 2), 1e-7)


def test_without_a_pull_everybody_is_alone(tiny):
    net = build("mlp:5", (4,), 3)
    free = last(fedamp.build(net, strength=0.0, batch=2), tiny, 3)
    alone = last(local.build(net, batch=2), tiny, 3)
    for n, value in free.client_states.items():
        close(value, alone.client_states[n])


def test_the_first_round_is_fedprox(tiny):
    net = build("mlp:5", (4,), 3)
    state = last(fedamp.build(net, strength=0.7, batch=2), tiny, 1)
    near = last(fedprox.build(net, mu=0.7, batch=2), tiny, 1)
    for n, value in state.message.items():
        close(value, near.message[n])


@pytest.mark.parametrize("attention", ["exponential", "cosine"])
def test_clients_of_one_kind_are_mixed_most(attention):
    data = replace(crossed(8), held_out=2)
    method = fedamp.build(toys.net(), attention=attention, lr=0.05)
    state = last(method, data, 10)
    models = torch.cat([v.flatten(1) for v in role("server/model", state.server).values()], 1)
    received = method.download(state.server, data.cohort(torch.arange(8)))
    cloud = torch.cat([v.flatten(1) for v in received.values()], 1)
    apart = torch.cdist(cloud[:6], models)
    kind = torch.arange(6) % 2
    for i in range(6):
        other = apart[i][kind != kind[i]].min()
        mine = apart[i][(kind == kind[i]) & (torch.arange(6) != i)].min()
        assert mine < other
    close(cloud[6:], models.mean(0).expand(2, -1))  # who comes later


@pytest.mark.slow
def test_it_helps_where_there_are_two_kinds_of_clients():
    data = crossed(8)
    method, plain = fedamp.build(toys.net()), fedavg.build(toys.net())
    own = evaluate(method, data, last(method, data, 12)).mean("accuracy")
    assert own > evaluate(plain, data, last(plain, data, 12)).mean("accuracy") + 0.2


def test_who_was_not_heard_yet_starts_at_the_mean_of_who_was(blobs):
    method = fedamp.build(toys.net(), epochs=1)
    state = last(method, blobs, 1, participation=fixed(4))
    heard = torch.isin(torch.arange(12), state.reporters.ids)
    assert torch.equal(state.server["server/heard"] > 0, heard)
    begun = first(method, blobs, 0).server
    late = method.download(state.server, blobs.cohort(torch.arange(12)[~heard]))
    for n, v in role("cloud", late).items():
        close(v, state.message[n].mean(0).expand_as(v))
        start = method.download(begun, blobs.cohort(torch.arange(12)))[f"cloud/{n}"]
        assert torch.equal(start, begun[f"server/model/{n}"])
