"""Settings chosen by successive halving, where the right one is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import toys
from torch import nn

import pyrofl
from pyrofl.data import Federation
from pyrofl.inference.engine.start import first
from pyrofl.inference.tuning.results import Trial, TuningResult, describe_setting, ranked
from pyrofl.inference.tuning.tune import halved, rungs, tune
from pyrofl.models import fedavg
from pyrofl.models.likelihoods import normal
from pyrofl.nets import Network
from pyrofl.partitions.validation import held_back

RATES = (1e-6, 0.5, 1.0, 2.5)
SLOPE = 3.0


@pytest.fixture
def line() -> Federation:
    """Clients with y = 3 x at x = 1 and -1: each loss is (w - 3)^2 / 2, and w -= lr (w - 3)."""
    x = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(20)[:, None]
    rows = torch.arange(40).split([8, 12, 4, 16])
    parts = [part.split([len(part) // 2] * 2) for part in rows]
    train, test = zip(*parts, strict=True)
    return Federation(x, SLOPE * x[:, 0], train, test)


def step(**setting: float) -> pyrofl.Method:
    """One step of gradient descent per round, in closed form."""
    net = Network(nn.Linear(1, 1, bias=False).double())
    plain = {"epochs": 1, "batch": None, "momentum": 0.0, "likelihood": normal(1.0)}
    return fedavg.build(net, **plain, **setting)


def chosen(line: Federation, **how: object) -> TuningResult:
    return tune(step, line, {"lr": RATES}, 9, metric="rmse", progress=False, **how)


def test_the_right_rate_is_chosen_and_all_scores_are_the_closed_forms(line):
    found = chosen(line)
    assert found.best == {"lr": 1.0}
    off = []
    for seed in range(3):
        begin = first(step(lr=1.0), held_back(line, seed=seed), seed).server
        off.append(abs(float(next(iter(begin.values()))) - SLOPE))
    for one in found.trials:
        exact = off[one.seed] * abs(1 - RATES[one.setting]) ** one.rounds
        assert one.problem or one.score == pytest.approx(exact, abs=1e-9)
    frame = found.frame()
    assert list(frame["rounds"]) == [3] * 4 + [9] * 9
    assert list(frame["seed"]) == [0] * 4 + [0] * 3 + [1] * 3 + [2] * 3
    assert list(frame["setting"])[4:] == ["lr=1.0", "lr=0.5", "lr=1e-06"] * 3
    assert set(frame["setting"][frame["chosen"]]) == {"lr=1.0"}
    assert found.rounds == 3 + 9 * 9
    assert "lr=1.0" in repr(found)
    assert "after 9 rounds" in repr(found)
    behind = torch.tensor(off) * 0.5**9
    margin, far = found.margins
    assert far.behind > margin.behind
    assert margin.behind == pytest.approx(float(behind.mean()))
    assert margin.error == pytest.approx(float(behind.std() / 3**0.5))
    assert list(frame["behind"])[4:] == [0.0, margin.behind, far.behind] * 3
    assert set(frame["behind"][:4]) == {""}
    assert f"{margin.behind:.4f} +- {margin.error:.2g} over lr=0.5, 3 seeds" in repr(found)


def test_nothing_is_trained_twice_and_what_is_there_is_gone_on_from(line, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        "pyrofl.inference.tuning.tune.fit",
        lambda *args, **how: (
            made.append(how["resume_from"] and how["resume_from"].state.number)
            or pyrofl.fit(*args, **how)
        ),
    )
    found = chosen(line, folder=tmp_path)
    assert made == [None] * 4 + [3] * 3 + [None] * 6
    again = chosen(line, folder=tmp_path)
    assert len(made) == 13
    assert again.lines() == found.lines()
    with pytest.raises(ValueError, match=r"now setting is 'lr=0.1' and was 'lr=1e-06'"):
        tune(step, line, {"lr": (0.1,)}, 9, folder=tmp_path, progress=False)


def test_test_rows_are_not_looked_at(line):
    found = chosen(line)
    for rows in line.test:
        line.x[rows] = math.nan
        line.y[rows] = math.nan
    assert chosen(line).lines() == found.lines()
    held = held_back(line)
    assert len(held.x) == sum(map(len, line.train))
    assert bool(held.x.isfinite().all())


def test_what_fails_is_last_and_no_crash(line):
    def sometimes(lr: float) -> pyrofl.Method:
        method = step(lr=lr)
        if lr < 1:
            return method

        def aggregate(*args: object) -> object:
            raise RuntimeError("of its own\nsecond line")

        return replace(method, aggregate=aggregate)

    found = tune(sometimes, line, {"lr": (1.0, 0.5)}, 3, metric="rmse", progress=False)
    assert found.best == {"lr": 0.5}
    problem = found.trials[0].problem
    assert problem.startswith("aggregate raises RuntimeError: of its own in 'raise RuntimeError(")
    assert "\n" not in problem
    assert math.isnan(found.trials[0].score)
    with pytest.raises(
        ValueError,
        match="the first: aggregate raises RuntimeError: of its own",
    ):
        tune(sometimes, line, {"lr": (1.0,)}, 3, metric="rmse", progress=False)


def test_one_that_diverges_late_gives_way_to_the_next():
    def attempt(which: int, rounds: int, seed: int) -> Trial:
        late = "diverged" if (which, rounds, seed) == (3, 9, 1) else ""
        return Trial(which, rounds, seed, math.nan if late else which / 9, 1.0, late)

    trials = halved(4, 9, "accuracy", attempt)
    assert [(one.setting, one.rounds, one.seed) for one in trials] == [
        *((k, 3, 0) for k in range(4)),
        *((3, 9, 0), (2, 9, 0), (1, 9, 0), (3, 9, 1), (2, 9, 1), (1, 9, 1), (2, 9, 2), (1, 9, 2)),
    ]
    found = TuningResult(({},) * 4, tuple(trials), "accuracy", 2)
    assert found.score == 2 / 9
    assert [margin.setting for margin in found.margins] == [1]
    assert [one.seed for one in halved(1, 9, "accuracy", attempt)] == [0]


def test_equal_scores_go_to_the_first():
    def attempt(which: int, rounds: int, seed: int) -> Trial:
        return Trial(which, rounds, seed, 1.0, 0.0)

    trials = halved(9, 90, "nll", attempt, seeds=2)
    assert [one.setting for one in trials] == [*range(9), 0, 1, 2, 0, 1, 2]
    assert ranked(trials, "nll") == [*range(9)]
    assert rungs(10, 54) == [6, 18, 54]


def test_luck_with_one_seed_does_not_decide():
    # With the first seed, and after few rounds, setting 1 is ahead; over the seeds it is behind.
    def attempt(which: int, rounds: int, seed: int) -> Trial:
        lucky = 0.8 if seed == 0 else 0.4
        return Trial(which, rounds, seed, lucky if which else 0.7, 0.0)

    trials = halved(2, 18, "accuracy", attempt)
    found = TuningResult(
        ({"lr": 1}, {"lr": 3}), tuple(trials), "accuracy", ranked(trials, "accuracy")[0]
    )
    assert found.best == {"lr": 1}
    (margin,) = found.margins
    assert margin.behind == pytest.approx(0.7 - 1.6 / 3)
    assert margin.error == pytest.approx(0.4 / 3)  # the sd of (.8, .4, .4) over the root of 3
    assert not margin.clear
    assert "not clear: less than twice its standard error" in found.margin


@pytest.mark.parametrize("method", ["accuracy", "nll"])
def test_a_method_of_classes_with_a_schedule(method):
    def build(lr: float) -> object:
        return lambda number: fedavg.build(
            toys.net(), epochs=2, lr=lr, decay=True, elapsed=number / 4
        )

    blobs = toys.blobs()
    found = pyrofl.tune(build, blobs, [{"lr": 1e-6}, {"lr": 0.05}], 4, metric=method, seed=3)
    assert describe_setting(found.best) == "lr=0.05"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"param_grid": {}}, "unused"),
        ({"param_grid": []}, "param_grid has no setting; pass at least one"),
        ({"param_grid": {"lr": ()}}, "param_grid has no setting"),
        ({"param_grid": {"lr": 0.1}}, r"param_grid\['lr'\] is 0.1; expected a list of values"),
        ({"param_grid": {"lr": "0.1"}}, r"param_grid\['lr'\] is '0.1'; expected a list of values"),
        (
            {"param_grid": {"lr": (0.1, 0.1)}},
            "param_grid has 'lr=0.1' twice; pass at least one",
        ),
        ({"param_grid": [3]}, "param_grid has 3; expected dicts of name -> value"),
        ({"param_grid": {"lr": (0.1, -1.0)}}, "lr is -1.0; expected a number of at least 0"),
        ({"metric": "accuracy"}, "metric is 'accuracy', but y has numbers; use rmse"),
        ({"metric": "ece"}, "metric is 'ece'; expected one of accuracy, nll, rmse"),
        ({"seeds": 0}, "seeds is 0; expected a whole number of at least 1"),
        ({"rounds": 0}, "rounds is 0; expected a whole number of at least 1"),
        (
            {"validation_fraction": 1.0},
            "validation_fraction is 1.0; expected a number above 0 to below 1",
        ),
        (
            {"validation_fraction": 0},
            "validation_fraction is 0; expected a number above 0 to below 1",
        ),
    ],
)
def test_bad_arguments_are_refused_in_a_line(line, given, told):
    asked = {"param_grid": {"lr": (0.1,)}, "rounds": 1, "metric": "rmse"} | given
    if told == "unused":  # nothing to choose from is one setting, the defaults
        assert tune(step, line, progress=False, **asked).best == {}
        return
    with pytest.raises(ValueError, match=told):
        tune(step, line, progress=False, **asked)
