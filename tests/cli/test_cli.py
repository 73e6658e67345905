"""The command line, end to end on small data."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import toys
import xarray

from pyrofl.choices import GROUPS
from pyrofl.cli.commands import preflight
from pyrofl.cli.parser import COMMANDS, main, parser
from pyrofl.data.tables.preprocessor import ColumnPreprocessing, Preprocessor
from pyrofl.experiments.comparison import compare_table
from pyrofl.experiments.methods import builds, methods, settings_of_method
from pyrofl.experiments.settings import Epochs, arguments, parse, read_settings
from pyrofl.experiments.tasks import Task, participation
from pyrofl.files.run_folder import CLIENTS, COMPARE, METRICS, read_csv
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Likelihood
from pyrofl.inference.definition.seeds import Seeds
from pyrofl.inference.fit import fit
from pyrofl.models import fedavg, fedprox, local
from pyrofl.nets import Network
from pyrofl.tensors import generator

SMALL = ["--per-class", "12", "--clients", "4", "--net", "mlp:6", "--rounds", "2", "--quiet"]
NETWORKS = """
from torch import nn
class Mixing(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, 10))
good = lambda: nn.Sequential(nn.Linear(64, 10))
narrow = nn.Linear(64, 3)
broken = lambda: 1 / 0
def halves(types, clients, rng): return [range(j, len(types), clients) for j in range(clients)]
def overlapping(types, clients, rng): return [[0]] * clients
"""


def test_list_names_everything_on_one_screen(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for word in ("pfedvem", "local", "digits", "dirichlet:A", "mlp", "same_shares", "poisson"):
        assert word in text
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("methods", "pfedvem confidence"),
        ("settings", "teachers coords=logvar|alpha"),
        ("data", "digits handwritten"),
        ("partitions", "dirichlet:A"),
        ("tests", "same_shares"),
        ("networks", "mlp"),
        ("likelihoods", "poisson"),
    ],
)
def test_list_tells_of_a_section(section, words, capsys):
    assert main(["list", section]) == 0
    text = capsys.readouterr().out
    for word in words.split():
        assert word in text
    assert max(map(len, text.splitlines())) < 110


def test_alone_it_tells_what_to_try(capsys):
    assert main([]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    tried = [line.split() for line in printed.out.partition("to try:")[2].splitlines() if line]
    assert len(tried) == 3
    for words in tried:
        parser().parse_args(words[1:])


def test_every_command_has_examples_that_it_takes(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            parser().parse_args([name, "--help"])
        told = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
        assert told
        for line in told:
            assert parser().parse_args(shlex.split(line)[1:]).do is COMMANDS[name][1]


def test_methods_are_found_by_their_build():
    assert {"local", "fedavg", "fedprox", "pfedvem"} <= builds().keys()
    assert not {"guides", "priors", "likelihoods"} & builds().keys()


def test_run_writes_its_files(finished):
    assert sorted(p.name for p in finished.iterdir()) == [
        "checkpoint.safetensors",
        "clients.csv",
        "figures",
        "metrics.csv",
        "posterior.nc",
        "rows.csv",
        "run.json",
    ]
    names = {p.stem for p in (finished / "figures").iterdir()}
    assert names == {"partition", "curves", "convergence", "clients", "reliability", "confidence"}


def test_run_json_says_how_it_came_about(finished):
    facts = json.loads((finished / "run.json").read_text())
    assert facts["seed"] == 3
    assert facts["seeds"] == dict.fromkeys(("split", "init", "participation", "noise"), 3)
    assert facts["experiment"]["methods"] == ["pfedvem"]
    assert facts["experiment"]["partition"] == "slices:5"  # a default, filled in
    assert facts["experiment"]["settings"] == ["head_epochs=2", "base_epochs=1", "batch=none"]
    assert {"python", "torch", "pyro", "pyrofl"} <= facts["versions"].keys()
    scalars = 64 * 6 + 6 + 6 * 10 + 10  # all parameters; tau comes on top
    assert facts["message_scalars"] == scalars + 1
    assert facts["bytes_down"] == [4 * scalars * 4] * 2  # all four clients train, 4 bytes each
    assert facts["bytes_up"] == [2 * (scalars + 1) * 4] * 2  # half of them report
    assert len(facts["seconds"]) == 2
    assert min(facts["seconds"]) > 0
    assert facts["rejected"] == [[], []]


def test_run_metrics(finished):
    rows = read_csv(finished / "metrics.csv")
    assert tuple(rows[0]) == METRICS
    assert {r["round"] for r in rows} == {"1", "2"}
    asked = {(r["model"], r["population"]) for r in rows}
    views = {(m, p) for m in ("personal", "global") for p in ("training", "held_out")}
    assert asked == views | {("global", "pooled")}
    assert all(0 <= float(r["value"]) <= 1 for r in rows if r["metric"] == "accuracy")


def test_run_clients_agree_with_metrics(finished):
    rows = read_csv(finished / "clients.csv")
    assert tuple(rows[0]) == CLIENTS
    taus = [r for r in rows if r["metric"] == "tau"]
    assert len(taus) == 4
    assert all(float(r["value"]) > 0 and r["model"] == "personal" for r in taus)
    ours = [
        float(r["value"])
        for r in rows
        if (r["model"], r["metric"]) == ("personal", "accuracy") and int(r["client"][7:]) < 4
    ]
    last = next(
        float(r["value"])
        for r in read_csv(finished / "metrics.csv")
        if (r["round"], r["model"], r["population"], r["metric"])
        == ("2", "personal", "training", "accuracy")
    )
    assert sum(ours) / len(ours) == pytest.approx(last, abs=1e-6)
    assert sum(int(r["size"]) for r in rows if r["metric"] == "tau") < 120  # two are held out


def test_run_posterior_has_named_axes(finished):
    with xarray.open_dataset(finished / "posterior.nc", group="posterior") as posterior:
        weight = posterior["head.weight"]
        assert weight.dims == ("chain", "draw", "client", "head_out", "head_in")
        assert weight.shape == (1, 7, 4, 10, 6)
        assert list(posterior["client"].values) == [f"client {j}" for j in range(4)]
        assert float(weight.std("draw").min()) > 0


def groups_in(path: Path) -> set[str]:
    with xarray.open_datatree(path / "posterior.nc", engine="h5netcdf") as tree:
        return set(tree.children)


def test_posterior_has_all_groups_if_they_are_small_or_those_that_are_asked_for(
    finished, tmp_path, capsys, monkeypatch
):
    assert groups_in(finished) == set(GROUPS)
    words = ["run", "pfedvem", "--data", "eight_schools", "--partition", "groups", "--rounds", "1"]
    words += ["--posterior-draws", "9", "--overwrite", "--out", str(tmp_path / "o")]
    assert main(words) == 0
    assert "posterior.nc: all ArviZ groups\n" in capsys.readouterr().err
    assert groups_in(tmp_path / "o") == set(GROUPS)
    assert main([*words, "--arviz-groups", "log_likelihood,posterior"]) == 0
    assert groups_in(tmp_path / "o") == {"posterior", "log_likelihood", "sample_stats"}
    # 9 draws of 8 clients: prior and log_prior of w, and 3 groups of as many rows.
    monkeypatch.setattr(preflight, "MAX_UNREQUESTED", 9 * 8 * 5)
    assert main(words) == 0
    assert groups_in(tmp_path / "o") == set(GROUPS)
    capsys.readouterr()
    monkeypatch.setattr(preflight, "MAX_UNREQUESTED", 9 * 8 * 5 - 1)
    assert main(words) == 0
    told = "posterior.nc: posterior and sample_stats only, as other groups have more than"
    assert told in capsys.readouterr().err
    assert groups_in(tmp_path / "o") == {"posterior", "sample_stats"}
    assert main([*words, "--arviz-groups", "all"]) == 0
    assert groups_in(tmp_path / "o") == set(GROUPS)


def test_groups_that_cannot_be_made_are_refused_before_any_work(tmp_path, capsys):
    out = tmp_path / "out"
    words = ["run", "fedavg", *SMALL, "--out", str(out)]
    assert main([*words, "--arviz-groups", "posterior,prior"]) == 2
    told = "--arviz-groups with fedavg: the prior has no draws: site"
    assert told in capsys.readouterr().err
    assert main([*words, "--arviz-groups", "posteriors"]) == 2
    assert (
        "found 'posteriors'; expected all, or some of posterior,prior," in capsys.readouterr().err
    )
    assert not out.exists()


def test_a_table_labels_inputs_and_outputs_of_its_network(tmp_path):
    lines = ["ward,age,bmi,kind"]
    lines += [f"{'NS'[i % 2]},{i % 7},{i % 5},{('u', 'v', 'w')[i % 3]}" for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    words = ["run", "pfedvem", "--data", f"csv:{tmp_path / 't.csv'}", "--target", "kind"]
    words += ["--client-column", "ward", "--rounds", "1", "--posterior-draws", "5"]
    for net, axes in (("softmax", {"head_in": ["age", "bmi"]}), ("mlp:2", {})):
        out = ["--net", net, "--overwrite", "--out", str(tmp_path / "o")]
        assert main([*words, *out]) == 0
        with xarray.open_datatree(tmp_path / "o/posterior.nc", engine="h5netcdf") as tree:
            posterior = tree["posterior"]
            assert posterior["head_out"].values.tolist() == ["u", "v", "w"]
            assert posterior["head_in"].values.tolist() == axes.get("head_in", [0, 1])
            assert tree["constant_data"]["feature"].values.tolist() == ["age", "bmi"]
            assert tree["observed_data"]["class"].values.tolist() == ["u", "v", "w"]
            assert tree.attrs["method"] == "pfedvem"
            assert tree.attrs["seed"] == 0


def test_same_seed_same_files(finished, tmp_path):
    facts = json.loads((finished / "run.json").read_text())["experiment"]
    words = ["run", "pfedvem", *SMALL, "--held-out", "2", "--seed", "3", "--participation", "0.5"]
    words += [
        "--eval-every",
        "1",
        "--draws",
        "2",
        "--posterior-draws",
        "0",
        "--set",
        *facts["settings"],
    ]
    assert main([*words, "--out", str(tmp_path / "again")]) == 0
    for name in ("metrics.csv", "clients.csv"):
        assert (tmp_path / "again" / name).read_text() == (finished / name).read_text()
    assert not (tmp_path / "again" / "posterior.nc").exists()


def test_overwrite_replaces_and_removes_what_is_stale(finished, tmp_path, capsys):
    out = tmp_path / "twice"
    words = ["run", "pfedvem", *SMALL, "--out", str(out), "--set", "head_epochs=1", "base_epochs=1"]
    assert main(words) == 0
    (out / "notes.txt").write_text("mine")
    again = ["run", "local", *SMALL, "--out", str(out), "--posterior-draws", "0"]
    assert main(again) == 2
    assert "not empty" in capsys.readouterr().err
    assert main([*again, "--overwrite"]) == 0
    assert {p.name for p in out.iterdir()} == {
        "checkpoint.safetensors",
        "clients.csv",
        "figures",
        "metrics.csv",
        "notes.txt",
        "rows.csv",
        "run.json",
    }
    assert not (out / "figures" / "confidence.png").exists()


def test_compare(tmp_path, capsys):
    out = tmp_path / "all"
    words = ["compare", "local", "fedavg", *SMALL, "--seeds", "2", "--posterior-draws", "2"]
    words += ["--set", "epochs=1", "fedavg.fine_tune=1", "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:4] == ["method", "model", "adaptation", "accuracy"]
    assert printed.pop().startswith("Two seeds: ")
    assert printed.pop().startswith("* the best mean")
    assert all("not converged" in line for line in printed[1:])  # after two rounds
    assert [line.split()[:3] for line in printed[1:]] == [
        ["local", "personal", "none"],
        ["fedavg", "global", "none"],
        ["fedavg", "personal", "none"],
        ["fedavg", "personal", "fine_tune"],
    ]
    assert "±" in printed[1]
    rows = read_csv(out / "compare.csv")
    assert tuple(rows[0]) == COMPARE
    assert {(r["method"], r["seed"]) for r in rows} == {
        (m, s) for m in ("local", "fedavg") for s in "01"
    }
    assert {"accuracy", "nll", "ece", "smallest_accuracy"} <= {r["metric"] for r in rows}
    assert {p.name for p in (out / "figures").iterdir()} == {"curves.png", "comparison.png"}
    for seed in "01":  # all methods have the same clients
        sizes = [
            {(r["client"], r["size"]) for r in read_csv(out / f"{m}-{seed}" / "clients.csv")}
            for m in ("local", "fedavg")
        ]
        assert sizes[0] == sizes[1]
    assert json.loads((out / "local-1" / "run.json").read_text())["experiment"]["seed"] == 1


def test_compare_is_run_for_each_seed(tmp_path):
    shared = [*SMALL, "--set", "epochs=1", "--posterior-draws", "0"]
    main(["compare", "local", *shared, "--seeds", "1", "--seed", "5", "--out", str(tmp_path / "a")])
    main(["run", "local", *shared, "--seed", "5", "--out", str(tmp_path / "b")])
    one, two = tmp_path / "a" / "local-5", tmp_path / "b"
    assert (one / "metrics.csv").read_text() == (two / "metrics.csv").read_text()


def test_compare_table_is_mean_and_standard_error():
    rows = [("m", s, "personal", "none", "accuracy", v, "") for s, v in enumerate((0.5, 0.7, 0.9))]
    assert "0.7000 ± 0.1155" in compare_table(rows)  # 0.2 / sqrt(3)


def test_compare_table_marks_the_best_and_pairs_the_seeds():
    """Seeds are harder or easier for both: differences of 0.1, 0.11 and 0.12 are clear."""
    good, bad = (0.5, 0.7, 0.9), (0.4, 0.59, 0.78)
    rows = [
        (name, s, "global", "none", metric, value, "")
        for name, values in (("bad", bad), ("good", good))
        for s, v in enumerate(values)
        for metric, value in (("accuracy", v), ("nll", v))
    ]
    head, worse, better, note = compare_table(rows).splitlines()
    assert head.endswith("accuracy minus *")
    assert worse.endswith("0.5900 ± 0.1097 *  -0.110 (-0.135 to -0.085)")  # the smaller nll
    assert better.split()[3:] == ["0.7000", "±", "0.1155", "*", "0.7000", "±", "0.1155"]
    assert note.startswith("* the best mean")


def test_compare_names_runs_that_have_not_converged_in_the_line_of_the_difference():
    rows = [
        (name, s, "global", "none", "accuracy", v + s / 50, "")
        for name, v in {"local": 0.86, "fedavg": 0.95, "ditto": 0.9}.items()
        for s in range(2)
    ]
    _, local, fedavg, ditto, _, few = compare_table(rows, {("local", 0), ("fedavg", 0)}).split("\n")
    assert local.endswith("; not converged: 1 of 2; *: not converged: 1 of 2")
    assert fedavg.endswith("*  not converged: 1 of 2")
    assert ditto.endswith("(-0.050 to -0.050); *: not converged: 1 of 2")
    assert few.startswith("Two seeds: ")
    *_, one = compare_table([row for row in rows if row[1] == 0]).splitlines()
    assert one.startswith("One seed: differences have no interval")


@pytest.mark.parametrize(
    ("data", "net", "draws"), [("eight_schools", "mean", "3"), ("linear", "linear", "1")]
)
def test_numbers_instead_of_classes(data, net, draws, tmp_path):
    words = ["run", "pfedvem", "--data", data, "--rounds", "2", "--quiet", "--draws", draws]
    assert main([*words, "--out", str(tmp_path)]) == 0
    facts = json.loads((tmp_path / "run.json").read_text())["experiment"]
    assert (facts["partition"], facts["net"]) == ("groups", net)
    assert {r["metric"] for r in read_csv(tmp_path / "metrics.csv")} == {"rmse", "nll", "crps"}
    names = {p.stem for p in (tmp_path / "figures").iterdir()}
    assert names == {"curves", "convergence", "clients", "confidence"}


def test_csv_with_groups(tmp_path, capsys):
    lines = [f"{'abc'[i % 3]},{'no' if i % 2 else 'yes'},{i},{i * i % 7}" for i in range(30)]
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["who,won,x,z", *lines]))
    words = ["run", "fedavg", "--data", f"csv:{table}", "--target", "won", "--client-column", "who"]
    words += ["--rounds", "1", "--quiet", "--features", "x,z", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert "global" in capsys.readouterr().out
    clients = {r["client"] for r in read_csv(tmp_path / "out" / "clients.csv")}
    assert clients == {"a", "b", "c"}


def test_it_says_what_is_predicted_from_what(tmp_path, capsys):
    rows = [f"{'abc'[i % 3]},{i % 2},{i},{i * i % 7}.5,{'vu'[i % 5 == 0]}" for i in range(30)]
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["who,won,x,z,kind", *rows, "a,1,NA,3.5,u", "b,,2,2.5,v"]))
    words = ["run", "local", "--data", f"csv:{table}", "--target", "won", "--client-column", "who"]
    words += ["--rounds", "1", "--missing", "drop", "--posterior-draws", "0"]
    words += ["--scaling", "none"]
    with pytest.warns(UserWarning, match="text is left out: kind"):
        assert main([*words, "--out", str(tmp_path / "out")]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first == (
        f"csv:{table}: 30 rows; target won: numbers from 0 to 1, likelihood normal:learned (all "
        "are whole: for classes, --likelihood categorical); features: 2 (x, z); left out: kind "
        "(text such as 'u'); rows dropped: 2 (x lacks 1, won lacks 1); "
        "target standardized internally: mean 0.458333, standard deviation 0.498261 over the "
        "training rows; predictions and scores "
        "are in its own unit"
    )
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    assert facts["experiment"]["missing"] == "drop"
    assert facts["data"] == {
        "rows": 30,
        "likelihood": "normal:learned",
        "classes": [],
        "target": "won",
        "features": ["x", "z"],
        "left_out": {"kind": "text such as 'u'"},
        "dropped": 2,
        "lacking": {"x": 1, "won": 1},
        "lost": [],
        "reordered": [],
        "unseen": {},
        "scales": "",
        "center": pytest.approx(11 / 24),
        "scale": pytest.approx((11 * 13) ** 0.5 / 24),
        "preparation": json.loads(
            Preprocessor((ColumnPreprocessing("x"), ColumnPreprocessing("z"))).to_json()
        ),
        "client_column": "who",
    }
    words = ["compare", "local", *words[2:], "--seeds", "1", "--likelihood", "categorical"]
    with pytest.warns(UserWarning, match="text is left out: kind"):
        assert main([*words, "--out", str(tmp_path / "all")]) == 0
    assert "30 rows; target won: 2 classes (0, 1); features" in capsys.readouterr().err
    figure = ["--out", str(tmp_path / "f.png"), "--clients", "3", "--partition", "iid"]
    assert main(["partition", "--target", "kind", "--data", words[3], *figure]) == 2
    assert "column won lacks 1 of 32 values" in capsys.readouterr().err
    assert main(["partition", "--missing", "drop", "--target", "kind", *words[2:4], *figure]) == 0
    told = capsys.readouterr().out
    assert "target kind: 2 classes (u, v); features: 6 (who=a, who=b, who=c, won, x, z); " in told
    assert "prepared: standardized by sums over clients: won, x, z; categories: who (3)" in told


def test_files_of_sites_are_prepared_and_how_is_kept(tmp_path, capsys):
    """The last site never trains and tells nothing; the last rows of each are tested."""
    (tmp_path / "in").mkdir()
    for j, site in enumerate("abc"):
        cells = [(i, "" if j and i % 3 else 100 * i + j, "uv"[i % 5 > 2]) for i in range(10)]
        lines = [f"{day},{dose},{kind},{'ny'[day % 2]}" for day, dose, kind in cells]
        text = "\n".join(["day,dose,kind,won", *lines])
        (tmp_path / f"in/{site}.csv").write_text(text)
    words = [
        "run",
        "fedavg",
        "--data",
        f"csv:{tmp_path}/in",
        "--target",
        "won",
        "--missing",
        "impute",
    ]
    words += ["--test-last", "day", "--test-fraction", "0.3", "--held-out", "1", "--rounds", "1"]
    words += ["--categories", "kind", "--posterior-draws", "2", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    told = capsys.readouterr().err.splitlines()[0]
    assert "features: 5 (day, dose, dose is missing, kind=u, kind=v); prepared: standard" in told
    facts = json.loads((tmp_path / "out/run.json").read_text())
    assert facts["experiment"]["scaling"] == "standardize"
    made = Preprocessor.from_json(json.dumps(facts["data"]["preparation"]))
    assert made.columns[0].center == 3  # days 0 to 6 of a and of b
    assert made.columns[1].center == pytest.approx((7 * 300 + 3 * 300 + 3) / 10)
    assert {r["client"] for r in read_csv(tmp_path / "out/clients.csv")} == {"a", "b", "c"}
    with xarray.open_datatree(tmp_path / "out/posterior.nc", engine="h5netcdf") as tree:
        scale = tree["constant_data"]["feature_scale"]
        assert scale.sel(feature="day").item() == made.columns[0].scale == 2
        assert tree["posterior"]["head_in"].values.tolist() == list(made.features)


def test_a_network_from_a_file(tmp_path):
    (tmp_path / "nets.py").write_text(NETWORKS)
    words = ["run", "local", *SMALL, "--net", f"{tmp_path / 'nets.py'}:good"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    with xarray.open_dataset(tmp_path / "out" / "posterior.nc", group="posterior") as posterior:
        assert set(posterior) == {"0.weight", "0.bias"}


def test_a_partition_from_a_file(tmp_path, capsys):
    (tmp_path / "deal.py").write_text(NETWORKS)
    words = ["--partition", f"{tmp_path / 'deal.py'}:halves", "--clients", "2"]
    assert main(["partition", *words, "--out", str(tmp_path / "f.png")]) == 0
    assert "2 clients of 673 to 674 training rows" in capsys.readouterr().out


def test_partition_draws_a_figure(tmp_path, capsys):
    path = tmp_path / "deep" / "fig.png"
    words = ["partition", "--partition", "dirichlet:0.3", "--clients", "10", "--out", str(path)]
    assert main(words) == 0
    assert path.read_bytes()[1:4] == b"PNG"
    assert "10 clients" in capsys.readouterr().out
    assert main(words) == 2
    assert main([*words, "--overwrite"]) == 0
    first = path.read_bytes()
    assert main([*words, "--overwrite", "--seed", "3", "--split-seed", "0"]) == 0
    assert path.read_bytes() == first
    assert main([*words, "--overwrite", "--split-seed", "3"]) == 0
    assert path.read_bytes() != first


BAD = {
    "run pfedvm": "did you mean pfedvem?",
    "tune fedavg --privacy clip=1": "other commands have --privacy, and this one has not",
    "run local --data digts": "did you mean digits?",
    "run local --partition dirichlt:1": "did you mean dirichlet?",
    "run local --net mpl:5": "did you mean mlp?",
    "run local --test same_share": "did you mean same_shares?",
    "run local --partition iid --clients 5000": "clients is 5000",
    "run local --clients 7": "multiple of 2",
    "run local --partition slices:3": "divisor of the 10 classes",
    "run local --partition labels": "lacks its number",
    "run local --partition groups": "no natural groups",
    "run local --data npz:bad.npz --partition iid --clients 2": "labels run from 0 to 7",
    "run local --data csv:nan.csv --target y": "column x lacks 1 of 3 values, first in line 3 ('')",
    "run local --data csv:nan.csv --target y --missing mode": "invalid choice: 'mode'",
    "run local --missing drop": "missing is 'drop'; expected none, as digits does not accept it",
    "run local --data csv:nan.csv": "target is missing",
    "run local --target y": "digits does not accept it",
    "run local --net nets.py:narrow": "outputs of shape (1, 3) for one row; expected (1, 10)",
    "run local --net nets.py:Mixing": "layer '1' is BatchNorm1d: use GroupNorm",
    "run local --net nets.py:broken": "cannot be made: division by zero",
    "run local --net nets.py:absent": "expected a torch module",
    "run local --partition nets.py:absent": "expected a function: a partition",
    "run local --partition nets.py:overlapping": "client 1 gets row 0, as client 0",
    "run local --net cnn-fedbe": "expected (channels, height, width)",
    "run local --device quantum": "device 'quantum' cannot be used",
    "run local --rounds 0": "--rounds: found '0'; expected a whole number of at least 1",
    "run local --seed -1": "--seed: found '-1'",
    "run local --held-out x": "--held-out is 'x', and partition slices:5 has no names",
    "run local --participation most": "participation is 'most'",
    "run local --participation 21": "count of participants is 21",
    "run local --participation 1.5": "share is 1.5; expected",
    "run local --participation bernoulli:0": "probability is 0.0; expected",
    "run local --set epoch=1": "did you mean epochs?",
    "run local --set epochs": "expected name=value",
    "run local --set epochs=1.5": "epochs of local is '1.5'; expected a whole number",
    "run local --set lr=fast": "lr of local is 'fast'; expected a number",
    "run local --set lr=nan": "expected a number",
    "run local --set lr=-1": "lr is -1.0",
    "run local --set batch=all": "expected a whole number or none",
    "run local --set fedavg.lr=1": "unknown method in setting 'fedavg.lr=1'",
    "run pfedvem --set confidence=half": "one of full, uncertainty, deviation",
    "run pfedvem --set personal_base=maybe": "expected true or false",
    "run local --out full": "full is not empty",
    "run local --out nets.py": "nets.py is a file",
    "run local --server-data 100000": "server_data is 100000",
    "run local --server-data 1.5": "server_data is 1.5",
    "run local --server-data digts": "did you mean digits?",
    "run local --drop-rate 2": "--drop-rate: found '2'; expected a number from 0 to 1",
    "run local --drop-rate nan": "--drop-rate: found 'nan'; expected a number",
    "run local --min-work 0": "--min-work: found '0'; expected a number above 0 to 1",
    "run local --bogus": "unrecognized arguments: --bogus",
    "compare local local": "expected no two alike",
    "compare local fedavg --set lr_base=1": "unknown setting of local, fedavg",
    "compare local --seeds 0": "--seeds: found '0'",
    "compare": "compare: METHOD is missing",
    "partition --data eight_schools --out f.png": "expected data with classes",
    "partition --out f.txt": "expected a file that ends in .png",
    "partition": "required: --out",
    "rnu": "invalid choice: 'rnu'",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETWORKS)
    Path("nan.csv").write_text("y,x\n1,2\n3,\n4,5\n")
    Path("full").mkdir()
    Path("full/file").write_text("")
    write_npz(Path("bad.npz"))
    before = sorted(Path(".").rglob("*"))
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("pyrofl: error: ")
    assert error.count("\n") == 1
    assert BAD[words] in error
    assert sorted(Path(".").rglob("*")) == before


def write_npz(path: Path) -> None:
    import numpy as np

    np.savez(
        path,
        images=np.zeros((4, 8, 8), np.uint8),
        labels=np.array([0, 1, 2, 7]),
        is_test=np.zeros(4, bool),
        classes=np.array(["a", "b", "c"]),
    )


def test_an_interrupt_is_one_line(tmp_path, monkeypatch, capsys):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("pyrofl.cli.commands.fitting.fit", stop)
    assert main(["run", "local", *SMALL, "--out", str(tmp_path / "out")]) == 130
    told = "after round 0 of 2: interrupted; there is no checkpoint to continue from"
    assert capsys.readouterr().err == f"\npyrofl: error: {told}\n"
    assert not (tmp_path / "out").exists()  # it was empty


def test_without_quiet_it_tells_what_it_does(tmp_path, capsys):
    words = [w for w in SMALL if w != "--quiet"]
    assert main(["run", "local", *words, "--set", "lr=1e18", "--out", str(tmp_path)]) == 4
    printed = capsys.readouterr()
    assert "local, seed 0: 4 clients, slices:5 of digits" in printed.err
    assert "2/2" in printed.err
    assert "rejected in" in printed.err  # such steps leave no finite number
    assert printed.out.startswith("model")


@pytest.mark.long  # starts a process
def test_whoever_reads_may_stop():
    command = [sys.executable, "-m", "pyrofl", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_settings_reach_the_methods_that_have_them():
    found = read_settings(
        ["lr=0.5", "fedprox.epochs=3", "mu=0"], {"local": local.build, "fedprox": fedprox.build}
    )
    assert found == {"local": {"lr": 0.5}, "fedprox": {"lr": 0.5, "epochs": 3, "mu": 0.0}}


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("3", float, 3.0),
        ("none", int | None, None),
        ("none", str | None, None),
        ("2", int | None, 2),
        ("head.*", str | None, "head.*"),
        ("true", bool, True),
        ("b", Literal["a", "b"], "b"),
        ("2", Literal[1, 2], 2),
        ("3", int | Epochs, 3),
    ],
)
def test_settings_have_types(text, kind, value):
    found = parse(text, kind, "it")
    assert found == value
    assert type(found) is type(value)


def test_a_run_is_told_by_what_reaches_it():
    words = ["lr=1", "mu=0", "local.epochs=2", "lr=0.5", "fedprox.epochs=3"]
    assert settings_of_method(words, "local") == ["epochs=2", "lr=0.5"]
    assert settings_of_method(words, "fedprox") == ["epochs=3", "lr=0.5", "mu=0"]


def test_settings_reach_through_shared_arguments():
    own = arguments(fedprox.build)
    assert own["mu"] is float
    assert {n: k for n, k in own.items() if n != "mu"} == arguments(fedavg.build)
    assert {*arguments(local.build), "aggregation"} == arguments(fedavg.build).keys()


def test_clients_may_have_budgets_of_their_own():
    kind = arguments(fedavg.build)["epochs"]
    epochs = parse("uneven:7", kind, "epochs")(torch.arange(200))
    assert (int(epochs.min()), int(epochs.max())) == (1, 7)
    with pytest.raises(ValueError, match=r"epochs is 'odd:7'; expected .*uneven:MOST"):
        parse("odd:7", kind, "epochs")


def scheduled(
    net: Network,
    *,
    server_data: torch.Tensor | None = None,
    likelihood: Likelihood,
    lr: float = 0.1,
    elapsed: float | None = None,
) -> Method:
    """Build a method whose learning rate depends on the round, and that needs the server's rows."""
    if server_data is None:
        raise ValueError("server_data is missing (--server-data)")
    return fedavg.build(
        net, likelihood=likelihood, lr=lr if elapsed is None else lr * (1 - elapsed)
    )


