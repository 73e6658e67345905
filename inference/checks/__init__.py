"""Posterior checks: calibration, model fit, cross-validation and predictions for new clients."""

from pyrofl.inference.checks.by_class import classification_report
from pyrofl.inference.checks.leave_one_client_out import loco
from pyrofl.inference.checks.leave_one_out import compare_loo, loo
from pyrofl.inference.checks.new_clients import new_client_posterior
from pyrofl.inference.checks.predictive import STATISTICS, pit, predictive_checks
from pyrofl.inference.checks.priors import prior_predictive, prior_sensitivity
from pyrofl.inference.checks.simulation import Ranks, sbc
from pyrofl.inference.conformal.sets import Conformal, PredictionSets
from pyrofl.inference.evaluation.evaluate import (
    Scores,
    calibration,
    calibration_by_client,
    uncertainty,
)
from pyrofl.inference.evaluation.predict import predict, predict_batch

__all__ = [
    "STATISTICS",
    "Ranks",
    "classification_report",
    "compare_loo",
    "loco",
    "loo",
    "new_client_posterior",
    "pit",
    "predictive_checks",
    "prior_predictive",
    "prior_sensitivity",
]
__all__ += ["Scores", "calibration", "calibration_by_client", "predict", "predict_batch", "sbc"]
__all__ += ["Conformal", "PredictionSets", "uncertainty"]
