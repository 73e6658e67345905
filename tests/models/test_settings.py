"""Every setting of every method refuses what lies outside of its range, by its name."""

from __future__ import annotations

import re
from math import nan

import promises
import pyro.distributions as dist
import pytest
import test_contract as contract
import torch
import toys
from hostile.settings import kind_of, known

from pyrofl.inference.privacy.sums import summed
from pyrofl.models import fola, guides, likelihoods, priors
from pyrofl.nets import build

# By the kinds that tests/hostile/settings.py gives to settings by hand.
OUTSIDE: dict[str, tuple[object, ...]] = {
    "count": (0, -1, 2.5),
    "whole": (-1, 2.5),
    "positive": (0.0, nan),
    "not negative": (-1.0, nan),
    "share": (-0.1, 1.5, nan),
    "below one": (-0.1, 1.0, nan),
    "both": (-0.1, nan),
    "word": ("no-such-word",),
    "pattern": ("no-such-layer.*",),
}


@contract.everywhere
def test_values_out_of_range_are_refused_by_name(name):
    build = contract.MODULES[name].build
    for setting in [setting for method, setting in known() if method == name]:
        for value in OUTSIDE.get(kind_of(name, setting), ()):
            given = {**promises.of(name).settings, setting: value}
            with pytest.raises(ValueError, match=rf"^({setting} is |no parameter matches)"):
                build(toys.net(), **given)


POINT = "guide is mean_field; expected guides.delta"
JOINT = "expected mean_field or full_covariance"
FIXED = "prior is not a normal with fixed moments"
# What is refused of several settings together, or of what is no number: method, settings, words.
REFUSED: tuple[tuple[str, dict[str, object], str], ...] = (
    ("fald", {"guide": guides.mean_field}, "expected delta, as draws are those of the"),
    ("fald", {"lr": 0.0}, "lr is 0.0; expected a number above 0"),
    ("fedabml", {"lr_prior": 1.1}, "lr_prior is 1.1; expected 0 to 1, a share of the way, if nat"),
    ("fedabml", {"lr_prior": -0.1, "natural": False}, "lr_prior is -0.1; expected a number of at"),
    ("fedabml", {"init_scale": 0.0, "guide": guides.delta}, "init_scale is 0.0"),
    ("fedamp", {"aggregation": "median"}, "aggregation is 'median'; expected none, as every"),
    ("fedavg", {"guide": guides.mean_field, "init_scale": 0.0}, "init_scale is 0.0"),
    ("fedbe", {"server_data": None}, "server_data is missing; expected rows [U, *x]"),
    ("fedbe", {"server_data": torch.zeros(0, 8)}, "server_data is missing"),
    ("fedbe", {"server_data": torch.zeros(4, 3)}, "server_data has shape (4, 3); expected rows"),
    ("fedbe", {"teachers": "X"}, "teachers is 'X' with 10 samples"),
    ("fedbe", {"teachers": ""}, "teachers is ''"),
    ("fedbe", {"teachers": "SS"}, "teachers is 'SS'"),
    ("fedbe", {"teachers": "S", "samples": 0}, "teachers is 'S' with 0 samples"),
    ("fedbe", {"posterior": "dirichlet", "alpha": 0.0}, "alpha is 0"),
    ("fedbe", {"elapsed": 1.5, "decay": True}, "elapsed is 1.5"),
    ("fedbe", {"likelihood": likelihoods.normal()}, "likelihood is Normal"),
    ("fedep", {"moments": "natural", "lr": 1.5}, "lr is 1.5, of natural gradients; expected at"),
    (
        "fedep",
        {"moments": "natural", "num_particles": 7},
        "num_particles is 7; expected an even number",
    ),
    ("fedep", {"guide": guides.delta}, JOINT),
    ("fedfomo", {"aggregation": "median"}, "aggregation is 'median'; expected none, as every"),
    ("fedhb", {"centers": 2}, "centers is 2, guide"),
    ("fedopt", {"optimizer": "sgd", "beta1": 1.0}, "beta1 is 1.0; expected a number from 0 to be"),
    ("fedpop", {"lr_head": 0.0}, "lr_head is 0.0; expected a number above 0"),
    ("fedpop", {"epochs": 0}, "epochs is 0; expected a whole number of at least 1"),
    ("fisher", {"prior": priors.flat}, FIXED),
    ("fisher", {"prior": priors.fixed(dist.Laplace)}, FIXED),
    ("fisher", {"guide": guides.copula}, JOINT),
    ("fola", {"guide": guides.delta}, JOINT),
    ("metavd", {"prune": 0.9, "dropout": "none"}, "prune is 0.9"),
    ("pvi", {"sampling": "activations", "covariance": "full"}, "sampling is 'activations', but"),
    (
        "virtual",
        {"warm_start": 2, "sampling": "weights"},
        "warm_start is 2, but sampling is 'weigh",
    ),
    ("pfedgp", {"guide": guides.mean_field}, POINT),
    ("pfedmb", {"drop": 0.6}, "drop is 0.6 with weighted=True; expected 0 to 1/branches = 0.2"),
    ("pfedmb", {"drop": 0.1, "weighted": False}, "drop is 0.1 with weighted=False"),
    ("pfedmb", {"guide": "projection", "concentration": 2.0}, "concentration is 2.0, prior None"),
    ("pfedmb", {"guide": "dirichlet", "init_scale": 0.0}, "init_scale is 0.0"),
    ("predbayes", {"server_data": None}, "server_data is missing"),
    ("predbayes", {"guide": guides.mean_field}, POINT),
    ("predbayes", {"aggregation": "median"}, "aggregation is 'median'; expected none"),
    ("predbayes", {"likelihood": likelihoods.normal()}, "the likelihood is Normal; expected one"),
    ("scaffold", {"lr": 0.0}, "lr is 0.0; expected a number above 0, by which eq. 4 divides"),
    ("virtual", {"private": "*"}, "all parameters are private (without `private`, those"),
    ("virtual", {"private": "tail"}, "no parameter matches 'tail'"),
    ("virtual", {"num_particles": 7}, "num_particles is 7; expected an even number"),
    ("virtual", {"guide": guides.copula}, "expected mean_field, full_covariance or delta"),
    *((n, {"head": "tail.*"}, "no parameter matches 'tail.*'") for n in ("fedper", "fedbabu")),
)


@pytest.mark.parametrize(("name", "settings", "words"), REFUSED)
def test_settings_that_do_not_suit_are_refused(name, settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        contract.MODULES[name].build(
            toys.net(),
            **{**promises.of(name).settings, "likelihood": likelihoods.categorical} | settings,
        )


def test_a_covariance_of_many_parameters_is_refused():
    with pytest.raises(ValueError, match=r"full_covariance\) of 3760 parameters; expected at most"):
        fola.build(build("mlp:50", (64,), 10), guide=guides.full_covariance)


@pytest.mark.parametrize("name", ["fedamp", "fedfomo", "predbayes"])
def test_what_needs_sums_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"{name}: .*; use "):
        summed(contract.built(name))