def test_a_schedule_and_the_servers_rows_reach_the_build(monkeypatch):
    monkeypatch.setattr("pyrofl.experiments.methods.builds", lambda: {"scheduled": scheduled})
    data = toys.blobs()
    task = Task(0, 0, Seeds(), replace(data, server_data=data.x[:7]), toys.net(), "categorical")
    made = methods(["scheduled"], ["lr=0.4"], task, 4)["scheduled"]
    assert callable(made)
    rates = [made(r).phases[0].updates[0].optim([torch.zeros(1, 1)]) for r in range(4)]
    assert [r.param_groups[0]["lr"] for r in rates] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    with pytest.raises(ValueError, match="unknown setting of scheduled: 'elapsed'"):
        methods(["scheduled"], ["elapsed=0.4"], task, 4)
    bare = Task(0, 0, Seeds(), data, toys.net(), "categorical")
    with pytest.raises(ValueError, match="scheduled: server_data is missing"):
        methods(["scheduled"], [], bare, 4)


def test_the_server_may_hold_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pyrofl.cli.parser.method_summaries", lambda: ["scheduled"])
    monkeypatch.setattr("pyrofl.experiments.methods.builds", lambda: {"scheduled": scheduled})
    for k, words in enumerate((["20"], ["0.1"], ["digits"])):
        out = ["--out", str(tmp_path / str(k)), "--posterior-draws", "0"]
        assert main(["run", "scheduled", *SMALL, "--server-data", *words, *out]) == 0
    assert main(["run", "scheduled", *SMALL, "--out", str(tmp_path / "no")]) == 2
    assert "scheduled: server_data is missing (--server-data)" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("text", "count"), [("everyone", 20), ("10", 10), ("0.1", 2), ("1.0", 20), ("1", 1)]
)
def test_participation(text, count):
    assert len(participation(text, 20)(generator(0), 20)) == count


