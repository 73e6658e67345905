"""What Ditto and its kin share: losses that read other parameters, and losses of no rows."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
import toys
from checks import close

from pyrofl.inference.definition.elbo import On, TransformedLoss, elbo
from pyrofl.inference.definition.method import phase_and_step, return_received
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.models import fedavg, fedprox, guides, local, scaffold
from pyrofl.models.shared.personal_copies import as_personal, start_own
from pyrofl.tensors import Tensors, generator, seeded

DATA = toys.blobs((3, 9))
BATCH = DATA.batch(torch.arange(2))


def held(seed: int) -> Tensors:
    """Return parameters of two clients under "w/" and, different, under "own/w/"."""
    start = fedavg.build(toys.net()).init(generator(1), 2)
    return toys.stacked(start, 2, seed) | start_own(
        toys.stacked(start, 2, seed + 1), DATA.cohort(torch.arange(2)), generator(1)
    )


def test_a_loss_reads_the_clients_own_parameters():
    method, tensors = fedprox.build(toys.net(), mu=0.5), held(3)
    received = {n: v for n, v in tensors.items() if n.startswith("w/")}
    mine = {n: tensors[f"own/{n}"] for n in received}
    loss = elbo(mean=True)
    run = (method.model, method.guide)
    close(
        TransformedLoss(loss, as_personal)(*run, received, tensors, BATCH),
        loss(*run, received, mine, BATCH),
    )
    moved = received | {n: v + 0.1 for n, v in received.items()}
    found = TransformedLoss(loss, as_personal, return_received)(
        *run, received, tensors | moved, BATCH
    )
    close(found, loss(*run, moved, mine, BATCH))


def test_a_loss_runs_another_methods_programs():
    flat, near, tensors = fedavg.build(toys.net()), fedprox.build(toys.net(), mu=9.0), held(3)
    received = {n: v + 1 for n, v in tensors.items() if n.startswith("w/")}
    run = (near.model, near.guide, received, tensors, BATCH)
    loss = elbo(mean=True)
    plain = loss(flat.model, flat.guide, received, tensors, BATCH)
    close(On(loss, flat.model, flat.guide)(*run), plain)
    assert bool((loss(*run) > plain).all())


def test_without_the_likelihood_the_divergence_is_left():
    for guide in (guides.delta, guides.mean_field):
        method = fedprox.build(toys.net(), mu=0.5, guide=guide)
        start = fedavg.build(toys.net(), guide=guide).init(generator(1), 2)
        received, tensors = toys.stacked(start, 2, 5), toys.stacked(start, 2, 6)
        run = (method.model, method.guide, received, tensors, BATCH)
        with seeded(0):
            fit = elbo(kl=0.0, mean=True)(*run)
        with seeded(0):
            both = elbo(mean=True)(*run)
        close(replace(elbo(mean=True), likelihood=False)(*run), both - fit, 1e-10)


def test_methods_that_train_as_fedavg_have_one_step():
    for module in (fedavg, fedprox, local):
        phase, step = phase_and_step(module.build(toys.net(), epochs=3))
        assert phase.epochs == 3
        assert step.names == "w/*"
    with pytest.raises(ValueError, match="unpack"):
        phase_and_step(scaffold.build(toys.net()))


NAMES = ("apfl", "ditto", "fedpa", "ifca", "perfedavg", "pfedbayes", "pfedme", "reptile")


@pytest.mark.parametrize("name", NAMES)
def test_baselines_take_other_guides_and_go_on_training_before_a_test(name):
    module = import_module(f"pyrofl.models.{name}")
    method = module.build(toys.net(), guide=guides.log_mean_field, num_particles=2, fine_tune=3)
    data = toys.blobs((6, 9, 20))
    state = toys.last(method, data, 2)
    assert not state.rejected
    scores = {
        a: evaluate(method, data, state, adaptation=a, part="train") for a in ("fine_tune", "none")
    }
    assert scores["fine_tune"].mean("nll") < scores["none"].mean("nll")


@pytest.mark.parametrize("name", sorted({*NAMES} - {"pfedbayes"}))
def test_baselines_without_a_server_of_their_own_take_robust_merges(name):
    module = import_module(f"pyrofl.models.{name}")
    plain, robust = (module.build(toys.net(), aggregation=m, epochs=1) for m in ("mean", "median"))
    data = toys.blobs((6, 9, 20, 8))
    a, b = (toys.last(m, data, 1) for m in (plain, robust))
    toys.assert_same(a.message, b.message)
    assert any(not torch.equal(v, b.server[n]) for n, v in a.server.items())
