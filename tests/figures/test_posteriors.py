"""Figures of posteriors show what they are given."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from pictures import overlaps

from pyrofl import figures

G = np.random.default_rng(0)


def table(rows: int) -> pd.DataFrame:
    columns = ("mean", "sd", "reference_mean", "reference_sd")
    found = pd.DataFrame(G.uniform(1, 2, (rows, 4)), [f"w[{i}]" for i in range(rows)], columns)
    for whose in ("", "reference_"):
        found[f"{whose}low"] = found[f"{whose}mean"] - 1.5 * found[f"{whose}sd"]
        found[f"{whose}high"] = found[f"{whose}mean"] + 3.0 * found[f"{whose}sd"]
    found["variable"] = "w"
    found["difference"] = (found["mean"] - found["reference_mean"]) / found["reference_sd"]
    found["ratio"] = found["sd"] / found["reference_sd"]
    return found


def words(figure) -> list[str]:
    return [t.get_text() for legend in figure.legends for t in legend.get_texts()]


@pytest.mark.parametrize("rows", [1, 12, 30])
def test_cost_shows_every_row_in_three_panels(rows, tmp_path):
    known = table(rows)
    figure = figures.posterior_differences(known, ("federated", "NUTS"))
    left, middle, right = figure.axes
    drawn = [c.lines[0].get_xdata() for c in left.containers]
    np.testing.assert_array_equal(drawn, [known["mean"], known["reference_mean"]])
    assert [t.get_text() for t in left.get_yticklabels()] == list(known.index)
    assert words(figure) == ["federated", "NUTS"]
    for axes, column in ((middle, "difference"), (right, "ratio")):
        dots = next(line for line in axes.lines if line.get_marker() == "o")
        np.testing.assert_array_equal(dots.get_xdata(), known[column])
        low, high = axes.get_xlim()
        assert low <= known[column].min()
        assert known[column].max() <= high
    assert left.get_ylim()[0] > left.get_ylim()[1]  # the first row is on top
    figures.save(figure, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").stat().st_size > 1000


def test_many_rows_are_dots_in_lanes_and_the_worst_has_its_name():
    shift = np.linspace(-0.1, 0.3, 40)
    many = pd.DataFrame({"variable": ["mu"] + 39 * ["a"], "difference": shift, "ratio": 1 - shift})
    many.index = ["mu", *(f"a[{i}]" for i in range(39))]
    figure = figures.posterior_differences(many)
    for axes, column in zip(figure.axes, ("difference", "ratio"), strict=True):
        dots = np.concatenate([line.get_xdata() for line in axes.lines if line.get_marker() == "o"])
        np.testing.assert_allclose(dots, many[column])
        lanes = [line.get_ydata() for line in axes.lines if line.get_marker() == "o"]
        assert [np.unique(np.round(lane)).tolist() for lane in lanes] == [[0.0], [1.0]]
        assert [t.get_text() for t in axes.texts] == ["a[38]"]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["mu", "a (39)"]
    assert overlaps(figure) == []


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (0.031, "\nMonte Carlo error of a difference: 0.031 sds"),
        (0.6, "\ntoo few draws: Monte Carlo error of a difference: 0.6 sds"),
    ],
)
@pytest.mark.parametrize("rows", [3, 40])
def test_cost_says_how_far_chance_alone_moves_means(rows, error, told):
    figure = figures.posterior_differences(table(rows).assign(error=error))
    assert figure.legends[0].get_title().get_text().endswith(f"15%{told}")


@pytest.mark.parametrize("rows", [4, 40])
def test_cost_counts_the_rows_that_agree(rows):
    many = table(rows).assign(difference=0.19, ratio=0.86)
    many.iloc[0, many.columns.get_loc("difference")] = -0.21
    many.iloc[1, many.columns.get_loc("ratio")] = 1.16
    for error, first in ((0.03, f"{rows - 2} of {rows} rows agree"), (0.6, "gray: differences")):
        told = (
            figures.posterior_differences(many.assign(error=error))
            .legends[0]
            .get_title()
            .get_text()
        )
        assert told.startswith(first)


def test_the_name_of_the_worst_row_stays_in_its_panel():
    many = pd.DataFrame({"variable": 85 * ["a"], "difference": 0.0, "ratio": 1.0})
    many.index = [f"a[the county of Cottonwood {i}]" for i in range(85)]
    many.loc[many.index[3], ["difference", "ratio"]] = 0.3, 1.08
    figure = figures.posterior_differences(many)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for axes in figure.axes:
        box = axes.texts[0].get_window_extent(canvas.get_renderer())
        assert axes.bbox.x0 <= box.x0
        assert box.x1 <= axes.bbox.x1


def test_shrinkage_sorts_by_the_clients_own_estimates():
    raw, mean, truth = np.array([1.0, 3.0, 2.0]), np.array([1.5, 2.4, 2.0]), np.arange(3.0)
    figure = figures.shrinkage("abc", raw, (mean, mean - 1, mean + 2), 2.0, "effect", truth)
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_yticklabels()] == ["b", "c", "a"]
    assert words(figure) == ["population mean", "own estimate", "later known", "posterior"]
    lines = {line.get_label(): line.get_xdata() for line in axes.lines}
    assert lines["own estimate"].tolist() == [3, 2, 1]
    assert lines["later known"].tolist() == [1, 2, 0]


def test_pooling_has_the_same_scale_on_both_sides():
    size = np.array([1, 1, 40])
    raw = (np.array([5.0, np.nan, 1.0]), np.array([2.0, np.nan, 0.1]))
    figure = figures.pooling(size, raw, (np.ones(3), np.ones(3)), 1.0, "y", "homes")
    left, right = figure.axes
    assert left.get_ylim() == right.get_ylim()
    assert left.get_xlabel() == "homes"
    assert left.get_xscale() == "log"


def test_forest_gives_every_fit_its_places():
    fits = {n: (np.ones(4), np.zeros(4), np.full(4, 3.0)) for n in ("one", "two", "three")}
    figure = figures.forest(fits, list("wxyz"), "coefficient", np.zeros(4))
    assert words(figure) == ["later known", "one", "two", "three"]
    (axes,) = figure.axes
    heights = [c.lines[0].get_ydata()[0] for c in axes.containers]
    assert heights == sorted(set(heights))


@pytest.mark.parametrize("clients", [3, 7, 30])
def test_lines_give_every_client_a_panel(clients):
    at = np.linspace(0, 1, 5)
    panels = {
        f"s{j}": (np.array([0.0, 1.0]), np.array([1.0, 3.0]), at, G.normal(size=(20, 5)))
        for j in range(clients)
    }
    panels["alone"] = (np.array([0.5]), np.array([1.0]), at, G.normal(size=(20, 5)))
    figure = figures.lines(panels, "days", "weight")
    assert [axes.get_title() for axes in figure.axes] == list(panels)
    own = next(x for x in figure.axes[0].lines if x.get_label().startswith("least squares"))
    np.testing.assert_allclose(own.get_ydata(), 1 + 2 * at)
    assert not [x for x in figure.axes[-1].lines if x.get_label().startswith("least squares")]


def test_courses_give_every_parameter_a_panel():
    mean, years = G.normal(size=(3, 5)), (1972.0, 1976.0, 1980.0)
    figure = figures.parameters_by_covariate(
        years, (mean, mean - 1, mean + 1), "abcde", "year", "points"
    )
    assert [axes.get_title() for axes in figure.axes] == list("abcde")
    (bars,) = figure.axes[2].containers
    assert bars.lines[0].get_ydata().tolist() == mean[:, 2].tolist()


def test_cost_of_several_variables_is_in_standard_deviations():
    known = table(3)
    known["variable"] = ["a", "b", "b"]
    left = figures.posterior_differences(known).axes[0]
    drawn = [c.lines[0].get_xdata() for c in left.containers]
    np.testing.assert_allclose(drawn, [known["difference"], np.zeros(3)])
