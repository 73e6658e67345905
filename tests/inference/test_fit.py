"""Fitting: what is written down on the way, going on from a round, and the way to ArviZ."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import Tensor

import pyrofl
from pyrofl.data import Federation
from pyrofl.files.run_folder import CLIENTS, METRICS
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.participation import Stragglers
from pyrofl.inference.evaluation.predict import Prediction
from pyrofl.metrics import mean
from pyrofl.models import fedavg, local, pfedvem, pvi


@pytest.fixture
def method() -> Method:
    return pfedvem.build(toys.net(), head_epochs=2, base_epochs=1)


def test_every_score_is_written_down_with_its_setting():
    method = fedavg.build(toys.net(), fine_tune=1)
    data = toys.blobs(held_out=2)
    run = pyrofl.fit(method, data, 5, eval_every=2, progress=False)
    assert [row["round"] for row in run.history if row["metric"] == "nll"] == [2] * 6 + [4] * 6 + [
        5
    ] * 6
    cells = {(r["model"], r["adaptation"], r["population"]) for r in run.history}
    assert cells == {
        (model, adaptation, population)
        for model, adaptation in (
            ("global", "none"),
            ("personal", "none"),
            ("personal", "fine_tune"),
        )
        for population in ("training", "held_out")
    }
    last = [r for r in run.history if r["round"] == 5 and r["metric"] == "accuracy"]
    again = run.evaluate(model="personal", adaptation="fine_tune", population="held_out").mean(
        "accuracy"
    )
    assert last[-1]["value"] == again
    assert [record.number for record in run.records] == [1, 2, 3, 4, 5]
    sent = [(record.bytes_down, record.bytes_up) for record in run.records]
    assert sent == [(10 * int(run.state.bytes_down[0]),) * 2] * 5


def test_a_method_without_test_rows_is_scored_on_training_rows():
    data = toys.blobs()
    data = Federation(data.x, data.y, data.train, tuple(r[:0] for r in data.test))
    run = pyrofl.fit(local.build(toys.net()), data, 1, eval_every=1, progress=False)
    assert run.evaluate_all()[0].part == "train"


def test_a_fit_goes_on_from_a_round_bitwise(method: Method, blobs: Federation):
    whole = pyrofl.fit(method, blobs, 4, seed=3, progress=False)
    half = pyrofl.fit(method, blobs, 2, seed=3, progress=False)
    rest = pyrofl.fit(method, blobs, 4, seed=3, progress=False, resume_from=half.state)
    toys.assert_same_round(whole.state, rest.state)
    assert [record.number for record in rest.records] == [3, 4]


def test_a_schedule_is_a_function_of_the_round(blobs: Federation):
    def decayed(number: int) -> Method:
        return fedavg.build(toys.net(), lr=0.1 if number == 0 else 0.0)

    one = pyrofl.fit(decayed, blobs, 1, progress=False)
    three = pyrofl.fit(decayed, blobs, 3, progress=False)
    toys.assert_same(one.state.server, three.state.server, rtol=1e-6, atol=1e-7)


def test_posteriors_reach_arviz_with_named_axes_and_clients(method: Method):
    data = toys.blobs(held_out=2)
    run = pyrofl.fit(method, data, 1, progress=False)
    net = toys.net()
    found = run.to_arviz(draws=7, dims={n: net.dims(n) for n in net.shapes})["posterior"]
    weight = found["head.weight"]
    assert dict(weight.sizes) == {"chain": 1, "draw": 7, "client": 10, "head_out": 5, "head_in": 6}
    assert weight.coords["client"].values.tolist() == [f"client {j}" for j in range(10)]
    drawn = run.posterior(7)["head.weight"]
    assert (weight.values[0] == drawn.numpy()).all()
    plain = run.to_arviz(draws=2)["posterior"]["head.bias"]
    assert plain.dims == ("chain", "draw", "client", "head.bias_dim_0")


def test_statistics_are_the_methods_own(method: Method, blobs: Federation):
    run = pyrofl.fit(method, blobs, 2, progress=False)
    known = run.statistics()
    assert set(known) == {"tau", "deviation"}
    assert {tuple(v.shape) for v in known.values()} == {(12,)}
    assert pyrofl.fit(fedavg.build(toys.net()), blobs, 1, progress=False).statistics() == {}


def doubt(prediction: Prediction, y: Tensor, mask: Tensor) -> Tensor:
    return mean(1 - prediction.mean.amax(-1), mask)


def test_a_metric_of_ones_own_is_written_down(method: Method, blobs: Federation):
    run = pyrofl.fit(method, blobs, 1, eval_every=1, metrics={"doubt": doubt}, progress=False)
    assert run.evaluate().values["doubt"].shape == (12,)
    assert "doubt" not in run.evaluate(metrics={}).values
    again = pyrofl.fit(method, blobs, 2, resume_from=run, eval_every=1, progress=False)
    assert [r["round"] for r in again.history if r["metric"] == "doubt"] == [1, 1, 2, 2]
    value = again.evaluate(model="personal", metrics={"mine": doubt}).mean("mine")
    table = again.metrics.query("round == 2 and model == 'personal' and metric == 'doubt'")
    assert table["value"].tolist() == [value]
    assert set(again.clients.query("metric == 'doubt'")["client"]) == set(blobs.names)


def test_a_run_gives_tables(method: Method):
    data = toys.blobs(held_out=2)
    poisoned = toys.poisoned(method, 3)
    part = Stragglers(drop_rate=0.3)
    run = pyrofl.fit(poisoned, data, 3, eval_every=2, stragglers=part, progress=False)
    assert list(run.metrics.columns) == list(METRICS)
    assert run.metrics.to_dict("records") == run.history
    assert sorted(set(run.metrics["round"])) == [2, 3]
    rounds = run.rounds
    assert rounds["round"].tolist() == [1, 2, 3]
    assert rounds["trained"].tolist() == [10] * 3
    assert (rounds["reported"] + rounds["silent"] + rounds["rejected"]).tolist() == [10] * 3
    assert [len(names) for names in rounds["silent_clients"]] == rounds["silent"].tolist()
    assert set().union(*rounds["rejected_reasons"]) == {run.records[0].rejected[0]}
    assert rounds["bytes_up"].tolist() == [record.bytes_up for record in run.records]
    loss = torch.stack([record.loss["base/*"].nanmean() for record in run.records])
    assert rounds["loss base/*"].tolist() == loss.tolist()
    clients = run.clients
    assert list(clients.columns) == list(CLIENTS)
    own = clients.query("metric == 'nll' and model == 'personal' and adaptation == 'none'")
    assert own["client"].tolist() == list(data.names)
    values = run.evaluate(model="personal").values["nll"]
    assert own["value"].tolist()[:10] == values.tolist()
    assert set(clients["metric"]) >= {"tau", "deviation", "rounds_silent", "gradient_steps"}
    empty = pyrofl.fit(method, data, 0, progress=False)
    assert (len(empty.metrics), len(empty.rounds)) == (0, 0)


def test_runs_and_rounds_tell_what_they_are(method: Method):
    data = toys.blobs(held_out=2)
    run = pyrofl.fit(toys.poisoned(method, 3), data, 2, eval_every=1, seed=4, progress=False)
    told = repr(run).splitlines()
    assert (len(told), len(repr(run.state).splitlines())) == (6, 5)
    assert told[0].startswith("Run of 2 rounds, seed 4, ")
    (untrained,) = run.warnings
    assert untrained.startswith("the personal model of 1 of 10 clients has not trained")
    assert told[1] == f"  status   {run.status}; {untrained}"
    assert told[3].endswith("10 training, 2 held out")
    assert "scores   round 2: personal accuracy 0." in told[4]
    assert f"{sum(record.bytes_down for record in run.records):,} down, " in told[5]
    assert "2 rejected, the last client 3: " in told[5]
    assert "  clients   10 trained, 9 reported, 0 dropped out" in repr(run.state)
    html = run._repr_html_()
    assert html.count("<tr>") == 5
    assert "client 3" in html
    fresh = pyrofl.fit(method, data, 0, progress=False)
    assert "not evaluated yet" in repr(fresh)
    assert "0 rejected" in repr(fresh)


def test_the_summary_of_an_earlier_state_names_what_its_clients_keep(method: Method, blobs):
    before, after = pyrofl.federate(method, blobs, 2)
    assert "12 clients were seen" in repr(before)
    assert "State after round 2" in repr(after)


COPIES = [lambda r: pickle.loads(pickle.dumps(r)), copy.copy, copy.deepcopy]


@pytest.mark.parametrize("again", COPIES)
def test_a_copied_method_knows_what_clients_share(again):
    method = pvi.build(toys.net())
    other = again(method)
    assert other.shared == method.shared
    assert other.per_client == method.per_client == "server/shift server/precision"


@pytest.mark.parametrize("again", COPIES)
def test_runs_can_be_pickled_and_copied(method: Method, blobs: Federation, again):
    run = pyrofl.fit(method, blobs, 1, eval_every=1, metrics={"doubt": doubt}, progress=False)
    other = again(run)
    assert (other.history, other.records[0].trained) == (run.history, run.records[0].trained)
    toys.assert_same(other.evaluate().values, run.evaluate().values)
    toys.assert_same_round(
        pyrofl.fit(other.method, other.data, 2, resume_from=other, progress=False).state,
        pyrofl.fit(method, blobs, 2, resume_from=run, progress=False).state,
    )


def test_without_cloudpickle_pickling_is_refused(method: Method, blobs: Federation, monkeypatch):
    run = pyrofl.fit(method, blobs, 0, progress=False)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TypeError, match=r"^a Run cannot be pickled .*checkpoints\.save$"):
        pickle.dumps(run)


def test_where_no_bar_can_be_drawn_the_progress_is_lines_that_say_what_they_show(
    method: Method, blobs: Federation, capsys: pytest.CaptureFixture[str]
):
    run = pyrofl.fit(method, blobs, 25)
    shown = capsys.readouterr().err.splitlines()
    numbers = [
        int(re.match(r"round (\d+)/25  loss per row: posterior", line)[1]) for line in shown[:-2]
    ]
    assert numbers == [*range(3, 25, 3), 25]
    assert shown[-2:] == [str(run.status), *run.warnings]
    # The head's loss is a client's total; here it is per row, so that it can be judged.
    total = run.state.loss["mu/* pi/*"]
    per_row, base = (float(v) for v in re.findall(r"[\d.]+(?=,|$)", shown[-3]))
    assert per_row == pytest.approx(float((total / blobs.sizes).mean()), rel=0.01)
    assert base == pytest.approx(float(run.state.loss["base/*"].mean()), rel=0.01)
    pyrofl.fit(method, blobs, 1, progress=False)
    assert capsys.readouterr().err == ""


def test_the_progress_bar_shows_rounds_and_loss(
    method: Method,
    blobs: Federation,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    pyrofl.fit(method, blobs, 2)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "loss per row: posterior" in shown
    assert ", base " in shown


def test_negative_intervals_are_refused(method: Method, blobs: Federation):
    with pytest.raises(ValueError, match="every is -1"):
        pyrofl.fit(method, blobs, 1, eval_every=-1)
    with pytest.raises(ValueError, match="draws is 0; expected a whole number of at least 1"):
        pyrofl.fit(method, blobs, 1, draws=0)
    with pytest.raises(ValueError, match="seed of init is True; expected a whole number"):
        pyrofl.fit(method, blobs, 1, seed=True)


def test_a_rejected_client_is_named_on_the_way(
    blobs: Federation, capsys: pytest.CaptureFixture[str]
):
    run = pyrofl.fit(toys.poisoned(fedavg.build(toys.net()), 3), blobs, 1)
    assert "round 1: client 3: w/fc1.weight" in capsys.readouterr().err
    assert [reason.split(":")[0] for reason in run.records[0].rejected] == ["client 3"]


def test_a_callback_ends_a_fit_by_a_boolean():
    method, data = fedavg.build(toys.net()), toys.blobs()

    def rounds(callback: Any) -> int:
        run = pyrofl.fit(method, data, 3, callback=callback, eval_every=2, progress=False)
        assert run.history[-1]["round"] == run.state.number
        return run.state.number

    assert rounds(lambda run: True) == 1
    assert rounds(lambda run: run.state.number == 2) == 2
    assert rounds(lambda run: np.bool_(True)) == 1
    assert rounds(lambda run: torch.tensor(run.state.number == 2)) == 2
    assert rounds(lambda run: np.float64(run.state.number) > 5) == 3
    assert rounds(lambda run: None) == 3
    for value in (1, "yes", torch.tensor([True, False]), [True]):
        with pytest.raises(ValueError, match=r"callback returns .*; expected True to end the fit"):
            rounds(lambda run, value=value: value)


@pytest.mark.parametrize("name", ["callback", "logger"])
def test_stop_iteration_of_a_users_function_is_said(name):
    def stops(*given: Any) -> None:
        next(iter(()))

    with pytest.raises(ValueError, match=f"{name} raises StopIteration; return True from callback"):
        pyrofl.fit(fedavg.build(toys.net()), toys.blobs(), 2, progress=False, **{name: stops})
