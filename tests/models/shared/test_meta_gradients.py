from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.programs import Loss, Program
from pyrofl.models.shared.meta_gradients import make_descent, maml
from pyrofl.tensors import Tensors, seeded

# Two quadratic clients: L_j(w) = 1/2 (w - mu_j)' Lam_j (w - mu_j).
LAM = torch.tensor([[[4.0, 0.0], [0.0, 1.0]], [[2.0, 0.5], [0.5, 3.0]]]).double()
MU = torch.tensor([[1.0, 0.0], [-1.0, 2.0]]).double()
AT = torch.tensor([0.2, -0.3], dtype=torch.float64).expand(2, 2)
GRADIENT = torch.einsum("cij,cj->ci", LAM, AT - MU)


def nothing(received: Tensors, local: Tensors, batch: Batch) -> None: ...


def quadratic(
    model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
) -> Tensor:
    gap = local["w"] - MU
    return torch.einsum("ci,cij,cj->c", gap, LAM, gap) / 2


def rows(*values: float) -> Batch:
    """Return one client's rows, all in one batch."""
    x = torch.tensor([values], dtype=torch.float64)
    mask = torch.ones(x.shape, dtype=torch.bool)
    return Batch(x[..., None], x, mask, torch.tensor([float(x.numel())]).double(), torch.arange(1))


def slope(loss: Loss, local: Tensors, batch: Batch, *names: str) -> list[Tensor]:
    local = {n: v.clone().requires_grad_(n in names) for n, v in local.items()}
    value = loss(nothing, nothing, {}, local, batch)
    return list(torch.autograd.grad(value.sum(), [local[n] for n in names]))


TWO = toys.blobs((3, 3)).batch(torch.arange(2))


def test_steps_go_down_the_gradient():
    at = make_descent(quadratic, "w", 0.1)(nothing, nothing, {}, {"w": AT, "other": MU}, TWO)
    close(at["w"], AT - 0.1 * GRADIENT)
    assert at["other"] is MU
    twice = make_descent(quadratic, "w", 0.1, steps=2)(nothing, nothing, {}, {"w": AT}, TWO)
    again = torch.einsum("cij,cj->ci", LAM, at["w"] - MU)
    close(twice["w"], at["w"] - 0.1 * again)


def test_a_long_gradient_is_clipped_for_each_client():
    at = make_descent(quadratic, "w", 1.0, clip=3.5)(nothing, nothing, {}, {"w": AT}, TWO)
    length = (at["w"] - AT).norm(dim=1)
    norms = GRADIENT.norm(dim=1)
    assert norms[0] < 3.5 < norms[1]
    close(length, [float(norms[0]), 3.5], 1e-6)


def test_maml_is_the_gradient_through_the_step():
    # (I - eta H) grad L(w - eta grad L(w)); the second client's is published as (1.2756, -3.1965).
    (exact,) = slope(maml(quadratic, "w", 0.1), {"w": AT}, TWO, "w")
    after = torch.einsum("cij,cj->ci", LAM, AT - 0.1 * GRADIENT - MU)
    close(exact, after - 0.1 * torch.einsum("cij,cj->ci", LAM, after))
    close(exact[1], [1.2756, -3.1965], 5e-5)
    (first,) = slope(maml(quadratic, "w", 0.1, order="first"), {"w": AT}, TWO, "w")
    close(first, after)
    (free,) = slope(maml(quadratic, "w", 0.1, order="hessian_free"), {"w": AT}, TWO, "w")
    close(free, exact)


def test_a_linear_loss_has_no_curvature():
    def linear(_m: Program, _g: Program, _r: Tensors, local: Tensors, _b: Batch) -> Tensor:
        return (local["w"] * MU).sum(1)

    (free,) = slope(maml(linear, "w", 0.1, order="hessian_free"), {"w": AT}, TWO, "w")
    close(free, MU)


