"""Priors by the parameter's name: each layer has its own, and each pattern decides for one."""

from __future__ import annotations

import math
from typing import Any

import prior_table as table
import pyro.distributions as dist
import pytest
import torch
import toys
from pyro import poutine
from torch import Tensor

from pyrofl.experiments.settings import argument_types
from pyrofl.inference.definition.elbo import with_rows
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import client_inputs
from pyrofl.models import fedavg, fedhb, guides, pfedbayes, pfedvem, priors

BUILT = [
    m
    for m, build in table.BUILDS.items()
    if "prior" in argument_types(build) and m != "fedwba"  # whose particles have one prior
]
HIERARCHICAL = [m for m in BUILT if argument_types(table.BUILDS[m])["prior"] == priors.PriorFamily]
MIXED = {"head.weight*": dist.Laplace, "*": dist.Normal}


Found = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


def log_priors(method: Method, values: dict[str, Tensor] | None = None) -> Found:
    """Return log priors at values, or at draws; these values; and the tensors of the clients."""
    state = first(method, table.data(), 0)
    batch = table.data().batch(torch.arange(3))
    received, private = client_inputs(method, table.data(), state, batch.cohort, 0)
    model = poutine.condition(method.model, values or {})
    torch.manual_seed(0)
    trace = poutine.trace(model).get_trace(
        *(with_rows(v, len(batch)) for v in (received, private | received)), batch
    )
    sites = {n: s for n, s in trace.nodes.items() if s["type"] == "sample" and n != "y"}
    drawn = {n: s["value"] for n, s in sites.items() if type(s["fn"]).__name__ != "_Subsample"}
    found = {n: sites[n]["fn"].log_prob(v).flatten() for n, v in drawn.items()}
    return found, drawn, private | received


@pytest.mark.parametrize("method", HIERARCHICAL)
def test_layers_have_their_own_families(method: str) -> None:
    mixed, values, _ = log_priors(table.make(method, prior=priors.by_name(MIXED)))
    normal, laplace = (
        log_priors(table.make(method, prior=prior), values)[0]
        for prior in (dist.Normal, dist.Laplace)
    )
    assert len(mixed) > 1
    for name, found in mixed.items():
        alone, other = (laplace, normal) if name.startswith("head.weight") else (normal, laplace)
        torch.testing.assert_close(found, alone[name])
        assert not torch.allclose(found, other[name])


def test_the_density_is_that_of_the_formula() -> None:
    method = pfedvem.build(toys.net("mlp:2"), head="*", prior=priors.by_name(MIXED), init_scale=0.5)
    found, values, known = log_priors(method)
    assert {*found} == {"fc1.weight", "fc1.bias", "head.weight", "head.bias"}
    for name, w in values.items():
        apart = (w.reshape(3, -1) - known[f"loc/{name}"].reshape(3, -1)).double()
        tau = known["tau"].double()[:, None]
        if name == "head.weight":
            each = (tau.sqrt() / 2).log() - tau.sqrt() * apart.abs()
        else:
            each = (tau / (2 * math.pi)).log() / 2 - tau * apart.square() / 2
        torch.testing.assert_close(found[name].double(), each.sum(1), rtol=1e-5, atol=1e-5)


def test_a_fit_with_families_by_name_differs_from_either() -> None:
    families: tuple[Any, ...] = (priors.by_name(MIXED), dist.Normal, dist.Laplace)
    states = [
        toys.last(table.make("ditto", prior=p, own_epochs=3), table.data(), 2) for p in families
    ]
    mixed, *others = (dict(state.client_states) for state in states)
    assert not any(torch.equal(mixed[n], other[n]) for other in others for n in mixed)


def test_equal_families_by_name_are_that_family() -> None:
    same = priors.by_name({"head.*": dist.Normal, "*": dist.Normal(0.0, 1.0)})
    net = toys.net("mlp:2")
    assert fedhb.build(net, guide=guides.delta, prior=same, centers=2).name == "fedhb"
    assert pfedbayes.build(net, prior=same, sampling="activations").name == "pfedbayes"
    with pytest.raises(
        ValueError, match=r"sampling is 'activations', but prior is .*not dist\.Nor"
    ):
        pfedbayes.build(net, prior=priors.by_name(MIXED), sampling="activations")


@pytest.mark.parametrize(
    "method",
    [
        m if m in ("fedavg", "ditto", "pfedvem") else pytest.param(m, marks=pytest.mark.slow)
        for m in BUILT
    ],
)
def test_a_pattern_that_decides_nothing_is_refused(method: str) -> None:
    for patterns in ("typo.*", "* typo.*"):
        unmatched = priors.by_name({patterns: dist.Normal, "*": dist.Normal})
        with pytest.raises(ValueError, match=r"'typo\.\*', which matches no parameter; expected"):
            table.make(method, prior=unmatched)
    hidden = priors.by_name({"*": dist.Normal, "*[a-z]": dist.Normal})
    with pytest.raises(ValueError, match="earlier patterns match all of its parameters; move it"):
        table.make(method, prior=hidden)


def test_a_rest_without_parameters_is_accepted() -> None:
    rest = priors.by_name({"fc1.* head.*": dist.Normal, "*": dist.Laplace})
    assert pfedvem.build(toys.net("mlp:2"), prior=priors.by_name({"head.*": dist.Normal})).name
    assert fedavg.build(toys.net("mlp:2"), prior=rest).name == "fedavg"


def test_a_complete_prior_by_name_is_refused_with_its_pattern() -> None:
    complete = priors.by_name({"head.weight": dist.Normal(0.0, 0.1), "*": dist.Normal})
    with pytest.raises(ValueError, match=r"prior of 'head\.weight' is Normal.*of its own"):
        pfedvem.build(toys.net("mlp:2"), prior=complete)
    with pytest.raises(ValueError, match=r"parameter head\.bias has no prior"):
        pfedvem.build(toys.net("mlp:2"), prior=priors.by_name({"head.weight": dist.Laplace}))
