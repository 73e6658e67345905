"""Fisher merging: exact where everything is linear and normal, and what one average cannot tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import toys
from checks import close
from promises import Promises
from regressions import MEAN, PRIOR, SD, TASK, posterior, q_of
from torch import Tensor
from torch.nn.functional import softplus

import pyrofl
from pyrofl.data import Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Likelihood
from pyrofl.inference.engine.federate import federate
from pyrofl.models import fedavg, fisher, guides, likelihoods
from pyrofl.models.shared.curvature import diagonal, full_fisher, slopes
from pyrofl.nets import build
from pyrofl.tensors import Tensors, generator, spread_out

PROMISES = {
    "fisher": Promises(
        together="*",
        random=True,
        message=(2 * toys.ALL, 2 * toys.ALL),
        any_number="shift precision",
    )
}


def exactly(guide: guides.Family = guides.full_covariance, **options: object) -> Method:
    """Let clients find their optimum to the last bits."""
    usual = {"likelihood": likelihoods.normal(), "prior": PRIOR, "guide": guide}
    usual |= {"epochs": 500, "batch": None, "lr": 0.1, "momentum": 0.9}
    return fisher.build(build("linear", (3,), 1), **(usual | options))  # type: ignore[arg-type]


def test_one_round_is_the_exact_posterior():
    mean, covariance = q_of(toys.last(exactly(), TASK.federation, 1).server)
    exact = posterior()
    close(mean, exact[0], 1e-9)
    close(covariance, exact[1], 1e-9)


def test_a_naive_average_after_one_round_is_elsewhere():
    merged = toys.last(exactly(), TASK.federation, 1)
    usual = {"epochs": 500, "batch": None, "lr": 0.1, "likelihood": likelihoods.normal()}
    naive = toys.last(fedavg.build(build("linear", (3,), 1), **usual), TASK.federation, 1)
    mean, covariance = q_of(merged.server)
    away = naive.server["w/w"].flatten() - mean
    assert away @ torch.linalg.solve(covariance, away) > 1.0  # in standard deviations


def test_the_diagonal_is_the_product_of_diagonals():
    state = toys.last(exactly(guides.mean_field), TASK.federation, 1)
    f = TASK.precision.diagonal(dim1=1, dim2=2)
    precision = f.sum(0) + 1 / 0.8**2
    close(softplus(state.server["spread/w"].flatten()).pow(-2), precision, 1e-9)
    close(state.server["w/w"].flatten(), ((f * TASK.mean).sum(0) + 0.5 / 0.8**2) / precision, 1e-9)


def test_further_rounds_count_nothing_twice():
    method = exactly()
    one, two = (toys.last(method, TASK.federation, rounds).server for rounds in (1, 2))
    toys.assert_same(one, two, atol=1e-8)


@pytest.mark.parametrize("kind", ["categorical", "poisson", "normal"])
def test_information_is_the_expected_square_of_slopes(kind):
    classes = 3 if kind == "categorical" else 1
    net, likelihood = build("mlp:4", (2,), classes), likelihoods.named(kind)
    rng = generator(1)
    w = {n: torch.randn(2, *s, generator=rng, dtype=torch.float64) for n, s in net.shapes.items()}
    data = toys.blobs((3, 5))
    batch = data.batch(torch.tensor([0, 1]))
    x = batch.x[..., :2]
    y = batch.y % classes if kind == "categorical" else batch.y.double()
    rows = pyrofl.Batch(x, y, batch.mask, batch.size, batch.ids)
    found = full_fisher(slopes(net, likelihood, w, rows))
    close(diagonal(slopes(net, likelihood, w, rows)), found.diagonal(dim1=1, dim2=2), 1e-10)
    for c, size in enumerate((3, 5)):
        own = {n: v[c] for n, v in w.items()}

        def outputs(own: Tensors, row: Tensor) -> Tensor:
            return net.apply(own, row[None])[0]

        total = torch.zeros(*found.shape[1:], dtype=torch.float64)
        for i in range(size):
            jacobian = torch.func.jacrev(outputs)(own, x[c, i])
            slope = torch.cat([v.reshape(classes, -1) for v in jacobian.values()], 1)
            out = outputs(own, x[c, i])
            p = out.softmax(0)
            known = {"normal": torch.eye(1), "poisson": out.exp()[None]}
            h = known.get(kind, torch.diag(p) - torch.outer(p, p)).double()
            total += slope.T @ h @ slope
        close(found[c], total, 1e-10)


def test_draws_have_the_moments_of_q():
    run = pyrofl.fit(exactly(), TASK.federation, 1, progress=False)
    drawn = run.posterior(4000)["w"][:, 0].flatten(1)
    exact, covariance = posterior()
    error = (covariance.diagonal() / 4000).sqrt()
    assert bool(((drawn.mean(0) - exact).abs() < 4 * error).all())
    wide = (covariance.diagonal().outer(covariance.diagonal()) + covariance**2) / 4000
    assert bool(((drawn.T.cov() - covariance).abs() < 4 * wide.sqrt()).all())
    found = run.to_arviz(50)
    assert "client" not in found["posterior"]["w"].dims


def hospitals() -> Federation:
    """Return four hospitals with 6 to 40 patients, whose intercepts differ.

    Rows of the first do not determine its coefficients without a prior.
    """
    rng, parts = np.random.default_rng(4), {}
    for j, size in enumerate((6, 40, 25, 12)):
        x = rng.normal(size=(size, 2))
        p = 1 / (1 + np.exp(-(x @ [1.0, -0.7] + j - 2)))
        parts[f"hospital {j}"] = (torch.tensor(x), torch.tensor(rng.binomial(1, p)).double())
    return Federation.from_arrays(parts).to("cpu", torch.float64)


def design(data: Federation, j: int) -> tuple[np.ndarray, np.ndarray]:
    """Return covariates with a last column of ones, and responses of a client."""
    x = data.x[data.train[j]].numpy()
    return np.concatenate([x, np.ones((len(x), 1))], 1), data.y[data.train[j]].numpy()


def mode(x: np.ndarray, y: np.ndarray, precision: np.ndarray, m: np.ndarray, logistic: bool) -> Any:
    """Return the posterior mode and the curvature of the likelihood there, by Newton's method."""
    w = np.zeros_like(m)
    for _ in range(50):
        p = 1 / (1 + np.exp(-x @ w)) if logistic else x @ w
        f = x.T @ ((p * (1 - p) if logistic else np.ones_like(p))[:, None] * x)
        w = w + np.linalg.solve(f + precision, x.T @ (y - p) - precision @ (w - m))
    return w, f