def test_bernoulli_participation_varies():
    draw = participation("bernoulli:0.5", 20)
    assert len({len(draw(generator(s), 20)) for s in range(20)}) > 3


def test_who_holds_what_has_a_seed_of_its_own(tmp_path):
    def sizes_and_scores(seed: int, split: int) -> tuple[list[str], list[str]]:
        out = tmp_path / f"{seed}-{split}"
        words = ["--seed", str(seed), "--split-seed", str(split), "--posterior-draws", "0"]
        assert main(["run", "fedavg", *SMALL, *words, "--out", str(out)]) == 0
        sizes = [row["size"] for row in read_csv(out / "clients.csv") if row["metric"] == "nll"]
        assert json.loads((out / "run.json").read_text())["experiment"]["split_seed"] == split
        return sizes, [row["value"] for row in read_csv(out / "metrics.csv")]

    one, two, other = sizes_and_scores(0, 5), sizes_and_scores(1, 5), sizes_and_scores(0, 6)
    assert one[0] == two[0] != other[0]
    assert one[1] != two[1]


def test_messages_are_folded_where_that_can_be_done(tmp_path, capsys):
    asked = [*SMALL, "--discard-messages", "--posterior-draws", "0", "--set", "epochs=1"]
    assert main(["run", "fedprox", *asked, "--out", str(tmp_path / "a")]) == 0
    facts = json.loads((tmp_path / "a" / "run.json").read_text())
    assert facts["experiment"]["discard_messages"] is True
    assert facts["message_scalars"] == 64 * 6 + 6 + 6 * 10 + 10
    assert facts["reported"] == [4, 4]
    assert facts["bytes_up"] == [4 * 4 * facts["message_scalars"]] * 2
    for words in (["run", "pvi"], ["compare", "fedprox", "pvi"]):
        assert main([*words, *asked, "--out", str(tmp_path / "b")]) == 2
        told = "--discard-messages with pvi: keep_messages is False, but this"
        assert told in capsys.readouterr().err
        assert not (tmp_path / "b").exists()


