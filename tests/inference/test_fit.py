"""Fitting: what is written down on the way, going on from a round, and the way to ArviZ."""

from __future__ import annotations

import pytest
import toys

import pyrofl
from pyrofl.data import Federation
from pyrofl.inference.method import Method
from pyrofl.models import fedavg, local, pfedvem


@pytest.fixture
def method() -> Method:
    return pfedvem.build(toys.net(), head_epochs=2, base_epochs=1)


def test_every_score_is_written_down_with_its_setting():
    method = fedavg.build(toys.net(), fine_tune=1)
    data = toys.blobs(held_out=2)
    run = pyrofl.fit(method, data, 5, every=2, progress=False)
    assert [row["round"] for row in run.metrics if row["metric"] == "nll"] == [2] * 6 + [4] * 6 + [
        5
    ] * 6
    cells = {(r["model"], r["adapted"], r["population"]) for r in run.metrics}
    assert cells == {
        (model, adapted, population)
        for model, adapted in (("global", "none"), ("personal", "none"), ("personal", "adapt"))
        for population in ("training", "held_out")
    }
    last = [r for r in run.metrics if r["round"] == 5 and r["metric"] == "accuracy"]
    again = run.evaluate(model="personal", adapted="adapt", population="held_out").mean("accuracy")
    assert last[-1]["value"] == again
    assert len(run.seconds) == len(run.rejected) == 5
    assert run.down == run.up == [int(run.state.down.sum())] * 5
    assert run.down[0] == 10 * int(run.state.down[0])


def test_a_method_without_test_rows_is_scored_on_training_rows():
    data = toys.blobs()
    data = Federation(data.x, data.y, data.train, tuple(r[:0] for r in data.test))
    run = pyrofl.fit(local.build(toys.net()), data, 1, every=1, progress=False)
    assert run.scores()[0].part == "train"


def test_a_fit_goes_on_from_a_round_bitwise(method: Method, blobs: Federation):
    whole = pyrofl.fit(method, blobs, 4, seed=3, progress=False)
    half = pyrofl.fit(method, blobs, 2, seed=3, progress=False)
    rest = pyrofl.fit(method, blobs, 4, seed=3, progress=False, start=half.state)
    toys.assert_same_round(whole.state, rest.state)
    assert len(rest.seconds) == 2


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


def test_the_progress_bar_shows_rounds_and_loss(
    method: Method, blobs: Federation, capsys: pytest.CaptureFixture[str]
):
    pyrofl.fit(method, blobs, 2)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "mu/* pi/*" in shown
    pyrofl.fit(method, blobs, 1, progress=False)
    assert capsys.readouterr().err == ""


def test_negative_intervals_are_refused(method: Method, blobs: Federation):
    with pytest.raises(ValueError, match="every is -1"):
        pyrofl.fit(method, blobs, 1, every=-1)
    with pytest.raises(ValueError, match="draws 0; expected"):
        pyrofl.fit(method, blobs, 1, draws=0)
    with pytest.raises(ValueError, match="seed of init is True; expected a whole number"):
        pyrofl.fit(method, blobs, 1, seed=True)


def test_a_rejected_client_is_named_on_the_way(
    blobs: Federation, capsys: pytest.CaptureFixture[str]
):
    run = pyrofl.fit(toys.poisoned(fedavg.build(toys.net()), 3), blobs, 1)
    assert "round 1: client 3: w/fc1.weight" in capsys.readouterr().err
    assert [reason.split(":")[0] for reason in run.rejected[0]] == ["client 3"]
