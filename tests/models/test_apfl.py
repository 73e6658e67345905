"""APFL: a share of one's own model between FedAvg and training alone."""

from __future__ import annotations

import pytest
import torch
import toys
from checks import close
from promises import Promises
from toys import last

from pyrofl.data.loaders.datasets import load
from pyrofl.inference.engine.state import RoundState, client_inputs
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.models import apfl, fedavg, likelihoods, local
from pyrofl.nets import build
from pyrofl.partitions.federations import split

PROMISES = {"apfl": Promises(statistics={"alpha": ()}, message=(toys.ALL, toys.ALL))}

USUAL = {"batch": 2, "lr": 0.1}


def test_with_no_share_the_personal_model_is_fedavgs(tiny):
    net = build("mlp:5", (4,), 3)
    method, plain = apfl.build(net, alpha=0.0, lr_alpha=0.0, **USUAL), fedavg.build(net, **USUAL)
    state, common = last(method, tiny, 3), last(plain, tiny, 3)
    received, private = client_inputs(method, tiny, state, tiny.cohort(torch.arange(3)), seed=0)
    mixed = method.views["personal"](received, private | received)
    for n, value in common.server.items():
        assert torch.equal(state.server[n], value)
        close(mixed[n], value.expand_as(mixed[n]))


def test_with_all_the_share_it_is_training_alone(tiny):
    net = build("mlp:5", (4,), 3)
    state = last(apfl.build(net, alpha=1.0, lr_alpha=0.0, **USUAL), tiny, 3)
    alone = last(local.build(net, **USUAL), tiny, 3)
    for n, value in alone.client_states.items():
        close(state.client_states[f"own/{n}"], value)


def test_a_round_moves_the_share_and_then_both_models(quadratic):
    w, v, share = (torch.tensor(x).double() for x in ([0.3, -0.2], [1.0, 0.5], 0.25))
    method = apfl.build(
        build("linear", (2,), 1),
        alpha=0.25,
        lr_alpha=0.01,
        likelihood=likelihoods.normal(),
        epochs=1,
        batch=None,
        lr=0.1,
        momentum=0.0,
    )
    own = {"own/w/w": v.expand(2, 2).clone(), "alpha": torch.full((2,), 0.25).double()}
    begun = RoundState(0, {"w/w": w}, own, torch.ones(2).bool())
    state = last(method, quadratic.federation, 1, resume_from=begun)

    def slope(at: torch.Tensor) -> torch.Tensor:
        return torch.einsum("cij,cj->ci", quadratic.precision, at - quadratic.mean) / 2

    alpha = share - 0.01 * ((v - w) * slope((share * v + (1 - share) * w).expand(2, 2))).sum(1)
    sent = w - 0.1 * slope(w.expand(2, 2))
    kept = v - 0.1 * slope(torch.lerp(sent, v.expand(2, 2), alpha[:, None]))
    close(state.client_states["alpha"], alpha)
    close(state.message["w/w"], sent)
    close(state.client_states["own/w/w"], kept)


@pytest.fixture(scope="module")
def skewed():
    return split(load("digits"), "dirichlet:0.1", 6, seed=1)


PLAIN = {"epochs": 1, "batch": 5, "lr": 0.05, "momentum": 0.0}


@pytest.mark.slow
def test_the_mixture_is_not_below_the_two_that_it_is_made_of(skewed):
    net = build("mlp:20", (1, 8, 8), 10)
    method, alone = apfl.build(net, **PLAIN), local.build(net, **PLAIN)
    state = last(method, skewed, 6)

    def accuracy(method, state, model):
        return evaluate(method, skewed, state, model=model).mean("accuracy", "row")

    own = accuracy(alone, last(alone, skewed, 6), "personal")
    mixed, common = (accuracy(method, state, m) for m in ("personal", "global"))
    assert mixed > max(own, common) - 0.01
    assert float(state.client_states["alpha"].min()) > 0.2, "labels are skewed: all need their own"


@pytest.mark.slow
def test_a_share_of_nothing_is_left_again(skewed):
    method = apfl.build(build("mlp:20", (1, 8, 8), 10), alpha=0.0, **PLAIN)
    assert float(last(method, skewed, 1).client_states["alpha"].max()) == 0
    assert float(last(method, skewed, 6).client_states["alpha"].min()) > 0


def test_shares_stay_shares(tiny):
    method = apfl.build(build("mlp:5", (4,), 3), lr_alpha=50.0, lr=0.1)
    alpha = last(method, tiny, 2).client_states["alpha"]
    assert bool(((alpha >= 0) & (alpha <= 1)).all())
    assert bool(((alpha == 0) | (alpha == 1)).any())


def test_fine_tuning_leaves_the_common_model(tiny):
    method = apfl.build(build("mlp:5", (4,), 3), lr=0.1, fine_tune=5)
    state = last(method, tiny, 2)
    tuned = evaluate(method, tiny, state, adaptation="fine_tune").mean("nll")
    assert tuned < evaluate(method, tiny, state).mean("nll")
    common = [
        evaluate(method, tiny, state, model="global", adaptation=a).mean("nll")
        for a in ("fine_tune", "none")
    ]
    assert common[0] == common[1]