def test_every_purpose_has_a_seed_of_its_own(tmp_path, capsys):
    def kept(name: str, *words: str) -> tuple[dict[str, object], str]:
        out = tmp_path / name
        words = ("--posterior-draws", "0", "--participation", "0.5", *words, "--out", str(out))
        assert main(["run", "fedavg", *SMALL, *words]) == 0
        rounds = [r for r in read_csv(out / "clients.csv") if r["metric"] == "rounds_trained"]
        seeds = json.loads((out / "run.json").read_text())["seeds"]
        trained = [r["value"] for r in rounds]
        return {"seeds": seeds, "trained": trained}, (out / "metrics.csv").read_text()

    plain = kept("plain", "--seed", "2")
    apart = ("--split-seed", "2", "--init-seed", "2", "--participation-seed", "2")
    assert kept("same", *apart, "--noise-seed", "2") == plain
    other = kept("noise", "--seed", "2", "--noise-seed", "3")
    known = {"split": 2, "init": 2, "participation": 2, "noise": 3}
    assert other[0] == {"seeds": known, "trained": plain[0]["trained"]}
    assert other[1] != plain[1]
    assert kept("init", "--seed", "2", "--init-seed", "3")[1] not in (plain[1], other[1])
    assert (
        kept("who", "--seed", "2", "--participation-seed", "9")[0]["trained"]
        != (plain[0]["trained"])
    )
    words = ["compare", "fedavg", *SMALL, *apart, "--noise-seed", "2", "--out", str(tmp_path / "c")]
    capsys.readouterr()
    assert main(words) == 2
    assert "runs would be equal; expected --seeds 1" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_equal_seeds_go_on_however_they_are_given(tmp_path, capsys):
    words = ["run", "fedavg", *SMALL, "--posterior-draws", "0", "--out", str(tmp_path / "run")]
    assert main([*words, "--checkpoint-every", "1"]) == 0
    assert main([*words, "--resume", "--noise-seed", "0", "--split-seed", "0"]) == 0
    for name in ("split", "init", "participation", "noise"):
        assert main([*words, "--resume", f"--{name}-seed", "4"]) == 2
        assert f"seed of {name} is 4 and was 0" in capsys.readouterr().err


