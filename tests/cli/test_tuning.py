"""The command tune, and compare --tune."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from promises import others_slow

from pyrofl.cli.commands import grids
from pyrofl.cli.parser import main
from pyrofl.data.loaders import datasets
from pyrofl.experiments.methods import builds, methods
from pyrofl.experiments.settings import arguments
from pyrofl.experiments.tasks import Task
from pyrofl.files.run_folder import read_csv
from pyrofl.inference.definition.seeds import Seeds
from pyrofl.nets import build
from pyrofl.partitions import federations

DATA = ["--per-class", "12", "--clients", "4", "--net", "softmax", "--rounds", "3", "--quiet"]
LR = ["--over", "lr=0.0001,0.1", "momentum=0.0,0.9"]


@pytest.mark.draws
def test_tune_writes_what_it_chose_and_the_command_that_runs_it(tmp_path, capsys):
    out = tmp_path / "tuned"
    words = ["tune", "fedavg", *LR, *DATA, "--set", "epochs=2", "--validation-fraction", "0.25"]
    words += ["--split-seed", "0"]
    assert main([*words, "--out", str(out)]) == 0
    table, said = capsys.readouterr().out.split("\n\n")
    rows, facts = read_csv(out / "tune.csv"), json.loads((out / "tune.json").read_text())
    assert [row["rounds"] for row in rows[:9]] == ["1", "2", "3"] * 3  # not pruned
    assert [row["seed"] for row in rows[-6:]] == ["1"] * 3 + ["2"] * 3
    assert {row["seed"] for row in rows[:-6]} == {"0"}
    margin = facts["margins"][0]
    finalists = {row["setting"] for row in rows[-6:]}
    last = [r for r in rows if r["rounds"] == "3" and r["setting"] in finalists]
    other = [r for r in last if r["chosen"] == "False"]
    assert {(float(r["behind"]), float(r["error"])) for r in other} == {
        (one["behind"], one["error"]) for one in facts["margins"]
    }
    assert {float(r["behind"]) for r in last if r not in other} == {0.0}
    assert f"Its margin is {margin['behind']:.4f} +- {margin['error']:.2g} over lr=" in said
    best = next(row for row in rows if row["chosen"] == "True")["setting"]
    assert "lr=0.1" in best
    assert best in said
    assert "chosen on 0.25 of the training rows of every client" in said
    assert "test rows are not used" in said
    assert len(table.splitlines()) == 1 + len(rows)
    last = {(t["setting"], t["seed"]): t["rounds"] for t in facts["trials"]}
    assert facts["rounds"] == sum(last.values()) <= 4 * 3 + 6 * 3
    assert (out / "figures/tune.png").stat().st_size > 5000
    assert {one.name for one in out.iterdir()} == {
        *("tune.csv", "tune.json", "tune.journal", "figures"),
    }
    repeat = shlex.split(said.splitlines()[-1])
    assert repeat == shlex.split(facts["command"])
    assert repeat[repeat.index("--split-seed") + 1] == "0"  # a value, if a small one
    assert main([*repeat[1:], "--out", str(tmp_path / "run"), "--quiet"]) == 0
    again = json.loads((tmp_path / "run/run.json").read_text())["experiment"]["settings"]
    assert again == ["epochs=2", *best.split()]


@pytest.mark.slow
def test_tune_goes_on_after_a_kill_to_the_same_bytes(tmp_path, forked):
    def words(at: Path) -> list[str]:
        return ["tune", "fedavg", *LR, *DATA, "--out", str(at)]

    whole, out = tmp_path / "whole", tmp_path / "out"
    assert forked(words(whole)).codes == [0]
    for resume, doom in (([], 5), (["--resume"], 8)):
        assert forked([*words(out), *resume], training=doom).codes == [-9]
        assert not (out / "tune.csv").exists()
    ended = forked([*words(out), "--resume", "--set", "epochs=3"])
    assert ended.codes == [2]
    assert "tune.journal is of another run; " in ended.told[-1]
    assert "set is ['epochs=3'] and was []" in ended.told[-1]
    for _ in range(2):  # the second time there is nothing left to do
        assert forked([*words(out), "--resume"]).codes == [0]
        assert (out / "tune.csv").read_bytes() == (whole / "tune.csv").read_bytes()
    facts = [json.loads((at / "tune.json").read_text()) for at in (out, whole)]
    for each in facts:
        del each["seconds"], each["hash"]
        for one in each["trials"]:
            del one["seconds"]
    assert facts[0] == facts[1]
    ended = forked([*words(out), "--resume", "--validation-fraction", "0.5"])
    assert ended.codes == [2]
    assert (
        "tune.journal is of another run; now validation fraction is 0.5 and was 0.2"
        in ended.told[-1]
    )
    ended = forked([*words(out), "--resume", "--tune-seeds", "2"])
    assert ended.codes == [2]
    assert "tune.journal is of another run; now tune seeds is 2 and was 3" in ended.told[-1]


def test_compare_tunes_every_method_by_as_many_settings_and_says_what_it_took(tmp_path, capsys):
    out = tmp_path / "both"
    words = ["compare", "local", "fedavg", *DATA, "--seeds", "2", "--posterior-draws", "0"]
    words += [
        "--tune",
        "--trials",
        "3",
        "--tune-seeds",
        "2",
        "--set",
        "fedavg.momentum=0.5",
        "--out",
        str(out),
    ]
    assert main(words) == 0
    table = capsys.readouterr().out
    rows = read_csv(out / "compare.csv")
    for name in ("local", "fedavg"):
        facts = json.loads((out / f"{name}-tune/tune.json").read_text())
        assert len(facts["about"]["settings"]) == 3
        assert facts["about"]["settings"][0]["lr"] == "0.01"  # the defaults
        (tuned,) = {row["tuned"] for row in rows if row["method"] == name}
        assert tuned.split() == [f"{n}={v}" for n, v in facts["chosen"].items()]
        assert table.count(tuned) >= 1
        told = json.loads((out / f"{name}-0/run.json").read_text())["experiment"]["settings"]
        assert set(told) >= {f"{name}.{word}" for word in tuned.split()}
        assert facts["margins"][0]["seeds"] == 2  # of --tune-seeds
    assert "momentum" not in json.loads((out / "fedavg-tune/tune.json").read_text())["chosen"]
    assert (out / "local-tune/figures/tune.png").exists()
    before = (out / "compare.csv").read_bytes()
    assert main([*words, "--resume"]) == 0
    assert (out / "compare.csv").read_bytes() == before
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "How settings were chosen" in page
    assert "Chosen on a fraction of 0.2 of the training rows; test rows were not used." in page


def test_a_method_all_of_whose_settings_fail_keeps_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pyrofl.models.fedavg.SEARCH_GRID", {"lr": (1e4, 1e5)})
    words = ["compare", "fedavg", *DATA, "--seeds", "1", "--posterior-draws", "0", "--tune"]
    words += ["--trials", "2", "--set", "fedavg.weight_decay=1000", "fedavg.lr=1000"]
    code = main([*words, "--out", str(tmp_path / "one")])
    assert code in (2, 4)  # fewer settings than were asked for, or a run that diverged
    words[words.index("--trials") + 1] = "1"
    assert main([*words, "--out", str(tmp_path / "two")]) == 4
    assert "none: all failed" in capsys.readouterr().out
    assert read_csv(tmp_path / "two/compare.csv")[0]["tuned"] == "none: all failed"


def test_a_storage_that_cannot_be_read_is_no_setting_that_fails(tmp_path, capsys):
    out = tmp_path / "out"
    (out / "fedavg-tune").mkdir(parents=True)
    (out / "fedavg-tune/tune.journal").write_bytes(b"another file\n")
    words = ["compare", "fedavg", *DATA, "--seeds", "1", "--posterior-draws", "0", "--tune"]
    assert main([*words, "--trials", "2", "--resume", "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "fedavg-tune/tune.journal cannot be used: " in line
    assert not (out / "compare.csv").exists()


@pytest.mark.parametrize("command", [["tune", "fedavg"], ["compare", "fedavg", "--tune"]])
def test_without_optuna_one_line_names_the_extra(tmp_path, capsys, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main([*command, *DATA, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "tuning needs Optuna" in line
    assert "pip install -e '.[tuning]'" in line
    assert not (tmp_path / "out").exists()


def test_a_choice_at_the_edge_of_its_grid_is_stated(tmp_path, capsys):
    words = ["tune", "fedavg", "--over", "lr=0.0001,0.001,0.1", *DATA, "--tune-seeds", "1"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    warning = "Warning: lr=0.1 is the largest of 3 values and was chosen; widen the grid."
    assert warning in said.out.splitlines()
    assert said.err == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--over", "lr"], "--over 'lr' has no values; expected name=value,value,..."),
        (["--over", "rate=1,2"], "unknown setting of fedavg: 'rate'; expected one of"),
        (["--over", "lr=0.1,ten"], "--over lr is 'ten'; expected a number"),
        (["--over", "lr=0.1,-1"], "fedavg: lr is -1.0; expected a number of at least 0"),
        (["--over", "lr=0.1,0.1"], "expected every name once, and no two values alike"),
        (["--over", "lr=0.1", "lr=0.2"], "expected every name once, and no two values alike"),
        (["--over", "lr=0.1", "--set", "lr=1"], "lr is given by --set and by --over; expected one"),
        (["--over", "lr=0.1,0.10"], "--trials is 2, and of fedavg there are 1 to try; expected"),
        (["--trials", "99"], "--trials is 99, and of fedavg there are 12 to try; expected at"),
        (["--metric", "rmse"], "metric is 'rmse', but y has classes; use accuracy or nll"),
        (
            ["--validation-fraction", "1"],
            "--validation-fraction: found '1'; expected a number above 0 to below 1",
        ),
    ],
)
def test_bad_words_are_refused_in_a_line(tmp_path, capsys, words, told):
    assert main(["tune", "fedavg", *DATA, *words, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert told in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tune", "--metric", "rmse"], "metric is 'rmse', but y has classes; use"),
        (["--trials", "2"], "--trials is given, and --tune is not; expected both"),
        (["--metric", "nll"], "--metric is given, and --tune is not; expected both"),
        (
            ["--tune", "--privacy", "clip=1,noise_multiplier=1"],
            "expected one of them, and settings chosen on",
        ),
        (["--tune", "--data", "linear"], "expected --split-seed S, or --seeds 1"),
    ],
)
def test_a_comparison_that_cannot_be_tuned_is_refused(tmp_path, capsys, words, told):
    if "--privacy" in words:
        pytest.importorskip("dp_accounting")
    plain = ["compare", "fedavg", "--rounds", "1", "--quiet", "--set", "lr=0.01"]
    assert main([*plain, *words, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert told in line


@pytest.mark.parametrize("method", others_slow(sorted(builds())))
def test_every_method_has_nine_settings_of_its_own_and_its_defaults_among_them(method):
    data = datasets.per_class(datasets.load("digits"), 4)
    federation = federations.split(data, "iid", 2, server_data=8)
    task = Task(0, 0, Seeds(0, 0, 0), federation, build("mlp:3", (64,), 10), "categorical")

    def made(**setting: str) -> object:
        words = [f"{name}={value}" for name, value in setting.items()]
        return methods([method], words, task, 9)[method]

    found = grids.settings_to_try(method, [], None, made, [], 0)
    assert len(found) == grids.NUM_TRIALS
    assert found[0].keys() == found[1].keys() <= arguments(builds()[method]).keys()
    assert grids.settings_to_try(method, [], None, made, [], 0) == found
    assert grids.settings_to_try(method, [], None, made, [], 1)[0] == found[0]
