"""Bayesian and personalised federated learning on Pyro.

A method is a Pyro model and guide, a local schedule and a server update; one loop runs them all.
We use Pyro's effect handlers and distributions, but not its global parameter store.
"""

from importlib.metadata import version

from pyrofl.data import Batch, Dataset, Federation, Who
from pyrofl.inference import reference
from pyrofl.inference.arviz import to_arviz
from pyrofl.inference.checks import pit, predictive_checks
from pyrofl.inference.elbo import elbo
from pyrofl.inference.evaluate import Scores, calibration, evaluate, predictions
from pyrofl.inference.fit import Run, fit
from pyrofl.inference.loo import compare, loo
from pyrofl.inference.meta import descended, maml
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.inference.newcomers import newcomer
from pyrofl.inference.optim import adam, sgd
from pyrofl.inference.participation import bernoulli, everyone, fixed, fraction
from pyrofl.inference.posterior import posterior
from pyrofl.inference.predict import predict
from pyrofl.inference.rounds import federate
from pyrofl.inference.sbc import sbc
from pyrofl.inference.seeds import Seeds
from pyrofl.inference.server import average, descend, weighted_mean
from pyrofl.inference.state import Round
from pyrofl.inference.uncertainty import calibration_by_client, uncertainty
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
    "predictions",
    "predictive_checks",
    "reference",
    "sbc",
    "sgd",
    "to_arviz",
    "uncertainty",
    "weighted_mean",
]