def test_a_run_that_fails_is_named_and_the_others_are_compared(tmp_path, monkeypatch, capsys):
    calls: list[int] = []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) != 2:  # local
            raise ValueError("client 2: its personal model predicts nan for row 7 of the data")
        return fit(*args, **options)

    monkeypatch.setattr("pyrofl.cli.commands.fitting.fit", failing)
    out = tmp_path / "all"
    words = ["compare", "local", "fedavg", *SMALL, "--seeds", "1", "--posterior-draws", "0"]
    assert main([*words, "--out", str(out)]) == 3
    found = capsys.readouterr()
    told = found.err.splitlines()[-1]
    assert told.startswith("pyrofl: error: 1 of 2 runs failed: local-0 after round 0 of ")
    assert "client 2: its personal model predicts nan for row 7 of the data; " in told
    assert {line.split()[0] for line in found.out.splitlines()[1:]} == {"fedavg"}
    assert {row["method"] for row in read_csv(out / "compare.csv")} == {"fedavg"}
    assert (out / "fedavg-0" / "run.json").exists()
    starts: list[bool] = []

    def watched(*args, **options):
        starts.append(options["resume_from"] is not None)
        return fit(*args, **options)

    monkeypatch.setattr("pyrofl.cli.commands.fitting.fit", watched)
    assert main([*words, "--out", str(out), "--resume", "--set", "local.lr=0.01"]) == 0
    assert starts == [False, True]  # nothing that was set reaches fedavg
    assert {row["method"] for row in read_csv(out / "compare.csv")} == {"local", "fedavg"}
    monkeypatch.setattr("pyrofl.cli.commands.fitting.fit", failing)
    assert main([*words, "--out", str(out), "--overwrite"]) == 3
    assert not [p for p in out.rglob("*") if p.is_file()]  # what others left is not theirs
    capsys.readouterr()
    assert main(["compare", "local", *words[3:], "--out", str(tmp_path / "none")]) == 3
    assert "1 of 1 runs failed" in capsys.readouterr().err
    assert not (tmp_path / "none" / "compare.csv").exists()


