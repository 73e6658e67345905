"""Figures of many rows, panels or curves, and of missing values, state what they do not show."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from papers import plots
from pictures import overlaps, title

from pyrofl import figures
from pyrofl.figures import many, style
from pyrofl.metrics import Bins, calibration_bins

RNG = np.random.default_rng(0)
NAN = math.nan
CLIENTS = 929
NAMES = [f"ward {j}" for j in range(CLIENTS)]


def note(figure) -> str:
    return " ".join(legend.get_title().get_text() for legend in figure.legends).replace("\n", " ")


def labels(figure) -> list[str]:
    return [t.get_text() for t in figure.axes[0].get_yticklabels()]


# Rows.


def test_rows_that_fit_keep_their_order():
    found = many.rows([3.0, NAN, 1.0])
    assert found.order.tolist() == [0, 1, 2]
    assert found.at.tolist() == [0, 1, 2]
    assert [(places.tolist(), size) for places, size in found.parts()] == [([0, 1, 2], 1.0)]


@pytest.mark.parametrize("count", [61, 929, 20_000])
def test_many_rows_are_sorted_and_each_has_a_place(count):
    key = RNG.normal(size=count)
    key[7] = NAN
    found = many.rows(key)
    assert sorted(found.order) == list(range(count))
    known = key[found.order]
    assert (np.diff(known[np.isfinite(known)]) <= 0).all()
    small, large = (places for places, _ in found.parts())
    assert sorted([*small, *large]) == list(range(count))
    assert np.isfinite(known[large]).all()  # of rows without a value, no name is needed
    assert (np.diff(found.at) > 0).all()
    assert np.diff(found.at[large][:15]).tolist() == [1.0] * 14  # rows with names have their room
    assert found.at[-1] < many.MAX_NAMED_ROWS


def test_rows_without_any_value_have_places_too():
    assert sorted(many.rows([NAN] * 100).order) == list(range(100))


def test_slides_have_fewer_names():
    with figures.theme("slides"):
        assert many.named() == 30
    assert many.named() == 60


def forest():
    mean = np.arange(float(CLIENTS))[::-1]
    return figures.forest({"fit": (mean, mean - 1, mean + 1)}, NAMES, "log odds")


def shrinkage():
    mean = np.arange(float(CLIENTS))[::-1]
    return figures.shrinkage(NAMES, mean, (mean, mean - 1, mean + 1), 4.0, "points")


def coverage_by_client():
    share = np.linspace(1, 0.5, CLIENTS)
    table = pd.DataFrame({"client": NAMES, "pooling": "client", "coverage": share})
    table = table.assign(low=0.7, high=0.9, target=0.8, test_rows=20)
    return figures.coverage_by_client(table)


def differences():
    middle = np.linspace(5, -5, CLIENTS)
    sites = {n: (m, m - 1, m + 1) for n, m in zip(NAMES, middle, strict=True)}
    return figures.differences({"fedavg": sites}, "points")


def predictive_checks():
    table = pd.DataFrame({"client": NAMES, "statistic": "mean", "p": np.linspace(1, 0, CLIENTS)})
    table = table.assign(mean=0.0, low=-1.0, high=1.0, observed=np.linspace(-2, 2, CLIENTS))
    return figures.predictive_checks(table)


def reliability_by_client():
    count, share = torch.tensor([20.0]), torch.tensor([0.5])
    sure = np.linspace(0.9, 0.1, CLIENTS)
    bins = {
        n: Bins(count, torch.tensor([s]), share) for n, s in zip(NAMES, sure.tolist(), strict=True)
    }
    return figures.reliability_by_client(bins)


BY_ROW = (
    forest, shrinkage, coverage_by_client, differences, predictive_checks, reliability_by_client,
)  # fmt: skip


@pytest.mark.parametrize("draw", BY_ROW)
def test_of_many_rows_all_are_drawn_and_those_at_the_ends_have_names(draw):
    figure = draw()
    axes = figure.axes[0]
    found = [label.split(" (")[0] for label in labels(figure)]
    ends = len(found) // 2
    assert found[:ends] == NAMES[:ends]
    assert found[ends + 1 :] == NAMES[-ends:]
    assert found[ends].startswith(f"{CLIENTS - 2 * ends} more")
    assert found[ends].endswith("not named")
    dots = [line for line in axes.lines if line.get_marker() in ("o", "s", "D")]
    at = np.unique(np.concatenate([line.get_ydata() for line in dots]))
    assert len(at) >= CLIENTS
    assert overlaps(figure) == []
    assert figure.get_figheight() < 11


def test_clients_of_which_nothing_is_known_are_counted():
    table = pd.DataFrame(
        {"client": ["a", "b", "c"], "pooling": "client", "coverage": [0.8, 0.9, NAN]}
    )
    table = table.assign(low=0.7, high=0.9, target=0.8, test_rows=[20, 20, 0])
    assert "1 client without test rows not shown" in note(figures.coverage_by_client(table))
    tested = calibration_bins(torch.rand(30), torch.ones(30), bins=5)
    none = calibration_bins(torch.zeros(0), torch.zeros(0), bins=5)
    figure = figures.reliability_by_client({"a": tested, "b": none})
    assert note(figure) == "1 client without test rows"


# Panels.


def summary(*shape):
    mean = RNG.normal(size=shape)
    return mean, mean - 1, mean + 1


def statistics(count):
    rows = [{"client": f"c{j}", "statistic": f"s{s}"} for j in range(8) for s in range(count)]
    return pd.DataFrame(rows).assign(observed=0.5, mean=0.0, low=-1.0, high=1.0, p=0.3)


PANELS = {
    "confidence_histogram": lambda n: plots.confidence_histogram(
        {f"model {i}": (RNG.random(99), RNG.random(99) > 0.5) for i in range(n)}
    ),
    "courses": lambda n: figures.parameters_by_covariate(
        range(30), summary(30, n), [f"a long name of a coefficient {i}" for i in range(n)], "x", "y"
    ),
    "coverage": lambda n: figures.coverage({f"b[{i}]": {"a": RNG.random(99)} for i in range(n)}),
    "distance": lambda n: plots.distance(
        {f"quantity {i}": {"a": np.exp(RNG.normal(size=(3, 9)))} for i in range(n)}
    ),
    "histograms": lambda n: plots.histograms(
        {f"rate {i}": {"a": RNG.normal(size=50)} for i in range(n)}, "gain (points)"
    ),
    "lines": lambda n: figures.lines(
        {f"c{j}": (np.arange(5.0),) * 3 + (RNG.normal(size=(9, 5)),) for j in range(n)},
        "x",
        "y (s)",
    ),
    "predictive_checks": lambda n: figures.predictive_checks(statistics(n)),
    "ranks": lambda n: figures.ranks(
        {f"a long name of a site[{i}]": RNG.random(99) for i in range(n)}
    ),
}


@pytest.mark.parametrize("theme", ["page", pytest.param("slides", marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow), 5, 100])
@pytest.mark.parametrize("name", PANELS)
def test_panels_fit_on_a_page_and_the_title_says_how_many_are_shown(name, count, theme):
    with figures.theme(theme):
        figure = PANELS[name](count)
        wide, tall = figure.get_size_inches() / style.pt(1) ** 0.5
        assert overlaps(figure) == []
    assert style.MIN_WIDTH <= wide <= style.MAX_WIDTH
    assert tall < 11.5
    shown = len(figure.axes)
    told = title(figure).replace("\n", " ")
    assert (f"({shown} of {count} " in told) == (shown < count)
    assert shown == count or count == 100


def test_of_many_ranks_the_least_uniform_are_shown():
    places = {f"b[{i}]": np.linspace(0.001, 0.999, 400) for i in range(60)}
    places["b[37]"] = np.full(400, 0.5)
    assert "b[37]" in [axes.get_title() for axes in figures.ranks(places).axes]
    places = {name: {"pvi": values} for name, values in places.items()}
    assert "b[37]" in [axes.get_title() for axes in figures.coverage(places).axes]


# Curves.


def scores(methods):
    columns = {"seed": 0, "model": "personal", "adaptation": "none", "population": "training"}
    return [
        {"method": f"method {m}", "round": r, "value": 1 - 1 / (r + m), "metric": "accuracy"}
        | columns
        for m in range(methods)
        for r in (1, 2, 3)
    ]


def reliability(models):
    sure = torch.linspace(0.3, 1, 400)
    bins = calibration_bins(sure, (sure > 0.6).float(), bins=10)
    return figures.reliability(dict.fromkeys([f"method {m}" for m in range(models)], bins))


CURVES = {
    "after_epochs": lambda n: plots.after_epochs(
        [0, 1, 5], {f"method {m}": RNG.random((3, 3)) for m in range(n)}
    ),
    "curves": lambda n: figures.curves(scores(n)),
    "reliability": reliability,
}


@pytest.mark.parametrize("name", CURVES)
def test_a_long_legend_leaves_the_panels_their_size(name):
    few, several, lots = (CURVES[name](count) for count in (2, 14, 41))
    assert "gray" not in note(several)
    assert "gray: 27 more" in note(lots)
    assert overlaps(few) == []
    for figure in (several, lots):
        assert len([t for t in figure.legends[0].texts if t.get_text().startswith("method")]) == 14
        assert overlaps(figure) == []
    tall = [f.axes[0].get_window_extent().height / f.dpi for f in (few, several, lots)]
    assert min(tall) > 0.85 * tall[0]


def test_of_many_curves_the_best_have_colors():
    named = [t.get_text() for t in figures.curves(scores(41)).legends[0].texts]
    assert named == [f"method {m}" for m in range(40, 26, -1)]


def test_a_long_label_is_wrapped():
    rows = [
        {"setting": f"{'a setting with a long name ' * 6}{i}", "rounds": 2, "score": 0.1 * i}
        for i in range(9)
    ]
    figure = figures.tuning([row | {"chosen": row["score"] == 0} for row in rows], "accuracy")
    assert overlaps(figure) == []
    assert note(figure) == "the first one is chosen; gray: 3 more"


# Missing values.


def one_gap(shape):
    values = RNG.random(shape)
    values.flat[0] = NAN
    return values


MISSING = {
    "clients": lambda: figures.clients(np.arange(1, 4), one_gap(3), "accuracy"),
    "comparison": lambda: figures.comparison([scores(2)[0] | {"value": NAN}, *scores(2)[1:]]),
    "coverage": lambda: figures.coverage({"b": {"a": one_gap(9)}}),
    "curves": lambda: figures.curves([scores(2)[0] | {"value": NAN}, *scores(2)[1:]]),
    "differences": lambda: figures.differences({"a": {"x": (NAN,) * 3, "y": (1, 0, 2)}}, "points"),
    "entropies": lambda: figures.entropies({"a": [one_gap(9)]}, 10),
    "forest": lambda: figures.forest({"a": (one_gap(3), np.zeros(3), np.ones(3))}, "abc", "x"),
    "histograms": lambda: plots.histograms({"a": {"b": one_gap(9)}}, "gain"),
    "pooling": lambda: figures.pooling(
        np.arange(1, 4), (one_gap(3), np.ones(3)), (np.ones(3), np.ones(3)), 0.5, "y"
    ),
    "predictive_checks": lambda: figures.predictive_checks(
        statistics(1).assign(observed=one_gap(8))
    ),
    "ranks": lambda: figures.ranks({"b": one_gap(9)}),
    "shrinkage": lambda: figures.shrinkage("abc", one_gap(3), summary(3), 0.5, "points"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", MISSING)
def test_missing_values_are_counted(name):
    figure = MISSING[name]()
    assert "1 missing value (NaN) not shown" in note(figure)
    assert overlaps(figure) == []


def test_a_model_without_any_score_has_no_mean():
    figure = figures.clients([1, 2], {"a": [NAN, NAN], "b": [0.5, 0.7]}, "accuracy")
    told = [t.get_text() for t in figure.legends[0].texts]
    assert told == ["a", "b", "mean of b: 0.6"]
    assert (
        title(figure).replace("\n", " ")
        == "Accuracy of each client, by its number of training rows"
    )


# Single parts.


def test_numbers_of_rows_are_whole():
    for size in ([3], [1, 2, 3]):
        (axes,) = figures.clients(size, RNG.random(len(size)), "accuracy").axes
        assert [tick for tick in axes.get_xticks() if tick != round(tick)] == []


def test_names_that_are_left_out_of_a_partition_are_counted():
    counts = RNG.poisson(3.0, (25, 3))
    named = figures.partition(counts, [f"hospital {j}" for j in range(25)]).axes[1]
    assert named.get_xlabel() == "client (by number; 25 names not shown)"
    numbered = figures.partition(counts, [f"client {j}" for j in range(25)]).axes[1]
    assert numbered.get_xlabel() == "client"


def test_of_many_clients_some_have_an_entropy_curve():
    figure = figures.entropies({"a": [RNG.random(9) for _ in range(929)]}, 10)
    assert len(figure.axes[0].lines) == 61
    assert note(figure) == "thin: 60 of 929 clients; thick: all of them"


def test_many_variables_have_lanes_on_one_page():
    rows = pd.DataFrame({"variable": [f"v{i // 3}" for i in range(300)]})
    rows = rows.assign(difference=RNG.normal(size=300), ratio=RNG.uniform(0.5, 1.5, 300))
    rows.loc[150, "difference"] = 50.0
    figure = figures.posterior_differences(rows)
    assert figure.get_figheight() < 12
    assert "(30 of 100 variables, those that deviate most)" in title(figure).replace("\n", " ")
    assert "v50 (3)" in labels(figure)


def test_levels_and_groups_of_a_conditional_effect_can_be_told_apart():
    rows = [
        {
            "ward": f"the ward {i} on a floor",
            "unit": f"u{j}",
            "mean": 1.0,
            "2.5%": 0.0,
            "97.5%": 2.0,
        }
        for j in range(20)
        for i in range(8)
    ]
    table = pd.DataFrame(rows)
    table.attrs.update(column="ward", by="unit", response="y")
    figure = figures.conditional(table)
    assert overlaps(figure) == []
    assert "gray: 6 more" in note(figure)
    looks = [(c.lines[0].get_color(), c.lines[0].get_marker()) for c in figure.axes[0].containers]
    assert len({*looks}) >= 8
    at = np.concatenate([c.lines[0].get_xdata() for c in figure.axes[0].containers])
    assert np.abs(at - at.round()).max() < 0.5  # a level's bars are next to its name


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (lambda: figures.forest({}, ["a"], "t"), "fits has 0"),
        (lambda: figures.forest({"m": ([1.0], [0.0], [2.0])}, ["a", "b"], "t"), "labels has 2"),
        (
            lambda: figures.forest({"m": ([1.0], [0.0], [2.0])}, ["a"], "t", truth=[1.0, 2.0]),
            "truth has 2",
        ),
        (
            lambda: figures.shrinkage(["a", "b"], [1.0], ([1.0], [0.0], [2.0]), 0.0, "t"),
            "names has 2, raw has 1",
        ),
        (lambda: figures.shrinkage([], [], ([], [], []), 0.0, "t"), "at least 1"),
        (
            lambda: figures.parameters_by_covariate(
                [0, 1, 2], (np.ones((3, 2)),) * 3, ["a"], "x", "y"
            ),
            "labels has 1, mean has 2",
        ),
        (
            lambda: figures.parameters_by_covariate(
                [0, 1], (np.ones((3, 1)),) * 3, ["a"], "x", "y"
            ),
            "at has 2, mean has 3",
        ),
        (
            lambda: figures.save(
                figures.forest({"m": ([1.0], [0.0], [2.0])}, ["a"], "t"), "picture"
            ),
            "has no ending",
        ),
        (lambda: figures.forest({"m": ([1.0], [2.0], [0.0])}, ["a"], "t"), "m has a lower end"),
        (lambda: figures.differences({"m": {"s": (1.0, 2.0, 0.0)}}, "u"), "m has a lower end"),
        (lambda: figures.differences({}, "u"), "sites has 0"),
        (lambda: figures.narrowing([1, 2], {"m": ([1.0], [0.0], [2.0])}, "t"), "sizes has 2"),
        (lambda: figures.ranks({"p": [0.2, 37.0]}), "places has 37"),
        (lambda: figures.ranks({}), "places has 0"),
        (lambda: figures.coverage({"a": {"b": [-5.0, 0.5]}}), "places has -5"),
        (lambda: figures.entropies({"a": [[0.2, 1.5]]}, 3), "a has 1.5"),
        (lambda: figures.entropies({"a": []}, 3), "a has 0"),
        (
            lambda: plots.confidence_histogram({"a": ([40.0, 90.0], [1, 0])}),
            "confidence has 40",
        ),
        (lambda: figures.confidence([1.0, -2.0], [1.0, 1.0], [1, 2]), "tau has -2"),
        (lambda: figures.clients([1, 2], [0.5], "accuracy"), "size has 2, value has 1"),
        (
            lambda: figures.pooling([1, 2], ([1.0], [1.0]), ([1.0], [1.0]), 0.0, "t"),
            "size has 2, raw has 1",
        ),
        (lambda: plots.distance({"m": {"a": [[1.0, 0.0]]}}), "m has 0"),
        (lambda: plots.histograms({}, "x"), "panels_of has 0"),
        (lambda: figures.lines({}, "x", "y"), "clients has 0"),
        (lambda: plots.alphas({}), "history has 0"),
    ],
)
def test_rows_that_do_not_fit_are_refused_in_one_line(draw, told):
    with pytest.raises(ValueError, match=told) as raised:
        draw()
    assert "\n" not in str(raised.value)


def test_a_client_of_unknown_coverage_is_not_outside_the_range():
    table = pd.DataFrame(
        {
            "client": ["a", "b"],
            "pooling": "pooled",
            "coverage": [np.nan, 0.9],
            "low": 0.7,
            "high": 1.0,
            "target": 0.8,
            "test_rows": 10,
        }
    )
    figure = figures.coverage_by_client(table)
    assert "0 of 2 clients outside" in title(figure)
    assert "1 missing value (NaN) not shown" in note(figure)


@pytest.mark.parametrize(
    ("chosen", "told"),
    [("", "none of them chosen"), ("yes", "the first one is chosen")],
)
def test_tuning_says_which_setting_is_chosen_only_if_one_is(chosen, told):
    rows = [
        {"setting": "a", "rounds": 3, "score": 0.3, "chosen": ""},
        {"setting": "b", "rounds": 3, "score": 0.9, "chosen": chosen},
    ]
    assert told in note(figures.tuning(rows, "accuracy"))


def test_an_interval_without_end_is_counted_as_missing():
    fits = {"m": ([1.0, 2.0], [-math.inf, 1.0], [2.0, 3.0])}
    told = note(figures.forest(fits, ["p", "q"], "t"))
    assert "1 missing value (NaN or infinite) not shown" in told
