"""Weights of rows and of classes: two is as the row doubled, and one as none."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
import toys
from promises import others_slow
from sklearn.linear_model import LogisticRegression
from sklearn.utils.class_weight import compute_class_weight
from test_contract import METHODS, built

import pyrofl
from pyrofl import datasets, federations, nets
from pyrofl.cli import main
from pyrofl.data import Federation
from pyrofl.data.fingerprint import fingerprint
from pyrofl.data.outlines import facts, outline_federation
from pyrofl.data.shard import shard
from pyrofl.data.weights import read
from pyrofl.inference.acceleration.recording import recorder
from pyrofl.inference.acceleration.row_space import rewriting
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.transport.client import Client
from pyrofl.models import fedavg

SIZES = (6, 9, 4)


def pair() -> tuple[Federation, Federation]:
    """Return clients of whose rows some weigh 2, and clients that have those rows twice."""
    data = toys.blobs(SIZES)
    weights = torch.ones(len(data.y), dtype=torch.float64)
    weights[::2] = 2
    train, more = [], torch.arange(len(data.y))
    for rows in data.train:
        again = rows[weights[rows] == 2]
        train.append(torch.cat([rows, len(more) + torch.arange(len(again))]))
        more = torch.cat([more, again])
    doubled = replace(data, x=data.x[more], y=data.y[more], train=tuple(train))
    return replace(data, weights=weights), doubled


def test_the_first_rows_of_a_client_may_weigh_0():
    data = toys.blobs((12, 9, 12))
    weights = torch.ones(len(data.y), dtype=torch.float64)
    weights[torch.cat([rows[:8] for rows in data.train])] = 0
    run = pyrofl.fit(fedavg.build(toys.net()), replace(data, weights=weights), 1, progress=False)
    assert not run.records[0].rejected


def full(name: str) -> Method:
    """Return a method that takes all rows of a client at once, in more steps than are recorded."""
    method = built(name)
    phases = tuple(replace(p, batch=None) for p in method.phases)
    return replace(method, phases=phases)


def last(name: str, data: Federation) -> RoundState:
    return list(federate(full(name), data, 2, seed=3))[-1]


# These deal rows into support and query by their places, and draw noise for each row.
DEALT = ("metavd", "perfedavg", "pfedgp")


@pytest.mark.parametrize("name", others_slow(sorted(set(METHODS) - set(DEALT))))
def test_a_row_of_weight_two_is_as_two_rows(name):
    one, two = (last(name, data) for data in pair())
    toys.assert_same(one.server, two.server, 1e-10, 1e-10)
    assert one.seen.all()
    private = [dict(state.client_states.items()) for state in (one, two)]
    toys.assert_same(*private, 1e-10, 1e-10)


@pytest.mark.parametrize("name", ["fedavg", "pfedvem", "pvi", "scaffold", *DEALT])
def test_rows_of_weight_one_are_as_rows_without(name):
    data = toys.blobs(SIZES)
    ones = replace(data, weights=torch.ones(len(data.y), dtype=torch.float64))
    one, other = (next(federate(built(name), d, 1, seed=3)) for d in (data, ones))
    toys.assert_same(one.server, other.server)
    assert fingerprint(data) != fingerprint(ones)


def test_a_minibatch_stands_for_the_weighted_rows_of_its_client():
    data, _ = pair()
    cohort, rows = (
        data.cohort(torch.tensor([0, 1])),
        torch.stack([data.train[0][:2], data.train[1][:2]]),
    )
    batch = data.gather(cohort, rows, torch.ones(2, 2, dtype=torch.bool))
    assert data.weights is not None
    assert batch.size.tolist() == [float(data.weights[data.train[j]].sum()) for j in (0, 1)]
    scale = batch._share
    expected = torch.tensor([6 / 2, 9 / 2])[:, None] * data.weights[rows]
    torch.testing.assert_close(scale, expected, rtol=1e-14, atol=0)
    assert torch.equal(batch.select_clients(slice(1, 2))._share, scale[1:])
    halves = batch.split(2)
    torch.testing.assert_close(torch.cat([h._share for h in halves], 1), 2 * scale)


def test_recorded_steps_and_few_rows_know_the_weights(monkeypatch):
    data, _ = pair()
    method = fedavg.build(toys.net(), epochs=12, batch=None)
    monkeypatch.setattr(recorder, "pays", lambda *given: True)
    monkeypatch.setattr(recorder, "may_try", lambda left: True)
    quick = next(federate(method, data, 1))
    monkeypatch.setattr(recorder, "pays", lambda *given: False)
    toys.assert_same(quick.server, next(federate(method, data, 1)).server)
    monkeypatch.setattr(rewriting, "ENABLED", False)
    toys.assert_same(quick.server, next(federate(method, data, 1)).server, 1e-10, 1e-12)
    assert not torch.equal(
        quick.server["w/head.bias"],
        next(federate(method, replace(data, weights=None), 1)).server["w/head.bias"],
    )


def test_balanced_classes_are_those_of_scikit_learn():
    data = toys.blobs(SIZES, held_out=1)
    rows = torch.cat(data.train[:2])
    there = np.unique(data.y[rows])
    expected = dict(
        zip(there, compute_class_weight("balanced", classes=there, y=data.y[rows]), strict=True)
    )
    made = data.with_class_weights("balanced")
    found = [expected.get(int(k), 1.0) for k in data.y]
    torch.testing.assert_close(made.weights, torch.tensor(found, dtype=torch.float64))
    assert float(made.weights[rows].sum()) == pytest.approx(len(rows))
    again = made.with_class_weights({"a": 3, "e": 0.5}).weights / made.weights
    assert again.tolist() == [{0: 3.0, 4: 0.5}.get(int(k), 1.0) for k in data.y]
    assert "per training row" in str(made.overview()["weights"])


def test_weights_that_cannot_be_are_named():
    data = toys.blobs(SIZES)
    for ask, told in (
        (lambda: data.with_class_weights({"z": 1}), "unknown class 'z'"),
        (
            lambda: data.with_class_weights({"a": -1}),
            "class a weighs -1; expected a number, at least 0",
        ),
        (lambda: data.with_class_weights("even"), "weights of classes: 'even'"),
        (
            lambda: data.with_class_weights(3),
            "weights of classes are a int; expected 'balanced', or a dict",
        ),
        (lambda: data.with_class_weights({0: 1}), "unknown class '0'"),
        (
            lambda: replace(data, y=data.y.double(), classes=()).with_class_weights("balanced"),
            "y is a numb",
        ),
        (lambda: replace(data, weights=torch.ones(3)), r"weights are \[3\]; expected a tensor"),
        (lambda: replace(data, weights=-torch.ones(31)), "row 0 weighs -1"),
        (
            lambda: data.with_class_weights(dict.fromkeys("abcde", 0)),
            "client 0: all its training rows have weight",
        ),
        (
            lambda: Client(built("fedavg"), data.with_class_weights("balanced")),
            "data have row weights",
        ),
        *(
            (partial(read, text), "is no weight of a class; expected balanced, or NAME=VALUE")
            for text in ("even", "yes", "yes=x", "yes=1,yes=2", "=1", "yes=-1")
        ),
    ):
        with pytest.raises(ValueError, match=told):
            ask()


def test_sites_have_weights_of_their_own():
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0]})
    sites = {"s": (frame, [0, 1, 1], frame, [0, 1, 1]), "t": (frame, [1, 0, 1])}
    made = Federation.from_arrays(
        sites, classes=2, held_out=["s"], weights={"s": pd.Series([1, 2, 0.5])}
    )
    assert made.names == ("t", "s")
    assert made.weights[made.train[1]].tolist() == [1, 2, 0.5]
    assert made.weights.sum() == 3 + 3.5 + 3
    with pytest.raises(ValueError, match=r"s: weights have shape \[2\]; expected \[3\]"):
        Federation.from_arrays(sites, classes=2, weights={"s": [1, 2]})
    with pytest.raises(ValueError, match="site with weights"):
        Federation.from_arrays(sites, classes=2, weights={"u": [1, 2, 3]})


def test_parts_of_a_federation_keep_their_weights():
    data, _ = pair()
    ids = torch.tensor([2, 0])
    part = shard(data, ids)
    assert torch.equal(part.cohort(ids).size, data.cohort(ids).size)
    batches = [d.batch(ids)._share for d in (part, data)]
    assert torch.equal(*batches)
    known = outline_federation(json.loads(json.dumps(facts(data.with_class_weights({"a": 0.1})))))
    assert torch.equal(known.totals, data.with_class_weights({"a": 0.1}).totals)


def test_a_run_is_saved_and_gone_on_with_its_weights(tmp_path):
    data, _ = pair()
    run = pyrofl.fit(built("pfedvem"), data, 1, progress=False)
    run.save(tmp_path / "run")
    loaded = pyrofl.load(tmp_path / "run")
    x = data.x[:4]
    for client in ("client 1", None):
        assert torch.equal(run.predict(x, client).mean, loaded.predict(x, client).mean)
    with pytest.raises(ValueError, match="hash of the data"):
        pyrofl.load(tmp_path / "run", data=replace(data, weights=None))
    with pytest.raises(ValueError, match="other training rows than"):
        next(federate(built("pfedvem"), replace(data, weights=None), 2, resume_from=run.state))


@pytest.fixture
def sheet(tmp_path):
    """A table of two sites, in which one in six is sick."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=240)
    sick = x + rng.logistic(size=240) > 2.4
    count = rng.integers(0, 3, 240)
    count[:4] = 1
    lines = [
        f"{'ab'[i % 2]},{x[i]:.3f},{'yes' if sick[i] else 'no'},{count[i]}" for i in range(240)
    ]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["site,x,sick,count", *lines]))
    return path


