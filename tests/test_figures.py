"""Figures show the numbers they were given, legibly, and leave pyplot alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from matplotlib._pylab_helpers import Gcf
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pyrofl import drawing, figures
from pyrofl.metrics import calibration_bins

RNG = np.random.default_rng(0)


def overlaps(figure: Figure) -> list[str]:
    """Return the labels of ticks that touch the next one, or leave the figure."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, found = canvas.get_renderer(), []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = [t.label1 for t in axis.get_major_ticks() if t.label1.get_visible()]
            labels = [label for label in labels if label.get_text()]
            boxes = [label.get_window_extent(renderer) for label in labels]
            found += [b.get_text() for a, b, c, d in _pairs(labels, boxes) if c.overlaps(d)]
        box = axes.get_tightbbox(renderer)
        if min(*box.min) < -1 or box.x1 > figure.bbox.x1 + 1 or box.y1 > figure.bbox.y1 + 1:
            found.append(f"axes {axes.get_xlabel()}")
    return found


def _pairs(labels, boxes):
    return zip(labels, labels[1:], boxes, boxes[1:], strict=False)


@pytest.mark.parametrize("clients", [1, 10, 100])
@pytest.mark.parametrize("classes", [1, 10, 100])
def test_a_partition_shows_its_counts_and_can_be_read(clients, classes):
    counts = RNG.poisson(3.0, (clients, classes))
    names = [f"client {j}" for j in range(clients)]
    figure = figures.partition(
        torch.from_numpy(counts), names, [f"class {k}" for k in range(classes)]
    )
    bars, heat = figure.axes[:2]
    assert [bar.get_height() for bar in bars.patches] == counts.sum(1).tolist()
    np.testing.assert_array_equal(heat.collections[0].get_array().reshape(classes, -1), counts.T)
    labels = [label.get_text() for label in heat.get_xticklabels()]
    assert (labels == names) is (clients <= 20)
    assert overlaps(figure) == []


def test_an_empty_class_is_lighter_than_one_row():
    image = figures.partition([[0, 1, 100]]).axes[1].collections[0]
    none, one, many = image.to_rgba(np.array([0, 1, 100]))[:, :3].sum(1)
    assert none > one > many


def table(seeds: int = 3) -> list[dict[str, object]]:
    rows = []
    for method, base in (("pfedvem", 0.8), ("fedavg", 0.6)):
        for model, population in (("personal", "training"), ("global", "pooled")):
            for seed in range(seeds):
                for r in (0, 10, 20):
                    row = {"method": method, "seed": seed, "round": r, "model": model}
                    row |= {"population": population, "adapted": "none"}
                    value = base + 0.01 * seed + 0.001 * r - 0.1 * (model == "global")
                    rows.append(row | {"metric": "accuracy", "value": value})
                    rows.append(row | {"metric": "nll", "value": 9.0})
    return rows


def test_curves_are_means_with_standard_errors():
    figure = figures.curves(table())
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["personal model, clients that train", "global model, all test rows"]
    line = figure.axes[1].lines[0]
    assert line.get_label() == "pfedvem"
    np.testing.assert_allclose(line.get_xdata(), [0, 10, 20])
    np.testing.assert_allclose(line.get_ydata(), [0.71, 0.72, 0.73])
    band = figure.axes[1].collections[0].get_paths()[0].vertices
    error = 0.01 / math.sqrt(3)
    assert band[:, 1].min() == pytest.approx(0.71 - error)
    assert band[:, 1].max() == pytest.approx(0.73 + error)
    assert figure.axes[0].get_ylabel() == "accuracy (share of rows)"
    assert overlaps(figure) == []


def test_one_seed_has_no_band():
    figure = figures.curves(table(seeds=1))
    assert not any(axes.collections for axes in figure.axes)


def test_panels_beyond_three_go_below_and_adaptation_is_a_line():
    rows = [row | {"population": p} for row in table(1) for p in ("training", "held_out")]
    rows += [row | {"adapted": "adapt"} for row in rows if row["model"] == "personal"]
    figure = figures.curves(rows)
    assert len(figure.axes) == 4
    assert [t.get_text() for t in figure.legends[0].texts] == [
        "pfedvem", "fedavg", "pfedvem, adapted", "fedavg, adapted",
    ]  # fmt: skip
    assert overlaps(figure) == []


def test_a_comparison_shows_every_seed_and_the_mean():
    rows = [row for row in table() if row["round"] == 20]
    figure = figures.comparison(rows)
    axes = figure.axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["pfedvem", "fedavg"]
    personal, other = axes.containers
    assert (personal.get_label(), other.get_label()) == ("personal model", "global model")
    np.testing.assert_allclose(personal.lines[0].get_xdata(), [0.83, 0.63])
    bars = np.array(personal.lines[2][0].get_segments())[:, :, 0]
    np.testing.assert_allclose(bars[:, 1] - bars[:, 0], 2 * 0.01 / math.sqrt(3))
    dots = [line for line in axes.lines if line.get_marker() == "."]
    np.testing.assert_allclose(dots[0].get_xdata(), [0.82, 0.83, 0.84])
    # A model's points stay in the lane of their method.
    for container in axes.containers:
        assert [round(y) for y in container.lines[0].get_ydata()] == [0, 1]
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
    line = figure.axes[0].lines[1]
    # 0.9 is the upper edge of its bin, so it is not with 0.91 and 0.92.
    np.testing.assert_allclose(line.get_xdata(), [0.3, 0.9, 0.915], rtol=1e-6)
    np.testing.assert_allclose(line.get_ydata(), [0.0, 1.0, 0.5])
    stairs = figure.axes[1].patches[0].get_data()
    np.testing.assert_allclose(stairs.values[[2, 8, 9]], [0.25, 0.25, 0.5])
    assert overlaps(figure) == []


def test_confidence_shows_weights_that_sum_to_one():
    tau = torch.tensor([1.0, 3.0, 4.0])
    figure = figures.confidence(tau, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([5, 50, 60]))
    weights, deviation, sizes = figure.axes
    points = sizes.collections[0].get_offsets()
    np.testing.assert_allclose(points, [[5, 12.5], [50, 37.5], [60, 50]])
    assert [sum(p.get_height() for p in a.patches) for a in (weights, deviation)] == [3, 3]
    assert weights.lines[0].get_xdata()[0] == pytest.approx(100 / 3)
    assert overlaps(figure) == []


@pytest.mark.parametrize(("largest", "scale"), [(50, "linear"), (5000, "log")])
def test_clients_are_points(largest, scale):
    size, value = torch.tensor([5, 40, largest]), torch.tensor([0.5, math.nan, 0.7])
    axes = figures.clients(size, value, "nll").axes[0]
    np.testing.assert_allclose(
        axes.collections[0].get_offsets()[[0, 2]], [[5, 0.5], [largest, 0.7]]
    )
    assert axes.lines[0].get_ydata()[0] == pytest.approx(0.6)
    assert axes.get_xscale() == scale
    assert axes.get_ylabel() == "negative log likelihood (nats per row)"


def test_names_have_looks_of_their_own():
    styles = drawing.styles(f"method {i}" for i in range(28))
    looks = {(s["color"], s["linestyle"]) for s in styles.values()}
    assert len(looks) == 28


def test_figures_are_saved_whole_and_pyplot_knows_of_none(tmp_path):
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    path = tmp_path / "partition.png"
    figures.save(figures.partition([[1, 2]]), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]
    assert Gcf.figs == {}
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