def test_who_failed_to_report_and_what_was_done_are_recorded(tmp_path):
    words = [
        "run",
        "fedavg",
        *SMALL,
        "--posterior-draws",
        "0",
        "--drop-rate",
        "0.5",
        "--min-work",
        "0.1",
    ]
    assert main([*words, "--set", "epochs=9", "--out", str(tmp_path / "run")]) == 0
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    rows = read_csv(tmp_path / "run" / "clients.csv")
    found = {
        metric: {r["client"]: int(r["value"]) for r in rows if r["metric"] == metric}
        for metric in ("rounds_trained", "rounds_reported", "rounds_silent", "gradient_steps")
    }
    silent = Counter(name for names in facts["silent"] for name in names)
    assert silent.total() > 0
    for name, rounds in found["rounds_trained"].items():
        assert found["rounds_silent"][name] == silent[name]
        assert found["rounds_reported"][name] == rounds - silent[name]
    assert sum(found["gradient_steps"].values()) == sum(facts["steps"])
    assert len(set(found["gradient_steps"].values())) > 1


def test_a_run_that_diverged_ends_with_its_own_code_and_without_a_posterior(tmp_path, capsys):
    words = ["run", "fedavg", *SMALL, "--set", "lr=300", "--out", str(tmp_path / "run")]
    assert main(words) == 4
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"pyrofl: error: {tmp_path / 'run'} holds what there is of a run: ")
    assert "diverged since round 1: the loss of w/* rose from 2.3" in told
    assert "; no posterior.nc; expected " in told
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["status"]["kind"] == "diverged"
    assert facts["status"]["text"] in told
    assert not (tmp_path / "run" / "posterior.nc").exists()


def test_a_comparison_with_a_run_that_diverged_is_whole(tmp_path, capsys):
    words = ["compare", "fedavg", "local", *SMALL, "--seeds", "1", "--set", "fedavg.lr=300"]
    assert main([*words, "--posterior-draws", "0", "--out", str(tmp_path / "all")]) == 4
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("pyrofl: error: 1 of 2 runs diverged or aggregated no update: fedavg-0 ")
    found = {row["method"] for row in read_csv(tmp_path / "all" / "compare.csv")}
    assert found == {"fedavg", "local"}


def test_a_run_in_which_nobody_was_merged_ends_with_its_own_code(tmp_path, capsys):
    words = ["run", "fedavg", *SMALL, "--drop-rate", "1", "--out", str(tmp_path / "run")]
    assert main(words) == 4
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.endswith(
        "not converged: no message was aggregated in any round, as no client reported"
    )
    assert (tmp_path / "run" / "run.json").exists()
