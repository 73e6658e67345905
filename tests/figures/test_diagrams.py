"""Plates show every site once, in its plate, and what it depends on."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import pyrofl
from pyrofl import figures
from pyrofl.cli.output import cards
from pyrofl.experiments.methods import builds
from pyrofl.models import pvi


def words(figure: Figure) -> set[str]:
    return {line for text in figure.axes[0].texts for line in text.get_text().split("\n")}


@pytest.mark.parametrize("name", builds())
def test_every_method_has_a_diagram(name):
    related = pyrofl.get_dependencies(cards.made(name, cards.network()), cards.rows())
    assert related["y"].observed
    assert related["y"].plates == ("clients", "rows")
    assert related["y"].reads
    figure = figures.plates(related)
    assert "~ Categorical" in words(figure)
    assert figure.axes[0].patches


def test_the_head_of_pfedvem_is_around_the_servers_with_a_confidence_of_the_clients_own():
    related = pyrofl.get_dependencies(cards.made("pfedvem", cards.network()), cards.rows())
    assert related["head.bias"].reads == ("client tau", "server loc/head.bias")
    assert related["head.bias"].distribution == "Normal"
    told = figures.plates(related).axes[0].get_legend().get_texts()
    assert [t.get_text() for t in told] == [
        "the server's",
        "kept by the client",
        "drawn",
        "observed",
    ]
    assert {n for n in related["y"].reads if " " in n} == {
        "server base/fc1.bias",
        "server base/fc1.weight",
    }


def test_what_clients_share_is_outside_of_their_plate():
    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            tau = pyro.sample("tau", dist.HalfCauchy(5.0))
            eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
            theta = pyro.deterministic("theta", mu + tau * eta)
            with batch.rows():
                pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)

    rows = np.ones((3, 1)), np.arange(3.0)
    data = pyrofl.Federation.from_arrays({"a": rows, "b": rows})
    related = pyrofl.get_dependencies(pvi.hierarchical(model, data, shared="mu tau"), data)
    assert related["mu"].plates == related["tau"].plates == ()
    assert related["tau"].distribution == "HalfCauchy"
    assert related["theta"].reads == ("mu", "tau", "eta")
    assert related["eta"].plates == related["theta"].plates == ("clients",)
    figure = figures.plates(related)
    boxes = [p for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch)]
    clients = boxes[0].get_bbox()
    inside = {
        t.get_text().split("\n")[0]
        for t in figure.axes[0].texts
        if clients.contains(*t.get_position())
    }
    assert {"eta", "theta", "y"} <= inside
    told = figure.axes[0].get_legend().get_texts()
    assert [t.get_text() for t in told] == ["drawn", "observed"]
    assert not {"mu", "tau"} & inside


def test_a_reader_may_give_axes_of_his_own():
    figure = Figure(figsize=(8, 3))
    axes = figure.subplots(1, 2)
    related = pyrofl.get_dependencies(cards.made("fedavg", cards.network()), cards.rows())
    assert figures.plates(related, ax=axes[0]) is figure
    fit = (np.zeros(2), -np.ones(2), np.ones(2))
    assert figures.forest({"one": fit}, ["a", "b"], "value", ax=axes[1]) is figure
    assert [t.get_text() for t in axes[1].get_legend().get_texts()] == ["one"]
    assert figure.legends == []