def test_tables_have_a_column_of_weights(sheet):
    how = {"target": "sick", "client_column": "site", "row_weights": "count"}
    data = federations.split(datasets.load(f"csv:{sheet}", **how), "groups")
    assert data.source.features == ("x",)
    table = pd.read_csv(sheet)
    assert data.weights.tolist() == table["count"].tolist()
    # The mode of the weighted rows, by scikit-learn from their copies.
    rows = torch.cat(data.train)
    model = LogisticRegression(C=np.inf, tol=1e-10)
    model.fit(data.x[rows], data.y[rows], sample_weight=data.weights[rows])
    net = nets.build("softmax", (1,), 2)
    run = pyrofl.fit(
        fedavg.build(net, lr=0.3, momentum=0.9, batch=None, epochs=1), data, 300, progress=False
    )
    server = run.state.server
    weight, bias = server["w/head.weight"], server["w/head.bias"]
    assert float(weight[1] - weight[0]) == pytest.approx(float(model.coef_[0, 0]), abs=1e-3)
    assert float(bias[1] - bias[0]) == pytest.approx(float(model.intercept_[0]), abs=1e-3)
    sheet.write_text(sheet.read_text().replace(",1\n", ",-1\n", 1))
    with pytest.raises(ValueError, match=r"column count holds '-1' in line \d+; expected weights"):
        datasets.load(f"csv:{sheet}", **how)
    with pytest.raises(ValueError, match=r"column site holds text.*; expected weights of rows"):
        datasets.load(f"csv:{sheet}", target="sick", row_weights="site")


