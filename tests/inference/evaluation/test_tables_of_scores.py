"""Scores as text and tables, modules as networks, and runs of several seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pyrofl
from pyrofl import datasets, federations, nets
from pyrofl.models import apfl, fedavg, pfedvem


class Own(torch.nn.Module):
    """A module that is no `Network`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of ten classes."""
        return self.head(x)


@pytest.fixture(scope="module")
def data() -> pyrofl.Federation:
    """Five ragged clients, one of them held out."""
    return federations.split(datasets.load("digits"), "dirichlet:0.5", 5, held_out=1)


@pytest.fixture(scope="module")
def runs(data) -> pyrofl.Chains:
    """Runs of two seeds."""
    return pyrofl.fit(fedavg.build(Own(), epochs=1), data, rounds=2, seeds=2, progress=False)


def test_scores_print_the_mean_and_the_range_of_each_metric(runs):
    scores = runs[0].evaluate()
    value = scores.values["accuracy"]
    low, high = (scores.names[int(i)] for i in (value.argmin(), value.argmax()))
    line = (
        f"mean {float(value.mean()):.4g} over clients, from {float(value.min()):.4g} ({low}) "
        f"to {float(value.max()):.4g} ({high})"
    )
    assert line in repr(scores)
    assert "tensor(" not in repr(scores)
    assert repr(scores).startswith("Scores of the global model on test rows\n")
    assert "of held-out clients" in repr(runs[0].evaluate(population="held_out"))
    assert line in scores._repr_html_()


def test_scores_are_a_data_frame_by_client(runs, data):
    for scores in (runs[0].evaluate(), runs[0].evaluate(population="held_out")):
        table = scores.to_dataframe()
        assert [*table.index] == [data.names[i] for i in scores.ids.tolist()]
        assert table["rows"].tolist() == scores.rows.tolist()
        np.testing.assert_array_equal(table["nll"], scores.values["nll"])
    small = runs[0].evaluate().smallest(0.5, data.sizes)
    assert [*small.to_dataframe().index] == [data.names[i] for i in small.ids.tolist()]


def test_scores_of_several_seeds_have_a_mean_and_a_spread(runs):
    table = runs.evaluate()
    each = [run.evaluate().mean("accuracy") for run in runs]
    assert each[0] != each[1]
    assert table.loc["accuracy", "mean"] == pytest.approx(np.mean(each))
    assert table.loc["accuracy", "sd"] == pytest.approx(np.std(each, ddof=1))
    assert table.loc["accuracy", "seed 1"] == each[1]
    assert runs.evaluate(draws=3, part="train").shape == table.shape


@pytest.mark.parametrize("build", [fedavg.build, pfedvem.build, apfl.build])
def test_a_module_is_a_network(build):
    network, module = build(nets.Network(Own())), build(Own())
    assert module.model.net.shapes == network.model.net.shapes
    with pytest.raises(ValueError, match="parameter"):
        build(torch.nn.ReLU())


def test_the_beginning_of_a_metric_proposes_it(runs):
    with pytest.raises(ValueError, match="did you mean accuracy"):
        runs[0].evaluate().mean("acc")
