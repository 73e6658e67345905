"""Figures of single papers show the numbers they were given, and can be read."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from matplotlib._pylab_helpers import Gcf
from matplotlib.colors import to_hex
from papers.plots import (
    after_epochs,
    alphas,
    confidence_histogram,
    distance,
    histograms,
    simplex,
)
from pictures import overlaps
from scipy.stats import t

from pyrofl.figures import style

RNG = np.random.default_rng(0)


def note(figure) -> str:
    return figure.legends[0].get_title().get_text()


def labels(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].texts]


# Branch weights.


def history(rounds=21, clients=4, branches=3):
    return {n: RNG.dirichlet([1.0] * branches, (rounds, clients)) for n in ("with", "without")}


def test_clients_with_one_name_share_a_panel_with_a_kind_of_line_each():
    weights = history()
    figure = alphas({n: torch.from_numpy(w) for n, w in weights.items()}, ["a", "b", "a", "b"])
    assert [block.get_suptitle() for block in figure.subfigs] == ["with", "without"]
    for block, value in zip(figure.subfigs, weights.values(), strict=True):
        assert [axes.get_title() for axes in block.axes] == ["a", "b"]
        for axes, members in zip(block.axes, ([0, 2], [1, 3]), strict=True):
            lines = [line for line in axes.lines if len(line.get_xdata()) == 21]
            for line, (b, m) in zip(lines, np.ndindex(3, 2), strict=True):
                np.testing.assert_array_equal(line.get_ydata(), value[:, members[m], b])
                assert line.get_color() == style.COLORS[b]
                assert line.get_linestyle() == style.LINES[m]
            assert axes.lines[0].get_ydata()[0] == pytest.approx(1 / 3)
    assert labels(figure) == ["branch 1", "branch 2", "branch 3"]
    assert note(figure) == "kinds of lines: clients; gray: equal weights"
    assert overlaps(figure) == []


@pytest.mark.parametrize("clients", [1, 7, 12])
def test_a_panel_per_client_by_default(clients):
    figure = alphas(history(2, clients))
    for block in figure.subfigs:
        assert [axes.get_title() for axes in block.axes] == [f"client {j}" for j in range(clients)]
        # The lowest panel of every column says what its axis is.
        columns = len({axes.get_position().x0.round(3) for axes in block.axes})
        named = [axes.get_xlabel() == "round" for axes in block.axes]
        assert named == [j + columns >= clients for j in range(clients)]
    assert note(figure) == "gray: equal weights"
    assert overlaps(figure) == []


def test_more_branches_than_colors_can_be_told_apart():
    axes = alphas({"a": history(9, 2, 10)["with"]}).subfigs[0].axes[0]
    lines = [line for line in axes.lines if len(line.get_xdata()) == 9]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 10


# The simplex of client weights.


def test_the_simplex_has_a_client_in_every_corner():
    weights = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1 / 3] * 3, [0.5, 0.25, 0.25]])
    accuracy = torch.tensor([0.4, 0.5, 0.6, 0.7, 0.8])
    marks = {"ensemble": (None, 0.9), "FedAvg": ([1 / 3] * 3, 0.7)}
    figure = simplex(weights, accuracy, marks, corners=("red", "green", "blue"))
    axes, bar = figure.axes
    contours = axes.collections[0]
    assert (contours.zmin, contours.zmax) == pytest.approx((40, 80))
    # The scale reaches to all marks.
    assert contours.levels[[0, -1]] == pytest.approx([40, 90])
    ensemble, fedavg = axes.lines[-2:]
    assert len(ensemble.get_xdata()) == 0
    center = [fedavg.get_xdata()[0], fedavg.get_ydata()[0]]
    np.testing.assert_allclose(center, [0.5, math.sqrt(0.75) / 3])
    scale = [line.get_ydata()[0] for line in bar.lines if line.get_marker() in "*o"]
    np.testing.assert_allclose(scale, [90, 70])
    assert labels(figure) == ["ensemble: 90.0%", "FedAvg: 70.0%"]
    corners = {text.get_text(): text.xy for text in axes.texts}
    places = axes.lines[0].get_xydata()[:3]
    np.testing.assert_allclose([corners[n] for n in ("red", "green", "blue")], places)
    assert overlaps(figure) == []


def test_a_simplex_without_marks_has_no_legend():
    figure = simplex(RNG.dirichlet([0.5] * 3, 50), RNG.random(50))
    assert figure.legends == []
    # All alike are drawn as well.
    figure = simplex(RNG.dirichlet([0.5] * 3, 50), np.full(50, 0.5))
    assert figure.axes[0].collections[0].levels[[0, -1]] == pytest.approx([50, 50.1])


# Confidence of right and wrong predictions.


def test_the_histogram_counts_right_and_wrong_predictions():
    sure = torch.tensor([[0.95, 0.95, 0.35, 0.05], [0.95, 0.55, 0.55, 1.0]])
    right = torch.tensor([[True, True, False, False], [False, True, False, True]])
    figure = confidence_histogram({"clients": (sure, right), "one": (sure[0], right[0])}, bins=10)
    for axes, rows in zip(figure.axes, (8, 4), strict=True):
        found = {p.get_label(): p.get_data() for p in axes.patches if p.get_label()}
        assert list(found) == ["right", "wrong"]
        assert sum(p.values.sum() for p in found.values()) == pytest.approx(100)
        np.testing.assert_allclose(found["right"].edges, np.linspace(0, 1, 11))
        assert found["wrong"].values[3] == pytest.approx(100 / rows)
    np.testing.assert_allclose(
        [p.get_data().values[9] for p in figure.axes[0].patches[1::2]], [37.5, 12.5]
    )
    assert [a.get_title() for a in figure.axes] == ["clients\n50.0% right", "one\n50.0% right"]
    assert overlaps(figure) == []


# Curves.


def test_new_clients_learn_epoch_by_epoch():
    epochs, table = [0, 1, 5, 10], torch.tensor([[0.1, 0.5, 0.6, 0.7], [0.3, 0.7, 0.8, 0.9]])
    figure = after_epochs(epochs, {"fedavg": table[0], "fedabml": table})
    axes = figure.axes[0]
    np.testing.assert_allclose(axes.lines[0].get_xydata().T, [epochs, table[0]])
    np.testing.assert_allclose(axes.lines[1].get_ydata(), table.mean(0))
    (shade,) = axes.collections
    assert shade.get_paths()[0].vertices[:, 1].max() == pytest.approx(0.9)
    assert note(figure) == "mean ± one standard error over seeds"
    assert axes.get_ylabel() == "accuracy (fraction of rows)"
    assert note(after_epochs(epochs, {"fedavg": table[0]}, "nll")) == ""
    assert overlaps(figure) == []


def test_distances_have_a_band_of_95_percent_confidence():
    logs = RNG.normal(size=(5, 30)) - np.arange(30) / 5
    figure = distance(
        {
            "distance": {"fedabml": np.exp(logs), "fedavg": np.ones((1, 30))},
            "loss": {"fedavg": torch.ones(30)},
        }
    )
    first, second = figure.axes
    assert (first.get_yscale(), first.get_ylabel(), second.get_ylabel()) == (
        "log", "distance", "loss",
    )  # fmt: skip
    np.testing.assert_allclose(first.lines[0].get_ydata(), np.exp(logs.mean(0)))
    (shade,) = first.collections
    corner = shade.get_paths()[0].vertices
    half = t.ppf(0.975, 4) * logs[:, 0].std(ddof=1) / math.sqrt(5)
    found = np.log(corner[corner[:, 0] == 0][:, 1])
    assert (found.min(), found.max()) == pytest.approx(
        (logs[:, 0].mean() - half, logs[:, 0].mean() + half)
    )
    # A method looks the same in all panels.
    assert second.lines[0].get_color() == first.lines[1].get_color()
    assert note(figure) == "geometric mean of 5 runs and its 95% confidence band"
    assert overlaps(figure) == []


def test_pyplot_knows_of_no_figure_and_no_chance_is_used():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    alphas(history(3, 2, 9))
    histograms({"in": {"a": RNG.random(9)}}, "points")
    assert Gcf.figs == {}
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    assert len({to_hex(color) for color in style.COLORS}) == len(style.COLORS)


def test_histograms_share_their_bins_and_count_every_seed():
    gains = {"ensemble": [-2.0, -1.0, 0.5, 3.0], "best": [4.0, 5.0, 6.0, 8.0]}
    figure = histograms({"lr $a$": gains, "lr b": {"ensemble": [0.0, 1.0]}}, "points", 5)
    one, other = figure.axes
    stairs = [[p.get_data() for p in axes.patches] for axes in (one, other)]
    np.testing.assert_allclose(stairs[0][0].edges, np.linspace(-2, 8, 6))
    assert [int(s.values.sum()) for s in stairs[0]] == [4, 4, 4, 4]  # filled, and its outline
    assert [int(s.values.sum()) for s in stairs[1]] == [2, 2]
    np.testing.assert_array_equal(stairs[0][0].values, [2, 1, 1, 0, 0])
    assert [t.get_text() for t in figure.legends[0].texts] == ["ensemble", "best"]
    assert overlaps(figure) == []