def test_by_command_a_site_is_held_out_by_name(sheet, tmp_path, capsys):
    words = [
        "run",
        "fedavg",
        "--data",
        f"csv:{sheet}",
        "--target",
        "sick",
        "--client-column",
        "site",
    ]
    words += ["--rounds", "1", "--quiet", "--posterior-draws", "0", "--out", str(tmp_path / "o")]
    assert main([*words, "--held-out", "a"]) == 0
    table = pd.read_csv(tmp_path / "o/rows.csv").groupby("client")["population"].unique()
    assert {name: list(of) for name, of in table.items()} == {"a": ["held_out"], "b": ["training"]}
    assert main([*words, "--overwrite", "--held-out", "c"]) == 2
    assert "unknown group to hold out: 'c'" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--held-out", "a", "--partition", "iid"]) == 2
    assert "--held-out is 'a', and partition iid has no names" in capsys.readouterr().err
    sheet.write_text(sheet.read_text().replace("\na,", "\n1,").replace("\nb,", "\n2,"))
    assert main([*words, "--overwrite", "--held-out", "1,"]) == 0
    facts = json.loads((tmp_path / "o/run.json").read_text())
    assert facts["experiment"]["held_out"] == "1,"


def test_by_command_balanced_classes_are_found_more_often(sheet, tmp_path, capsys):
    words = [
        "run",
        "fedavg",
        "--data",
        f"csv:{sheet}",
        "--target",
        "sick",
        "--client-column",
        "site",
    ]
    words += ["--rounds", "6", "--set", "lr=0.1", "--quiet", "--posterior-draws", "0"]
    words += ["--features", "x"]
    found = {}
    for asked in ((), ("--class-weights", "balanced"), ("--class-weights", "yes=5,no=1")):
        out = tmp_path / str(len(found))
        assert main([*words, *asked, "--out", str(out)]) == 0
        table = pd.read_csv(out / "rows.csv")
        of = table[(table["y"] == "yes") & (table["model"] == "global")]
        found["".join(asked[1:])] = (of["p(yes)"] > 0.5).mean()
    assert found[""] + 0.2 < min(found["balanced"], found["yes=5,no=1"])
    assert main([*words, "--class-weights", "z=1", "--out", str(tmp_path / "new")]) == 2
    assert "'z'" in capsys.readouterr().err
