"""Words of the command line that could mean two things: one clear line, before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from promises import others_slow

from pyrofl.cli import main
from pyrofl.experiments.methods import builds
from pyrofl.experiments.settings import read_settings

SMALL = ["fedavg", "--per-class", "6", "--clients", "2", "--posterior-draws", "0", "--quiet"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--round", "3"], "unrecognized arguments: --round 3; did you mean --rounds?"),
        (["--epochs", "1"], "epochs is a setting of methods, use --set epochs=1; see"),
        (["--epochs=1"], "epochs is a setting of methods, use --set epochs=1; see"),
        (["--hold-back", "0.1"], "--hold-back 0.1; it is --validation-fraction now"),
        (["--settings", "3"], "unrecognized arguments: --settings 3; it is --trials now"),
        (["--prior", "flat", "--set", "prior=flat"], "--set gives prior more than once"),
        (["--prior", "student(3)"], "prior of fedavg is 'student(3)'; expected a prior, such as"),
        (["--guide", "low_rank(0)"], "guide of fedavg is 'low_rank(0)'; expected a guide: delta,"),
        (["--set", "lr=.1", "lr=.2"], "--set gives lr more than once, lr=.1 and lr=.2"),
        (["--set", "lr=.1", "--set", "lr=.1"], "--set gives lr more than once"),
        (["--set", "lr=1e-400"], "lr of fedavg is '1e-400'; expected 0, or at least 1.18e-38"),
        (["--set", "lr=1e-45"], "expected 0, or at least 1.18e-38"),
        (["--drop-rate", "1e-400"], "--drop-rate: found '1e-400'; expected 0, or at least"),
        (["--partition", "dirichlet:0.3,min=1,min=2"], "gives min more than once"),
    ],
)
def test_what_could_mean_two_things_is_refused(words, told, tmp_path, capsys):
    try:
        code = main(["run", *SMALL, *words, "--out", str(tmp_path / "out")])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rounds: 3\nrounds: 4\n", "'rounds' is given more than once; expected one value"),
        ("set:\n  lr: 0.1\n  lr: 0.2\n", "'lr' is given more than once"),
        ("set: [lr=0.1, lr=0.2]\n", "gives lr more than once, lr=0.1 and lr=0.2"),
        ("set: {lr: 0.1}\nsettings: {lr: 0.2}\n", "gives settings by two names"),
        ("per-class: 6\nper_class: 7\n", "gives per_class by two names"),
    ],
)
def test_a_config_that_gives_two_values_is_refused(text, told, tmp_path, capsys):
    (tmp_path / "study.yaml").write_text(text)
    assert main(["run", *SMALL, "--config", str(tmp_path / "study.yaml")]) == 2
    assert told in capsys.readouterr().err


def test_prior_and_guide_are_settings_of_every_method_and_commas_separate_methods(tmp_path):
    out = tmp_path / "out"
    words = ["--prior", "student_t(3)", "--guide", "mean_field", "--rounds", "1", "--seeds", "1"]
    words += ["--set", "fedavg.epochs=1", "--out", str(out)]
    assert (
        main(["compare", "fedavg,pfedvem", "local,", *SMALL[1:], "--net", "softmax", *words]) == 0
    )
    for method in ("fedavg", "pfedvem", "local"):
        settings = json.loads((out / f"{method}-0" / "run.json").read_text())["experiment"]
        assert settings["settings"][1:] == ["prior=student_t(3)", "guide=mean_field"]


@pytest.mark.parametrize("method", others_slow(builds(), ["pfedvem"]))
@pytest.mark.parametrize("name", ["prior", "guide"])
def test_every_method_reads_prior_and_guide(method, name):
    texts = {"prior": "student_t(3)", "guide": "low_rank(2)"}
    (chosen,) = read_settings([f"{name}={texts[name]}"], {method: builds()[method]}).values()
    assert callable(chosen[name])


def test_settings_on_the_command_line_replace_those_of_the_config(tmp_path):
    (tmp_path / "study.yaml").write_text("set: {lr: 0.1, momentum: 0.5}\nrounds: 1\n")
    out = tmp_path / "out"
    words = ["--config", str(tmp_path / "study.yaml"), "--set", "lr=0.2", "--out", str(out)]
    assert main(["run", *SMALL, *words]) == 0
    facts = json.loads((out / "run.json").read_text())
    assert facts["experiment"]["settings"] == ["momentum=0.5", "lr=0.2"]


def test_a_run_is_resumed_with_other_rounds_and_says_if_there_is_none(tmp_path, capsys):
    def run(rounds: int, *words: str, out: Path = tmp_path / "out") -> int:
        named = ["--rounds", str(rounds), "--out", str(out), "--checkpoint-every", "1"]
        return main(["run", *SMALL, "--set", "epochs=1", *named, *words])

    assert run(60) == 0  # evaluated every third round
    capsys.readouterr()
    assert run(80, "--resume") == 0  # by default every fourth
    rows = (tmp_path / "out" / "metrics.csv").read_text().splitlines()[1:]
    rounds = sorted({int(row.split(",")[0]) for row in rows})
    assert rounds == [*range(3, 80, 3), 80]
    assert run(82, "--resume", "--eval-every", "5") == 2
    assert "ask for round 5" in capsys.readouterr().err
    assert run(1, "--resume", out=tmp_path / "outt") == 0
    assert "outt holds no run to resume; starting at round 1" in capsys.readouterr().err