def test_each_part_of_the_gradient_has_rows_of_its_own():
    # L(w) = mean of (w - x)^4 / 4, so that slope and curvature depend on the rows.
    def quartic(m: Program, g: Program, r: Tensors, local: Tensors, batch: Batch) -> Tensor:
        cost = (local["w"][:, None] - batch.x[..., 0]) ** 4 / 4
        return (cost * batch.mask).sum(1) / batch.mask.sum(1)

    batch, w = rows(0.5, 1.0, 2.0), {"w": torch.tensor([0.3], dtype=torch.float64)}
    a, b, c = 0.5, 1.0, 2.0
    near = 0.3 - 0.1 * (0.3 - a) ** 3
    (free,) = slope(maml(quartic, "w", 0.1, order="hessian_free"), w, batch, "w")
    g = (near - b) ** 3
    close(free, [g - 0.1 * 3 * (0.3 - c) ** 2 * g])
    (exact,) = slope(maml(quartic, "w", 0.1), w, batch, "w")
    outer = ((near - b) ** 3 + (near - c) ** 3) / 2
    close(exact, [outer * (1 - 0.1 * 3 * (0.3 - a) ** 2)])
    (first,) = slope(maml(quartic, "w", 0.1, order="first"), w, rows(0.5, 1.0, 0.5, 2.0), "w")
    close(first, [outer])


def test_what_makes_no_inner_step_gets_its_gradient_too():
    # L(w, s) = s (w - 1)^2: the inner step moves w alone, the outer gradient of s runs through it.
    def loss(m: Program, g: Program, r: Tensors, local: Tensors, batch: Batch) -> Tensor:
        return local["s"] * (local["w"] - 1) ** 2

    local = {"w": torch.tensor([3.0]).double(), "s": torch.tensor([2.0]).double()}
    near = 3 - 0.1 * 2 * 2 * 2
    expected = (near - 1) ** 2 + 2 * 2 * (near - 1) * (-0.1 * 2 * 2)
    for order in ("exact", "hessian_free"):
        (found,) = slope(maml(loss, "w", 0.1, order=order), local, rows(1.0), "s")
        close(found, [expected])


@pytest.mark.parametrize("order", ["exact", "first", "hessian_free"])
def test_without_a_step_it_is_the_loss(order):
    # No step at rate 0, and a batch of one row supports and is asked.
    model, guide = toys.FAMILIES["delta"](toys.blobs())
    local = toys.stacked(guide.start(toys.net().init(torch.Generator())), 2)
    data = toys.blobs((1, 1))
    batch = data.batch(torch.arange(2))
    plain = elbo(mean=True)(model, guide.program, {}, local, batch)
    found = maml(elbo(mean=True), "mu/*", 0.0, order=order)(model, guide.program, {}, local, batch)
    close(found.detach(), plain.detach())


def test_a_stochastic_loss_has_a_finite_curvature():
    # A difference quotient of two losses that draw anew would be of the size of 1 / delta.
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            w = pyro.sample("w", dist.Normal(torch.zeros(1, 1, dtype=torch.float64), 1.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(w, 1.0), obs=batch.y)

    def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            pyro.sample("w", dist.Normal(local["mu"], 0.5))

    batch = rows(0.5, 1.0, 2.0)
    mu = {"mu": torch.zeros(1, dtype=torch.float64)}
    loss = maml(elbo(), "mu", 0.1, order="hessian_free")

    def once() -> Tensor:
        local = {n: v.clone().requires_grad_() for n, v in mu.items()}
        value = loss(model, guide, {}, local, batch)
        return torch.autograd.grad(value.sum(), local["mu"])[0]

    with seeded(0):
        draws = torch.cat([once() for _ in range(400)])
    # Each third stands for three rows: L(mu) = 3/2 (mu - x)^2 + mu^2/2, curvature 4.
    near = 0.1 * 3 * 0.5
    expected = (1 - 0.4) * (4 * near - 3 * 1.0)
    error = draws.std() / 400**0.5
    assert abs(float(draws.mean()) - expected) < 4 * error
    assert draws.std() < 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": 0.1, "steps": -1}, "steps is -1; expected a whole number of at least 0"),
        ({"lr": 0.1, "clip": 0.0}, "clip is 0.0; expected a number above 0"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        make_descent(quadratic, "w", **arguments)


def test_unknown_orders_and_names_are_refused():
    with pytest.raises(ValueError, match="order is 'second'"):
        maml(quadratic, "w", 0.1, order="second")
    with pytest.raises(ValueError, match="no local tensor matches 'v'"):
        make_descent(quadratic, "v", 0.1)(nothing, nothing, {}, {"w": AT}, TWO)
