"""A study of a regression by formula has the posterior, estimates and page of one process."""

from __future__ import annotations

import re
import shutil
import warnings
from dataclasses import replace

import arviz
import numpy as np
import pandas as pd
import pytest
import site_studies
from hospitals import Wire, lenient
from hospitals import project as network_study
from messy_hospitals import LINEAR, LOGISTIC, hospitals, study

pytest.importorskip("formulae")

import pyrofl
from pyrofl import federations
from pyrofl.cli.parser import main
from pyrofl.experiments.console import Stopped
from pyrofl.flower.coordinator import ServerSettings, coordinate
from pyrofl.flower.disclosure import leaving
from pyrofl.flower.tables import read_site_tables
from pyrofl.inference import hmc

SOON = ServerSettings(3, 3, 0.0)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Shorten the server's chains."""
    for name, value in {"NUM_METRIC_UPDATES": 1, "THINNING": 1}.items():
        monkeypatch.setattr(hmc, name, value)


def wire(project, states, names=("bern", "basel", "chur"), lenient_rules=True, **options):
    """Return the sites of a project, in this process."""
    sites, rules = {}, lenient(states) if lenient_rules else ""
    for node, name in enumerate(names, 10):
        site = {"name": name, "project": str(project.folder), "state": str(states / name)}
        site |= {"rules": rules}
        sites[node] = site | {"data": str(project.folder / f"sites/{name}.csv")}
    return Wire(sites, **options)


def finished(project, tmp_path, transport):
    """Run a study; return its store after the results were written, and the log."""
    said: list[str] = []
    (store,) = coordinate(project, tmp_path / "out", transport, SOON, said.append).values()
    assert store.finish() == []
    return store, said


@pytest.mark.parametrize(("formula", "how"), [LOGISTIC, LINEAR], ids=["logistic", "linear"])
def test_a_study_has_the_posterior_and_page_of_one_process(formula, how, tmp_path):
    entries = {"rounds": 4, **how, "question": "Who dies?"}
    project = study(tmp_path / "p", formula, **entries)
    transport = wire(project, tmp_path / "states")
    store, said = finished(project, tmp_path, transport)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the server prints them
        tables = federations.from_frames({n: hospitals()[n] for n in ("basel", "bern", "chur")})
        method = pyrofl.regression(formula, tables, **how)
    run = pyrofl.fit(
        method, tables, 4, stop_when="converged", progress=False, chunk_size=1, seed=project.seed
    )
    assert store.run.state.number == run.state.number
    run = run.copy(state=replace(run.state, server=store.server.state.server))
    expected = run.to_arviz(1000, progress=False)["posterior"]
    out = tmp_path / "out/regression"
    found = arviz.from_netcdf(out / "posterior.nc")["posterior"]
    assert {"Intercept", "b", "sd_client"} <= set(found)
    assert found.attrs["corrected"] == expected.attrs["corrected"]
    for name in found:
        np.testing.assert_allclose(found[name].values[0], expected[name].values[0], 1e-8, 1e-8)
    for name in ("bern", "basel", "chur"):
        own = arviz.from_netcdf(tmp_path / f"states/{name}/regression/posterior.nc")["posterior"]
        effects = expected["r_client"].sel(client=[name])
        np.testing.assert_allclose(
            own["r_client"].values.ravel(), effects.values.ravel(), 1e-8, 1e-8
        )
    estimates = pd.read_csv(out / "estimates.csv", index_col="parameter")
    assert estimates.index.tolist() == run.summary(1000).index.tolist()
    page = (out / "report.html").read_text()
    assert "<h1>Who dies?</h1>" in page
    assert "4 of 68 rows are dropped" in page or "5 of 68 rows are dropped" in page
    assert any("regression: the sites agreed on " in line for line in said)
    assert any("warning: chur has fewer than" in line for line in said)
    assert "b[" in store.table()


def test_a_hostile_site_ends_the_agreement_with_its_name(tmp_path):
    project = study(tmp_path / "p", LINEAR[0])

    def spoil(number, node, answer):
        described = [flat for label, flat in answer.items() if label.startswith("described")]
        for flat in described if node == 11 else ():
            flat["reports"] = flat["reports"].replace('"m"', "7")
        return answer

    transport = wire(project, tmp_path / "states", spoil=spoil)
    with pytest.raises(ValueError, match="basel: columns: column sex: got levels of type int, str"):
        finished(project, tmp_path, transport)


