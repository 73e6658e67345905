"""What federation bought, of folders that are written by hand and of one that is not."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from handmade import run
from scipy.stats import ttest_rel

from pyrofl.cli import main
from pyrofl.files.run_folder import read_csv

SITES = {"big": 60, "small": 20, "middle": 40}


def rights(seed: int, share: dict[str, float]) -> dict[str, np.ndarray]:
    """Return where a model is right, at sites in an order that is not that of their sizes."""
    rng = np.random.default_rng(seed)
    return {name: (rng.random(n) < share[name]).astype(int) for name, n in SITES.items()}


@pytest.fixture
def folder(tmp_path):
    """A comparison in which federation helps the small site and harms the big one."""
    own = rights(0, {"big": 0.95, "small": 0.3, "middle": 0.7})
    fed = rights(1, {"big": 0.5, "small": 0.95, "middle": 0.7})
    run(tmp_path, "local", 0, own)
    run(tmp_path, "fedavg", 0, fed | {"middle": own["middle"]})
    tmp_path.joinpath("notes.txt").write_text("mine")
    return tmp_path


def test_the_answer_in_plain_words(folder, capsys):
    assert main(["benefit", str(folder)]) == 0
    told = capsys.readouterr().out
    assert (
        "At 1 of 3 clients the global model of fedavg predicts better than their own; at 1 it "
        "predicts worse; at 1 the result is inconclusive. Over all 120 test rows it is worse by "
    ) in told
    assert "points of accuracy (95% interval -" in told
    assert "0.15 of 3 would count as better or worse by chance" in told
    assert (folder / "figures/benefit.png").stat().st_size > 1000
    assert (folder / "notes.txt").read_text() == "mine"


def test_log_scores_have_the_interval_of_scipy(folder, capsys):
    assert main(["benefit", str(folder), "--by", "log_score"]) == 0
    tables = [pd.read_csv(folder / m / "rows.csv") for m in ("fedavg-0", "local-0")]
    for site in read_csv(folder / "benefit.csv"):
        fed, own = (t[t["client"] == site["client"]]["log_score"] for t in tables)
        low, high = ttest_rel(fed, own).confidence_interval(0.95)
        found = [float(site[n]) for n in ("low", "high", "own", "score", "rows")]
        assert np.allclose(found, [low, high, own.mean(), fed.mean(), len(own)])
    whole = ttest_rel(*(t["log_score"] for t in tables)).confidence_interval(0.95)
    assert f"(95% interval {whole.low:.3f} to {whole.high:.3f})" in capsys.readouterr().out


def test_numbers_are_compared_by_crps(tmp_path, capsys):
    words = ["--data", "linear", "--rounds", "1", "--seeds", "1", "--posterior-draws", "0"]
    assert main(["compare", "local", "fedavg", *words, "--quiet", "--out", str(tmp_path)]) == 0
    assert main(["benefit", str(tmp_path), "--by", "crps"]) == 0
    table = pd.read_csv(tmp_path / "fedavg-0/rows.csv")
    of = table[(table["population"] == "training") & (table["model"] == "global")]
    found = {r["client"]: -float(r["score"]) for r in read_csv(tmp_path / "benefit.csv")}
    assert found == pytest.approx(of.groupby("client")["crps"].mean().to_dict())
    assert "units of the target, in mean CRPS" in capsys.readouterr().out
    for one in tmp_path.glob("*-0/rows.csv"):  # as an older version wrote them
        pd.read_csv(one).drop(columns="crps").to_csv(one, index=False)
        facts = json.loads(one.with_name("run.json").read_text())
        del facts["hashes"]
        one.with_name("run.json").write_text(json.dumps(facts))
    assert "which rows.csv lacks" in refused(capsys, "benefit", str(tmp_path), "--by", "crps")


def test_the_smallest_site_comes_first(folder):
    run(folder / "other", "local", 0, {"b": [1, 0] * 5, "a": [1, 0] * 5})
    run(folder / "other", "fedavg", 0, {"b": [1, 1] * 5, "a": [1, 0] * 5})
    assert main(["benefit", str(folder / "other")]) == 0
    assert [r["client"] for r in read_csv(folder / "other/benefit.csv")] == ["b", "a"]


CONVERGED = {"status": {"text": "converged: nothing moves", "kind": "converged", "merged": 9}}


def test_a_baseline_that_has_not_converged_is_named_in_every_line(folder, capsys):
    own, fed = ({"a": np.tile([1, 0, 0, 1], 20)}, {"a": np.tile([1, 1, 1, 0], 20)})
    both = {"o": ({}, CONVERGED), "f": (CONVERGED, {}), "c": (CONVERGED, CONVERGED)}
    for name, (of_own, of_fed) in both.items():
        run(folder / name, "local", 0, own, **of_own)
        run(folder / name, "fedavg", 0, fed, **of_fed)
        assert main(["benefit", str(folder / name)]) == 0
        lines = capsys.readouterr().out.splitlines()
        (sentence,) = [line for line in lines if line.startswith("At ")]
        (line,) = read_csv(folder / name / "benefit.csv")
        sites = [line for line in lines if line.split()[:1] in (["a"], ["all"])]
        assert len(sites) == 2
        if name == "o":
            assert "as the clients' own models have not converged" in sentence
            assert all("(not converged)" in one for one in sites)
            assert line["not_converged"] == "the clients' own models have not converged"
        elif name == "f":
            assert "as the global model of fedavg has not converged" in sentence
            assert "global model of fedavg (not converged)" in lines[0]
        else:
            assert "not converged" not in "".join(lines)
            assert line["not_converged"] == ""


def test_intervals_of_few_rows_and_seeds_stay_between_100_points(tmp_path, capsys):
    for seed in range(2):
        run(tmp_path, "local", seed, {"a": [1, 1], "b": [1, 0]}, **CONVERGED)
        run(tmp_path, "fedavg", seed, {"a": [seed, 0], "b": [0, 0]}, **CONVERGED)
    assert main(["benefit", str(tmp_path)]) == 0
    for line in read_csv(tmp_path / "benefit.csv"):
        assert -1 <= float(line["low"]) <= float(line["high"]) <= 1
    assert "over seeds -75.0 to 25.0)" in capsys.readouterr().out  # both have own models at 75%


def test_seeds_are_averaged_by_row_and_shown(folder, capsys):
    own, fed = ({"a": np.tile([1, 0], 10)}, {"a": np.tile([1, 1], 10)})
    for seed in (0, 1, 2):
        run(folder / "s", "local", seed, own)
        run(folder / "s", "fedavg", seed, fed)
    assert main(["benefit", str(folder / "s")]) == 0
    (line,) = read_csv(folder / "s/benefit.csv")
    assert line["rows"] == "20"  # not 60: the same rows
    assert "; over seeds 50.0 to 50.0)" in capsys.readouterr().out


def test_clients_that_differ_between_seeds_are_sites_of_their_own(folder, capsys):
    out = folder / "s"
    for seed in (0, 1):
        for method in ("local", "fedavg"):
            path = run(out, method, seed, {"client 0": [1, 0] * 5})
            text = (path / "run.json").read_text().replace('"groups"', '"iid"')
            (path / "run.json").write_text(text)
    assert main(["benefit", str(out)]) == 0
    names = {r["client"] for r in read_csv(out / "benefit.csv")}
    assert names == {"client 0 (seed 0)", "client 0 (seed 1)"}
    assert "has its own partition" in capsys.readouterr().out


def refused(capsys, *words: str) -> str:
    """Return the one line that refuses a command."""
    assert main(list(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_lacks_is_said_in_one_line(folder, tmp_path, capsys):
    one = str(folder / "fedavg-0")
    assert "holds fedavg-0; expected local, which is each" in refused(capsys, "benefit", one)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty holds no run.json; expected a folder" in refused(capsys, "benefit", str(empty))
    assert "--by is error, and classes are" in refused(
        capsys, "benefit", str(folder), "--by", "error"
    )
    (folder / "fedavg-0/rows.csv").unlink()
    assert "run again with --save-predictions --overwrite" in refused(
        capsys, "benefit", str(folder)
    )
    (folder / "fedavg-0/run.json").write_text("[]")
    assert "run.json cannot be read" in refused(capsys, "benefit", str(folder))
    (folder / "fedavg-0/run.json").write_text('{"schema": 1}')
    assert "its schema is 1, and this version reads 2" in refused(capsys, "benefit", str(folder))


def test_other_rows_are_refused(folder, capsys):
    run(folder / "o", "local", 0, {"a": [1] * 10})
    run(folder / "o", "fedavg", 0, {"a": [1] * 9})
    assert "predict 10 and 9 test rows, 9 of them both" in refused(
        capsys, "benefit", str(folder / "o")
    )


def test_a_real_comparison(tmp_path, capsys):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"site": np.repeat(["<b>a</b>", "b,\n$x$", "c"], 24)})
    table["x"] = rng.normal(size=72)
    table["z"] = np.where(rng.random(72) < 0.04, np.nan, rng.normal(size=72))  # few gaps:
    table["sick"] = np.where(table["x"] + rng.logistic(size=72) > 0, "yes", "no")
    table.to_csv(tmp_path / "t.csv", index=False)
    words = [
        "compare",
        "local",
        "fedavg",
        "--data",
        f"csv:{tmp_path / 't.csv'}",
        "--target",
        "sick",
    ]
    words += ["--client-column", "site", "--rounds", "1", "--seeds", "2", "--posterior-draws", "2"]
    words += ["--missing", "impute", "--set", "fedavg.fine_tune=1", "--quiet"]
    (tmp_path / "o").mkdir()
    (tmp_path / "o/benefit.csv").write_text("of other rows")
    # Columns differ between the seeds, as only some have gaps in training rows.
    assert main([*words, "--out", str(tmp_path / "o"), "--overwrite"]) == 0
    assert not (tmp_path / "o/benefit.csv").exists()
    rows = pd.read_csv(tmp_path / "o/fedavg-1/rows.csv")
    right = rows["p(yes)"].gt(rows["p(no)"]) == rows["y"].eq("yes")
    mine = right.groupby([rows["client"], rows["model"], rows["adaptation"]]).mean()
    told = pd.read_csv(tmp_path / "o/fedavg-1/clients.csv").query("metric == 'accuracy'")
    assert len(told) == 9
    for r in told.itertuples():
        assert mine[r.client, r.model, r.adaptation] == pytest.approx(r.value)
    capsys.readouterr()
    assert main(["benefit", str(tmp_path / "o")]) == 0
    assert capsys.readouterr().out.count(" of 3 clients the ") == 2
    assert len(read_csv(tmp_path / "o/benefit.csv")) == 6
