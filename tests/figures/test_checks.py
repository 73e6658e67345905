"""Figures of checks show what they are given."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from pictures import overlaps
from scipy.stats import binom, binomtest

from pyrofl import figures
from pyrofl.figures import style
from pyrofl.metrics import calibration_bins, calibration_error

G = np.random.default_rng(0)


def words(figure) -> list[str]:
    return [t.get_text() for legend in figure.legends for t in legend.get_texts()]


def test_rank_histograms_have_the_band_of_uniform_ranks(tmp_path):
    places = (G.integers(0, 200, 400) + 0.5) / 200
    with_gap = np.concatenate([places[:300], [np.nan] * 100])
    figure = figures.ranks({"mu": places, "eta": with_gap, "w": places}, 10, columns=2)
    assert [axes.get_title() for axes in figure.axes] == ["mu", "eta", "w"]
    for axes, count in zip(figure.axes, (400, 300, 400), strict=True):
        (stairs,) = (p for p in axes.patches if hasattr(p, "get_data"))
        assert stairs.get_data().values.sum() == count
        low, high = binom.ppf([0.005, 0.995], count, 0.1)
        (span,) = (p for p in axes.patches if not hasattr(p, "get_data"))
        box = span.get_bbox()
        assert (box.y0, box.y1) == (low, high)
    assert words(figure) == ["99% of uniform ranks", "replications"]
    figures.save(figure, tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").stat().st_size > 1000


def test_coverage_is_the_share_of_truths_inside():
    places = np.array([0.5, 0.4, 0.7, 0.9, np.nan])  # in intervals from levels 0, 0.2, 0.4, 0.8
    figure = figures.coverage({"one": {"a": places}, "two": {"a": places, "b": places}})
    left, right = figure.axes
    curve = {line.get_label(): line for line in left.lines}["a"]
    x, y = curve.get_xdata(), curve.get_ydata()
    for level, share in ((0.1, 0.25), (0.3, 0.5), (0.5, 0.75), (0.9, 1.0)):
        assert y[np.isclose(x, level)] == share
    assert words(figure) == ["a", "b", "99% band of chance"]
    assert left.get_ylim() == right.get_ylim()


def checked() -> pd.DataFrame:
    rows = [
        {"client": c, "statistic": s, "observed": 1.0, "mean": 2.0, "low": 0.0, "high": 3.0, "p": p}
        for c, p in (("a", 0.5), ("b", 0.001), ("c", 0.999))
        for s in ("mean", "sd")
    ]
    return pd.DataFrame(rows)


def test_predictive_checks_mark_what_is_extreme():
    figure = figures.predictive_checks(checked(), {"mean": "mean (faults)"})
    left, right = figure.axes
    assert [left.get_xlabel(), right.get_xlabel()] == ["mean (faults)", "sd"]
    assert [t.get_text() for t in left.get_yticklabels()] == ["a", "b", "c"]
    dots = {line.get_label(): line.get_ydata().tolist() for line in left.lines}
    assert dots["observed"] == [0]
    assert dots["p below 0.025 or above 0.975"] == [1, 2]
    assert left.get_ylim()[0] > left.get_ylim()[1]


@pytest.mark.parametrize("clients", [1, 7])
def test_every_client_has_its_reliability_diagram(clients):
    sure = torch.rand(clients, 40, generator=torch.Generator().manual_seed(0))
    bins = calibration_bins(sure, (sure > 0.5).float(), bins=5)
    found = {f"c{j}": type(bins)(*(v[j] for v in bins)) for j in range(clients)}
    figure = figures.reliability_by_client(found)
    (axes,) = figure.axes
    ece = calibration_error(bins)[0]
    told = [f"c{j} (40 rows, ECE {float(ece[j]):.2f})" for j in range(clients)]
    assert [t.get_text() for t in axes.get_yticklabels()] == told
    rows, sure, right = (np.nan_to_num(np.asarray(value)) for value in bins)
    share = (rows * right).sum(1) / 40
    np.testing.assert_allclose(axes.containers[0].lines[0].get_xdata(), share, 1e-6)
    mean = next(line for line in axes.lines if line.get_marker() == "D")
    np.testing.assert_allclose(mean.get_xdata(), (rows * sure).sum(1) / 40, 1e-6)
    ends = axes.containers[0].lines[2][0].get_segments()
    exact = [binomtest(round(40 * s), 40).proportion_ci(method="wilson") for s in share]
    np.testing.assert_allclose([e[:, 0] for e in ends], [(c.low, c.high) for c in exact], 1e-6)
    assert words(figure) == ["mean confidence", "accuracy, 95% interval"]


def test_a_client_with_all_rows_right_has_an_interval_too():
    bins = calibration_bins(torch.full((1, 23), 0.95), torch.ones(1, 23), bins=5)
    one = type(bins)(*(v[0] for v in bins))
    none = type(bins)(*(torch.zeros(5), torch.full((5,), torch.nan), torch.full((5,), torch.nan)))
    figure = figures.reliability_by_client({"a": one, "nobody": none})
    ends = figure.axes[0].containers[0].lines[2][0].get_segments()[0][:, 0]
    exact = binomtest(23, 23).proportion_ci(method="wilson")
    np.testing.assert_allclose(ends, (exact.low, exact.high), 1e-6)


def test_narrowing_shows_every_fit_at_every_size():
    fit = (np.array([1.0, 2.0]), np.array([0.0, 1.5]), np.array([3.0, 2.5]))
    figure = figures.narrowing((0, 10), {"exact": fit, "own": fit}, "mean", 1.5)
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0", "10"]
    assert [c.lines[0].get_ydata().tolist() for c in axes.containers] == [[1.0, 2.0]] * 2
    bars = axes.containers[0].lines[2][0].get_segments()
    assert [segment[:, 1].tolist() for segment in bars] == [[0.0, 3.0], [1.5, 2.5]]
    assert words(figure) == ["truth", "exact", "own"]


def test_every_client_has_its_distribution_and_every_data_set_a_color():
    clients = {"in": [G.random(40) for _ in range(3)], "out": [1 + G.random(40)] * 2}
    figure = figures.entropies(clients, classes=10)
    axes = figure.axes[0]
    looks = [(line.get_color(), line.get_linewidth()) for line in axes.lines]
    blue, orange = style.COLORS[:2]
    assert looks == [(blue, 0.7)] * 3 + [(blue, 2.4)] + [(orange, 0.7)] * 2 + [(orange, 2.4)]
    together = np.sort(np.concatenate(clients["in"]))
    x, y = axes.lines[3].get_data()
    np.testing.assert_array_equal(x[1:], together)
    np.testing.assert_allclose(y[1:], np.arange(1, 121) / 120)
    low, high = axes.get_xlim()
    assert low < 0 < math.log(10) < high  # a peak at either end is not cut off
    assert "nats; at most log 10 = 2.30" in axes.get_xlabel()
    assert [text.get_text() for text in figure.legends[0].texts] == ["in", "out"]
    assert overlaps(figure) == []


@pytest.mark.parametrize("end", [0.0, math.log(3)])
def test_entropies_at_an_end_are_inside_the_panel(end):
    (axes,) = figures.entropies({"in": [np.full(9, end)]}, 3).axes
    assert axes.get_ylim() == pytest.approx((-0.02, 1.02))
    x, y = axes.lines[-1].get_data()
    assert axes.get_xlim()[0] < x[-1] < axes.get_xlim()[1]
    assert y[-1] == 1.0
