"""What is made of a recipe is what it was told of; what is not the library's is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pyro.distributions as dist
import pytest
import test_contract as contract
import torch
import toys

from pyrofl import Network, recipes
from pyrofl.inference.definition.description import described
from pyrofl.models import fedavg, guides, likelihoods, pfedvem, priors
from pyrofl.models.shared.schedules import uneven


@contract.everywhere
def test_every_method_is_made_again(name):
    method = contract.make(name)
    again = recipes.made(recipes.told(method))
    assert described(again) == described(method)
    assert again.name == method.name


PARTS = [
    likelihoods.categorical,
    likelihoods.normal(0.5),
    likelihoods.binomial(3),
    priors.flat,
    priors.fixed(dist.Laplace, 1.0, 2.0),
    priors.by_name({"*.bias": priors.flat, "*": priors.fixed(priors.student_t(4.0))}),
    priors.proximal(0.0),
    dist.Normal,
    dist.Normal(0.0, 0.7),
    dist.StudentT(4.0),
    guides.delta,
    guides.flow(3),
    uneven(5),
    (1, 2.5, "a", None, True, [torch.ones(2)]),
]


@pytest.mark.parametrize("part", PARTS, ids=range(len(PARTS)))
def test_parts_are_told_in_words_that_a_file_may_hold(part):
    told = recipes.told(part)
    again = recipes.told(recipes.made(told))
    assert str(again) == str(told)
    if not isinstance(part, tuple):
        assert json.loads(json.dumps(told)) == told


def test_arguments_change_what_is_made():
    method = fedavg.build(toys.net(), lr=0.5, prior=priors.fixed(dist.Laplace), epochs=uneven(3))
    again = recipes.made(recipes.told(method))
    assert described(again) == described(method)
    assert described(again) != described(fedavg.build(toys.net(), lr=0.5))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: fedavg.build(Network(torch.nn.Linear(8, 5))), "net is Network, not made by"),
        (lambda: fedavg.build(toys.net(), prior=lambda *args: None), "prior is .*lambda"),
        (
            lambda: pfedvem.build(toys.net(), prior=toys.net),
            "prior is net.spec.; expected a family",
        ),
    ],
)
def test_what_is_ones_own_cannot_be_told(make, told):
    with pytest.raises(ValueError, match=told):
        recipes.told(make())


@pytest.mark.parametrize(
    "told",
    [
        {"name": "os:system"},
        {"name": "pyrofl.models.likelihoods:torch"},
        {"name": "pyrofl.files.run_folder:write_json"},
        {"name": "pyrofl.models.nothing:build"},
        {"call": "os:system", "with": {"command": "touch x"}},
        {"call": "pyrofl.files.run_folder:sweep", "with": {"path": "."}},
        {"call": "pyrofl.models.likelihoods:named", "with": {"spec": "normal"}},
        {"call": "subprocess:run", "with": {"args": ["true"]}},
    ],
    ids=str,
)
def test_nothing_else_is_called(told):
    with pytest.raises(ValueError, match=r"expected a function of the library"):
        recipes.made(told)


def test_a_fresh_process_imports_what_it_needs():
    told = recipes.told(fedavg.build(toys.net(), likelihood=likelihoods.normal(2.0)))
    code = f"from pyrofl import recipes; print(recipes.made({told!r}).name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "fedavg\n"


def test_swap_builds_a_method_again_with_other_settings():
    method = pfedvem.build(toys.net(), lr_head=0.02)
    other = method.swap(prior=dist.Laplace, guide=guides.log_mean_field)
    same = pfedvem.build(toys.net(), lr_head=0.02, prior=dist.Laplace, guide=guides.log_mean_field)
    states = [toys.last(m, toys.blobs(), 2) for m in (other, same)]
    assert all(torch.equal(v, states[1].server[n]) for n, v in states[0].server.items())
    assert recipes.spec_of(other).arguments["lr_head"] == 0.02
    back = toys.last(other.swap(prior=dist.Normal, guide=None), toys.blobs(), 2)
    first = toys.last(method, toys.blobs(), 2)
    assert all(torch.equal(v, back.server[n]) for n, v in first.server.items())


def test_swap_refuses_what_build_refuses():
    method = pfedvem.build(toys.net())
    with pytest.raises(TypeError, match="'gide'; did you mean guide"):
        method.swap(gide=guides.delta)
    with pytest.raises(ValueError, match="not made by a build function"):
        replace(method, name="mine").swap(guide=guides.delta)
