"""Odd inputs of checks and references are refused in one line, before any work."""

from __future__ import annotations

from functools import cache

import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray

import pyrofl
from pyrofl import Federation, checks, nets, reference
from pyrofl.models import likelihoods, pvi

X = torch.linspace(-1.0, 1.0, 8)[:, None]
METHOD = pvi.build(nets.build("linear", (1,), 1), likelihood=likelihoods.normal(0.5))
DATA = Federation.from_arrays({"a": (X, X[:, 0]), "b": (X, 0.5 - X[:, 0])})
# Of the same clients, with another number of features.
OTHER = Federation.from_arrays({n: (X.expand(8, 2), X[:, 0]) for n in "ab"})
FAILS = "RuntimeError: Expected size for first two dimensions"


def program(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        effect = pyro.sample("effect", dist.Normal(mu, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(effect, 1.0), obs=batch.y)


@cache
def run() -> pyrofl.Run:
    return pyrofl.fit(METHOD, DATA, 3, progress=False)


@cache
def ranks() -> checks.Ranks:
    sites = {"w": (("replication", "client"), torch.ones(5, 2).numpy())}
    return checks.Ranks(xarray.Dataset(sites, {"client": ["a", "b"]}), draws=9, bins=2)


def evaluated(**options: object) -> object:
    return pyrofl.evaluate(METHOD, OTHER, run().state, part="train", **options)


ODD = {
    "sbc of other data": (
        lambda: checks.sbc(METHOD, OTHER, 1, 40, 39),
        f"program raises {FAILS}",
    ),
    "sbc of another server": (
        lambda: checks.sbc(METHOD, DATA, 1, 40, 39, server={"foo": torch.ones(2)}),
        "download raises KeyError: 'server/shift'; expected a name that init",
    ),
    "level 0": (lambda: ranks().coverage([0.0]), r"levels are \[0.0\]; expected numbers"),
    "a text as levels": (lambda: ranks().coverage("0.5"), "levels are '0.5'; expected numbers"),
    "no level": (lambda: ranks().coverage([]), r"levels are \[\]; expected numbers"),
    "an unknown client": (lambda: ranks().of_client("c"), "unknown client 'c'; expected one of a"),
    "evaluation of other data": (evaluated, f"program raises {FAILS}"),
    "posterior of other data": (
        lambda: pyrofl.posterior(METHOD, OTHER, run().state, 10),
        f"program raises {FAILS}",
    ),
    "export of other data": (
        lambda: pyrofl.Run(METHOD, OTHER, run().state).to_arviz(5, corrected=False),
        f"program raises {FAILS}",
    ),
    "prior of other data": (
        lambda: checks.prior_predictive(METHOD, OTHER, draws=5),
        f"program raises {FAILS}",
    ),
    "hmc of other data": (lambda: reference.hmc(METHOD, OTHER), f"program raises {FAILS}"),
    "nuts of other data": (lambda: reference.nuts(METHOD, OTHER), f"program raises {FAILS}"),
    "loo of one draw": (lambda: checks.loo(run(), 1), "draws is 1; expected many"),
    "no models": (lambda: checks.compare_loo({}), "models is empty; expected a dict of name"),
    "no runs": (lambda: checks.prior_sensitivity([]), "fitted is empty; expected a run"),
    "few draws": (lambda: checks.prior_sensitivity(run(), 1), "draws is 1; expected a whole"),
    "a draw": (lambda: reference.compare_posteriors(run(), run(), draws=1), "draws is 1; expected"),
    "an unknown shared site": (
        lambda: reference.hmc(program, DATA, shared="nu"),
        "shared names no site 'nu'; the names are mu, effect",
    ),
    "unknown dims": (
        lambda: reference.hmc(program, DATA, shared="mu", dims={"nu": ("a",)}),
        "unknown site in dims 'nu'; expected one of mu, effect, x",
    ),
    "an unknown option": (
        lambda: reference.nuts(program, DATA, shared="mu", max_depth=3),
        "unknown argument of NUTS 'max_depth'; did you mean max_tree_depth",
    ),
    "a chain of a draw": (
        lambda: reference.nuts(program, DATA, 1, shared="mu"),
        "draws is 1; expected a whole number of at least 4",
    ),
    "no federation": (lambda: reference.pooled(3), "data is 3; expected a Federation"),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_inputs_are_refused_in_one_line(what):
    make, told = ODD[what]
    with pytest.raises(ValueError, match=told) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_loss_that_rises_is_told():
    with pytest.warns(UserWarning, match=r"the loss has risen from .* lower lr"):
        reference.centralized(METHOD, DATA, draws=4, steps=3, lr=1e6)
