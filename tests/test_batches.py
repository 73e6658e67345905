"""The posterior does not depend on how rows and clients are batched; one contract for all methods.

The rows of each client are alike, so a minibatch has the mean gradient of all rows. Clients have 4
to 6 rows, hence two minibatches of at most 3 rows, the last of which is shorter. One epoch of them
thus makes the same steps, with the same noise, as two epochs of all rows, and what a method adds up
over an epoch is the same: the results are equal up to rounding of sums of a few terms. The model is
linear with normal noise, so posteriors are normal; methods that need classes are logistic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from promises import others_slow
from regressions import MEAN, PRIOR, SD, q_of
from test_contract import METHODS, MODULES
from torch import Tensor, nn

from pyrofl.data import Batch, Federation
from pyrofl.data.loaders.conjugate import ConjugateTask, conjugate
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import bernoulli, fixed
from pyrofl.models import fedep, fisher, fola, guides, likelihoods, pvi
from pyrofl.models.shared.gaussians import Normals
from pyrofl.nets import Network
from pyrofl.tensors import Tensors

SIZES = 4, 6, 5, 6
HALF = 2  # of the clients
ROUNDING = 1e-9  # of double precision, after some dozens of steps


class Two(nn.Module):
    """Two weights that all clients share, and one of each client."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Parameter(torch.zeros(2))
        self.own = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ torch.cat([self.common, self.own]))[:, None]


def alike(classes: tuple[str, ...] = ()) -> Federation:
    """Return clients, all rows of each of which are the same."""
    source = torch.Generator().manual_seed(3)
    x = torch.randn(len(SIZES), 3, generator=source, dtype=torch.float64)
    y = torch.randn(len(SIZES), generator=source, dtype=torch.float64)
    each = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    rows = torch.arange(len(each)).split(SIZES)
    none = tuple(torch.arange(0) for _ in rows)
    label = (y > 0).long() if classes else y
    return Federation(x[each], label[each], rows, none, classes=classes)


def of_rows(outputs: int = 1) -> Network:
    """Return a linear network that does not start at 0."""
    return Network(nn.Linear(3, outputs, bias=False).double())


SPLIT = partial(Network, Two(), head="own")
PLAIN = {"likelihood": likelihoods.normal()}
LABELS = {"server_data": torch.eye(3, dtype=torch.float64)}
MEAN_FIELD = {"guide": guides.mean_field, "prior": PRIOR}


def task() -> ConjugateTask:
    """Return the regression that `alike` is."""
    data = alike()
    return conjugate([data.x[rows] for rows in data.train], [data.y[rows] for rows in data.train])


@dataclass(frozen=True)
class Case:
    """A method, and names of its settings that count epochs.

    Attributes:
        name: of the method.
        net: makes the network.
        options: settings.
        epochs: name -> epochs of minibatches; twice as many of all rows.
        classes: whether it needs classes.
    """

    name: str
    net: Callable[..., Network] = of_rows
    options: dict[str, object] = field(default_factory=lambda: PLAIN)
    epochs: dict[str, int] = field(default_factory=lambda: {"epochs": 2})
    classes: bool = False

    def method(self, batch: int | None) -> Method:
        """Build the method."""
        epochs = {n: v if batch else 2 * v for n, v in self.epochs.items()}
        net = self.net(2) if self.classes else self.net()
        method: Method = MODULES[self.name].build(net, **self.options, batch=batch, **epochs)
        return method


def case(name: str, net: Callable[..., Network] = of_rows, **options: object) -> Case:
    """Return a case with other settings than the usual ones."""
    return Case(name, net, PLAIN | options)


# A step of lr = 1 solves a normal model, and so do all that follow: PVI's rates fall by steps.
EXACT = {"prior": PRIOR, "lr": 1.0}
OTHERS = {
    "fedavg with a normal": case("fedavg", **MEAN_FIELD),
    "fald, diagonal": case("fald", surrogates="diagonal"),
    "fald, full": case("fald", surrogates="full"),
    "fedep, full": case("fedep", guide=guides.full_covariance),
    "fedep, stateless": case("fedep", stateless=True),
    "fedep, langevin": Case(
        "fedep", options=PLAIN | {"moments": "langevin"}, epochs={"burn_in": 1, "epochs": 3}
    ),
    "fedep, natural": case(
        "fedep", **EXACT, guide=guides.full_covariance, moments="natural", num_particles=8
    ),
    "fisher, full": case("fisher", guide=guides.full_covariance),
    "fola, full": case("fola", guide=guides.full_covariance),
    "fola, multiply": case("fola", multiply=True),
    "pfedmb with a Dirichlet": case("pfedmb", guide="dirichlet", branches=2),
}
OWN = {
    "fedbabu": case("fedbabu", SPLIT),
    "fedbe": Case("fedbe", options=LABELS, classes=True),
    # Samples are means over an epoch, which are all the optimum once SGD has come to rest.
    "fedpa": Case("fedpa", options=PLAIN | {"lr": 0.1}, epochs={"epochs": 400}),
    "fedper": case("fedper", SPLIT),
    "fedpop": Case("fedpop", SPLIT, epochs={"burn_in": 1, "epochs": 3}),
    "fedrep": Case("fedrep", SPLIT, epochs={"epochs": 2, "head_epochs": 2}),
    "lgfedavg": case("lgfedavg", SPLIT, head="own"),
    "metavd": case("metavd", sampling="weights"),  # not the outputs, of each row
    # Its minibatches have three parts of 3 rows, hence all rows.
    "perfedavg": Case("perfedavg", options=PLAIN | {"adapt_steps": 2}, epochs={}),
    # A step predicts half of a minibatch given the other half, hence the kernel is left as it is.
    "pfedgp": case("pfedgp", lr=0.0),
    "pfedmb": case("pfedmb", branches=2),
    "pfedvem": Case("pfedvem", SPLIT, epochs={"base_epochs": 2}),  # the head sees all rows
    "predbayes": Case("predbayes", options=LABELS, epochs={"epochs": 2, "thin": 1}, classes=True),
    "pvi": case("pvi", **EXACT, covariance="full"),
    "virtual": case("virtual", SPLIT, **EXACT, guide=guides.full_covariance),
}
CASES = {name: OWN.get(name, Case(name)) for name in METHODS} | OTHERS