def test_a_site_without_a_column_is_named(tmp_path):
    frames = hospitals()
    frames["basel"] = frames["basel"].rename(columns={"age": "Age"})
    project = study(tmp_path / "p", LINEAR[0], frames)
    with pytest.raises(ValueError, match=r"^basel: basel: column age is missing; expected"):
        finished(project, tmp_path, wire(project, tmp_path / "states"))


def test_a_silent_site_is_asked_again_and_named(tmp_path):
    project = study(tmp_path / "p", LINEAR[0])
    lost = []

    def lose(number, node, answer):
        is_lost = node == 12 and any(what.startswith("described") for what in answer)
        lost.append(is_lost)
        return None if is_lost and sum(lost) in losses else answer

    losses = range(1, 3)
    finished(project, tmp_path, wire(project, tmp_path / "states", spoil=lose))
    assert sum(lost) > 3
    losses, project = range(1, 10**6), study(tmp_path / "q", LINEAR[0])
    with pytest.raises(Stopped, match=r"^chur did not reply to 3 requests on the columns"):
        finished(project, tmp_path / "q", wire(project, tmp_path / "others", spoil=lose))


def test_a_study_is_resumed_in_the_middle_of_the_agreement(tmp_path):
    project = study(tmp_path / "p", LINEAR[0])
    sent = []

    def stop(number, node, answer):
        sent.append([what for what in answer if what.startswith("described")])
        if sum(map(len, sent)) == 4:
            raise KeyboardInterrupt
        return answer

    with pytest.raises(KeyboardInterrupt):
        finished(project, tmp_path, wire(project, tmp_path / "states", spoil=stop))
    _, said = finished(project, tmp_path, wire(project, tmp_path / "states"))
    assert any("in 2 exchanges" in line for line in said)
    assert (tmp_path / "out/regression/report.html").is_file()


