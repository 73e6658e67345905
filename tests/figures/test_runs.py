"""Figures show the numbers they were given, legibly, and leave pyplot alone."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib._pylab_helpers import Gcf
from matplotlib.backends.backend_agg import FigureCanvasAgg
from pictures import overlaps, title

from pyrofl import figures
from pyrofl.figures import style
from pyrofl.inference.definition.metadata import Monitor
from pyrofl.metrics import Bins, calibration_bins

RNG = np.random.default_rng(0)


def table(seeds: int = 3) -> list[dict[str, object]]:
    rows = []
    for method, base in (("pfedvem", 0.8), ("fedavg", 0.6)):
        for model, population in (("personal", "training"), ("global", "pooled")):
            for seed in range(seeds):
                for r in (0, 10, 20):
                    row = {"method": method, "seed": seed, "round": r, "model": model}
                    row |= {"population": population, "adaptation": "none"}
                    value = base + 0.01 * seed + 0.001 * r - 0.1 * (model == "global")
                    rows.append(row | {"metric": "accuracy", "value": value})
                    rows.append(row | {"metric": "nll", "value": 9.0})
    return rows


def test_curves_are_means_with_standard_errors():
    figure = figures.curves(table())
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["Personal models, training clients", "Global model, all test rows"]
    line = figure.axes[1].lines[0]
    assert line.get_label() == "pfedvem"
    np.testing.assert_allclose(line.get_xdata(), [0, 10, 20])
    np.testing.assert_allclose(line.get_ydata(), [0.71, 0.72, 0.73])
    band = figure.axes[1].collections[0].get_paths()[0].vertices
    error = 0.01 / math.sqrt(3)
    assert band[:, 1].min() == pytest.approx(0.71 - error)
    assert band[:, 1].max() == pytest.approx(0.73 + error)
    assert figure.axes[0].get_ylabel() == "accuracy (fraction of rows)"
    assert figure.legends[0].get_title().get_text() == "mean ± one standard error over seeds"
    assert overlaps(figure) == []


def test_populations_with_the_same_curves_share_a_panel():
    rows = [row | {"model": "global"} for row in table() if row["metric"] == "accuracy"]
    rows = [row for row in rows if row["population"] == "pooled"]
    alike = [row | {"population": "training"} for row in rows]
    figure = figures.curves([*rows, *alike])
    (axes,) = figure.axes
    assert axes.get_title() == "Global model, all test rows"
    note = figure.legends[0].get_title().get_text().replace("\n", " ")
    assert note.endswith("; training clients: the same curves")
    assert len(axes.lines) == 2  # a method each
    apart = [row | {"value": row["value"] + 0.001 * row["round"]} for row in alike]
    assert len(figures.curves([*rows, *apart]).axes) == 2


def test_one_seed_has_no_band():
    figure = figures.curves(table(seeds=1))
    assert not any(axes.collections for axes in figure.axes)
    assert figure.legends[0].get_title().get_text() == ""


def test_a_single_round_shows_its_standard_error():
    rows = [row for row in table() if row["round"] == 20]
    bar = figures.curves(rows).axes[0].collections[0].get_segments()[0]
    np.testing.assert_allclose(bar[:, 0], 20)
    assert bar[1, 1] - bar[0, 1] == pytest.approx(2 * 0.01 / math.sqrt(3))


@pytest.mark.parametrize("last", [1, 2, 3, 12, 1000])
def test_rounds_are_whole(last):
    rows = [row | {"round": last if row["round"] else 1} for row in table()]
    axes = figures.curves(rows).axes[0]
    low, high = axes.get_xlim()
    shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert shown
    assert all(tick == round(tick) for tick in shown)


def test_methods_keep_their_order_and_color_whatever_models_they_have():
    has = {"local": ["personal"], "fedavg": ["global"], "pfedvem": ["personal", "global"]}
    rows = [
        row | {"method": method}
        for method, models in has.items()
        for row in table()
        if row["method"] == "fedavg" and row["model"] in models
    ]
    learning, final = figures.curves(rows), figures.comparison(rows)
    order = ["local", "fedavg", "pfedvem"]
    assert [t.get_text() for t in learning.legends[0].texts] == order
    assert [t.get_text() for t in final.axes[0].get_yticklabels()] == order
    colors = {(line.get_label(), line.get_color()) for a in learning.axes for line in a.lines}
    assert len(colors) == len(order)
    # Alone in its lane, a model is in the middle.
    assert [c.lines[0].get_ydata()[0] for c in final.axes[0].containers[:2]] == [0, 1]


def test_panels_beyond_three_go_below_and_adaptation_is_a_line():
    worse = {"training": 0.0, "held_out": 0.05}  # or they would share a panel
    rows = [
        row | {"population": p, "value": row["value"] - less}
        for row in table(1)
        for p, less in worse.items()
    ]
    rows += [row | {"adaptation": "fine_tune"} for row in rows if row["model"] == "personal"]
    figure = figures.curves(rows)
    assert len(figure.axes) == 4
    assert [t.get_text() for t in figure.legends[0].texts] == [
        "pfedvem", "fedavg", "pfedvem, fine-tuned", "fedavg, fine-tuned",
    ]  # fmt: skip
    assert overlaps(figure) == []


def test_a_comparison_shows_every_seed_and_the_mean():
    rows = [row for row in table() if row["round"] == 20]
    figure = figures.comparison(rows)
    axes = figure.axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["pfedvem", "fedavg"]
    labels = [bar.get_label() for bar in axes.containers]
    assert labels == ["personal model", "global model"] * 2
    means = [bar.lines[0].get_xdata()[0] for bar in axes.containers]
    np.testing.assert_allclose(means, [0.83, 0.73, 0.63, 0.53])
    bars = np.array([bar.lines[2][0].get_segments()[0] for bar in axes.containers])[:, :, 0]
    np.testing.assert_allclose(bars[:, 1] - bars[:, 0], 2 * 0.01 / math.sqrt(3))
    dots = [line for line in axes.lines if line.get_marker() == "."]
    np.testing.assert_allclose(dots[0].get_xdata(), [0.82, 0.83, 0.84])
    # A model's points stay in the lane of their method.
    assert [round(line.get_ydata()[0]) for line in dots] == [0, 0, 1, 1]
    assert [round(bar.lines[0].get_ydata()[0]) for bar in axes.containers] == [0, 0, 1, 1]
    title = figure.legends[0].get_title().get_text()
    assert title == "mean ± one standard error; dots: 3 seeds"
    assert overlaps(figure) == []


def test_a_metric_that_nobody_measured_is_refused():
    for draw in (figures.curves, figures.comparison):
        with pytest.raises(ValueError, match="metric 'rmse'; found accuracy, nll"):
            draw(table(), "rmse")
        with pytest.raises(ValueError, match="found no rows"):
            draw([])


def test_reliability_shows_the_bins():
    confidence = torch.tensor([0.3, 0.9, 0.92, 0.91])
    bins = calibration_bins(confidence, torch.tensor([0, 1, 0, 1]), bins=10)
    figure = figures.reliability({"fedavg": bins})
    points = figure.axes[0].collections[0]
    # 0.9 is the upper edge of its bin, so it is not with 0.91 and 0.92.
    shown = np.ma.getdata(points.get_offsets())[[2, 8, 9]]
    np.testing.assert_allclose(shown, [[0.3, 0.0], [0.9, 1.0], [0.915, 0.5]], rtol=1e-6)
    stairs = figure.axes[1].patches[0].get_data()
    np.testing.assert_allclose(stairs.values[[2, 8, 9]], [25, 25, 50])
    assert overlaps(figure) == []


def test_reliability_joins_only_bins_with_enough_rows():
    rows = torch.tensor([30, 24, 40, 400, 0])
    sure = torch.tensor([0.1, 0.3, 0.5, 0.7, math.nan])
    right = torch.tensor([0.2, 1.0, 0.4, 0.8, math.nan])
    figure = figures.reliability({"few": Bins(rows, sure, right)})
    upper, points = figure.axes[0], figure.axes[0].collections[0]
    joined = upper.lines[1].get_ydata()
    np.testing.assert_allclose(joined, [0.2, math.nan, 0.4, 0.8, math.nan], rtol=1e-6)
    hollow = [tuple(face[:3]) == (1, 1, 1) for face in points.get_facecolors()]
    assert hollow[:4] == [False, True, False, False]
    assert np.argsort(points.get_sizes()[:4]).tolist() == [1, 0, 2, 3]
    assert "hollow: under 25 rows or 2%" in figure.legends[0].get_title().get_text()
    # 30 rows of 10,000 are too few as well: clients may share them.
    many = figures.reliability({"many": Bins(rows.where(rows != 400, 9906), sure, right)})
    assert np.isfinite(many.axes[0].lines[1].get_ydata()).tolist() == [False] * 3 + [True, False]


def test_reliability_keeps_its_legend_off_the_axes():
    bins = calibration_bins(torch.tensor([0.05] * 30), torch.ones(30))
    figure = figures.reliability({f"model {i}": bins for i in range(5)})
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    legend = figure.legends[0].get_window_extent(canvas.get_renderer())
    assert not any(legend.overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1


def test_reliability_without_rows_is_an_empty_figure():
    bins = calibration_bins(torch.zeros(0), torch.zeros(0))
    lower = figures.reliability({"nobody": bins}).axes[1]
    assert not lower.patches[0].get_data().values.any()


def test_names_have_looks_of_their_own():
    styles = style.styles(f"method {i}" for i in range(28))
    looks = [(s["color"], s["linestyle"]) for s in styles.values()]
    assert len({*looks[: style.MAX_COLORED_CURVES]}) == style.MAX_COLORED_CURVES
    marks = [(s["color"], s["marker"]) for s in styles.values()]  # of points without lines
    assert len({*marks[: style.MAX_COLORED_CURVES]}) == style.MAX_COLORED_CURVES
    assert {color for color, _ in looks[style.MAX_COLORED_CURVES :]} == {style.PALE_COLOR}


def test_figures_are_saved_whole_and_pyplot_knows_of_none(tmp_path):
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    path = tmp_path / "partition.png"
    figures.save(figures.partition([[1, 2]]), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]
    assert Gcf.figs == {}
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


class Told:
    """What a figure asks a run."""

    def __init__(self, table, verdict):
        self.table, self.status = pd.DataFrame(table), verdict

    def parameter_changes(self):
        return self.table


class Small(str):
    small: ClassVar = {"mean": 0.01, "sd": 0.01, "norm": 0.001}


def test_convergence_shows_every_site_and_what_is_small():
    rounds, nan = range(1, 9), math.nan
    lines = [
        {
            "round": r,
            "site": f"${j}$",
            "mean": 2.0**-r * (j > 0),
            "sd": 3.0**-r / (9 - j),
            "norm": nan,
        }
        for r in rounds
        for j in range(9)
    ]
    lines += [{"round": r, "site": "w", "mean": nan, "sd": nan, "norm": 1e308} for r in rounds]
    figure = figures.convergence(
        Told(lines, Small("not converged: the mean of a changed by 9 sd in the last round"))
    )
    sds, norms = figure.axes
    assert [axes.get_yscale() for axes in (sds, norms)] == ["log", "log"]
    for axes, small in ((sds, 0.01), (norms, 0.001)):
        (below,) = axes.patches
        assert below.get_y() + below.get_height() == pytest.approx(small)
        assert below.get_y() == axes.get_ylim()[0]
    assert len(sds.lines) == 2 * 9  # also of the sites without a color
    named = [t.get_text() for t in figure.legends[0].texts]
    assert len(named) == 6 + 1
    assert "converged range" in named
    assert r"\$8\$" in named  # it moves most
    best = next(line for line in sds.lines if line.get_label() == r"\$8\$")
    np.testing.assert_allclose(best.get_ydata(), [2.0**-r for r in rounds])
    assert np.isnan(sds.lines[0].get_ydata()).all()  # nothing moved: a logarithm cannot show it
    assert "gray: 4 that moved less" in figure.legends[0].get_title().get_text()
    assert title(figure).startswith("Not converged: the mean of a")
    assert overlaps(figure) == []
    chains = pd.concat([pd.DataFrame(lines).assign(seed=s) for s in "01"])
    both = figures.convergence(Told(chains, Small("not converged: so")))
    assert len(both.axes[0].lines) == 2 * 2 * 9
    with pytest.raises(ValueError, match=r"moved nothing that is known \(not converged: no"):
        figures.convergence(Told(pd.DataFrame(lines)[:0], Small("not converged: no round yet")))


def test_watched_numbers_are_lines_by_round():
    record = type("Record", (), {})

    def run_of(shares, monitors=None):
        run = type("Run", (), {})()
        run.records, run.monitors = [], monitors or {}
        for number, share in enumerate(shares, 1):
            one = record()
            one.number, one.watched = number, {"rates_above_$0.9$": share}
            run.records.append(one)
        return run

    figure = figures.watched(run_of([0.1, 0.4, 0.7]))
    (line,) = figure.axes[0].lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2, 3], [0.1, 0.4, 0.7])
    assert figure.axes[0].get_ylabel() == r"rates above \$0.9\$"
    assert [t.get_text() for t in figure.legends[0].texts] == [r"rates above \$0.9\$"]
    assert overlaps(figure) == []
    monitors = {"rates_above_$0.9$": Monitor(high=0.5, words="share of rates")}
    for last, told in ((0.7, "too high"), (0.4, "not too high")):
        axes = figures.watched(run_of([0.6, last], monitors)).axes[0]
        assert axes.get_ylabel() == "share of rates"
        assert axes.lines[1].get_label() == f"limit 0.5: {told} after the last round"
    chains = type("Chains", (), {"runs": [run_of([0.1, 0.4]), run_of([0.2, 0.3])]})()
    assert len(figures.watched(chains).axes[0].lines) == 2
    with pytest.raises(ValueError, match="the method watches no number; expected one that does"):
        figures.watched(run_of([]))
