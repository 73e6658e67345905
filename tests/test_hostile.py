"""Federations that nobody would wish for: a clear refusal, or finite results, from every method."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import test_contract as contract
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyrofl.cli_settings import accepted
from pyrofl.data import Federation
from pyrofl.inference.fit import Run
from pyrofl.inference.method import Method
from pyrofl.inference.rounds import federate
from pyrofl.nets import build
from pyrofl.tensors import generator

FEATURES, CLASSES = 3, 3
# Whatever a method calls its work: as little of it as there can be.
LITTLE = {"batch": None, "draws": 2, "server_steps": 2, "samples": 2, "components": 2}
LITTLE |= dict.fromkeys(("epochs", "head_epochs", "base_epochs", "steps", "tune_steps"), 1)
LITTLE |= dict.fromkeys(("local_steps", "fine_tune", "inner_steps", "burn_in"), 1)
ENOUGH = 80  # federations for each method: 2,000 and more of them in all
DEEP = ("fedbabu", "fedrep")  # they need a base and a head


@st.composite
def federations(draw: Callable[..., Any]) -> dict[str, Any]:
    """Draw the arguments of a federation with what users complain about."""
    one_of = st.sampled_from
    sizes = draw(
        st.one_of(
            st.lists(st.integers(1, 6), min_size=1, max_size=4),
            one_of([[1], [1, 1], [1, 1, 200], [300, 1], [5, 5, 5, 5]]),
        )
    )
    g = generator(draw(st.integers(0, 10**6)))
    dtype = draw(one_of([torch.float32, torch.float64]))
    rows = sum(sizes)
    x = torch.randn(rows, FEATURES, generator=g, dtype=torch.float64)
    y = torch.randint(CLASSES, (rows,), generator=g)
    owner = torch.repeat_interleave(torch.tensor(sizes))
    features = draw(one_of(["any", "any", "constant", "zero", "one giant row", "one column"]))
    if features == "constant":
        x = torch.ones_like(x) * 3.7
    if features == "zero":
        x = torch.zeros_like(x)
    if features == "one giant row":
        x[0] = 1e12
    if features == "one column":
        x[:, 1:] = 0
    labels = draw(one_of(["any", "any", "single", "empty", "one each", "equal clients"]))
    if labels == "single":
        y = torch.full_like(y, int(y[0]))
    if labels == "empty":
        y = y.clamp(max=CLASSES - 2)
    if labels == "one each":
        y = owner % CLASSES
    if labels == "equal clients":
        place = torch.cat([torch.arange(size) for size in sizes])
        x, y = x[place], y[place]
    exponent = draw(one_of([0, 0, 0, -30, -15, -4, 4, 15, 30]))
    x = (x * 10.0**exponent).to(dtype)
    if draw(st.booleans()):
        x = x.T.contiguous().T
        y = torch.stack([y, y], 1)[:, 0]
    parts = torch.arange(rows).split(sizes)
    return {"x": x, "y": y, "train": parts, "test": parts, "classes": ("a", "b", "c")}


@cache
def little(name: str, extra: bool) -> Method:
    """Build a method with few steps on few parameters."""
    make = contract.MODULES[name].build
    known = {n: v for n, v in LITTLE.items() if n in accepted(make)}
    if "unlabelled" in accepted(make):
        known["unlabelled"] = torch.randn(6, FEATURES, generator=generator(1))
    net = build("mlp:2" if extra or name in DEEP else "softmax", (FEATURES,), CLASSES)
    method: Method = make(net, **known)
    return method


def bad(tensors: dict[str, Tensor]) -> list[str]:
    real = {n: v for n, v in tensors.items() if v.is_floating_point()}
    return [n for n, v in real.items() if not bool(v.isfinite().all())]


def survive(name: str, made_of: dict[str, Any], extra: bool) -> str:
    """Make two rounds and test; return what happened in a word."""
    state = None
    try:
        data, method = Federation(**made_of), little(name, extra)
        for state in federate(method, data, 2):
            assert not bad(state.server), (state.number, bad(state.server))
            assert not bad(state.private), (state.number, bad(state.private))
            assert not bad(state.message), (state.number, bad(state.message))
            told = {reason.split(":")[0] for reason in state.rejected} - {"the server"}
            left = {data.names[i] for i in state.trained.tolist()} - {
                data.names[i] for i in state.who.ids.tolist()
            }
            assert told == left
            assert all("; expected " in reason for reason in state.rejected)
        assert state is not None
        scores = Run(method, data, state).evaluate()
        accuracy = scores.values["accuracy"]
    except ValueError as error:
        if "expected" not in str(error):  # such as those of torch: nobody knows what to do then
            raise AssertionError("not a clear refusal") from error
        return "refused"
    if bool(accuracy.isnan().any()):  # finite weights times large inputs
        return "scored NaN"
    assert bool(((accuracy >= 0) & (accuracy <= 1)).all())
    return "rejected" if state.rejected else "finite"


def hunt(name: str, examples: int) -> dict[str, int]:
    """Let a method meet so many federations; return how often what happened."""
    found: dict[str, int] = {}

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
    )
    @given(federations(), st.booleans())
    def meet(data: dict[str, Any], extra: bool) -> None:
        what = survive(name, data, extra)
        found[what] = found.get(what, 0) + 1

    meet()
    return found


@contract.everywhere
def test_hostile_federations_are_refused_or_survived(name):
    found = hunt(name, ENOUGH)
    assert sum(found.values()) == ENOUGH
    assert found["finite"] > ENOUGH / 2
    assert found["refused"] < ENOUGH / 10


def test_they_are_two_thousand_in_all():
    assert ENOUGH * len(contract.METHODS) >= 2000


if __name__ == "__main__":
    for method in contract.METHODS:
        print(method, hunt(method, ENOUGH))
