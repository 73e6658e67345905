"""Figures of clients show the numbers they were given, legibly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pictures import overlaps, title

from pyrofl import figures
from pyrofl.figures import style

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("clients", [1, 10, 100])
@pytest.mark.parametrize("classes", [2, 10, 100])
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
    assert (labels == [str(j) for j in range(clients)]) is (clients <= 20)
    assert overlaps(figure) == []


def test_rows_of_one_class_are_bars_alone():
    figure = figures.partition([[3], [5]], ["hospital A", "client 7"])
    (bars,) = figure.axes
    assert [bar.get_height() for bar in bars.patches] == [3, 5]
    assert [t.get_text() for t in bars.get_xticklabels()] == ["hospital A", "7"]
    assert overlaps(figure) == []


def test_names_that_are_no_numbers_are_shown_whole():
    heat = figures.partition([[1, 2], [3, 4]], ["hospital A", "client 7"], ["cat", "dog"]).axes[1]
    assert [t.get_text() for t in heat.get_xticklabels()] == ["hospital A", "7"]
    assert [t.get_text() for t in heat.get_yticklabels()] == ["cat", "dog"]


def test_an_empty_class_is_lighter_than_one_row():
    image = figures.partition([[0, 1, 100]]).axes[1].collections[0]
    none, one, many = image.to_rgba(np.array([0, 1, 100]))[:, :3].sum(1)
    assert none > one > many


def test_confidence_shows_weights_that_sum_to_one_from_zero_on():
    tau = torch.tensor([1.0, 3.0, 4.0])
    figure = figures.confidence(tau, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([5, 50, 60]))
    weights, deviation = figure.axes
    points = weights.collections[0].get_offsets()
    np.testing.assert_allclose(points, [[5, 12.5], [50, 37.5], [60, 50]])
    points = deviation.collections[0].get_offsets()
    np.testing.assert_allclose(points, [[5, 0.1], [50, 0.2], [60, 0.3]], rtol=1e-6)
    assert weights.get_ylim()[0] == deviation.get_ylim()[0] == 0
    assert weights.lines[0].get_ydata()[0] == pytest.approx(100 / 3)
    told = figure.legends[0].get_title().get_text()
    assert told == "weights of 12.5 to 50%: the largest is 4 times the smallest"
    assert overlaps(figure) == []


def test_weights_that_hardly_differ_are_told_to_be_equal():
    tau = torch.tensor([1.0, 1.02])
    figure = figures.confidence(tau, torch.tensor([0.1, 0.2]), torch.tensor([5, 50]))
    told = figure.legends[0].get_title().get_text()
    assert told == "weights of 49.5 to 50.5%: all but equal"


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
    assert style.axis_label("smallest_nll") == f"{axes.get_ylabel()}, smallest 10% of clients"
    assert overlaps(axes.figure) == []


def test_models_of_one_client_are_joined_and_have_means_of_their_own():
    size, alone = torch.tensor([5, 5, 300]), torch.tensor([0.2, math.nan, 0.9])
    together = torch.tensor([0.8, 0.7, 0.85])
    figure = figures.clients(size, {"alone": alone, "together": together}, "accuracy")
    (axes,) = figure.axes
    joined, *dots = axes.collections
    for drawn, values in zip(dots, (alone, together), strict=True):
        np.testing.assert_array_equal(drawn.get_offsets()[:, 1].filled(np.nan), values)
    np.testing.assert_allclose(dots[0].get_offsets()[:, 0], size, rtol=0.04)
    np.testing.assert_allclose(joined.get_segments()[0][:, 1], [0.2, 0.8])
    np.testing.assert_allclose([x.get_ydata()[0] for x in axes.lines], [0.55, 2.35 / 3])
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["alone", "mean of alone: 0.55", "together", "mean of together: 0.783"]
    assert title(figure) == "Accuracy: together above alone for 1 of 2 clients"
    assert overlaps(figure) == []
