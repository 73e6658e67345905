"""Scores of classes and numbers equal those computed by hand."""

from __future__ import annotations

import pytest
import torch

from pyrofl.inference.conformal.scores import Forecast, aps_scores, check_predictive_sd


def test_aps_scores_by_hand():
    probs = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5]])
    u = torch.tensor([0.5, 0.2, 1.0])
    by_hand = [[0.25, 0.9, 0.65], [0.82, 0.16, 0.92], [0.75, 1.0, 0.5]]
    assert torch.allclose(aps_scores(probs, u), torch.tensor(by_hand), atol=1e-6)


def test_without_randomization_the_last_class_counts_fully():
    probs = torch.tensor([[0.5, 0.2, 0.3]])
    assert torch.allclose(aps_scores(probs, torch.ones(1)), torch.tensor([[0.5, 1.0, 0.8]]))
    assert torch.allclose(aps_scores(probs, torch.zeros(1)), torch.tensor([[0.0, 0.8, 0.5]]))


def test_the_score_of_a_row_is_that_of_its_class():
    probs = torch.tensor([[0.5, 0.2, 0.3], [0.5, 0.2, 0.3]])
    found = Forecast(probs, torch.zeros(2), torch.tensor([0.5, 0.1])).scores(torch.tensor([2, 0]))
    assert torch.allclose(found, torch.tensor([0.65, 0.05]))


def test_scores_of_numbers_are_errors_in_standard_deviations():
    found = Forecast(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 4.0]), torch.ones(2))
    assert found.scores(torch.tensor([0.0, 4.0])).tolist() == [2.0, 0.5]


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_numbers_need_a_finite_spread(bad):
    sd = torch.tensor([1.0, bad])
    with pytest.raises(ValueError, match="Bern: the predictive standard deviation of a row is"):
        check_predictive_sd("Bern", sd, has_classes=False)
    check_predictive_sd("Bern", sd, has_classes=True)
