"""Warnings name the line of the user's file that led to them."""

from __future__ import annotations

import ast
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrofl
from pyrofl import Federation, datasets, federations, nets
from pyrofl.models import fedavg, pvi

ROOT = Path(__file__).parent.parent
SOURCES = [p for part in ("pyrofl", "inference", "models") for p in (ROOT / part).rglob("*.py")]


def test_only_one_function_of_the_package_issues_warnings():
    """It finds the user's line; a fixed `stacklevel` is that of one way to call a function."""
    callers = set()
    for path in SOURCES:
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "warn(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"warn", "warnings.warn"}:
                callers.add(path.name)
    assert len(SOURCES) > 200
    assert callers == {"user_warnings.py"}


def a_line_of(call) -> warnings.WarningMessage:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    assert seen, "no warning"
    assert {one.filename for one in seen} == {__file__}
    return seen[0]


def test_frames_of_pyro_torch_and_contextlib_are_passed_over():
    names = {"__name__": "pyrofl.somewhere"}
    code = "from pyrofl.user_warnings import warn_user\ndef deep(*a): warn_user('mind this')"
    exec(code, names)

    class Module(torch.nn.Module):
        def forward(self):
            names["deep"]()

    def model():
        pyro.sample("x", dist.Delta(torch.zeros(())))
        Module()()

    @contextmanager
    def block():
        names["deep"]()
        yield

    def enter():
        with block():
            pass

    exec("def run(call): call()", names)  # of the package, between the user and the warning
    first = a_line_of(lambda: names["run"](names["deep"]))
    assert str(first.message) == "mind this"
    assert "names" in Path(__file__).read_text().splitlines()[first.lineno - 1]
    a_line_of(lambda: names["run"](pyro.poutine.trace(model)))
    a_line_of(enter)


def repeated_rows():
    x, y = torch.arange(24.0).reshape(12, 2), torch.arange(12) % 2
    rows = torch.arange(8)
    data = Federation(x, y, (rows, rows + 4), (rows[:0],) * 2, ("A", "B"), ("no", "yes"))
    pyrofl.fit(fedavg.build(nets.build("mlp:2", (2,), 2)), data, rounds=1, progress=False)


def forgotten_site():
    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            tau = pyro.sample("tau", dist.HalfNormal(5.0))
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            with batch.rows():
                pyro.sample("y", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)

    schools = federations.split(datasets.load("eight_schools"), "groups")
    pvi.hierarchical(model, schools, shared="mu")


def categories_without_order():
    answers = ["low", "Low", "high", "high"]
    Federation.from_arrays({n: (np.zeros((4, 1)), answers) for n in "AB"})


@pytest.mark.parametrize("call", [repeated_rows, forgotten_site, categories_without_order])
def test_public_functions_warn_at_the_callers_line(call):
    a_line_of(call)
