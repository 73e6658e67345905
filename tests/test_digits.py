"""Methods with their defaults against training alone, on handwritten digits."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

import pyrofl
from pyrofl import nets
from pyrofl.data import Federation
from pyrofl.data.loaders import datasets
from pyrofl.models import fedbe
from pyrofl.partitions import federations
from pyrofl.tensors import Tensors, role


def clients(seed: int) -> Federation:
    """Return twenty clients as the command line makes them, tested on all digits they hold."""
    return federations.split(
        datasets.load("digits"), "slices:5", 20, seed=seed, test="same_classes", server_data=0.2
    )


def accuracy(name: str, data: Federation, seed: int) -> float:
    """Fit a method with its defaults; return how its main model does, adapted if it adapts."""
    build = import_module(f"pyrofl.models.{name}").build
    own = {"server_data": data.server_data} if name in ("fedbe", "predbayes") else {}
    net = nets.build("mlp:50", (64,), 10)
    run = pyrofl.fit(build(net, **own), data, 20, seed=seed, progress=False)
    assert not any(record.rejected for record in run.records)
    assert all(bool(v.isfinite().all()) for r in run.records for v in r.loss.values())
    personal = run.method.main_view == "personal"
    adaptation = "fine_tune" if run.method.adapt and personal else "none"
    return run.evaluate(adaptation=adaptation).mean("accuracy")


PAPERS = ("pfedvem", "pfedmb", "metavd", "fedbe", "fedabml")
AROUND_FEDAVG = ("fedopt", "ditto", "pfedme", "apfl", "perfedavg", "reptile", "ifca", "fedpa")
GROUPS = ("fedem", "fedamp", "fedfomo", "pfedgp", "predbayes")
IN_PARTS = ("fedper", "fedrep", "fedbabu", "lgfedavg")
BAYESIAN = ("fedpop", "pfedbayes")
GAUSSIAN = ("fisher", "fola", "fedep", "fedhb", "virtual")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "seed"),
    [
        *((PAPERS, seed) for seed in range(10)),
        *(
            (names, seed)
            for names in (AROUND_FEDAVG, GROUPS, IN_PARTS, BAYESIAN, GAUSSIAN)
            for seed in range(3)
        ),
    ],
)
def test_defaults_beat_training_alone(names, seed):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small steps are fastest so
    try:
        data = clients(seed)
        alone = accuracy("local", data, seed)
        for name in names:
            assert accuracy(name, data, seed) > alone, name
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 10))]
)
def test_distillation_does_not_end_below_the_average_that_it_starts_from(seed):
    """Where clients are so unlike that an average of their models is worse than their ensemble."""
    data = federations.split(
        datasets.load("digits"),
        "step:2,minor=2",
        20,
        seed=seed,
        test="same_classes",
        server_data=0.2,
    )
    net = nets.build("mlp:50", (64,), 10)
    method = fedbe.build(net, server_data=data.server_data)
    run = pyrofl.fit(method, data, 5, seed=seed, progress=False)
    average = {n: v[0] for n, v in role("server/teacher/w", run.state.server).items()}
    rows = data.pooled_test

    def right(weights: Tensors) -> float:
        return float((net.apply(weights, data.x[rows]).argmax(-1) == data.y[rows]).float().mean())

    assert right(role("w", run.state.server)) >= right(average)
    assert not run.warnings
