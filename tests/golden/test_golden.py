"""The library gives what plain loops, written from the papers alone, give: to 1e-9.

Start, rows, order of rows, who reports and all noise are those of the files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.training import noise
from pyrofl.models import fedabml, fedbe, metavd, pfedmb, pfedvem
from pyrofl.nets import build

HERE = Path(__file__).parent
LIBRARY = "redesign"  # what the library itself gave, see test_redesign.py
FILES = sorted(path.stem for path in HERE.glob("*.npz") if path.stem != LIBRARY)
METHODS = {"pfedvem": pfedvem, "pfedmb": pfedmb, "metavd": metavd}
METHODS |= {"fedbe": fedbe, "fedabml": fedabml}
WITHIN = 1e-9


@pytest.fixture(params=FILES)
def case(request) -> tuple[str, dict[str, Any]]:
    with np.load(HERE / f"{request.param}.npz") as file:
        return request.param, dict(file)


def part(held: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    return {
        n.removeprefix(prefix): torch.from_numpy(v) for n, v in held.items() if n.startswith(prefix)
    }


def method_of(name: str, held: dict[str, Any], **other: Any) -> Method:
    settings = json.loads(str(held["settings"])) | other
    if "unlabelled" in held:
        settings["server_data"] = torch.from_numpy(held["unlabelled"])
    return METHODS[name.partition("_")[0]].build(build("mlp:4,3", (4,), 3), **settings)


@pytest.fixture
def constant(case, monkeypatch) -> None:
    """Let rows come in their order, and all noise from the file's table."""
    table = torch.from_numpy(case[1]["noise"])

    def fill(shape: Any) -> Tensor:
        return table[: torch.Size(shape).numel()].reshape(tuple(shape))

    def of_clients(generators: Any, shape: Any, dtype: torch.dtype) -> Tensor:
        """Draw the same for every client and every step to come: [C, steps, *p]."""
        return fill(shape[1:]).expand(len(generators), *shape).clone()

    def of_rows(values: Any, seed: int) -> None:
        values[:] = fill(values.shape).numpy()

    def shares(concentration: Tensor, *_: Any) -> Tensor:
        found = fill(concentration.shape).abs()
        return found / found.sum(-1, keepdim=True)

    monkeypatch.setattr(noise, "_normals", of_clients)
    monkeypatch.setattr(noise, "_draw_normals", of_rows)
    monkeypatch.setattr(
        "torch.distributions.normal._standard_normal", lambda shape, dtype, device: fill(shape)
    )
    monkeypatch.setattr(torch, "_sample_dirichlet", shares)
    monkeypatch.setattr(torch, "randperm", lambda n, generator=None: torch.arange(n))


def rounds(case: tuple[str, dict[str, Any]], **other: Any) -> Iterator[RoundState]:
    name, held = case
    rows = torch.arange(len(held["y"])).split(held["sizes"].tolist())
    x, y = torch.from_numpy(held["x"]), torch.from_numpy(held["y"])
    data = Federation(x, y, rows, rows, classes=("a", "b", "c"))
    reports = iter(json.loads(str(held["reports"])))
    return federate(
        method_of(name, held, **other),
        data,
        4,
        server_state=part(held, "start/"),
        participation=lambda *_: torch.tensor(next(reports)),
    )


def distance(held: dict[str, Any], state: RoundState) -> float:
    """Return how far the state of a round is from the file's, at most."""
    number = f"round{state.number}"
    pairs = [(v, state.server[n]) for n, v in part(held, f"{number}/server/").items()]
    seen = state.seen  # the library holds nothing of clients that have not trained yet
    private = part(held, f"{number}/private/").items()
    pairs += [(v[seen], state.client_states[n][seen]) for n, v in private]
    for expected, found in pairs:
        assert found.shape == expected.shape
    return max(float((expected - found).abs().max()) for expected, found in pairs)


@pytest.mark.usefixtures("constant")
def test_the_library_gives_what_plain_loops_give(case):
    states = {state.number: state for state in rounds(case)}
    for number in (1, 4):
        assert distance(case[1], states[number]) < WITHIN


@pytest.mark.usefixtures("constant")
def test_another_setting_is_told_from_it(case):
    other = {"batch": 5} if "batch" in json.loads(str(case[1]["settings"])) else {}
    states = {state.number: state for state in rounds(case, **other)}
    assert distance(case[1], states[4]) > 1e3 * WITHIN


@pytest.mark.long  # starts a process
def test_the_command_writes_these_files(tmp_path):
    subprocess.run([sys.executable, HERE / "make.py", tmp_path], check=True, capture_output=True)
    assert sorted(path.stem for path in tmp_path.glob("*.npz")) == FILES
    for name in FILES:
        with np.load(tmp_path / f"{name}.npz") as new, np.load(HERE / f"{name}.npz") as old:
            assert set(new.files) == set(old.files)
            for n in old.files:
                if old[n].dtype.kind == "f":
                    np.testing.assert_allclose(new[n], old[n], rtol=0, atol=1e-12)
                else:
                    np.testing.assert_array_equal(new[n], old[n])


def test_the_plain_loops_know_nothing_of_the_library():
    for path in HERE.glob("*.py"):
        if not path.name.startswith(
            ("test_", "released", "interface", "commands", LIBRARY)
        ):  # which runs the library
            assert "pyrofl" not in path.read_text()
