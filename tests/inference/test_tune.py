"""Settings chosen by Optuna studies, where the right one is known."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import toys
from torch import nn

import pyrofl
from pyrofl.data import Federation
from pyrofl.inference.engine.start import first
from pyrofl.inference.tuning import studies
from pyrofl.inference.tuning.results import (
    TrialScore,
    TuningResult,
    describe_setting,
    ranked_settings,
)
from pyrofl.inference.tuning.tune import run_trials, tune
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
    first_seed = [3, 6, 9] * 3 + [3]  # three are not pruned, the last one diverges
    assert list(frame["rounds"]) == first_seed + [9] * 6
    assert list(frame["seed"]) == [0] * 10 + [1] * 3 + [2] * 3
    assert list(frame["setting"])[10:] == ["lr=1.0", "lr=0.5", "lr=1e-06"] * 2
    assert set(frame["setting"][frame["chosen"]]) == {"lr=1.0"}
    assert found.total_rounds == 3 + 9 * 9
    assert "lr=1.0" in repr(found)
    assert "after 9 rounds" in repr(found)
    behind = torch.tensor(off) * 0.5**9
    margin, far = found.margins
    assert far.behind > margin.behind
    assert margin.behind == pytest.approx(float(behind.mean()))
    assert margin.error == pytest.approx(float(behind.std() / 3**0.5))
    assert list(frame["behind"])[10:] == [0.0, margin.behind, far.behind] * 2
    assert list(frame["behind"])[:10] == [
        *("", "", far.behind, "", "", margin.behind, "", "", 0.0, ""),
    ]
    assert f"{margin.behind:.4f} +- {margin.error:.2g} over lr=0.5, 3 seeds" in repr(found)


def interrupt_fit(monkeypatch, number: int) -> list[int]:
    """Interrupt the given call of `fit` in trials; return a list of the rounds of all calls."""
    calls: list[int] = []

    def fit(method: object, data: object, rounds: int, **how: object) -> object:
        calls.append(rounds)
        if len(calls) == number:
            raise KeyboardInterrupt
        return pyrofl.fit(method, data, rounds, **how)

    monkeypatch.setattr("pyrofl.inference.tuning.studies.fit", fit)
    return calls


@pytest.mark.parametrize("number", [5, 13])
def test_an_interrupted_search_continues_to_the_same_result(line, tmp_path, monkeypatch, number):
    whole = chosen(line)
    calls = interrupt_fit(monkeypatch, number)
    with pytest.raises(KeyboardInterrupt):
        chosen(line, folder=tmp_path)
    at = len(calls)
    resumed = chosen(line, folder=tmp_path)
    assert resumed.rows() == whole.rows()
    done = number - 1 - (number - 1) % 3 if number <= 10 else number - 1
    assert len(calls) - at == 16 - done  # the interrupted trial starts again, no other does
    again = chosen(line, folder=tmp_path)
    assert len(calls) - at == 16 - done
    assert again.rows() == whole.rows()
    assert again.total_seconds == resumed.total_seconds


def test_another_search_does_not_continue_a_folder(line, tmp_path):
    same = {"build": step, "data": line, "param_grid": {"lr": (0.5, 1.0)}, "rounds": 3}
    same |= {"metric": "rmse", "seeds": 1, "folder": tmp_path, "progress": False}
    found = tune(**same)
    other_data = Federation(line.x, 2 * line.y, line.train, line.test)
    for changed, stated in (
        ({"param_grid": {"lr": (0.1,)}}, r"settings is \['lr=0.1'\] and was \['lr=0.5', "),
        ({"data": other_data}, "now hash of the data is '.*' and was '"),
        ({"build": lambda lr: step(lr=lr / 2)}, "now hash of the methods is '.*' and was '"),
        ({"rounds": 8}, "now rounds is 8 and was 3"),
        ({"metric": "nll"}, "now metric is 'nll' and was 'rmse'"),
        ({"seed": 1}, "now seed of init is 1 and was 0, "),
        ({"about": {"site": 2}}, "now site is 2 and was None"),
        ({"draws": 3}, "now draws is 3 and was None"),
    ):
        with pytest.raises(ValueError, match=rf"tune.journal is of another run; .*{stated}"):
            tune(**same | changed)
    assert tune(**same).rows() == found.rows()


def test_an_operation_cut_off_by_a_kill_is_left_out(line, tmp_path):
    whole = chosen(line, folder=tmp_path)
    journal = tmp_path / "tune.journal"
    content = journal.read_bytes()
    for fraction in (0.3, 0.9):
        journal.write_bytes(content[: int(len(content) * fraction) - 2])
        (tmp_path / "tune.journal.lock").touch()
        assert chosen(line, folder=tmp_path).rows() == whole.rows()


@pytest.mark.parametrize(
    "content", [b"{}\n", b"SQLite 3\0\n" + b"x" * 9000, b"[]\n", b'{"op_code":0}\n']
)
def test_a_damaged_storage_is_refused_in_a_line(line, tmp_path, content):
    (tmp_path / "tune.journal").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"tune.journal cannot be used: .*; expected a writable"
    ) as bad:
        chosen(line, folder=tmp_path)
    assert "\n" not in str(bad.value)


def test_a_storage_may_have_a_strange_path_and_is_no_link(line, tmp_path):
    folder = tmp_path / "a?b{c}%d #"
    assert chosen(line, folder=folder).best == {"lr": 1.0}
    (tmp_path / "tune.journal").symlink_to(folder / "tune.journal")
    with pytest.raises(ValueError, match=r"tune.journal cannot be used: .* is a link to"):
        chosen(line, folder=tmp_path)


def test_optuna_reads_the_storage(line, tmp_path):
    optuna = pytest.importorskip("optuna")
    chosen(line, folder=tmp_path)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "tune.journal"))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.load_study(study_name="seed 0", storage=storage)
    assert study.best_params == {"lr": "1.0"}
    assert [t.state.name for t in study.trials] == ["COMPLETE"] * 3 + ["PRUNED"]


def test_optuna_is_silent_and_keeps_its_verbosity(line, capfd):
    optuna = pytest.importorskip("optuna")
    before = optuna.logging.get_verbosity()
    chosen(line)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert optuna.logging.get_verbosity() == before


def test_a_range_gives_random_settings_of_the_seed(line):
    distributions = pytest.importorskip("optuna").distributions
    grid = {"lr": distributions.FloatDistribution(0.1, 1.0, log=True), "momentum": (0.0, 0.5)}

    def drawn(seed: int, trials: int = 5) -> TuningResult:
        build = lambda **s: step(lr=s["lr"])  # noqa: E731
        how = {"metric": "rmse", "seed": seed, "seeds": 1, "progress": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the largest rate, which is best
            return tune(build, line, grid, 2, trials=trials, **how)

    found = drawn(0)
    assert len(found.settings) == 5
    assert all(0.1 <= one["lr"] <= 1.0 and one["momentum"] in (0.0, 0.5) for one in found.settings)
    assert found.best["lr"] == max(one["lr"] for one in found.settings)
    assert drawn(0).rows() == found.rows()
    assert drawn(1).settings != found.settings
    assert drawn(0, 8).settings[:5] == found.settings
    whole = {"epochs": distributions.IntDistribution(1, 2)}
    with pytest.raises(ValueError, match="trials is 3, and param_grid has 2 settings"):
        tune(step, line, whole, 2, trials=3, metric="rmse", progress=False)


@pytest.mark.parametrize(
    ("rates", "stated"),
    [
        ((0.1, 0.2, 0.4), "lr=0.4 is the largest of 3 values"),
        ((2.0, 1.1, 2.5, 3.0), "lr=1.1 is the smallest of 4 values"),
        ((0.1, 1.0, 2.0), ""),
        ((0.1, 1.0), ""),
    ],
)
def test_a_choice_at_the_edge_of_its_grid_is_a_warning(line, rates, stated):
    how = {"metric": "rmse", "seeds": 1, "progress": False}
    if not stated:
        assert not tune(step, line, {"lr": rates}, 3, **how).edge_warnings
        return
    with pytest.warns(UserWarning, match=f"{stated} and was chosen; widen the grid"):
        found = tune(step, line, {"lr": rates}, 3, **how)
    assert stated in repr(found)


def test_a_choice_of_names_or_of_zero_is_at_no_edge():
    settings = [
        {"a": a, "b": b, "c": c} for a, b, c in zip("xyz", (0, 1, 2), (True, False, 1), strict=True)
    ]
    assert not TuningResult(tuple(settings), (), "accuracy", 0).edge_warnings
    assert len(TuningResult(tuple(settings), (), "accuracy", 2).edge_warnings) == 1


def test_test_rows_are_not_looked_at(line):
    found = chosen(line)
    for rows in line.test:
        line.x[rows] = math.nan
        line.y[rows] = math.nan
    assert chosen(line).rows() == found.rows()
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


def trained_by(score: Callable[[int, int], float | None]) -> Callable[..., list[TrialScore]]:
    """Return trials with scores of (setting, seed), of which None is a failure."""

    def trained(k: int, which: Sequence[int]) -> list[TrialScore]:
        scores = [(i, score(i, k)) for i in which]
        return [
            TrialScore(i, 9, k, math.nan if s is None else s, 1.0, "diverged" if s is None else "")
            for i, s in scores
        ]

    return trained


def test_one_that_diverges_late_gives_way_to_the_next():
    def score(which: int, seed: int) -> float | None:
        return None if (which, seed) == (3, 1) else which / 9

    trials = run_trials(4, "accuracy", trained_by(score))
    assert [(one.setting, one.seed) for one in trials] == [
        *((k, 0) for k in range(4)),
        *((3, 1), (2, 1), (1, 1), (2, 2), (1, 2)),
    ]
    found = TuningResult(
        ({},) * 4, tuple(trials), "accuracy", ranked_settings(trials, "accuracy")[0]
    )
    assert found.chosen == 2
    assert found.score == 2 / 9
    assert [margin.setting for margin in found.margins] == [1]
    assert [one.seed for one in run_trials(1, "accuracy", trained_by(score))] == [0]


def test_equal_scores_go_to_the_first():
    trials = run_trials(9, "nll", trained_by(lambda which, seed: 1.0), seeds=2)
    assert [one.setting for one in trials] == [*range(9), 0, 1, 2]
    assert ranked_settings(trials, "nll") == [*range(9)]
    assert studies.stages(54) == [18, 36, 54]


def test_luck_with_one_seed_does_not_decide():
    # With the first seed, setting 1 is ahead; over the seeds it is behind. Setting 4, which is no
    # finalist, is better with the first seed than setting 0 over all.
    scores = {0: (0.75, 0.7, 0.65), 1: (0.8, 0.4, 0.4), 2: (0.74, 0.72, 0.5), 3: (0.1,), 4: (0.73,)}
    trials = run_trials(5, "accuracy", trained_by(lambda which, seed: scores[which][seed]))
    chosen = ranked_settings(trials, "accuracy")[0]
    found = TuningResult(tuple({"lr": i} for i in range(5)), tuple(trials), "accuracy", chosen)
    assert found.best == {"lr": 0}
    second, third = found.margins
    assert (second.setting, third.setting) == (2, 1)
    differences = torch.tensor([-0.05, 0.3, 0.25])
    assert third.behind == pytest.approx(0.5 / 3)
    assert third.error == pytest.approx(float(differences.std() / 3**0.5))
    assert not third.clear
    assert "not clear: less than twice its standard error" in found.margin_text


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
        ({"trials": 2}, "trials is 2, and param_grid has no range; expected None"),
        ({"every": 2}, "unknown argument 'every'; expected one of"),
        ({"param_grid": {"lr": (0.1, math.nan)}}, "lr is nan; expected a number"),
        ({"param_grid": {"lr": (1e9, 1e10)}, "rounds": 40}, "all 2 settings fail, the first: "),
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
