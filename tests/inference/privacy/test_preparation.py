"""Privacy that is stated holds: nothing is computed from rows besides noisy messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import toys
from sites import SIZES, some

import pyrofl
from pyrofl import Privacy, datasets, federations
from pyrofl.cli.parser import main
from pyrofl.data import Federation
from pyrofl.inference.engine.participation import bernoulli, everyone, fixed
from pyrofl.inference.privacy import private
from pyrofl.inference.transport import Client, Server
from pyrofl.models import fedavg, likelihoods, pvi
from pyrofl.nets import build

pytest.importorskip("dp_accounting")
PROMISE = {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a table of four clients with numbers, a category, a gap and classes."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.normal(50, 10, 40), "dose": rng.normal(size=40)})
    frame["age_gap"] = frame["age"].where(frame.index != 3)
    frame["kind"] = ["a", "b"] * 20
    frame["y"], frame["site"] = ["no", "yes", "yes", "yes"] * 10, [f"s{i % 4}" for i in range(40)]
    frame["amount"] = frame["dose"] + 3
    frame.to_csv(path := tmp_path / "table.csv", index=False)
    return path


def loaded(table: Path, **options: Any) -> Federation:
    asked = {"target": "y", "client_column": "site", "features": ("age", "dose"), **options}
    return federations.split(datasets.load(f"csv:{table}", **asked), "groups")


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "standardized": ({"scaling": "standardize"}, "age, dose of x were standardized by sums"),
    "gaps": (
        {"features": ("age_gap",), "missing": "impute", "scaling": "none"},
        "gaps of age_gap were filled by means over the clients' rows; expected missing='error'",
    ),
    "categories": (
        {"features": ("age", "kind"), "categories": ("kind",), "scaling": "none"},
        "the categories of kind were collected from the clients' rows; expected a column of 0 and",
    ),
    "target": (
        {"target": "amount", "features": ("age",), "scaling": "none"},
        "the target amount was standardized by sums over the clients' rows; expected a likelihood",
    ),
}


@pytest.mark.filterwarnings("ignore:.*scale")
@pytest.mark.parametrize("where", ["server", "client"])
@pytest.mark.parametrize("kind", KINDS)
def test_prepared_data_are_refused(kind, where, table):
    options, told = KINDS[kind]
    data = loaded(table, **options)
    made = {"likelihood": likelihoods.normal(1.0)} if kind == "target" else {}
    outputs = len(data.classes) or 1
    method = fedavg.build(build("softmax", data.x.shape[1:], outputs), **made)
    privacy = Privacy(**PROMISE, where=where)
    with pytest.raises(ValueError, match=told):
        pyrofl.fit(method, data, 1, privacy=privacy, progress=False)
    with pytest.raises(ValueError, match=told):
        next(pyrofl.federate(method, data, 1, privacy=privacy))
    with pytest.raises(ValueError, match=told):
        Client(private(method, privacy, data.clients), data)
    assert Client(method, data)


def weighted(data: Federation, kind: str) -> Federation:
    if kind == "balanced":
        return data.with_class_weights("balanced")
    return data.with_class_weights({data.classes[0]: 2.0})


@pytest.mark.filterwarnings("ignore:.*scale")
def test_balanced_weights_are_refused_and_known_ones_are_not(table):
    data = loaded(table, scaling="none")
    method = fedavg.build(build("softmax", (2,), 2))
    how: dict[str, Any] = {"privacy": Privacy(**PROMISE), "progress": False}
    with pytest.raises(ValueError, match="class weights are balanced by counts over the clients'"):
        pyrofl.fit(method, weighted(data, "balanced"), 1, **how)
    for some_data in (data, weighted(data, "known")):
        assert pyrofl.fit(method, some_data, 1, **how).privacy is not None


def test_a_regression_is_refused():
    rng = np.random.default_rng(0)
    frames = {
        name: pd.DataFrame({"x": rng.normal(size=9), "y": rng.poisson(2.0, 9)}) for name in "abcd"
    }
    data = federations.from_frames(frames)
    method = pyrofl.regression("y ~ x", data, family="poisson")
    made = method.prepare(data)
    promise = private(fedavg.build(toys.net()), Privacy(**PROMISE), 4).metadata.privacy
    own = replace(method, metadata=replace(method.metadata, privacy=promise))
    with pytest.raises(ValueError, match="levels, columns and priors of a regression are made of"):
        next(pyrofl.federate(own, made, 1))


@pytest.mark.filterwarnings("ignore:.*scale")
@pytest.mark.parametrize("command", ["run", "compare"])
def test_the_command_line_refuses_them_before_any_work(command, table, tmp_path, capsys):
    out = tmp_path / "out"
    words = [command, "fedavg", *(["local"] * (command == "compare")), "--data", f"csv:{table}"]
    words += ["--target", "y", "--client-column", "site", "--features", "age,dose", "--quiet"]
    words += ["--rounds", "1", "--posterior-draws", "0", "--out", str(out)]
    asked = ["--privacy", "clip=1.0,noise_multiplier=2.0,delta=0.01"]
    cases = {
        "age, dose of x were standardized": [],
        "class weights are balanced": ["--scaling", "none", "--class-weights", "balanced"],
    }
    for told, more in cases.items():
        assert main([*words, *asked, *more]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
        assert told in line
        assert "expected" in line
        assert not out.exists()
    assert main([*words, *asked, "--scaling", "none", "--class-weights", "no=2"]) == 0
    assert main([*words, "--overwrite"]) == 0  # without privacy all is as before


DATA = toys.blobs(SIZES)


def at_server(participation: Any, seed: Any = 0, where: str = "server", **asked: Any) -> Server:
    method = private(fedavg.build(toys.net()), Privacy(**PROMISE, where=where), 6, fixed(2))
    return Server(
        method, DATA.names, DATA.sizes, DATA.dtype, seed, participation=participation, **asked
    )


def test_a_sample_that_clients_can_predict_is_refused():
    secret = pyrofl.Seeds(init=1, noise=1, participation=2**61 + 7)
    assert at_server(fixed(2), secret)
    told = "epsilon counts sampling that clients cannot predict, but the seed of participation is"
    for seed in (0, 5, pyrofl.Seeds(init=3, participation=4, noise=4)):
        with pytest.raises(ValueError, match=told):
            at_server(fixed(2), seed)
    assert at_server(fixed(2), 0, where="client")  # epsilon counts no sampling
    told = "sampling 'without replacement' of 2, but this server has 6 clients and sampling 'all'"
    with pytest.raises(ValueError, match=told):
        at_server(everyone, secret)
    with pytest.raises(ValueError, match="with sampling 'without replacement' of 2"):
        at_server(bernoulli(0.5), secret)


def test_clients_take_part_without_the_seed_of_participation():
    secret = pyrofl.Seeds(init=1, noise=1, participation=2**61 + 7)
    server = at_server(fixed(2), secret)
    orders = server.configure_train()
    assert "2305843009213693959" not in repr(orders)
    method = private(fedavg.build(toys.net()), Privacy(**PROMISE), 6, fixed(2))
    replies = {n: Client(method, some(DATA, [n]), 1).train(order) for n, order in orders.items()}
    state = server.aggregate_train(replies)
    assert not state.rejected
    assert len(state.reporters.ids) == 2


def test_a_noisy_client_sends_no_more_replies_than_it_agreed_to():
    method = private(pvi.build(toys.net()), Privacy(**PROMISE, where="client"), 6)
    server = Server(method, DATA.names, DATA.sizes, DATA.dtype)
    client = Client(method, some(DATA, ["client 0"]), rounds=1)
    order = server.configure_train()["client 0"]
    first, again = (client.train(order) for _ in range(2))
    assert torch.equal(first["up/shift"], again["up/shift"])
    with pytest.raises(ValueError, match="of round 2, but this client takes part in 1 rounds"):
        client.train(order | {"round": 2})
