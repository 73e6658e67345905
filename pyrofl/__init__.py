"""Bayesian and personalized federated learning on Pyro.

A method is a Pyro model and guide, a local schedule and a server update; one loop runs them all.
We use Pyro's effect handlers and distributions, but not its global parameter store.

The names below are those of every script. The others are in modules: `pyrofl.checks.sbc`,
`pyrofl.figures.forest`, `pyrofl.priors.flat`. All are imported when they are first used.
"""

from pyrofl.starting import begin_command

begin_command()

# ruff: noqa: E402 (an interrupt of what follows has to end the command in one line)
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pyrofl.extensions import register

if TYPE_CHECKING:  # each is imported when it is first used, see FUNCTIONS
    from pyrofl.data import Batch, Federation
    from pyrofl.experiments.comparison import compare
    from pyrofl.inference.definition.aggregator import Aggregator
    from pyrofl.inference.definition.budget import Privacy
    from pyrofl.inference.definition.elbo import elbo
    from pyrofl.inference.definition.method import ClosedFormUpdate, GradientStep, Method, Phase
    from pyrofl.inference.definition.optim import adam, sgd
    from pyrofl.inference.definition.seeds import Seeds
    from pyrofl.inference.engine.federate import federate
    from pyrofl.inference.engine.state import RoundState
    from pyrofl.inference.evaluation.evaluate import evaluate
    from pyrofl.inference.fit import fit
    from pyrofl.inference.fitted_run.chains import Chains
    from pyrofl.inference.fitted_run.loading import load
    from pyrofl.inference.fitted_run.run import Run
    from pyrofl.inference.membership import join, leave
    from pyrofl.inference.posteriors.arviz import to_arviz
    from pyrofl.inference.posteriors.draws import posterior
    from pyrofl.nets import Network
    from pyrofl.tensors import Tensors

__version__ = version("pyrofl")

register(
    {
        "checks of arrays": "pyrofl.data.tables.array_checks:array_warnings",
        "checks of frames": "pyrofl.data.tables.row_checks:frame_copy_warnings",
        "checks of words": "pyrofl.data.tables.data_quality:word_warning",
        "checks of units": "pyrofl.data.tables.array_checks:unit_warnings",
        "constants": "pyrofl.inference.definition.description:constants_hash",
        "clients of rows": "pyrofl.data.tables.owners:named_clients",
        "engine ray": "pyrofl.inference.transport.start:ray_engine_starter",
        "executor": "pyrofl.inference.acceleration.grouped_training:run_phases_accelerated",
        "figure of rows": "pyrofl.figures:partition",
        "figure of run": "pyrofl.figures.runs:overview",
        "preprocessor": "pyrofl.data.tables.preprocessor:Preprocessor",
        "privacy": "pyrofl.inference.privacy.differential_privacy:with_privacy",
        "private data": "pyrofl.inference.privacy.preparation:refuse_preparation",
        "unrecorded updates": "pyrofl.inference.acceleration.recordings:recording_advice",
        "summary of columns": "pyrofl.data.tables.column_summary:summarize_columns",
        "validation": "pyrofl.inference.validation.validate:validate_method",
    }
)

__all__ = [
    "Aggregator",
    "Batch",
    "Chains",
    "Client",
    "ClosedFormUpdate",
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
    "compare",
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
    "adam": "pyrofl.inference.definition.optim",
    "Aggregator": "pyrofl.inference.definition.aggregator",
    "Batch": "pyrofl.data",
    "Chains": "pyrofl.inference.fitted_run.chains",
    "Client": "pyrofl.inference.transport",
    "ClosedFormUpdate": "pyrofl.inference.definition.method",
    "compare": "pyrofl.experiments.comparison",
    "conformal": "pyrofl.inference.conformal.conformal",
    "elbo": "pyrofl.inference.definition.elbo",
    "evaluate": "pyrofl.inference.evaluation.evaluate",
    "federate": "pyrofl.inference.engine.federate",
    "Federation": "pyrofl.data",
    "fit": "pyrofl.inference.fit",
    "get_data_flow": "pyrofl.inference.data_flow",
    "get_dependencies": "pyrofl.inference.dependencies",
    "GradientStep": "pyrofl.inference.definition.method",
    "hierarchical": "pyrofl.models.hierarchical",
    "join": "pyrofl.inference.membership",
    "kaplan_meier": "pyrofl.models.regression.kaplan_meier",
    "leave": "pyrofl.inference.membership",
    "load": "pyrofl.inference.fitted_run.loading",
    "Method": "pyrofl.inference.definition.method",
    "Network": "pyrofl.nets",
    "Phase": "pyrofl.inference.definition.method",
    "plan": "pyrofl.inference.planning",
    "posterior": "pyrofl.inference.posteriors.draws",
    "Preprocessor": "pyrofl.data.tables.preprocessor",
    "Privacy": "pyrofl.inference.definition.budget",
    "recordings": "pyrofl.inference.acceleration.recordings",
    "regression": "pyrofl.models.regression",
    "RegressionClient": "pyrofl.models.regression.remote",
    "RegressionServer": "pyrofl.models.regression.remote",
    "rehearse": "pyrofl.models.regression.rehearsal",
    "report": "pyrofl.reports.report",
    "RoundState": "pyrofl.inference.engine.state",
    "Run": "pyrofl.inference.fitted_run.run",
    "Seeds": "pyrofl.inference.definition.seeds",
    "Server": "pyrofl.inference.transport",
    "sgd": "pyrofl.inference.definition.optim",
    "SiteRules": "pyrofl.inference.transport.site_rules",
    "survival_counts": "pyrofl.models.regression.kaplan_meier",
    "Tensors": "pyrofl.tensors",
    "to_arviz": "pyrofl.inference.posteriors.arviz",
    "to_pyro": "pyrofl.inference.pyro_pair",
    "tune": "pyrofl.inference.tuning.tune",
    "validate_method": "pyrofl.inference.validation.validate",
}
"""name after `pyrofl.` -> the module of the function or class of this name."""


def __getattr__(name: str) -> Any:
    """Import and return a module or function of the package when it is first accessed."""
    if name in FUNCTIONS:
        globals()[name] = value = getattr(import_module(FUNCTIONS[name]), name)
        return value
    if name not in MODULES:
        raise AttributeError(f"module 'pyrofl' has no attribute {name!r}")
    globals()[name] = value = import_module(MODULES[name])
    return value


def __dir__() -> list[str]:
    """Return the public names of the package, including modules not yet imported."""
    return sorted([*__all__, *MODULES, *FUNCTIONS, "__version__"])