@pytest.mark.parametrize("after", ["described", "reply", "weights"])
def test_a_site_that_lost_its_state_rejoins_without_a_change_of_the_posterior(after, tmp_path):
    """By its rows alone; a correction in which the state was lost is refused, and repeated."""
    formula, how = LOGISTIC
    project = study(tmp_path / "p", formula, rounds=2, **how)
    finished(project, tmp_path, wire(project, tmp_path / "states"))
    states, lost = tmp_path / "others", []

    def lose(number, node, answer):
        if not lost and node == 12 and any(what.startswith(after) for what in answer):
            lost.append(number)
            shutil.rmtree(states / "basel")
        return answer

    transport = wire(project, states, spoil=lose)
    transport.sites[11]["rejoin"] = True
    _, said = finished(project, tmp_path / "again", transport)
    assert lost
    if after == "weights":
        assert any("start the correction again" in line for line in said)
        finished(project, tmp_path / "again", transport)
    one, two = (
        arviz.from_netcdf(out / "regression/posterior.nc")["posterior"]
        for out in (tmp_path / "out", tmp_path / "again/out")
    )
    assert one.attrs["corrected"] == two.attrs["corrected"] == "yes"
    assert set(one) == set(two)
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-12)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"features": ["age"]}, "formula and features are given; expected one of them"),
        ({"dtype": "float32"}, "dtype is 'float32'; expected 'float64' with a formula"),
        ({"test-fraction": 0.2}, "test-fraction is 0.2; expected 0.0 with a formula"),
    ],
)
def test_settings_that_do_not_fit_a_formula_are_refused(entries, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        study(tmp_path / "p", LINEAR[0], **entries)


def test_what_leaves_is_told_before_anything_leaves(tmp_path):
    project = study(tmp_path / "p", LINEAR[0])
    told = leaving(project, read_site_tables(project, str(tmp_path / "p/sites/chur.csv"), "chur"))
    assert "columns: numbers of rows and of missing values; levels of categories" in told
    assert "means and spreads" in told
    assert "scores: none" in told
    assert "up/" in told
    assert "note" not in told


def test_a_site_whose_rules_forbid_the_study_says_why_and_the_server_learns_the_rule(tmp_path):
    frames = site_studies.hospitals()
    frames["basel"].loc[:1, "arm"] = "z"
    project = study(tmp_path / "p", "score ~ age + arm", frames)
    transport = wire(project, tmp_path / "states", lenient_rules=False)
    with pytest.raises(
        ValueError, match=r"^basel: the rules of this site forbid the study \(min-level-rows\)$"
    ):
        finished(project, tmp_path, transport)
    expected = "column arm has levels of fewer rows (z); expected at least 3 rows each: join "
    assert f"refused: basel: rule min-level-rows: {expected}" in log_of(tmp_path, "basel")
    assert "refused" not in log_of(tmp_path, "bern")
    left = [answer for node, _, answer in transport.messages if node == 11]
    assert not any(label.startswith("described") for answer in left for label in answer)


def log_of(tmp_path, name):
    return (tmp_path / f"states/{name}/site.log").read_text()


@pytest.mark.filterwarnings("ignore:nearly all rows of chur")
def test_a_harmless_study_runs_with_the_default_rules(tmp_path):
    formula = "score ~ age + arm + (1 | client)"
    columns, frames = {"age": {"unit": "years"}}, site_studies.hospitals()
    frames["chur"] = pd.concat([frames["chur"]] * 2)
    project = study(tmp_path / "p", formula, frames, rounds=2, columns=columns)
    transport = wire(project, tmp_path / "states", lenient_rules=False)
    store, _ = finished(project, tmp_path, transport)
    lines = {line.split()[0]: line.split()[1] for line in store.tables[0].splitlines()}
    assert (lines["parameter"], lines["b[age]"]) == ("unit", "years")
    assert lines["b[arm[b]]"] != "years"
    page = (tmp_path / "out/regression/report.html").read_text()
    assert re.search("one unit more of age [(]years[)]", page, re.IGNORECASE)
    assert "<td>years</td>" in page
    assert "chur: the check warns of rows; see its site.log" in page


def test_too_many_rounds_are_refused(tmp_path):
    project = study(tmp_path / "p", "score ~ age", site_studies.hospitals(), rounds=101)
    transport = wire(project, tmp_path / "states", lenient_rules=False)
    with pytest.raises(ValueError, match=r"the rules of this site forbid the study \(max-rounds\)"):
        finished(project, tmp_path, transport)


def test_rules_are_checked_before_a_site_joins(tmp_path, capsys):
    project = study(tmp_path / "p", LINEAR[0])
    words = ["study", "join", "127.0.0.1:1", "--name", "chur", "--study", str(project.folder)]
    words += [
        "--data",
        str(tmp_path / "p/sites/chur.csv"),
        "--state",
        str(tmp_path / "s"),
        "--show",
    ]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "chur: rule min-rows: 3 rows are complete; expected at least 5: join this" in error
    assert main([*words, "--rules", lenient(tmp_path)]) == 0
    assert "means and spreads" in capsys.readouterr().out


def test_a_rehearsal_prints_the_rule_and_the_rows_that_messages_reveal(tmp_path, capsys):
    frames = site_studies.hospitals()
    frames["bern"].loc[6, "arm"] = "z"
    project = study(tmp_path / "p", "score ~ age + arm", frames)
    words = ["study", "rehearse", str(project.folder), "--name", "bern", "--data"]
    assert main([*words, str(tmp_path / "p/sites/bern.csv")]) == 0
    said = capsys.readouterr().out
    assert "the rules forbid this study: bern: rule min-level-rows: column arm has" in said
    assert "recovered from the messages: 1 of 60 rows" in said
    row = frames["bern"].iloc[6]
    assert re.search(
        rf"bern +7 +sums of arm\[z\].*age {row['age']:g},.* score {row['score']:g}", said
    )
    assert main([*words, str(tmp_path / "p/sites/chur.csv")]) == 0
    said = capsys.readouterr().out
    assert said == "the rules permit this study\nrecovered from the messages: 0 of 45 rows\n"


def test_a_rehearsal_needs_a_formula(tmp_path, capsys):
    network_study(tmp_path / "p")
    data = str(tmp_path / "p/sites/hospital_1.csv")
    assert main(["study", "rehearse", str(tmp_path / "p"), "--data", data]) == 2
    assert "p/study.yaml has no formula; expected a study with one" in capsys.readouterr().err
