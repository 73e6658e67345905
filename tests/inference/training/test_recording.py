"""Recorded traces against those of Pyro."""

from __future__ import annotations

import re
from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from pyro import poutine

from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import trace_program
from pyrofl.models import fedavg, guides
from pyrofl.models.priors import fixed

KEYS = ("type", "name", "is_observed", "scale", "mask", "infer", "cond_indep_stack")


def programs() -> tuple:
    method = fedavg.build(toys.net(), prior=fixed(), guide=guides.mean_field)
    data = toys.blobs()
    batch = data.batch(torch.arange(3))
    state = method.init(torch.Generator().manual_seed(0), 3)
    local = {n: v.double().expand(3, 1, *v.shape) for n, v in state.items()}
    return method, (local, local, batch)


def test_sites_are_those_of_pyro():
    method, args = programs()
    with pyro.validation_enabled(False):
        pyro.set_rng_seed(1)
        q = poutine.trace(method.guide).get_trace(*args)
        p = poutine.trace(poutine.replay(method.model, trace=q)).get_trace(*args)
        pyro.set_rng_seed(1)
        ours = trace_program(method.guide, args)
        theirs = trace_program(method.model, args, ours)
    for mine, pyros in ((ours, q), (theirs, p)):
        expected = {n: s for n, s in pyros.nodes.items() if n not in ("_INPUT", "_RETURN")}
        assert list(mine.nodes) == list(expected)
        for name, site in expected.items():
            found = mine.nodes[name]
            assert torch.equal(torch.as_tensor(found["value"]), torch.as_tensor(site["value"]))
            assert type(found["fn"]) is type(site["fn"])
            for key in KEYS:
                assert str(found[key]) == str(site[key]), (name, key)
        assert mine.log_prob_sum() == pyros.log_prob_sum()


def test_observed_sites_and_others_are_not_replayed():
    def first() -> None:
        pyro.sample("a", dist.Delta(torch.tensor(1.0)), infer={"mark": 1})
        pyro.sample("y", dist.Delta(torch.tensor(2.0)))

    def second() -> None:
        pyro.sample("a", dist.Delta(torch.tensor(3.0)))
        pyro.sample("b", dist.Delta(torch.tensor(4.0)))
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(5.0))
        pyro.param("p", torch.tensor(6.0))
        pyro.sample("hidden", dist.Normal(0.0, 1.0), infer=hidden)

    hidden = {"_do_not_trace": True, "is_auxiliary": True}
    trace = trace_program(second, (), trace_program(first, ()))
    values = {n: s["value"].item() for n, s in trace.nodes.items()}
    assert values == {"a": 1.0, "b": 4.0, "y": 5.0, "p": 6.0}
    assert trace.nodes["y"]["is_observed"]
    assert trace.nodes["p"]["type"] == "param"
    assert trace.nodes["a"]["infer"] == {"mark": 1}
    pyro.clear_param_store()


def sampled() -> None:
    pyro.sample("a", dist.Normal(0.0, 1.0))


def observing() -> None:
    pyro.sample("a", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0))


def parameter() -> None:
    pyro.param("a", torch.tensor(1.0))


def test_a_name_is_taken_once():
    def both(*programs) -> None:
        for program in programs:
            program()

    for twice in product((sampled, observing, parameter), repeat=2):
        if twice != (parameter, parameter):
            with pytest.raises(RuntimeError, match="several sites are named 'a'"):
                trace_program(both, twice)
    assert list(trace_program(both, (parameter, parameter)).nodes) == ["a"]
    pyro.clear_param_store()


def test_a_latent_site_takes_values_of_latent_sites_alone():
    for known in (observing, parameter):
        with pytest.raises(RuntimeError, match="site 'a' must be sampled"):
            trace_program(sampled, (), trace_program(known, ()))
    pyro.clear_param_store()


def test_errors_have_a_note_with_shapes():
    def broken(received: dict, local: dict, batch: Batch) -> None:
        pyro.sample("first", dist.Normal(torch.zeros(2, 3), 1.0).to_event(1))
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing") as caught:
        trace_program(broken, ({}, {}, None))
    assert str(caught.value) == "no such thing"
    (note,) = caught.value.__notes__
    assert re.search(r"first dist +2 \| 3", note)
    assert not pyro.poutine.runtime._PYRO_STACK
