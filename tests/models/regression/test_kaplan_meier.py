"""Kaplan-Meier curves from counts equal those of lifelines on the rows, and reveal no few rows."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from regression_problems import BOUNDS, frames

import pyrofl
from pyrofl import SiteRules, federations, figures
from pyrofl.inference.transport.site_rules import BrokenRuleError

REFERENCES = json.loads(Path(__file__).with_name("references.json").read_text())["kaplan_meier"]


def counts_of(tables, bounds=BOUNDS, *, rules=None, time="time", event="seen"):
    return pyrofl.survival_counts(federations.from_frames(tables), time, event, bounds, rules=rules)


def test_curves_of_clients_and_of_all_rows_are_those_of_lifelines():
    sent = {}
    for name, frame in frames().items():  # each site for itself, by messages
        sent |= json.loads(json.dumps(counts_of({name: frame}, rules=SiteRules(min_events=1))))
    table = pyrofl.kaplan_meier(sent)
    assert table["client"].unique().tolist() == ["bern", "basel", "chur", "all"]
    for client, curve in REFERENCES.items():
        own = table[(table["client"] == client) & (table["time"] > 0)]
        assert own["time"].tolist() == BOUNDS
        for column, other in (("survival", "survival"), ("2.5%", "low"), ("97.5%", "high")):
            assert own[column].to_numpy() == pytest.approx(curve[other], rel=1e-12)
    whole = pd.concat(frames().values())
    at_risk = [len(whole), *((whole["time"] > low).sum() for low in [0.0, *BOUNDS[:-1]])]
    assert table[table["client"] == "all"]["at_risk"].tolist() == at_risk


def test_a_grid_of_all_times_gives_the_curve_of_the_rows():
    frame = pd.DataFrame({"time": [1, 1, 2, 3, 3, 4, 6], "seen": [1, 0, 1, 1, 1, 0, 1]})
    table = pyrofl.kaplan_meier(counts_of({"bern": frame}, [1, 2, 3, 4, 5, 6, 7]))
    own = table[table["client"] == "bern"]
    steps = [1, 6 / 7, 4 / 5, 2 / 4, 1, 1, 0]
    expected = [*np.cumprod(steps), 0.0]  # after the last row, whose time is an event
    assert own["survival"].to_numpy() == pytest.approx(expected, abs=1e-15)
    assert own["at_risk"].tolist() == [7, 7, 5, 4, 2, 1, 1, 0]
    assert own["2.5%"].isna().tolist() == [True] + [False] * 5 + [True] * 2


def test_survival_is_unknown_after_the_last_censored_row():
    frame = pd.DataFrame({"time": [1.0, 2.0, 2.5], "seen": [1, 1, 0]})
    table = pyrofl.kaplan_meier(counts_of({"bern": frame}, [1, 2, 3, 4]))
    own = table[table["client"] == "bern"]["survival"]
    assert own.to_numpy() == pytest.approx([1, 2 / 3, 1 / 3, 1 / 3, np.nan], nan_ok=True)


def test_small_counts_do_not_leave_and_the_wider_bounds_of_the_error_do():
    random = np.random.default_rng(0)
    seen = 0
    for _ in range(40):
        n = int(random.integers(6, 60))
        frame = pd.DataFrame({"time": random.weibull(1.0, n), "seen": random.integers(0, 2, n)})
        bounds = np.sort(random.uniform(0.1, 3.0, int(random.integers(1, 7))))
        parts = counts_of({"bern": frame}, bounds)["bern"]
        cells = [*parts["events"], *parts["censored"], *parts["beyond"]]
        if all(cell in (0, *range(3, n + 1)) for cell in cells):
            assert counts_of({"bern": frame}, bounds, rules=SiteRules())["bern"] == parts
            continue
        with pytest.raises(BrokenRuleError, match="min-events") as caught:
            counts_of({"bern": frame}, bounds, rules=SiteRules())
        assert "\n" not in str(caught.value)
        assert caught.value.for_server == "the rules of this site forbid the study (min-events)"
        _, found, wider = str(caught.value).partition("such as ")
        if found:
            chosen = [b for b in bounds if f"{b:g}" in wider.split(", ")]
            sent = counts_of({"bern": frame}, chosen, rules=SiteRules())["bern"]
            cells = [*sent["events"], *sent["censored"], *sent["beyond"]]
            assert all(cell == 0 or cell >= 3 for cell in cells)
            seen += 1
    assert seen > 5


def test_clients_of_few_rows_send_nothing():
    frame = pd.DataFrame({"time": [1.0] * 4, "seen": [1] * 4})
    with pytest.raises(BrokenRuleError, match="bern: rule min-rows: 4 rows are complete"):
        counts_of({"bern": frame}, [2.0], rules=SiteRules())


def cell(name, value):
    return lambda f: f.assign(**{name: f[name].astype(object).where(f.index != 1, value)})


@pytest.mark.parametrize(
    ("change", "how", "text"),
    [
        (cell("time", -1.0), {}, "bern: time is -1 in row 2; expected times of at least 0"),
        (cell("time", np.inf), {}, "bern: time is inf in row 2; expected times of at least 0"),
        (cell("seen", 2), {}, "bern: seen is 2 in row 2; expected 1 for an event and 0 for a cen"),
        (cell("seen", "yes"), {}, "bern: column seen holds text; expected numbers"),
        (lambda f: f.assign(time="3 days"), {}, "bern: column time holds text; expected numbers"),
        (lambda f: f, {"time": "tme"}, "bern: unknown column 'tme'; did you mean time"),
        (lambda f: f, {"bounds": []}, "increasing times above 0, such as"),
        (lambda f: f, {"bounds": [2.0, 1.0]}, "increasing times above 0, such as"),
        (lambda f: f, {"bounds": [0.0, 1.0]}, "increasing times above 0, such as"),
        (lambda f: f, {"bounds": [1.0, np.inf]}, "increasing times above 0, such as"),
    ],
)
def test_wrong_cells_and_bounds_are_refused_in_one_line(change, how, text):
    table = {"bern": change(frames()["bern"]).infer_objects()}
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        counts_of(table, **{"bounds": BOUNDS, **how})
    assert text in str(caught.value)


def test_rows_without_time_or_event_are_left_out_with_a_warning():
    frame = frames()["bern"]
    frame.loc[[1, 2], "time"], frame.loc[5, "seen"] = np.nan, np.nan
    with pytest.warns(UserWarning, match="bern: 3 of 60 rows have no time or event"):
        counts = counts_of({"bern": frame})["bern"]
    assert sum(counts["events"] + counts["censored"] + counts["beyond"]) == 57


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("events", [1, 2], "events are no list of 5"),
        ("events", 3, "events are no list of 5"),
        ("events", [1, 2, 3, 4, -1], "events have -1; expected whole numbers of at least 0"),
        ("events", [1, 2, 3, 4, 0.5], "events have 0.5; expected whole numbers"),
        ("events", [1, 2, 3, 4, True], "events have True; expected whole numbers"),
        ("censored", [1, 2, 3, 4, 10**30], "censored have 1000000000000000000000000000000; ex"),
        ("beyond", [float("nan")], "beyond have nan; expected whole numbers"),
        ("beyond", [], "beyond are no list of 1"),
        ("bounds", [3.0, 2.0, 1.0, 4.0, 5.0], "increasing times above 0"),
        ("bounds", "12345", "increasing times above 0"),
        ("bounds", [0.2, 0.4, 0.7, 1.0, 9.0], "basel: counts have other bounds than those of bern"),
        ("rows", [1], "counts are .*, rows; expected bounds, events, censored, beyond"),
        ("\n" + "x" * 10**6, [1], "counts are .*; expected bounds, events, censored, beyond"),
        (None, 7, "counts are a int; expected bounds, events, censored, beyond"),
    ],
)
def test_counts_of_a_broken_site_are_refused_in_one_line_with_its_name(part, value, text):
    counts = counts_of(frames())
    counts["basel"] = value if part is None else {**counts["basel"], part: value}
    with pytest.raises(ValueError, match=f"^basel: .*{text}|^{text}") as caught:
        pyrofl.kaplan_meier(counts)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1200


def test_a_client_called_all_and_no_client_are_refused():
    with pytest.raises(ValueError, match="none of them with the name 'all'"):
        pyrofl.kaplan_meier(counts_of({"all": frames()["bern"]}))
    with pytest.raises(ValueError, match="counts are of no client"):
        pyrofl.kaplan_meier({})


def test_the_figure_has_a_curve_of_steps_for_each_client():
    table = pyrofl.kaplan_meier(counts_of(frames()))
    axes = figures.survival(table, "years").axes[0]
    for client, line in zip(["bern", "basel", "chur", "all"], axes.get_lines(), strict=False):
        assert line.get_drawstyle() == "steps-post"
        own = table[table["client"] == client]
        assert line.get_ydata().tolist() == own["survival"].tolist()
