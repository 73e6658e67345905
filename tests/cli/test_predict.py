"""A run's folder predicts new rows; what it says of test rows is what the run was scored by."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import pyrofl
from pyrofl.cli import main
from pyrofl.cli.commands.predict import rows_of

RUN = [
    "--data",
    "csv:old.csv",
    "--target",
    "ill",
    "--client-column",
    "site",
    "--net",
    "softmax",
    "--quiet",
]
RUN += ["--rounds", "2", "--posterior-draws", "0"]
NEW = ["--data", "new.csv", "--out", "out.csv"]
OTHER = ["--data", "other.csv", "--out", "out.csv"]  # without names of clients


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["site,age,dose,ill"]
    for site in "ABC":
        for age, dose in rng.normal(size=(30, 2)).round(3):
            ill = "yes" if age + (site == "B") * dose > rng.normal() else "no"
            lines.append(f"site {site},{age},{dose},{ill}")
    Path("old.csv").write_text("\n".join(lines))
    Path("new.csv").write_text("dose,site,age,note\n1,site A,2,x\n3,site C,4,y\n")
    Path("other.csv").write_text("dose,age,note\n1,2,x\n3,4,y\n")
    return tmp_path


def table(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("method", ["pfedvem", "perfedavg", "pvi", "local"])
def test_predictions_of_test_rows_score_as_the_run_says(method):
    assert main(["run", method, *RUN, "--out", "run"]) == 0
    words = ["predict", "run", "--data", "old.csv", "--client-column", "site", "--out", "out.csv"]
    assert main(words) == 0
    data, found, rows = rows_of(Path("run")), table("out.csv"), table("old.csv")
    assert [row["row"] for row in found] == [str(n) for n in range(1, 91)]
    assert [row["client"] for row in found] == [row["site"] for row in rows]
    scored = [row for row in table("run/clients.csv") if row["metric"] == "accuracy"]
    model = "global" if method == "pvi" else "personal"
    adaptation = "fine_tune" if method == "perfedavg" else "none"
    for row in scored:
        if (row["model"], row["adaptation"]) == (model, adaptation):
            mine = data.test[data.names.index(row["client"])].tolist()
            right = [found[i]["class"] == rows[i]["ill"] for i in mine]
            assert np.mean(right) == pytest.approx(float(row["value"]), rel=1e-6)


def test_the_table_of_training_is_not_replaced(capsys):
    assert main(["run", "local", *RUN, "--out", "run"]) == 0
    whole = Path("old.csv").read_bytes()
    words = [
        "predict",
        "run",
        "--data",
        "new.csv",
        "--client-column",
        "site",
        "--overwrite",
        "--out",
    ]
    assert main([*words, "old.csv"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "the run was fitted to old.csv, which --out old.csv would replace; expected" in line
    assert Path("old.csv").read_bytes() == whole
    # A client that was never seen has no model of local training.
    assert main(["predict", "run", *OTHER, "--new-client"]) == 2
    assert "a new client without rows has an untrained model" in capsys.readouterr().err


def test_numbers_far_from_those_of_training_are_told(capsys):
    assert main(["run", "fedavg", *RUN, "--out", "run"]) == 0
    capsys.readouterr()
    words = ["predict", "run", *OTHER, "--overwrite", "--client", "site A"]
    assert main(words) == 0
    assert capsys.readouterr().err == ""
    Path("other.csv").write_text("dose,age\n1,2\n3,-1e30\n-25,4\n")
    assert main(words) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pyrofl: warning: other.csv: column age holds -1e30 in line 3, 1")
    assert "e+30 standard deviations from its mean in training" in line
    assert len(table("out.csv")) == 3
    run = pyrofl.load("run")
    with pytest.warns(UserWarning, match=r"x: column dose holds 800 in row 2, \d+ standard dev"):
        run.predict({"age": [0, 1], "dose": [1, 800]}, "site A")
    with pytest.warns(UserWarning, match="x: column age holds"):  # columns as they are
        run.predict(np.array([[55.0, 1.0]], dtype=np.float32), "site A")


def test_what_was_done_is_said(capsys):
    assert main(["run", "perfedavg", *RUN, "--out", "run"]) == 0
    capsys.readouterr()
    assert main(["predict", "run", *NEW, "--client-column", "site"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "new.csv: 2 columns as in training, brought into their order by name; not used: note",
        "personal model of site A, adapted to its training rows",
        "personal model of site C, adapted to its training rows",
        "out.csv holds 2 predictions",
    ]
    again = ["predict", "run", *OTHER, "--overwrite"]
    assert main([*again, "--client", "site B", "--unadapted", "--draws", "3"]) == 0
    assert "personal model of site B, 3 draws\n" in capsys.readouterr().out
    assert main([*again, "--new-client"]) == 0
    assert "global model of new client without rows\n" in capsys.readouterr().out
    assert main([*again, "--new-client", "--own-rows", "old.csv"]) == 0
    told = "personal model of new client with its own rows, adapted to its training"
    assert told in capsys.readouterr().out


def test_rows_that_are_gone_are_missed(capsys):
    assert main(["run", "perfedavg", *RUN, "--out", "run"]) == 0
    whole = Path("old.csv").read_text()
    Path("old.csv").write_text(whole.replace("yes", "no", 1))
    assert main(["predict", "run", *OTHER, "--client", "site A"]) == 2
    assert "is of another run; now hash of the data is" in capsys.readouterr().err
    Path("old.csv").unlink()
    assert main(["predict", "run", *OTHER, "--client", "site A"]) == 2
    told = "run holds a method that adapts to training rows, and run/run.json does not lead to them"
    assert told in capsys.readouterr().err
    assert not Path("out.csv").exists()
    assert main(["predict", "run", *OTHER, "--client", "site A", "--unadapted"]) == 0


@pytest.mark.parametrize(
    "asked", [(), ("--scaling", "none", "--privacy", "clip=1,noise_multiplier=1")]
)
def test_a_network_of_ones_own_is_run_if_it_is_named_again(capsys, asked):
    if asked:
        pytest.importorskip("dp_accounting")
    noted = "from pathlib import Path\nPath('seen').touch()\n"
    Path("nets.py").write_text(f"from torch import nn\n{noted}net = nn.Linear(2, 2)\n")
    run = ["run", "fedavg", *RUN, *asked]
    assert main([*run, "--net", "nets.py:net", "--out", "run"]) == 0
    Path("seen").unlink()
    words = ["predict", "run", *OTHER, "--client", "site A"]
    assert main(words) == 2
    assert "expected --net nets.py:net, which is code and is run" in capsys.readouterr().err
    assert not Path("seen").exists()
    assert main([*words, "--net", "nets.py:net"]) == 0
    rows_of_test = [
        "predict",
        "run",
        "--data",
        "old.csv",
        "--client-column",
        "site",
        "--out",
        "all.csv",
    ]
    assert main([*rows_of_test, "--net", "nets.py:net"]) == 0
    all_rows = table("all.csv")
    for row in table("run/rows.csv"):
        found = float(all_rows[int(row["row"])]["p(yes)"])
        assert found == pytest.approx(float(row["p(yes)"]), rel=1e-5)
    Path("nets.py").write_text("from torch import nn\nnet = nn.Linear(2, 3)\n")
    assert main([*words, "--net", "nets.py:net", "--overwrite"]) == 2
    assert main(["run", "fedavg", *RUN, "--out", "usual"]) == 0
    capsys.readouterr()
    assert (
        main(["predict", "usual", *OTHER, "--overwrite", "--new-client", "--net", "nets.py:net"])
        == 2
    )
    assert "the run was of --net softmax; expected no --net" in capsys.readouterr().err


def test_rows_without_columns_are_for_scripts(capsys):
    words = ["run", "fedavg", "--per-class", "6", "--net", "softmax", "--clients", "2", "--rounds"]
    assert main([*words, "1", "--posterior-draws", "0", "--quiet", "--out", "run"]) == 0
    capsys.readouterr()
    assert main(["predict", "run", *OTHER, "--new-client"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected run.predict(x, client) in a script" in line


def test_numbers_have_intervals():
    words = [
        "--data",
        "csv:old.csv",
        "--target",
        "age",
        "--client-column",
        "site",
        "--features",
        "dose",
    ]
    words += ["--likelihood", "normal:0.5", "--rounds", "1", "--posterior-draws", "0", "--quiet"]
    assert main(["run", "fedavg", *words, "--out", "run"]) == 0
    assert main(["predict", "run", *OTHER, "--client", "site A"]) == 0
    rows = table("out.csv")
    assert list(rows[0]) == ["row", "client", "mean", "sd", "5%", "50%", "95%"]
    assert all(float(row["5%"]) < float(row["mean"]) < float(row["95%"]) for row in rows)
    assert float(rows[0]["sd"]) == pytest.approx(0.5)


def test_rows_that_name_another_client_are_refused(capsys):
    assert main(["run", "fedavg", *RUN, "--out", "run"]) == 0
    capsys.readouterr()
    for asked, told in (
        (["--client", "site A"], "new.csv: column site holds 'site C' in line 3, and client is"),
        (["--new-client"], "rows name the known client site A, site C, and --new-client is given"),
    ):
        assert main(["predict", "run", *NEW, *asked]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line
        assert line.endswith("expected --client-column site, or a table without column site")
