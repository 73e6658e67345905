"""An experiment is the command line, the file of --config, run.json and the key of --resume."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrofl.cli.parser import COMMANDS, main, parser
from pyrofl.experiments.experiment import Experiment, options, words_of

FEW = ["--rounds", "2", "--clients", "4", "--per-class", "9", "--net", "mlp:3", "--quiet"]
FEW += ["--posterior-draws", "0"]


def parsed(command: str, *words: str) -> Experiment:
    """Return the experiment of a command line."""
    given = parser().parse_args([command, "fedavg", *words])
    return replace(Experiment.of(given), methods=("fedavg",))


def values_of(one: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a field."""
    kind = options()[one.name].kind
    if "choices" in kind:
        return st.sampled_from(kind["choices"])
    if kind.get("action") == "store_true":
        return st.booleans()
    if kind.get("action") == "extend":
        return st.lists(st.sampled_from(["lr=0.1", "batch=none", "a=-3"]), min_size=1).map(tuple)
    if one.name == "arviz_groups":
        return st.sampled_from(["all", ("posterior", "sample_stats")])
    if one.name == "held_out":
        return st.sampled_from([0, 3, "A,B", "5,"])
    if isinstance(one.default, float) or one.name == "test_fraction":
        return st.floats(0.01, 0.99)
    texts = st.sampled_from(["a b", "-x", "é", "x=1,y"])
    is_number = "type" in kind and kind["type"].__name__ == "read"
    return st.integers(1, 60) if is_number else texts


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_options_json_and_words_give_the_same_experiment(data):
    chosen = {
        one.name: data.draw(values_of(one))
        for one in fields(Experiment)
        if one.name != "methods" and data.draw(st.booleans())
    }
    experiment = Experiment(methods=("fedavg",), **chosen)
    names = ("seeds", "tune", "trials", "metric", "validation_fraction", "tune_seeds", "over")
    assert Experiment.of(json.loads(json.dumps(experiment.to_json()))) == experiment
    other = replace(experiment, over=())
    assert parsed("compare", *other.words(("over",))) == other
    alone = replace(other, **{n: getattr(Experiment(), n) for n in names})
    assert parsed("run", *alone.words(names)) == alone


def test_all_options_of_a_fit_are_fields_of_the_experiment():
    names = {one.name for one in fields(Experiment)}
    for command in ("run", "compare", "tune", "partition"):
        rows = COMMANDS[command][2]
        assert {row.name for row in rows} - {"config", "methods"} <= names
    assert parsed("run") == Experiment(methods=("fedavg",))


def test_a_config_file_gives_options_and_the_command_line_wins(tmp_path):
    config = tmp_path / "study.yaml"
    config.write_text(
        "methods: [fedavg]\nrounds: 2\nper-class: 9\nclients: 4\nnet: mlp:3\nposterior_draws: 0\n"
        "set: {lr: 0.5, batch: null}\nresume: false\nquiet: true\n"
    )
    assert main(["run", f"--config={config}", "--seed", "4", "--out", str(tmp_path / "a")]) == 0
    words = ["run", "fedavg", *FEW, "--seed", "4", "--set", "lr=0.5", "batch=none"]
    assert main([*words, "--out", str(tmp_path / "b")]) == 0
    one, two = (tmp_path / n for n in "ab")
    assert (one / "metrics.csv").read_bytes() == (two / "metrics.csv").read_bytes()
    facts = [json.loads((at / "run.json").read_text())["experiment"] for at in (one, two)]
    assert facts[0] | {"out": ""} == facts[1] | {"out": ""}
    words = ["compare", "local", "--config", str(config), "--seeds", "1", "--rounds", "1"]
    assert main([*words, "--out", str(tmp_path / "c")]) == 0
    (path,) = (tmp_path / "c").glob("*/run.json")
    found = json.loads(path.read_text())["experiment"]
    assert (found["methods"], found["rounds"], found["clients"]) == (["local"], 1, 4)


def test_the_file_of_a_run_repeats_it(tmp_path):
    first, again = tmp_path / "first", tmp_path / "again"
    assert main(["run", "fedavg", *FEW, "--set", "lr=0.3", "--out", str(first)]) == 0
    words = ["run", "--config", str(first / "run.json"), "--out", str(again)]
    assert main(words) == 0
    assert (first / "metrics.csv").read_bytes() == (again / "metrics.csv").read_bytes()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("roudns: 3", "holds 'roudns', which is no option; did you mean rounds?"),
        ("rounds: 0", "--rounds: found '0'; expected a whole number of at least 1"),
        ("rounds: [1", "cannot be read: while parsing"),
        ("- 1", "holds no mapping; expected lines such as rounds: 20"),
        ("missing: guess", "argument --missing: invalid choice: 'guess'"),
        ("3: 4", "holds 3, which is no option"),
        ("rounds: 3", "run: METHOD is missing; expected one of pyrofl list methods"),
    ],
)
def test_a_wrong_config_file_is_refused_in_one_line(text, words, tmp_path, capsys):
    config = tmp_path / "study.yaml"
    config.write_text(text)
    assert main(["run", "--config", str(config), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_lists_of_yaml_are_joined_by_commas():
    assert words_of({"features": ["a", "b"], "settings": ["lr=1"], "participation": 0.1}) == [
        *("--features", "a,b", "--participation", "0.1", "--set", "lr=1"),
    ]


def test_what_may_differ_when_a_run_is_resumed_is_stated_by_the_fields():
    free = {one.name for one in fields(Experiment) if one.metadata["resumable"]}
    assert {"rounds", "out", "quiet", "eval_every"} <= free
    assert not free & {
        "data",
        "clients",
        "partition",
        "net",
        "participation",
        "privacy",
        "chunk_size",
    }
    assert Experiment().key() == Experiment(rounds=3, out="a", methods=("local",)).key()
    assert Experiment().key() != Experiment(clients=3).key()
