"""The same seed gives the same bits; threads, chunks and the order of clients only round."""

from __future__ import annotations

import io
from dataclasses import replace

import pyro.distributions as dist
import pytest
import test_contract as contract
import torch
import toys
from checks import close
from promises import others_slow
from torch import Tensor

from pyrofl.data import Cohort, Federation
from pyrofl.data.loaders.conjugate import linear_regression
from pyrofl.experiments.tasks import threads
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import Stragglers, bernoulli
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.models import fedavg, guides, likelihoods, pfedvem, priors, pvi
from pyrofl.models.shared.gaussians import Normals
from pyrofl.nets import build
from pyrofl.tensors import generator


def run(name: str, count: int) -> RoundState:
    with threads(count):
        *_, state = federate(
            contract.built(name), toys.blobs((3, 9, 7, 12)), 1, stragglers=Stragglers(0.2, 0.5)
        )
    return state


@contract.on_archetypes
def test_threads_only_round(name):
    toys.assert_same_round(run(name, 1), run(name, 2), rtol=1e-8, atol=1e-9)


# Torch splits work of 32,768 numbers and more: here rows times 300, or the weights of a head, whose
# sum then differs in its last bit. All that is above is smaller.
LARGE = {
    "fedavg": (
        lambda net: fedavg.build(net, guide=guides.mean_field, epochs=1, batch=None, lr=0.01),
        "mlp:300",
        (400, 900, 700),
    ),
    "pfedvem": (
        lambda net: pfedvem.build(net, head_epochs=1, base_epochs=1, batch=50),
        "mlp:7000",
        (40, 90, 70),
    ),
}


@pytest.mark.parametrize("name", others_slow(LARGE, ["fedavg"]))
@pytest.mark.parametrize("chunk_size", others_slow([1, 3, None], [None]))
def test_work_that_is_large_enough_for_threads_only_rounds(chunk_size, name):
    make, net, sizes = LARGE[name]
    method = make(build(net, (toys.FEATURES,), toys.CLASSES))
    data = toys.blobs(sizes)
    states = []
    for count in (1, 2, 2):
        with threads(count):
            states += federate(method, data, 1, chunk_size=chunk_size)
    toys.assert_same_round(states[0], states[1], rtol=1e-8, atol=1e-10)
    toys.assert_same_round(states[1], states[2])


def permuted(data: Federation, order: Tensor) -> Federation:
    """Return the same clients in another order, under their names."""
    parts = {n: [getattr(data, n)[i] for i in order] for n in ("train", "test", "names")}
    return replace(data, **parts)


@pytest.mark.parametrize(
    "family", others_slow(toys.FAMILIES, ["mean_field", "flow", "gamma and beta"])
)
def test_chunks_order_threads_and_pauses_only_round(family):
    # Every kind of guide, with momentum, minibatches, failures and partial work.
    data = toys.blobs((3, 9, 7, 12, 5))
    method = toys.trained(toys.FAMILIES[family], data)
    order = torch.tensor([3, 0, 4, 2, 1])
    options = {"stragglers": Stragglers(0.2, 0.5), "seed": 6}
    begun, whole = federate(method, data, 2, chunk_size=5, **options)
    (again,) = federate(method, data, 2, chunk_size=5, resume_from=stored(begun), **options)
    toys.assert_same_round(whole, again)
    for count, chunk in ((1, 1), (2, 3)):
        with threads(count):
            *_, fresh = federate(method, data, 2, chunk_size=chunk, **options)
            (resumed,) = federate(
                method, data, 2, chunk_size=chunk, resume_from=stored(begun), **options
            )
            *_, moved = federate(method, permuted(data, order), 2, chunk_size=chunk, **options)
        for found in (fresh, resumed):
            toys.assert_same_round(found, whole, rtol=1e-9, atol=1e-10)
        toys.assert_same(moved.server, whole.server, 1e-9, 1e-10)
        for part in ("client_states", "loss"):
            expected = {n: v[order] for n, v in getattr(whole, part).items()}
            toys.assert_same(getattr(moved, part), expected, 1e-9, 1e-10)
        assert sorted(order[moved.reporters.ids].tolist()) == whole.reporters.ids.tolist()