@pytest.mark.parametrize("name", [*others_slow(METHODS), *OTHERS])
def test_minibatches_and_chunks_have_the_result_of_all_rows_at_once(name):
    one = CASES[name]
    data = alike(("a", "b") if one.classes else ())
    some = {"participation": bernoulli(0.7)}
    whole = toys.last(one.method(None), data, 2, **some)
    for chunk in (None, 3):
        parts = toys.last(one.method(3), data, 2, chunk_size=chunk, **some)
        toys.assert_same(parts.server, whole.server, ROUNDING, ROUNDING)
        toys.assert_same(parts.client_states, whole.client_states, ROUNDING, ROUNDING)


SGD = {"lr": 0.1, "momentum": 0.9, "epochs": 150}
FULL = PLAIN | {"prior": PRIOR, "guide": guides.full_covariance, "batch": 3}
ALL_OF_THEM: dict[str, Callable[[Network], Method]] = {
    "pvi": partial(pvi.build, **PLAIN, **EXACT, covariance="full", epochs=2, batch=3, damping=1.0),
    "fedep": partial(fedep.build, **FULL, **SGD, damping=1.0),
    "fedep, natural": partial(
        fedep.build, **FULL, moments="natural", num_particles=8, lr=1.0, epochs=2, damping=1.0
    ),
}


def pooled(some: ConjugateTask, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the weights given the rows of some clients."""
    precision = some.precision[ids].sum(0) + torch.eye(3).double() / SD**2
    pull = sum((some.precision[j] @ some.mean[j] for j in ids), torch.full((3,), MEAN / SD**2))
    return torch.linalg.solve(precision, pull.double()), torch.linalg.inv(precision)


@pytest.mark.parametrize("name", ALL_OF_THEM)
def test_factors_of_partial_participation_reach_the_posterior_of_all(name):
    # The server keeps a factor of each client; in a normal model, that of its last report is exact.
    method, seen = ALL_OF_THEM[name](of_rows()), set[int]()
    for state in federate(method, alike(), 6, participation=fixed(HALF), chunk_size=3):
        assert len(state.reporters.ids) == HALF
        seen |= {*state.reporters.ids.tolist()}
    assert len(seen) == len(SIZES)
    mean, root = Normals(3, True).moments(state.server)
    exact = pooled(task(), [*range(len(SIZES))])
    close(mean, exact[0], 1e-6)
    close(root @ root.T, exact[1], 1e-6)


@pytest.mark.parametrize("build_method", [fisher.build, partial(fola.build, multiply=True)])
def test_one_round_of_some_is_the_posterior_of_their_rows(build_method):
    method = build_method(of_rows(), **FULL, **SGD)
    state = toys.last(method, alike(), 1, participation=bernoulli(0.6), chunk_size=1, seed=1)
    cohort = state.reporters.ids.tolist()
    assert 0 < len(cohort) < len(SIZES)
    mean, covariance = q_of(state.server, "weight")
    exact = pooled(task(), cohort)
    close(mean, exact[0], 1e-6)
    close(covariance, exact[1], 1e-6)


def hierarchy(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Draw clients' weights around common ones."""
    with batch.clients():
        one = torch.ones(1, dtype=batch.x.dtype)
        common = pyro.sample("common", dist.Normal(0 * one, one).expand([3]).to_event(1))
        own = pyro.sample("own", dist.Normal(common, 0.5).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Normal((own * batch.x).sum(-1), 1.0), obs=batch.y)


def test_minibatches_of_a_hierarchical_model_have_the_posterior_of_all_rows():
    data = alike()
    whole, parts = (
        toys.last(
            pvi.hierarchical(
                hierarchy,
                data,
                shared="common",
                num_particles=16,
                batch=batch,
                steps=steps,
                damping=1.0,
            ),
            data,
            3,
            chunk_size=chunk,
        )
        for batch, steps, chunk in ((None, 4, None), (3, 2, 3))
    )
    toys.assert_same(parts.server, whole.server, 1e-8, 1e-8)
    toys.assert_same(parts.client_states, whole.client_states, 1e-8, 1e-8)
