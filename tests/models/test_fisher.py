"""Fisher merging: exact where everything is linear and normal, and what one average cannot tell."""

from __future__ import annotations

import pytest
import torch
import toys
from checks import close
from promises import Promises
from regressions import PRIOR, TASK, posterior, q_of
from torch import Tensor
from torch.nn.functional import softplus

import pyrofl
from pyrofl.inference.method import Method
from pyrofl.models import fedavg, fisher, guides, likelihoods
from pyrofl.models.shared.laplace import diagonal, slopes, whole
from pyrofl.nets import build
from pyrofl.tensors import Tensors, generator

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
    found = whole(slopes(net, likelihood, w, rows))
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
