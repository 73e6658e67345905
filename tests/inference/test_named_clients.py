"""New rows that name their client are predicted for this client, or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import pyrofl
from pyrofl import datasets, federations, nets
from pyrofl.models import fedrep, likelihoods

SHIFTS = {"bern": -6.0, "chur": 0.0, "zug": 6.0}
NEW = pd.DataFrame({"x": [0.0, 0.1, 0.2, 0.3], "hospital": ["zug", "bern", "chur", "zug"]})


def frames() -> dict[str, pd.DataFrame]:
    rng, found = np.random.default_rng(17), {}
    for name, shift in SHIFTS.items():
        x = rng.normal(size=12)
        y = 1 + x + shift + 0.3 * rng.normal(size=12)
        found[name] = pd.DataFrame({"y": y, "x": x, "hospital": name})
    return found


@pytest.fixture(scope="module")
def regression() -> pyrofl.Run:
    data = federations.from_frames(frames())
    method = pyrofl.regression("y ~ x + (1 | hospital)", data, client="hospital")
    return pyrofl.fit(method, data, progress=False)


@pytest.fixture(scope="module")
def network(tmp_path_factory: Any) -> pyrofl.Run:
    path = tmp_path_factory.mktemp("csv") / "all.csv"
    pd.concat(frames().values()).to_csv(path, index=False)
    dataset = datasets.load(f"csv:{path}", target="y", client_column="hospital")
    data = federations.split(dataset, "groups")
    net = nets.build("mlp:4", (1,), 1)
    method = fedrep.build(net, likelihood=likelihoods.normal(0.5))
    return pyrofl.fit(method, data, 2, progress=False)


@pytest.mark.parametrize("kind", ["regression", "network"])
def test_each_row_is_predicted_for_the_client_that_it_names(kind: str, request: Any) -> None:
    run = request.getfixturevalue(kind)
    found = run.predict(NEW, None)
    for name in SHIFTS:
        mine = np.array(NEW.hospital == name)
        own = run.predict(NEW[mine], name)
        assert torch.equal(found.mean[torch.from_numpy(mine)], own.mean)
        assert torch.equal(found.values["sd"][torch.from_numpy(mine)], own.values["sd"])
        assert torch.equal(own.mean, run.predict(NEW[mine].drop(columns="hospital"), name).mean)
        assert name in found.about


@pytest.mark.parametrize("kind", ["regression", "network"])
def test_contradictions_are_refused(kind: str, request: Any) -> None:
    run = request.getfixturevalue(kind)
    for rows, client, text in (
        (NEW, "zug", "holds 'bern' in row 2, and client is 'zug'; pass client=None"),
        (NEW.assign(hospital="Zug"), None, "which is no client; did you mean zug?"),
        (NEW.assign(hospital=["zug", None, "zug", "zug"]), None, "expected the name of a client"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            run.predict(rows, client)


def test_new_names_are_new_clients_and_said_beside_known_ones(regression: pyrofl.Run) -> None:
    new = regression.predict(NEW.assign(hospital="genf"), None, draws=4000)
    plain = regression.predict(NEW.drop(columns="hospital"), None, draws=4000)
    assert new.about.startswith("regression for genf, effects drawn from their distribution")
    assert new.values["sd"].numpy() == pytest.approx(plain.values["sd"].numpy(), rel=0.2)
    with pytest.warns(UserWarning, match="column hospital names genf besides known clients"):
        mixed = regression.predict(NEW.assign(hospital=["zug", "genf", "zug", "zug"]), None)
    assert mixed.values["sd"][1] > 3 * mixed.values["sd"][0]


def test_own_rows_and_prediction_sets_need_rows_of_one_client(network: pyrofl.Run) -> None:
    own = (NEW[["x"]], [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(ValueError, match="rows name the known client zug, bern, chur, and own"):
        network.predict(NEW, None, own)
    found = pyrofl.conformal(network, alpha=0.5, share=1.0)
    with pytest.raises(ValueError, match="and thresholds differ between clients; pass client="):
        found.predict(NEW, None, own)


@pytest.mark.slow
def test_names_that_are_numbers_or_differ_from_those_of_the_tables() -> None:
    numbered = {name: frame.assign(ward=k + 1) for k, (name, frame) in enumerate(frames().items())}
    data = federations.from_frames(numbered)
    method = pyrofl.regression("y ~ x + (1 | ward)", data, client="ward")
    run = pyrofl.fit(method, data, progress=False)
    found = run.predict({"x": [0.0, 0.0], "ward": [3.0, 1.0]}, None)
    assert found.mean.tolist() == [
        float(run.predict({"x": [0.0]}, name).mean) for name in ("zug", "bern")
    ]


def test_the_client_column_is_kept_by_a_saved_run(network: pyrofl.Run, tmp_path: Path) -> None:
    network.save(tmp_path / "run")
    loaded = pyrofl.load(tmp_path / "run", method=network.method)
    assert torch.equal(loaded.predict(NEW, None).mean, network.predict(NEW, None).mean)
