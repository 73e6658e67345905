"""pFedGP: the exact process for regression, and what clients learn together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch import nn
from toys import crossed, last

from pyrofl.data.loaders.conjugate import ConjugateTask, conjugate
from pyrofl.inference.definition.elbo import latent, traces
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.start import first
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.models import fedavg, likelihoods, pfedgp, priors
from pyrofl.nets import Network, build
from pyrofl.tensors import generator, role

SENT = toys.BASE + 2
PROMISES = {
    "pfedgp": Promises(
        together="*",
        sites=toys.BASE_AXES | {"log_length": (), "log_scale": ()},
        message=(SENT, SENT),
        any_number="log_length/* log_scale/*",
    )
}
NOISE = 0.5


def task(rows: int = 7) -> ConjugateTask:
    rng = generator(4)
    x = [torch.randn(n, 2, generator=rng).double() for n in (rows, rows - 3)]
    return conjugate(x, [v[:, 0].sin() + 0.3 * v[:, 1] for v in x])


def plain(**options: object) -> Method:
    """Build processes on the rows themselves, which have nothing to learn but s and l."""
    usual: dict[str, object] = {
        "likelihood": likelihoods.normal(NOISE),
        "length": 0.8,
        "init_scale": 1.3,
    }
    return pfedgp.build(build("linear", (2,), 1), **(usual | options))


def check_name(
    method: Method, data: ConjugateTask, x: torch.Tensor
) -> list[tuple[torch.Tensor, ...]]:
    """Return mean and covariance of f at rows x, for each client, by the guide."""
    federation = data.federation
    state, cohort = first(method, federation, 0), federation.cohort(torch.arange(2))
    received, local = prepared(method, federation, state, cohort, adaptation="fine_tune")
    assert isinstance(local, dict)
    batch = federation.batch(torch.arange(2))
    here = x.expand(2, *x.shape)
    none = torch.full(here.shape[:2], -1)
    asked = replace(batch, x=here, y=here[..., 0], mask=none < 0, at=none)
    q, _ = traces(method.guide, method.guide, received, local, asked)
    fn = dict(latent(q))["f"]["fn"]
    return list(zip(fn.mean[..., 0], fn.covariance_matrix[..., 0, 0], strict=True))


def test_regression_is_the_exact_process():
    data, at = task(), torch.tensor([[0.0, 0.0], [1.0, -2.0], [5.0, 5.0]]).double()
    for j, (mean, variance) in enumerate(check_name(plain(), data, at)):
        rows = data.federation.train[j]
        x, y = data.federation.x[rows], data.federation.y[rows]

        def k(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return 1.3**2 * torch.exp(-torch.cdist(a, b).square() / (2 * 0.8**2))

        noisy = k(x, x) + NOISE**2 * torch.eye(len(x)).double()
        exact = k(at, x) @ torch.linalg.solve(noisy, y)
        told = (k(at, at) - k(at, x) @ torch.linalg.solve(noisy, k(x, at))).diagonal()
        close(mean, exact, 1e-8)
        close(variance, told, 1e-8)


def test_with_a_linear_kernel_it_is_bayesian_linear_regression():
    data, at = task(), torch.tensor([[0.3, -0.7], [1.0, 2.0]]).double()
    found = check_name(plain(kernel="linear", likelihood=likelihoods.normal(1.0)), data, at)
    # A slope of standard deviation s / l.
    loc, tau = torch.zeros(2), torch.full((2,), (0.8 / 1.3) ** 2)
    mean, covariance = data.posterior(loc, tau)
    for j, (center, variance) in enumerate(found):
        close(center, at @ mean[j], 1e-8)
        close(variance, (at @ covariance[j] * at).sum(1), 1e-8)


@pytest.mark.parametrize("kernel", ["rbf", "linear"])
def test_rows_whose_features_are_all_zero_leave_the_parameters_finite(kernel):
    data = replace(task().federation, x=torch.zeros_like(task().federation.x))
    method = plain(kernel=kernel)
    for check in (True, False):
        (state,) = federate(method, data, 1, check=check)
        assert state.rejected == ()
        assert all(bool(v.isfinite().all()) for v in state.server.values())


def test_a_client_with_too_many_rows_keeps_some_evenly_spaced():
    data, at = task(10), torch.zeros(1, 2).double()
    ((few, _), _) = check_name(plain(rows=5), data, at)
    thin = replace(data.federation, train=(data.federation.train[0][::2], data.federation.train[1]))
    ((same, _), _) = check_name(plain(rows=5), replace(data, federation=thin), at)
    close(few, same, 1e-10)


def test_before_any_row_all_classes_are_alike(blobs):
    method = pfedgp.build(toys.net())
    state = first(method, blobs, 0)
    told = evaluate(method, blobs, state)
    close(told.values["nll"], torch.full((12,), float(torch.tensor(5.0).log())).double(), 1e-6)


def test_who_comes_later_conditions_on_its_rows_and_is_not_too_sure():
    whole = toys.blobs((80,) * 10, held_out=4)
    parts = {"train": [v[:30] for v in whole.train], "test": [v[30:] for v in whole.train]}
    rng = generator(6)
    odd = torch.rand(len(whole.y), generator=rng) < 0.3  # labels that nobody can know
    guess = torch.randint(toys.CLASSES, whole.y.shape, generator=rng)
    data = replace(whole, y=torch.where(odd, guess, whole.y), **parts)
    method, plain_one = pfedgp.build(toys.net()), fedavg.build(toys.net(), lr=0.05, fine_tune=5)
    state, held = last(method, data, 10), {"model": "personal", "population": "held_out"}
    gp = evaluate(method, data, state, draws=50, adaptation="fine_tune", **held)
    tuned = evaluate(plain_one, data, last(plain_one, data, 10), adaptation="fine_tune", **held)
    assert gp.mean("nll") < tuned.mean("nll") - 0.1
    no_rows = evaluate(method, data, state, draws=50, **held)
    assert gp.mean("nll") < no_rows.mean("nll") - 0.3


def test_clients_may_disagree_about_labels_of_the_same_rows():
    data = crossed(8)
    method, common = pfedgp.build(toys.net()), fedavg.build(toys.net(), lr=0.05)
    own = evaluate(method, data, last(method, data, 8)).mean("accuracy")
    assert own > evaluate(common, data, last(common, data, 8)).mean("accuracy") + 0.2


def test_its_own_model_is_what_it_left_its_training_with(blobs):
    method = pfedgp.build(toys.net(), epochs=1)
    state = last(method, blobs, 1)
    for n, value in role("own", state.client_states).items():
        assert torch.equal(value, state.message[n])
        assert not torch.equal(value[0], state.server[n])


def test_what_it_cannot_be_is_refused():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(8, 4), nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.a(x).relu())
            return found

    with pytest.raises(ValueError, match=r"head is 'head\.\*'; expected one fully connected layer"):
        pfedgp.build(Network(Odd()))


def test_a_prior_pulls_the_spreads(tiny):
    narrow = priors.by_name({"log_scale": priors.fixed(loc=3.0, scale=0.01), "*": priors.flat})
    net = build("mlp:5", (4,), 3)
    free, pulled = (
        last(pfedgp.build(net, prior=p, lr=1e-4, momentum=0.0), tiny, 2).server[
            "log_scale/head.bias"
        ]
        for p in (priors.flat, narrow)
    )
    assert pulled > free + 0.05
