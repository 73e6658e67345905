"""Mistakes that torch, Pyro or Python would report in their own words: refused in one line."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pyro
import pytest
import torch
import toys
from means import method, numbers
from torch import Tensor, nn

from pyrofl import Phase, elbo, fit
from pyrofl.data import Cohort
from pyrofl.inference.definition.method import Method
from pyrofl.models import fedamp, fedavg, fedlap, pfedgp, pvi
from pyrofl.nets import Network
from pyrofl.tensors import Tensors


def with_step(**changes: Any) -> Method:
    step = replace(method().phases[0].updates[0], **changes)
    return method(phases=(Phase((step,), 5, 2),))


def with_kl(result: Any) -> Method:
    return with_step(loss=elbo(kl=lambda received, local, batch: result))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: with_step(optim=pyro.optim.Adam({"lr": 0.1})), "optim returns a NoneType; expect"),
        (lambda: with_step(optim=torch.optim.LBFGS), "optim returns a LBFGS; expected an optimi"),
        (lambda: with_kl(torch.tensor(0.1)), r"kl returns shape \[\]; expected a tensor of shape"),
        (lambda: with_kl(0.1), "kl returns a float; expected a tensor of shape"),
    ],
)
def test_parts_of_a_gradient_step_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(build(), numbers(), 1, progress=False)


def test_an_optimizer_of_torch_is_accepted() -> None:
    kind = with_step(optim=lambda tensors: torch.optim.AdamW(tensors, lr=0.01))
    assert fit(kind, numbers(), 1, progress=False).state.number == 1


def test_unknown_arguments_are_compared_with_those_of_fit() -> None:
    """Not with those of `federate`, which does not have them all."""
    with pytest.raises(ValueError, match="unknown argument 'progess'; did you mean progress"):
        fit(method(), numbers(), 1, progess=False)
    with pytest.raises(ValueError, match="unknown argument 'chunksize'; did you mean chunk_size"):
        fit(method(), numbers(), 1, chunksize=2)


def test_unknown_metrics_are_named() -> None:
    scores = fit(fedavg.build(toys.net()), toys.blobs(), 1, progress=False).evaluate()
    with pytest.raises(ValueError, match="unknown metric 'acuracy'; did you mean accuracy"):
        scores.mean("acuracy")


def test_clients_are_named_and_not_numbered() -> None:
    with pytest.raises(ValueError, match="unknown client 0; expected one of client 0, client 1"):
        fedavg.build(toys.net()).to_pyro(toys.blobs((3, 8)), 0)


def test_methods_say_why_they_have_no_pair() -> None:
    with pytest.raises(ValueError, match=r"to_pyro of pfedgp is not possible: .* half of its rows"):
        pfedgp.build(toys.net()).to_pyro(toys.blobs((3, 8)))


def broken(server: Tensors, message: Tensors, cohort: Cohort, generator: Any) -> Tensors:
    """Return numbers that are NaN."""
    return {n: v.mean(0) * torch.nan for n, v in message.items()}


def test_losses_that_are_nan_do_not_depend_on_ids() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = fit(method(aggregate=broken), numbers(), 1, progress=False)
    assert run.status.kind == "diverged"


class Scaled(nn.Module):
    """Linear layer whose outputs are multiplied by a parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(toys.FEATURES, toys.CLASSES)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.scale


@pytest.mark.parametrize("build", [pvi.build, fedlap.build, fedamp.build])
def test_a_parameter_may_have_no_axes(build: Any) -> None:
    run = fit(build(Network(Scaled())), toys.blobs((3, 8)), 1, progress=False)
    assert run.posterior(2)["scale"].shape in ((2,), (2, 2))
