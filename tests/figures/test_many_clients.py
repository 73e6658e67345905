"""Figures of many clients with long names can be read, have a title, and keep their size."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from papers import plots
from pictures import overlaps, title

from pyrofl import figures
from pyrofl.figures import style
from pyrofl.metrics import calibration_bins

RNG = np.random.default_rng(0)
WIDEST, HIGHEST = 14.0, 12.0  # inches
LONG = "hospital at the end of the long road through the valley of "


def names(clients: int) -> list[str]:
    return [f"{LONG}{j}" for j in range(clients)]


def differences(clients: int) -> Figure:
    middle, half = RNG.normal(0.5, 1, clients), RNG.uniform(0.5, 2, clients)
    sites = dict(
        zip(names(clients), np.stack([middle, middle - half, middle + half], 1), strict=True)
    )
    models = ("fedavg, personal", "fedavg, global", "pfedvem", "pvi", "fedper", "ditto")
    return figures.differences(dict.fromkeys(models, sites), "points of accuracy")


def coverage_by_client(clients: int) -> Figure:
    table = pd.DataFrame({"client": names(clients), "pooling": "client", "target": 0.8})
    table = table.assign(coverage=RNG.uniform(0.6, 1, clients), low=0.7, high=0.95, test_rows=20)
    return figures.coverage_by_client(pd.concat([table, table.assign(pooling="pooled")]))


def predictive_checks(clients: int) -> Figure:
    table = pd.DataFrame({"client": names(clients), "statistic": "mean", "mean": 0.0, "low": -1})
    p = RNG.uniform(0, 1, clients)
    return figures.predictive_checks(table.assign(high=1, observed=RNG.normal(size=clients), p=p))


def reliability_by_client(clients: int) -> Figure:
    sure = 1 - 0.4 * torch.rand(30, generator=torch.Generator().manual_seed(0))
    bins = calibration_bins(sure, (sure > 0.8).float(), bins=5)
    return figures.reliability_by_client(dict.fromkeys(names(clients), bins))


def lines(clients: int) -> Figure:
    x, line = np.arange(5.0), RNG.normal(size=(20, 5))
    return figures.lines({n: (x, x, x, line) for n in names(clients)}, "days", "reaction (ms)")


def summary(clients: int):
    mean = RNG.normal(size=clients)
    return mean, mean - 1, mean + 1


BY_CLIENT = {
    "alphas": lambda n: plots.alphas({"a": RNG.dirichlet([1.0] * 3, (9, n))}, names(n)),
    "clients": lambda n: figures.clients(
        torch.arange(1, n + 1), {"alone": RNG.random(n), "together": RNG.random(n)}, "accuracy"
    ),
    "confidence": lambda n: figures.confidence(
        RNG.uniform(1, 2, n), RNG.random(n), torch.arange(1, n + 1)
    ),
    "coverage_by_client": coverage_by_client,
    "differences": differences,
    "entropies": lambda n: figures.entropies({"test": [RNG.random(9) for _ in range(n)]}, 10),
    "forest": lambda n: figures.forest({"a": summary(n), "b": summary(n)}, names(n), "log odds"),
    "lines": lines,
    "partition": lambda n: figures.partition(RNG.poisson(3, (n, 10)), names(n)),
    "pooling": lambda n: figures.pooling(
        np.arange(1, n + 1),
        (RNG.random(n), RNG.random(n)),
        (RNG.random(n), RNG.random(n)),
        0.5,
        "y",
    ),
    "predictive_checks": predictive_checks,
    "reliability_by_client": reliability_by_client,
    "shrinkage": lambda n: figures.shrinkage(names(n), RNG.random(n), summary(n), 0.5, "points"),
}


@pytest.mark.parametrize("name", BY_CLIENT)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("clients", [1, 3, 12, 60, pytest.param(929, marks=pytest.mark.slow)])
@pytest.mark.parametrize("theme", ["page", pytest.param("slides", marks=pytest.mark.slow)])
def test_figures_of_any_number_of_clients_can_be_read(name, clients, theme):
    with figures.theme(theme):
        figure = BY_CLIENT[name](clients)
        wide, tall = figure.get_size_inches() / style.pt(1) ** 0.5
        assert overlaps(figure) == []
    assert wide <= WIDEST
    assert tall <= HIGHEST
    assert len(title(figure)) > 10


def test_of_many_clients_those_that_are_off_have_names():
    n = 929
    table = pd.DataFrame({"client": [f"ward {j}" for j in range(n)], "statistic": "mean"})
    table = table.assign(mean=0.0, low=-1.0, high=1.0, observed=0.0, p=0.5)
    table.loc[[5, 6, 700], "p"] = 0.001
    table.loc[[8, 9], "p"] = 0.999
    (axes,) = figures.predictive_checks(table).axes
    named = [t.get_text() for t in axes.get_yticklabels()]
    assert named[:2] == ["ward 8", "ward 9"]
    assert named[-3:] == ["ward 5", "ward 6", "ward 700"]


def test_all_panels_at_the_bottom_of_their_columns_have_tick_labels():
    figure = differences(5)  # six panels in four columns
    below = figure.axes[2:]
    assert all(any(t.label1.get_visible() for t in a.xaxis.get_major_ticks()) for a in below)
    assert "better: " in figure.axes[0].get_title()


def test_slides_have_larger_type_and_no_background():
    data = {"mu": {"pvi": RNG.random(200)}}
    page = figures.coverage(data)
    with figures.theme("slides"):
        slide = figures.coverage(data)
    again = figures.coverage(data)
    sizes = [f.axes[0].xaxis.label.get_size() / f.get_figwidth() for f in (page, slide, again)]
    assert sizes[1] > 1.15 * sizes[0]
    assert sizes[2] == sizes[0]  # the theme ends with its block
    with figures.theme("slides"):
        (line,) = Figure().subplots().plot([1, 2])  # one of a user's own
    assert line.get_color() == style.COLORS[0]
    assert slide.get_facecolor()[3] == 0
    assert page.get_facecolor()[3] == 1
    assert overlaps(slide) == []


def test_an_unknown_theme_is_refused():
    told = r"unknown theme 'slide'; did you mean slides\?"
    with pytest.raises(ValueError, match=told), figures.theme("slide"):
        pass
