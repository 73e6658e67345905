"""What `check` refuses, each with what it would have given in silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from torch import Generator, Tensor, nn
from torch.nn.functional import softplus

from pyrofl.cli.methods import builds
from pyrofl.data import Batch, Federation
from pyrofl.inference.elbo import elbo
from pyrofl.inference.facts import PER_CLIENT, POSITIVE, SHARED
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.inference.mistakes import check
from pyrofl.inference.optim import sgd
from pyrofl.inference.programs import Program
from pyrofl.inference.servers import Pooled, by_size
from pyrofl.models import fedavg, likelihoods
from pyrofl.nets import Network
from pyrofl.tensors import Tensors


def numbers() -> Federation:
    """Return three clients of 20, 7 and 1 rows, y around 1 + client."""
    rng = torch.Generator().manual_seed(0)
    rows = torch.arange(28).split([20, 7, 1])
    y = torch.cat([j + 1 + torch.randn(len(r), generator=rng).double() for j, r in enumerate(rows)])
    return Federation(y[:, None] * 0 + 1, y, rows, rows)


def normal(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Model each client's rows as Normal(theta, 1)."""
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Guess a normal."""
    with batch.clients():
        pyro.sample("theta", dist.Normal(local["q/mu"], softplus(local["q/pi"])))


def method(model: Program = normal, guide: Program = guide, **changes: object) -> Method:
    def init(generator: Generator, clients: int) -> Tensors:
        zero = torch.zeros((), dtype=torch.float64)
        return {"q/mu": zero, "q/pi": zero}

    step = Step("q/*", sgd(0.01), elbo(8))
    made = Method(init, model, guide, (Phase((step,), 5, 2),), Pooled({"*": by_size}))
    return replace(made, **changes)


def own_plate(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        with pyro.plate("rows", batch.y.shape[1], dim=-1):
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def no_plate(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def in_rows(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients(), batch.rows():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def guide_in_rows(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients(), batch.rows():
        pyro.sample("theta", dist.Normal(local["q/mu"], softplus(local["q/pi"])))


def with_param(received: Tensors, local: Tensors, batch: Batch) -> None:
    sd = pyro.param("sd", torch.ones((), dtype=torch.float64))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, sd), obs=batch.y)


def prior_of_rows(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(batch.x[..., 0].mean(1, keepdim=True), 10.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def negative_share(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        pyro.sample("p", dist.Dirichlet(torch.tensor([2.0, -1.0])).mask(False))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def guide_of_shares(received: Tensors, local: Tensors, batch: Batch) -> None:
    guide(received, local, batch)
    with batch.clients():
        pyro.sample("p", dist.Dirichlet(torch.ones(2, dtype=torch.float64)))


def mean_of_rows(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        with batch.rows():
            centre = batch.x[..., 0] - batch.x[..., 0].mean(1, keepdim=True)
            pyro.sample("y", dist.Normal(theta + centre, 1.0), obs=batch.y)


def negative(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, -1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"model": own_plate}, "observed site 'y' is not inside batch.rows()"),
        ({"model": no_plate}, "observed site 'y' is not inside batch.rows()"),
        (
            {"model": in_rows, "guide": guide_in_rows},
            "latent site 'theta' is inside batch.rows(), and its guide",
        ),
        ({"model": with_param}, "'sd' is a pyro.param, which no step moves"),
        ({"model": prior_of_rows}, "prior of 'theta' depends on the rows of the batch"),
        ({"model": mean_of_rows}, "likelihood of 'y' in one row depends on other rows"),
        ({"model": negative}, "scale of the distribution of 'theta' is -1; expected GreaterThan"),
        (
            {"model": negative_share, "guide": guide_of_shares},
            "distribution of 'p' is 2, -1; expec",
        ),
        ({"facts": {"theta thetta": SHARED}}, "'thetta' in the fact .* did you mean theta?"),
        ({"facts": {"server/tabel": PER_CLIENT}}, "'server/tabel' in the fact .* matches no name"),
        ({"facts": {"q/mue": POSITIVE}}, "'q/mue' in the fact .* did you mean q/mu?"),
    ],
)
def test_what_would_be_wrong_in_silence_is_refused(wrong, told):
    check(method(), numbers())
    pyro.get_param_store().clear()
    with pytest.raises(
        ValueError, match=told.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")
    ):
        check(method(**wrong), numbers())
    assert len(pyro.get_param_store()) == 0


@pytest.mark.parametrize("names", ["q/* pl/*", "q/mu q/pie"])
def test_every_pattern_of_a_step_must_match(names):
    step = Step(names, sgd(0.01), elbo(8))
    with pytest.raises(ValueError, match=r"in the step .* of phases matches no name; "):
        check(method(phases=(Phase((step,), 5, 2),)), numbers())


def test_a_tensor_that_nothing_moves_is_named():
    step = Step("q/mu", sgd(0.01), elbo(8))
    with pytest.warns(UserWarning, match="the guide reads q/pi, and no step or move changes it"):
        check(method(phases=(Phase((step,), 5, 2),)), numbers())


class Mixing(nn.Module):
    """Layers of which one mixes the rows that run together."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.mix = nn.Linear(toys.FEATURES, toys.CLASSES), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.mix(x))


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x - x.mean(0),
        lambda x: x.softmax(0),
        lambda x: nn.functional.batch_norm(x, None, None, training=True),
        lambda x: x + x.flip(0),
    ],
)
def test_networks_that_mix_rows_are_refused(mix):
    with pytest.raises(ValueError, match="depends on other rows or on padding"):
        check(fedavg.build(Network(Mixing(mix))), toys.blobs())


def test_a_site_outside_the_plate_of_clients_is_refused_unless_one_runs_alone():
    def outside(received: Tensors, local: Tensors, batch: Batch) -> None:
        scale = pyro.sample("scale", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        with batch.clients(), batch.rows():
            pyro.sample("y", dist.Normal(scale, 1.0), obs=batch.y)

    def guess(received: Tensors, local: Tensors, batch: Batch) -> None:
        pyro.sample("scale", dist.Normal(local["q/mu"][0, 0], 1.0))

    with pytest.raises(ValueError, match=r"outside batch\.clients"):
        check(method(outside, guess), numbers())


@pytest.mark.parametrize("name", sorted(builds()))
def test_every_method_passes(name):
    extra = {"unlabelled": toys.blobs().x[-30:]} if name == "fedbe" else {}
    check(builds()[name](toys.net(), **extra), toys.blobs(held_out=1))
    if name not in ("pvi", "fedbe"):
        likelihood = likelihoods.normal()
        check(builds()[name](toys.build("mlp:3", (1,), 1), likelihood=likelihood), numbers())
