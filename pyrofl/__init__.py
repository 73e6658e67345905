"""Bayesian and personalized federated learning on Pyro.

A method is a Pyro model and guide, a local schedule and a server update; one loop runs them all.
We use Pyro's effect handlers and distributions, but not its global parameter store.

The names below are those of every script. The others are in modules that are loaded when
they are first used: `pyrofl.checks.sbc`, `pyrofl.figures.forest`, `pyrofl.priors.flat`.
"""

from pyrofl.starting import begin_command

begin_command()

# ruff: noqa: E402 (an interrupt of what follows has to end the command in one line)
from importlib import import_module
from importlib.metadata import version
from typing import Any

from pyrofl.data import Batch, Federation, Preprocessor
from pyrofl.inference.aggregation.aggregator import Aggregator
from pyrofl.inference.budget import Privacy
from pyrofl.inference.conformal.conformal import conformal
from pyrofl.inference.data_flow import get_data_flow
from pyrofl.inference.elbo import elbo
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.inference.federate import federate
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.chains import Chains
from pyrofl.inference.fitted_run.loading import load
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.membership import join, leave
from pyrofl.inference.method import GradientStep, Method, Phase
from pyrofl.inference.optim import adam, sgd
from pyrofl.inference.planning import plan
from pyrofl.inference.posteriors.arviz import to_arviz
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.inference.recordings import recordings
from pyrofl.inference.relations import get_dependencies
from pyrofl.inference.seeds import Seeds
from pyrofl.inference.transport import Client, Server
from pyrofl.inference.tuning.tune import tune
from pyrofl.inference.validation.validate import validate_method
from pyrofl.models.hierarchical import hierarchical
from pyrofl.nets import Network
from pyrofl.tensors import Tensors

__version__ = version("pyrofl")

__all__ = [
    "Aggregator",
    "Batch",
    "Chains",
    "Client",
    "Federation",
    "GradientStep",
    "Method",
    "Network",
    "Phase",
    "Preprocessor",
    "Privacy",
    "RoundState",
    "Run",
    "Seeds",
    "Server",
    "Tensors",
    "adam",
    "conformal",
    "elbo",
    "evaluate",
    "federate",
    "fit",
    "get_data_flow",
    "get_dependencies",
    "hierarchical",
    "join",
    "leave",
    "load",
    "plan",
    "posterior",
    "recordings",
    "sgd",
    "to_arviz",
    "tune",
    "validate_method",
]

MODULES = {
    "checks": "pyrofl.inference.checks",
    "data": "pyrofl.data",
    "datasets": "pyrofl.data.loaders.datasets",
    "effects": "pyrofl.models.regression.effects",
    "federations": "pyrofl.partitions.federations",
    "figures": "pyrofl.figures",
    "guides": "pyrofl.models.guides",
    "likelihoods": "pyrofl.models.likelihoods",
    "loggers": "pyrofl.inference.fitted_run.loggers",
    "meta_gradients": "pyrofl.models.shared.meta_gradients",
    "metrics": "pyrofl.metrics",
    "models": "pyrofl.models",
    "nets": "pyrofl.nets",
    "participation": "pyrofl.inference.engine.participation",
    "priors": "pyrofl.models.priors",
    "privacy": "pyrofl.inference.privacy",
    "reference": "pyrofl.inference.reference",
    "aggregation": "pyrofl.inference.aggregation",
}
"""name after `pyrofl.` -> the module that it stands for."""

FUNCTIONS = {
    "regression": "pyrofl.models.regression",
    "report": "pyrofl.reports.report",
    "to_pyro": "pyrofl.inference.pyro_pair",
}
"""name after `pyrofl.` -> the module of the function of this name."""


def __getattr__(name: str) -> Any:
    """Import and return a module or function of the package when it is first accessed."""
    if name in FUNCTIONS:
        globals()[name] = found = getattr(import_module(FUNCTIONS[name]), name)
        return found
    if name not in MODULES:
        raise AttributeError(f"module 'pyrofl' has no attribute {name!r}")
    globals()[name] = found = import_module(MODULES[name])
    return found


def __dir__() -> list[str]:
    """Return the public names of the package, including modules not yet imported."""
    return sorted([*__all__, *MODULES, *FUNCTIONS, "__version__"])