def stored(state: RoundState) -> RoundState:
    """Return a round as it comes back from a file."""
    file = io.BytesIO()
    torch.save(state.__dict__ | {"reporters": tuple(state.reporters)}, file)
    file.seek(0)
    known = torch.load(file, weights_only=True)
    return RoundState(**known | {"reporters": Cohort(*known["reporters"])})


@pytest.mark.parametrize("guide", [guides.delta, guides.mean_field])
def test_a_client_is_the_same_whoever_else_is_there(guide):
    # Local training, so that nothing but random numbers could reach a client from the others.
    data = toys.blobs((3, 9, 7, 12, 5))
    q = guide(toys.net().shapes, init_scale=0.1)
    one = toys.trained(lambda _: (toys.FAMILIES["mean_field"](data)[0], q), data)
    alone = replace(one, aggregate=lambda server, message, cohort, generator: server)
    some = torch.tensor([4, 1])
    fewer = permuted(data, some)
    *_, all_ = federate(alone, data, 2, stragglers=Stragglers(0.3, 0.4))
    *_, few = federate(alone, fewer, 2, stragglers=Stragglers(0.3, 0.4))
    for part in ("client_states", "loss"):
        expected = {n: v[some] for n, v in getattr(all_, part).items()}
        toys.assert_same(getattr(few, part), expected, 1e-9, 1e-10)
    other = replace(fewer, names=("somebody", "else"))
    *_, named = federate(alone, other, 2, stragglers=Stragglers(0.3, 0.4))
    assert any(not torch.allclose(v, few.client_states[n]) for n, v in named.client_states.items())
    for draws in (None, 3):
        found = evaluate(alone, data, all_, draws=draws).values
        scores = evaluate(alone, fewer, few, draws=draws).values
        toys.assert_same(scores, {n: v[some] for n, v in found.items()}, 1e-6, 1e-6)
    draws = {n: v[:, some] for n, v in posterior(alone, data, all_, 4).items()}
    toys.assert_same(posterior(alone, fewer, few, 4), draws, 1e-9, 1e-10)


def test_random_streams_do_not_meet():
    # Participation, failures and noise are drawn apart: one may change and the others stay.
    method, data = fedavg.build(toys.net(), epochs=1), toys.blobs((3, 9, 7, 12))
    options = {"participation": bernoulli(0.6), "seed": 2}
    plain = list(federate(method, data, 3, **options))
    failing = list(federate(method, data, 3, stragglers=Stragglers(0.4), **options))
    assert [s.trained.tolist() for s in plain] == [s.trained.tolist() for s in failing]
    assert [s.reporters.ids.tolist() for s in plain] != [s.reporters.ids.tolist() for s in failing]
    toys.assert_same(plain[0].loss, failing[0].loss)


def exact(task: object, clients: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of a normal prior, N(0, I), times the rows of some clients."""
    data = task.federation  # type: ignore[attr-defined]
    rows = torch.cat([data.train[i] for i in clients.tolist()])
    design = data.x[rows]
    precision = torch.eye(design.shape[1]).to(design) + design.T @ design
    return torch.linalg.solve(precision, design.T @ data.y[rows]), precision.inverse()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_posterior_is_that_of_the_rows_of_those_who_were_heard(seed):
    task = linear_regression(6, 2, [4, 9, 6, 12, 5, 7], seed=1)
    net = build("linear", (2,), 1)
    exactly = {"covariance": "full", "damping": 1.0, "lr": 1.0, "epochs": 2}
    prior = priors.fixed(dist.Normal, 0.0, 1.0)
    method = pvi.build(net, likelihood=likelihoods.normal(), prior=prior, **exactly)
    # From the prior: PVI starts at a network, whose factor a client takes back once it is heard.
    start = {n: torch.zeros_like(v) for n, v in method.init(generator(0), 6).items()}
    start["precision"] = torch.tensor([1.0, 0.0, 1.0])
    loss = Stragglers(0.5)
    (state,) = federate(method, task.federation, 1, seed=seed, stragglers=loss, server_state=start)
    heard = loss.reported(torch.arange(6), task.federation.names, seed, 0)
    assert state.reporters.ids.tolist() == heard.tolist()
    assert 0 < len(heard) < 6
    normals = Normals(len(state.server["shift"]), True)
    mean, root = normals.moments(state.server)
    expected = exact(task, heard)
    assert mean.shape == expected[0].shape
    close(mean, expected[0], 1e-6)
    close(root @ root.T, expected[1], 1e-6)