def stratified(data: Federation, logistic: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return BFI's mean and covariance of (coefficients, all intercepts), by its own formula.

    A = Lambda + sum_j Z_j'(A_j - Lambda_j) Z_j and A mean = Lambda m + sum_j Z_j'(A_j w_j - ...),
    with Z_j that selects coefficients and the intercept of j.
    """
    count = data.clients
    a, b = np.eye(2 + count) / SD**2, np.full(2 + count, MEAN) / SD**2
    local, m = np.eye(3) / SD**2, np.full(3, MEAN)
    for j in range(count):
        x, y = design(data, j)
        w, f = mode(x, y, local, m, logistic)
        at = np.r_[0, 1, 2 + j]
        a[np.ix_(at, at)] += f
        b[at] += (f + local) @ w - local @ m
    return np.linalg.solve(a, b), np.linalg.inv(a)


def pooled_row(data: Federation, j: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a client's covariates with an indicator of each client, and its responses."""
    x, y = design(data, j)
    found = np.zeros((len(x), 2 + data.clients))
    found[:, :2], found[:, 2 + j] = x[:, :2], 1
    return found, y


def normal_of(q: Tensors) -> tuple[Tensor, Tensor]:
    """Return mean and covariance root of three parameters, as the guide reads them."""
    root = torch.eye(3, dtype=torch.float64)
    root[*torch.tril_indices(3, 3, -1)] = q["spread/below"]
    mean = torch.cat([v.flatten() for n, v in q.items() if n.startswith("w/")])
    return mean, q["spread/log_sd"].exp()[:, None] * root


def bfi(likelihood: Likelihood, **options: Any) -> Method:
    usual = {"likelihood": likelihood, "prior": PRIOR, "guide": guides.full_covariance}
    usual |= {"epochs": 3000, "batch": None, "lr": 0.3, "momentum": 0.9, "local_prior": True}
    return fisher.build(build("softmax", (2,), 1), **(usual | options))


@pytest.mark.parametrize("likelihood", [likelihoods.normal(), likelihoods.bernoulli])
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_strata_are_those_of_bayesian_federated_inference(likelihood, chunk_size):
    """And of the pooled posterior exactly, where the likelihood is normal."""
    data, logistic = hospitals(), likelihood is likelihoods.bernoulli
    options = {} if logistic else {"lr": 0.1, "epochs": 1000}
    method = bfi(likelihood, strata="head.bias", **options)
    *_, state = federate(method, data, 1, chunk_size=chunk_size)
    mean, covariance = stratified(data, logistic)
    sd = np.sqrt(covariance.diagonal())
    found, root = normal_of(state.server)
    close(found[:2], mean[:2], 1e-8)
    close((root @ root.mT)[:2, :2], covariance[:2, :2], 1e-8)
    # A new client's intercept has the prior.
    close(found[2], MEAN, 1e-8)
    close(root[2], [0.0, 0.0, SD], 1e-8)
    received = spread_out(state.server, 4)
    personal = method.read_view("personal", received, state.get_client_states(torch.arange(4)))
    for j in range(4):
        at = np.r_[0, 1, 2 + j]
        found, root = normal_of({n: v[j] for n, v in personal.items()})
        close(found, mean[at], 1e-8)
        close(root @ root.mT, covariance[np.ix_(at, at)], 1e-8)
    if not logistic:
        x = np.concatenate([pooled_row(data, j)[0] for j in range(4)])
        y = np.concatenate([pooled_row(data, j)[1] for j in range(4)])
        precision = np.eye(6) / SD**2 + x.T @ x
        exact = np.linalg.solve(precision, np.full(6, MEAN) / SD**2 + x.T @ y)
        np.testing.assert_allclose(mean, exact, atol=1e-10)
        np.testing.assert_allclose(covariance, np.linalg.inv(precision), atol=1e-10)
    else:  # one normal for each hospital is not far from one for all
        x = np.concatenate([pooled_row(data, j)[0] for j in range(4)])
        y = np.concatenate([pooled_row(data, j)[1] for j in range(4)])
        exact, _ = mode(x, y, np.eye(6) / SD**2, np.full(6, MEAN), True)
        assert np.abs((mean - exact) / sd).max() < 0.3


def test_draws_of_strata_are_joint_over_clients():
    """Draws of all intercepts and coefficients together have the moments of BFI's normal."""
    data = hospitals()
    run = pyrofl.fit(bfi(likelihoods.bernoulli, strata="head.bias"), data, 1, progress=False)
    drawn = run.posterior(4000)
    weight, bias = (drawn[f"head.{n}"].flatten(2) for n in ("weight", "bias"))
    close(weight[:, 0], weight[:, 3], 1e-10)  # up to rounding
    values = torch.cat([weight[:, 0], bias[..., 0]], 1)
    mean, covariance = (torch.tensor(v) for v in stratified(data, True))
    variance = covariance.diagonal()
    assert bool(((values.mean(0) - mean).abs() < 4 * (variance / 4000).sqrt()).all())
    wide = (variance.outer(variance) + covariance**2) / 4000
    assert bool(((values.T.cov() - covariance).abs() < 4.5 * wide.sqrt()).all())  # of 21 entries
    axes = run.to_arviz(10, corrected=False, progress=False)["posterior"]
    assert "client" not in axes["head.weight"].dims
    assert "client" in axes["head.bias"].dims


def test_absent_clients_have_the_prior_of_their_stratum():
    data = hospitals()
    run = pyrofl.fit(
        bfi(likelihoods.bernoulli, strata="head.bias", epochs=1),
        data,
        1,
        participation=lambda *_: torch.tensor([1, 2]),
        progress=False,
    )
    bias = run.posterior(4000)["head.bias"][..., 0]
    for j in (0, 3):
        assert abs(float(bias[:, j].mean()) - MEAN) < 4 * SD / 4000**0.5
        assert abs(float(bias[:, j].std()) / SD - 1) < 4 / 8000**0.5


def test_a_local_prior_makes_one_round_possible_where_a_client_has_no_optimum():
    """Six rows of the first hospital determine no coefficients; without strata, all is shared."""
    data = hospitals()
    (state,) = federate(bfi(likelihoods.bernoulli), data, 1)
    a, b = np.eye(3) / SD**2, np.full(3, MEAN) / SD**2
    local, m = a.copy(), np.full(3, MEAN)
    for j in range(4):
        w, f = mode(*design(data, j), local, m, True)
        a, b = a + f, b + (f + local) @ w - local @ m
    mean, root = normal_of(state.server)
    close(mean, np.linalg.solve(a, b), 1e-8)
    close(root @ root.mT, np.linalg.inv(a), 1e-8)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strata": "head.weight"}, "strata are head.weight; expected some of the last of"),
        ({"strata": "*"}, "strata are head.weight, head.bias; expected some of the last of"),
        ({"strata": "bias"}, "no parameter matches 'bias'"),
        ({"strata": "head.bias", "guide": guides.mean_field}, "strata need all covariances"),
    ],
)
def test_strata_that_do_not_fit_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        bfi(likelihoods.bernoulli, **options)
