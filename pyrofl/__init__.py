"""Bayesian and personalised federated learning on Pyro.

A method is a Pyro model and guide, a local schedule and a server update; one loop runs them all.
We use Pyro's effect handlers and distributions, but not its global parameter store.
"""

from importlib.metadata import version

from pyrofl.data import Batch, Dataset, Federation, Who
from pyrofl.inference import reference
from pyrofl.inference.checks.leave_one_out import compare, loo
from pyrofl.inference.checks.newcomers import newcomer
from pyrofl.inference.checks.predictive import pit, predictive_checks
from pyrofl.inference.checks.simulation import sbc
from pyrofl.inference.elbo import elbo
from pyrofl.inference.evaluation.evaluate import (
    Scores,
    calibration,
    calibration_by_client,
    evaluate,
)
from pyrofl.inference.evaluation.predict import predict, predict_batch
from pyrofl.inference.evaluation.uncertainty import uncertainty
from pyrofl.inference.fit import Run, fit
from pyrofl.inference.loop.participation import bernoulli, everyone, fixed, fraction
from pyrofl.inference.loop.rounds import federate
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.inference.optim import adam, sgd
from pyrofl.inference.posteriors.arviz import to_arviz
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.inference.seeds import Seeds
from pyrofl.inference.servers.averages import average, descend, weighted_mean
from pyrofl.models.shared.meta_gradients import descended, maml
from pyrofl.nets import Network
from pyrofl.tensors import Tensors

__version__ = version("pyrofl")

__all__ = [
    "Batch",
    "Dataset",
    "Federation",
    "Method",
    "Network",
    "Phase",
    "Round",
    "Run",
    "Scores",
    "Seeds",
    "Step",
    "Tensors",
    "Who",
    "adam",
    "average",
    "bernoulli",
    "calibration",
    "calibration_by_client",
    "compare",
    "descend",
    "descended",
    "elbo",
    "evaluate",
    "everyone",
    "federate",
    "fit",
    "fixed",
    "fraction",
    "loo",
    "maml",
    "newcomer",
    "pit",
    "posterior",
    "predict",
    "predict_batch",
    "predictive_checks",
    "reference",
    "sbc",
    "sgd",
    "to_arviz",
    "uncertainty",
    "weighted_mean",
]
