"""Fits of all methods with priors and guides of every kind, on a small federation."""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import promises
import pyro.distributions as dist
import torch
import toys
from pyro.infer.autoguide import AutoNormal

import pyrofl
import pyrofl.models
from pyrofl.data import Federation
from pyrofl.experiments.settings import argument_types
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.models import guides, priors
from pyrofl.models.guides import dropout, simplex
from pyrofl.models.guides.automatic import from_pyro
from pyrofl.models.priors import learned_scales

MODULES = {
    m.name: import_module(f"pyrofl.models.{m.name}")
    for m in pkgutil.iter_modules(pyrofl.models.__path__)
}
BUILDS: dict[str, Callable[..., Method]] = {
    n: module.build for n, module in MODULES.items() if hasattr(module, "build")
}
QUICK = {"epochs": 1, "head_epochs": 1, "base_epochs": 1, "own_epochs": 1, "num_particles": 2}
QUICK |= {"distil_epochs": 1, "burn_in": 0, "tune_steps": 1, "steps": 2}


def function(name: str, shape: Any, received: Any, local: Any, batch: Any) -> Any:
    """Return a normal prior."""
    zero = batch.size.new_zeros(shape)
    return dist.Normal(zero, zero + 0.5).to_event(len(shape))


PRIORS: dict[str, Callable[[], Any]] = {
    "Normal(0, 1)": lambda: dist.Normal(0.0, 1.0),
    "Normal(0, 0.1)": lambda: dist.Normal(0.0, 0.1),
    "Laplace(0, 1)": lambda: dist.Laplace(0.0, 1.0),
    "StudentT(3)": lambda: dist.StudentT(3.0),
    "Cauchy(0, 1)": lambda: dist.Cauchy(0.0, 1.0),
    "HalfNormal(1)": lambda: dist.HalfNormal(1.0),
    "Categorical": lambda: dist.Categorical(torch.ones(3)),
    "Dirichlet": lambda: dist.Dirichlet(torch.full((5,), 2.0)),
    "Normal [7]": lambda: dist.Normal(torch.zeros(7), 1.0),
    "dist.Normal": lambda: dist.Normal,
    "dist.Laplace": lambda: dist.Laplace,
    "dist.StudentT": lambda: dist.StudentT,
    "dist.Gamma": lambda: dist.Gamma,
    "dist.LogNormal": lambda: dist.LogNormal,
    "Horseshoe": lambda: priors.Horseshoe,
    "mixture()": priors.mixture,
    "student_t(3)": lambda: priors.student_t(3.0),
    "learned()": learned_scales.learned,
    "fixed(Normal)": lambda: priors.fixed(dist.Normal, 0.0, 1.0),
    "fixed(Laplace)": lambda: priors.fixed(dist.Laplace, 0.0, 1.0),
    "flat": lambda: priors.flat,
    "by_name": lambda: priors.by_name({"head.*": priors.fixed(), "*": priors.flat}),
    "by_name missing": lambda: priors.by_name({"other.*": priors.fixed()}),
    "function": lambda: function,
    "function of (x, y, z)": lambda: lambda x, y, z: dist.Normal(x, y),
    "3.0": lambda: 3.0,
    "None": lambda: None,
    "text": lambda: "normal",
}
GUIDES: dict[str, Callable[[], Any]] = {
    "delta": lambda: guides.delta,
    "mean_field": lambda: guides.mean_field,
    "log_mean_field": lambda: guides.log_mean_field,
    "full_covariance": lambda: guides.full_covariance,
    "low_rank(2)": lambda: guides.low_rank(2),
    "low_rank": lambda: guides.low_rank,
    "copula": lambda: guides.copula,
    "flow(2, 4)": lambda: guides.flow(2, 4),
    "log_variance": lambda: dropout.log_variance,
    "log_alpha": lambda: dropout.log_alpha,
    "softmax": lambda: simplex.softmax,
    "dirichlet": lambda: simplex.dirichlet,
    "from_pyro": lambda: from_pyro(AutoNormal, data(), model=toys.tempered),
    "AutoNormal": lambda: AutoNormal,
    "Normal(0, 1)": lambda: dist.Normal(0.0, 1.0),
    "3.0": lambda: 3.0,
    "text": lambda: "mean_field",
}
ARGUMENTS = {"prior": PRIORS, "guide": GUIDES}
CELLS = tuple(
    (method, argument, value)
    for argument, values in ARGUMENTS.items()
    for method, build in BUILDS.items()
    if argument in argument_types(build)
    for value in values
)


@cache
def data() -> Federation:
    return toys.blobs((5, 9, 4))


def make(method: str, **settings: Any) -> Method:
    """Build a method with quick settings."""
    quick = {n: v for n, v in QUICK.items() if n in argument_types(BUILDS[method])}
    return BUILDS[method](
        toys.net("mlp:2"), **{**promises.of(method).settings, **quick, **settings}
    )


def refusal(error: BaseException) -> str:
    """Return the line of a refusal; "" if it is no ValueError of one line."""
    line = str(error)
    return line if type(error) is ValueError and line and "\n" not in line else ""


def fitted(method: Method) -> str:
    """Fit two rounds and draw from the posterior; return what is not finite, or ""."""
    *_, state = federate(method, data(), 2, chunk_size=3)
    bad = [n for n, v in state.loss.items() if not bool(v.isfinite().all())]
    with warnings.catch_warnings():  # of draws after two rounds
        warnings.simplefilter("ignore")
        found = pyrofl.Run(method, data(), state).to_arviz(2)
    drawn = found["posterior"].data_vars
    bad += [str(n) for n, v in drawn.items() if not bool(torch.tensor(v.values).isfinite().all())]
    return f"not finite: {', '.join(bad)}" if bad else ""


def outcome(method: str, argument: str, value: str) -> tuple[str, str]:
    """Return what comes of one cell: works, refused, raised at build, or error later."""
    given = ARGUMENTS[argument][value]()
    try:
        made = make(method, **{argument: given})
        if value == "learned()":
            made = learned_scales.learning(made, toys.net("mlp:2").shapes)
    except Exception as error:
        return ("refused", line) if (line := refusal(error)) else ("bad refusal", repr(error))
    try:
        bad = fitted(made)
    except Exception as error:
        return "later", f"{type(error).__name__}: {error}".partition("\n")[0]
    return ("not finite", bad) if bad else ("works", "")
