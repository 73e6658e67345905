"""What `check` refuses, each with what it would have given in silence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from means import guide, method, normal, numbers
from promises import others_slow
from pyro import poutine
from torch import Generator, Tensor, nn
from torch.nn.functional import softplus

from pyrofl.data import Batch, Cohort, Federation
from pyrofl.experiments.methods import builds
from pyrofl.inference.aggregation import Aggregator, by_size, weight_by
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.metadata import PER_CLIENT, POSITIVE, SHARED, Metadata
from pyrofl.inference.definition.method import GradientStep, Phase
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.programs import Program
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.validation.validate import validate_method
from pyrofl.models import fedavg, likelihoods
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, spread_out


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
            center = batch.x[..., 0] - batch.x[..., 0].mean(1, keepdim=True)
            pyro.sample("y", dist.Normal(theta + center, 1.0), obs=batch.y)


def mean_of_responses(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y - batch.y.mean())


def axis_too_many(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        spread = softplus(local["q/pi"])[:, None]
        pyro.sample("theta", dist.Normal(local["q/mu"][:, None], spread))


def negative(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, -1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def with_factor(cost: Callable[[Tensor, Batch], Tensor], where: str) -> Program:
    """Return the model with a cost of its own, "outside" the plates, or of "clients" or "rows"."""

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
            if where == "clients":
                pyro.factor("cost", cost(theta, batch))
            with batch.rows():
                pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)
                if where == "rows":
                    pyro.factor("cost", cost(theta, batch))
        if where == "outside":
            pyro.factor("cost", cost(theta, batch))

    return model


def of_all_rows(theta: Tensor, batch: Batch) -> Tensor:
    return -(theta - batch.x[..., 0]).square().sum(1, keepdim=True)


def of_rows(theta: Tensor, batch: Batch) -> Tensor:
    return -(theta - batch.x[..., 0]).square()


def of_theta(theta: Tensor, batch: Batch) -> Tensor:
    return -theta.square()


def guide_with_factor(received: Tensors, local: Tensors, batch: Batch) -> None:
    guide(received, local, batch)
    with batch.clients():
        pyro.factor("cost", torch.zeros(len(batch), 1), has_rsample=True)


def writes_into_rows(received: Tensors, local: Tensors, batch: Batch) -> None:
    batch.x.add_(1.0)
    normal(received, local, batch)


def misshapen(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        with batch.rows():
            mean = theta * (batch.x @ torch.ones(3, dtype=batch.x.dtype))
            pyro.sample("y", dist.Normal(mean, 1.0), obs=batch.y)


def of_some_rows(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        with pyro.plate("some", batch.y.shape[1], subsample_size=2, dim=-1) as at:
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y[:, at])


def of_known_rows(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Hide a row, which is no mistake."""
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        with batch.rows(), poutine.mask(mask=batch.x[..., 0] > -1e9):
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def looked_up(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Read x as a place in a table, of which there are as many as somebody has."""
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        with batch.rows():
            at = (batch.x[..., 0] > 0).long() + torch.isin(batch.x[..., 0], TABLE).long() - 1
            offset = torch.tensor([0.0, 1.0]).double()[at.where(at >= 0, 2)]
            pyro.sample("y", dist.Normal(theta + offset, 1.0), obs=batch.y)


TABLE = numbers().x[:, 0]


@pytest.mark.parametrize("fine", [of_known_rows, looked_up])
def test_rows_may_be_hidden_and_looked_up(fine):
    validate_method(method(fine), numbers())


def counts(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        with batch.rows():
            pyro.sample("y", dist.Poisson(theta.exp() + 0 * batch.y), obs=batch.y)


@pytest.mark.parametrize(("where", "cost"), [("clients", of_theta), ("rows", of_rows)])
def test_factors_of_clients_and_of_rows_may_be(where, cost):
    validate_method(method(with_factor(cost, where)), numbers())


def at_risk(theta: Tensor, batch: Batch) -> Tensor:
    """Return a partial likelihood in the manner of Cox, which compares the rows of a client."""
    later = (batch.y[:, None] >= batch.y[:, :, None]) & batch.mask[:, None]
    cost = theta * batch.x[..., 0]
    total = cost[..., None, :].masked_fill(~later, -torch.inf).logsumexp(-1)
    return torch.where(batch.mask, cost - total, 0.0).sum(-1, keepdim=True)


def test_a_cost_of_a_client_may_compare_its_rows_where_every_step_has_all():
    model, step = with_factor(at_risk, "clients"), method().phases[0].updates
    whole = (Phase(step, 5, None),)
    validate_method(method(model, phases=whole), numbers())
    told = "'cost' of a client or row depends on other rows or on padding"
    for wrong in (
        method(model),  # minibatches of two rows
        method(with_factor(of_all_rows, "clients"), phases=whole),  # counts padding
        method(with_factor(of_all_rows, "rows"), phases=whole),
    ):
        with pytest.raises(ValueError, match=told):
            validate_method(wrong, numbers())


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"model": with_factor(of_theta, "outside")}, "pyro.factor 'cost' is outside batch.clie"),
        ({"model": with_factor(of_all_rows, "clients")}, "pyro.factor 'cost' of a client or row"),
        ({"model": with_factor(of_all_rows, "rows")}, "pyro.factor 'cost' of a client or row"),
        (
            {"guide": guide_with_factor},
            "pyro.factor 'cost' is in the guide, where it has no effect",
        ),
        ({"model": writes_into_rows}, "a program writes into 'batch.x' in place; "),
        ({"model": misshapen}, "fails on the first rows of 'client 0', x float64 "),
        ({"model": counts}, "a response 'y' of the data is "),
        (
            {"aggregate": Aggregator({"q/mu": by_size, "q/pie": by_size})},
            "'q/pie' in the aggregation matches no",
        ),
        ({"model": own_plate}, "observed site 'y' is not inside batch.rows()"),
        ({"model": no_plate}, "observed site 'y' is not inside batch.rows()"),
        ({"model": of_some_rows}, "site 'y' is in plate 'some', which subsamples 2 of 3 entries"),
        (
            {"model": in_rows, "guide": guide_in_rows},
            "latent site 'theta' is inside batch.rows(), but its guide",
        ),
        ({"model": with_param}, "'sd' is a pyro.param, which no step trains"),
        ({"model": prior_of_rows}, "prior of 'theta' depends on the rows of the batch"),
        ({"model": mean_of_rows}, "likelihood of 'y' in one row depends on other rows"),
        ({"model": mean_of_responses}, "likelihood of 'y' in one row depends on other rows"),
        (
            {"guide": axis_too_many, "phases": (Phase((GradientStep("q/*", sgd(0.01), elbo()),)),)},
            "latent site 'theta' has batch shape (2, 2, 1), but axis -3 has no plate",
        ),
        ({"model": negative}, "scale of the distribution of 'theta' is -1; expected GreaterThan"),
        (
            {"model": negative_share, "guide": guide_of_shares},
            "distribution of 'p' is 2, -1; expec",
        ),
        (
            {"metadata": Metadata({"theta thetta": SHARED})},
            "'thetta' in the metadata .* did you mean theta?",
        ),
        (
            {"metadata": Metadata({"server/tabel": PER_CLIENT})},
            "'server/tabel' in the metadata .* matches no name",
        ),
        (
            {"metadata": Metadata({"q/mue": POSITIVE})},
            "'q/mue' in the metadata .* mean q/mu?",
        ),
    ],
)
def test_what_would_be_wrong_in_silence_is_refused(wrong, told):
    validate_method(method(), numbers())
    pyro.get_param_store().clear()
    with pytest.raises(
        ValueError, match=told.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")
    ):
        validate_method(method(**wrong), numbers())
    assert len(pyro.get_param_store()) == 0


def point(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        pyro.sample("theta", dist.Delta(local["q/mu"]))


@pytest.mark.parametrize("plates", ["rows", "own plate", "no plate"])
def test_rows_outside_their_plate_would_count_by_the_minibatch(plates):
    """Twenty rows of 1.6 and a prior N(0, 1): theta is 20 * 1.6 / 21, and not 2 * 1.6 / 3."""

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        own = pyro.plate("rows", batch.y.shape[1], dim=-1)
        with batch.clients():
            theta = pyro.sample("theta", dist.Normal(torch.zeros(len(batch), 1).double(), 1.0))
            with {"rows": batch.rows(), "own plate": own, "no plate": nullcontext()}[plates]:
                pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)

    y, rows = torch.full((20,), 1.6).double(), (torch.arange(20),)
    data = Federation(y[:, None], y, rows, rows)
    phase = Phase((GradientStep("q/mu", sgd(0.04), elbo()),), 10, 2)
    made = method(model, point, phases=(phase,))
    found = next(federate(made, data, 1, check=False)).server["q/mu"]
    expected = 20 * 1.6 / 21 if plates == "rows" else 2 * 1.6 / 3
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-3, atol=0)
    if plates != "rows":
        with pytest.raises(ValueError, match=r"not inside batch\.rows\(\); put"):
            federate(made, data, 1)


def test_a_misspelt_pattern_would_freeze_what_it_means():
    step = GradientStep("q/mu q/pie", sgd(0.01), elbo(8))
    made = method(phases=(Phase((step,), 5, 2),))
    state = next(federate(made, numbers(), 1, check=False))
    assert state.server["q/mu"] != 0
    assert state.server["q/pi"] == 0, "as it began"
    with pytest.raises(ValueError, match="did you mean q/pi"):
        federate(made, numbers(), 1)


@pytest.mark.parametrize("names", ["q/* pl/*", "q/mu q/pie"])
def test_every_pattern_of_a_step_must_match(names):
    step = GradientStep(names, sgd(0.01), elbo(8))
    with pytest.raises(ValueError, match=r"in the step .* of phases matches no name; "):
        validate_method(method(phases=(Phase((step,), 5, 2),)), numbers())


def test_a_tensor_that_nothing_moves_is_named():
    step = GradientStep("q/mu", sgd(0.01), elbo(8))
    with pytest.warns(UserWarning, match="q/pi is read by the guide but never updated"):
        validate_method(method(phases=(Phase((step,), 5, 2),)), numbers())


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
        validate_method(fedavg.build(Network(Mixing(mix))), toys.blobs())


def test_a_site_outside_the_plate_of_clients_is_refused_unless_one_runs_alone():
    def outside(received: Tensors, local: Tensors, batch: Batch) -> None:
        scale = pyro.sample("scale", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        with batch.clients(), batch.rows():
            pyro.sample("y", dist.Normal(scale, 1.0), obs=batch.y)

    def guess(received: Tensors, local: Tensors, batch: Batch) -> None:
        pyro.sample("scale", dist.Normal(local["q/mu"][0, 0], 1.0))

    with pytest.raises(ValueError, match=r"outside batch\.clients"):
        validate_method(method(outside, guess), numbers())


@pytest.mark.parametrize("name", others_slow(sorted(builds())))
def test_every_method_passes(name):
    extra = {"server_data": toys.blobs().x[-30:]} if name in ("fedbe", "predbayes") else {}
    validate_method(builds()[name](toys.net(), **extra), toys.blobs(held_out=1))
    if name not in ("pvi", "fedbe", "predbayes"):
        numeric: dict[str, Any] = {"likelihood": likelihoods.normal()}
        if name == "fedgvi":
            numeric["loss"] = "beta"  # the default is of classes alone
        validate_method(builds()[name](toys.build("mlp:3", (1,), 1), **numeric), numbers())


def test_a_network_with_too_few_outputs_is_refused_whichever_rows_are_looked_at():
    data = toys.blobs()
    few = Network(nn.Linear(toys.FEATURES, toys.CLASSES - 1))
    first = torch.cat([data.train[j][:3] for j in range(data.clients)])
    for y in (data.y, data.y.index_fill(0, first, 0)):
        with pytest.raises(ValueError, match=r"a response 'y' of the data is 4, outside the supp"):
            validate_method(fedavg.build(few), replace(data, y=y))


def test_a_server_state_of_all_clients_is_looked_at_by_its_rows():
    """A model that reads a table [J] of the server at its client's row: NaN where nobody looks."""

    def init(generator: Generator, clients: int) -> Tensors:
        zero = torch.zeros((), dtype=torch.float64)
        return {"q/mu": zero, "q/pi": zero, "server/sd": torch.ones(clients, dtype=torch.float64)}

    def download(server: Tensors, cohort: Cohort) -> Tensors:
        spread = spread_out({n: server[n] for n in ("q/mu", "q/pi")}, len(cohort.ids))
        return spread | {"sd": server["server/sd"][cohort.ids]}

    def scaled(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            theta = pyro.sample("theta", dist.Normal(0.0, received["sd"]))
            with batch.rows():
                pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)

    made = method(
        scaled,
        init=init,
        download=download,
        upload=lambda received, local: {n: local[n] for n in ("q/mu", "q/pi")},
        metadata=Metadata({"server/sd": PER_CLIENT}),
    )
    server = made.init(torch.Generator(), 3)
    validate_method(made, numbers(), server_state=server)
    server["server/sd"][2] = -1.0  # of the smallest client, the second of those looked at
    with pytest.raises(ValueError, match="scale of the distribution of 'theta' is -1; expected G"):
        validate_method(made, numbers(), server_state=server)


def test_a_merge_that_makes_a_new_name_is_refused():
    def upload(received: Tensors, local: Tensors) -> Tensors:
        return {"center": local["q/mu"]}  # the server's own would stay as it is

    wrong = method(upload=upload, aggregate=Aggregator({"*": by_size}))
    told = "the aggregation adds 'center' to the server's state, which has q/mu, q/pi; name"
    with pytest.raises(ValueError, match=told):
        validate_method(wrong, numbers())
    other = replace(wrong, upload=lambda received, local: {"server/seen": local["q/mu"]})
    validate_method(other, numbers())


def test_a_view_that_sets_an_unknown_name_is_refused():
    def at_zero(received: Tensors, local: Tensors) -> Tensors:
        return {**local, "mu/q": 0 * local["q/mu"]}  # no program reads it

    for view in (at_zero, lambda received, local: [local, at_zero(received, local)]):
        with pytest.raises(
            ValueError, match="view 'global' returns 'mu/q', which is neither received"
        ):
            validate_method(method(views={"global": view}), numbers())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"aggregate": Aggregator({"*": weight_by("tau")})},
            r"the weight of '\*' raises KeyError: 'tau'; expected one of q/mu, q/pi",
        ),
        ({"views": {"global": lambda received, local: None}}, "view 'global' returns is a NoneTy"),
        (
            {"views": {"own": lambda received, local: {"q/mu": local["mu"]}}},
            "view 'own' raises KeyError: 'mu' in .*; expected one of q/mu, q/pi",
        ),
    ],
)
def test_a_merge_or_view_that_fails_is_refused_in_a_line(changes, told):
    with pytest.raises(ValueError, match=told):
        validate_method(method(**changes), numbers())


def test_a_training_row_of_two_clients_is_reported():
    data = numbers()
    first, second, *others = data.train
    both = replace(data, train=(first, torch.cat([second, first[:1]]), *others))
    names = " and ".join(data.names[:2])
    line = f"1 training row belongs to .* row {int(first[0])} to {names}; each client"
    with pytest.warns(UserWarning, match=line):
        validate_method(method(), both)
