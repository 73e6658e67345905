"""Natural parameters, mirrored draws, and natural-gradient steps that solve normal models."""

from __future__ import annotations

import pytest
import torch
from checks import close
from torch import Tensor

from pyrofl.models.pvi.natural_gradient import natural
from pyrofl.models.shared.gaussians import Normals, assemble_root, balance_noise, draw_count
from pyrofl.tensors import generator

COVARIANCE = torch.tensor([[2.0, 0.6, -0.3], [0.6, 1.0, 0.2], [-0.3, 0.2, 0.5]]).double()
MEAN = torch.tensor([1.0, -2.0, 0.5]).double()


def test_moments_and_naturals_are_inverse():
    normals = Normals(3, full=True)
    root = torch.linalg.cholesky(COVARIANCE)
    factor = normals.naturals(MEAN, root)
    precision = factor["precision"]
    assert precision.shape == (6,)
    close(normals.matrix(precision) @ COVARIANCE, torch.eye(3))
    close(normals.packed(normals.matrix(precision)), precision)
    mean, back = normals.moments(factor)
    close(mean, MEAN)
    close(back, root)
    assert normals.proper(precision)


def test_diagonal_moments_and_naturals_are_inverse():
    normals, sd = Normals(3, full=False), COVARIANCE.diagonal().sqrt()
    factor = normals.naturals(MEAN, sd)
    close(factor["precision"] * COVARIANCE.diagonal(), torch.ones(3))
    for found, expected in zip(normals.moments(factor), (MEAN, sd), strict=True):
        close(found, expected)


@pytest.mark.parametrize("full", [True, False])
def test_log_densities_are_those_of_torch(full):
    covariance = COVARIANCE if full else COVARIANCE.diagonal().diag()
    normals, root = Normals(3, full), torch.linalg.cholesky(covariance)
    factor = normals.naturals(MEAN, root if full else root.diagonal())
    u = torch.randn(4, 3, generator=generator(0), dtype=torch.float64)
    expected = torch.distributions.MultivariateNormal(MEAN, covariance).log_prob(u)
    close(normals.log_density(u, factor), expected)


def test_a_factor_that_is_no_distribution_is_found_out():
    full, diagonal = Normals(2, full=True), Normals(2, full=False)
    matrices = torch.tensor([[[2.0, 0.0], [0.0, 1.0]], [[1.0, 2.0], [2.0, 1.0]]]).double()
    packed = full.packed(matrices)
    assert full.proper(packed).tolist() == [True, False]
    assert diagonal.proper(torch.tensor([[1.0, 2.0], [1.0, -2.0]])).tolist() == [True, False]
    mean, root = full.moments({"shift": torch.ones(2, 2).double(), "precision": packed})
    assert mean.isfinite().all(1).tolist() == [True, False]
    assert root.isfinite().all((1, 2)).tolist() == [True, False]
    with pytest.raises(ValueError, match="2001 variables; expected at most 2000"):
        Normals(2001, full=True)


def test_balanced_draws_have_the_moments_of_the_normal():
    noise = torch.randn(12, 2, 1, 3, generator=generator(1), dtype=torch.float64)
    found = balance_noise(noise)
    close(found.mean(0), torch.zeros(2, 1, 3))
    second = torch.einsum("scri,scrj->crij", found, found) / 12
    close(second, torch.eye(3).expand(2, 1, 3, 3))
    few = balance_noise(noise[:4])
    close(few[:2], noise[:2])
    close(few[2:], -noise[:2])
    with pytest.raises(ValueError, match="num_particles is 3; expected an even number"):
        balance_noise(noise[:3])


def quadratic(root: Tensor, mean: Tensor, curvature: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of E[(u - peak)' curvature (u - peak)] / 2 minus the entropy."""
    return curvature @ (mean - peak), curvature @ root - torch.linalg.inv(root).mT


def step(mean: Tensor, root: Tensor, grads: tuple[Tensor, Tensor], **options: object) -> None:
    """Move mean and root, of one client, in place."""
    params = [mean[None], root[None]]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad[None]
    settings = {"lr": 1.0, "steady": 10, "reach": torch.full((3,), 100.0)} | options
    natural(**settings)(params).step()  # type: ignore[arg-type]


def test_one_step_solves_a_normal_model():
    mean, root = torch.zeros(3).double(), torch.eye(3).double()
    precision = torch.linalg.inv(COVARIANCE)
    step(mean, root, quadratic(root, mean, precision, MEAN))
    close(mean, MEAN)
    close(root @ root.T, COVARIANCE)
    close(root, root.tril())


def test_one_step_solves_a_normal_model_without_covariances():
    mean, sd = torch.zeros(3).double(), torch.full((3,), 0.5).double()
    precision = torch.tensor([2.0, 1.0, 4.0]).double()
    step(mean, sd, (precision * (mean - MEAN), precision * sd - 1 / sd))
    close(mean, MEAN)
    close(sd.square(), 1 / precision)


def test_a_shorter_step_goes_part_of_the_way_in_precision():
    mean, root = torch.zeros(3).double(), torch.eye(3).double()
    precision = torch.linalg.inv(COVARIANCE)
    step(mean, root, quadratic(root, mean, precision, MEAN), lr=0.25)
    close(torch.linalg.inv(root @ root.T), 0.75 * torch.eye(3) + 0.25 * precision)


def test_a_single_draw_far_out_does_no_lasting_harm():
    # The first step goes where it must; from then on variances fall to a tenth at most, and rise.
    for root in (torch.eye(3).double(), torch.ones(3).double()):
        full, mean = root.dim() > 1, torch.zeros(3).double()
        params = [mean[None], root[None]]
        optimizer = natural(1.0, 10, torch.full((3,), 100.0))(params)
        spread = []
        for curvature in (1e4, 1e12, 1e4, 1e4, 1e4):
            inverse = torch.linalg.inv(root).mT if full else 1 / root
            params[0].grad = curvature * mean[None]
            params[1].grad = (curvature * root - inverse)[None]
            optimizer.step()
            spread.append(float((root @ root.T)[0, 0] if full else root[0] ** 2))
        assert spread == pytest.approx([1e-4, 1e-5, 1e-4, 1e-4, 1e-4])


def test_entries_outside_the_mask_stay_zero():
    mean, root = torch.zeros(3).double(), torch.eye(3).double()
    precision = torch.linalg.inv(COVARIANCE)
    mask = torch.block_diag(torch.ones(2, 2), torch.ones(1, 1))
    step(mean, root, quadratic(root, mean, precision, MEAN), within=mask)
    close(torch.linalg.inv(root @ root.T), precision * mask)


def test_a_saddle_is_left_along_the_slope():
    # Its curvature is -4: the step is as long as with 4, and downhill.
    mean, sd = torch.ones(3).double(), torch.ones(3).double()
    step(mean, sd, (-4 * mean, -4 * sd - 1 / sd))
    close(mean, torch.full((3,), 2.0))
    close(sd, torch.full((3,), 0.5))


def test_long_steps_are_shortened_and_later_ones_fall():
    mean, root = torch.zeros(3).double(), torch.eye(3).double()
    eye = torch.eye(3).double()
    step(mean, root, quadratic(root, mean, eye, MEAN), reach=torch.tensor([5.0, 0.5, 5.0]))
    close(mean, MEAN / 4)
    params = [torch.zeros(1, 3).double(), torch.ones(1, 3).double()]
    optimizer = natural(0.5, 1, torch.full((3,), 100.0), only_mean=True)(params)
    seen = []
    for _ in range(4):
        before = params[0].clone()
        params[0].grad, params[1].grad = torch.ones(1, 3).double(), torch.ones(1, 3).double()
        optimizer.step()
        seen.append(float((before - params[0])[0, 0]))
    assert seen == pytest.approx([0.5, 0.5, 0.25, 0.5 / 3])
    assert params[1].tolist() == [[1.0, 1.0, 1.0]]
    with pytest.raises(ValueError, match=r"lr is 2.0; expected a number above 0 to 1"):
        natural(2.0, 1, torch.ones(3))


def test_a_client_that_turned_bad_changes_nothing_for_others():
    mean = torch.zeros(2, 3).double()
    root = torch.eye(3).double().repeat(2, 1, 1)
    slope, spread = quadratic(root[0], mean[0], torch.linalg.inv(COVARIANCE), MEAN)
    mean.grad, root.grad = torch.stack([slope, slope * torch.nan]), torch.stack([spread] * 2)
    root.grad[1, 0, 0] = torch.nan
    natural(1.0, 1, torch.full((3,), 100.0))([mean, root]).step()
    close(root[0] @ root[0].T, COVARIANCE)
    assert not root[1].isfinite().any()
    assert not mean[1].isfinite().any()


def test_blocks_are_put_together():
    found = assemble_root(
        torch.ones(1, 1, 1), torch.full((1, 2, 1), 2.0), torch.full((1, 2, 2), 3.0)
    )
    assert found.tolist() == [[[1, 0, 0], [2, 3, 3], [2, 3, 3]]]


def test_draws_are_never_fewer_than_two_of_each_variable():
    assert [draw_count(n, 70, "full") for n in (16, 140, 256)] == [140, 140, 256]
    assert draw_count(16, 70, "blocks") == 140
    assert draw_count(16, 70, "diagonal") == 16
    with pytest.raises(ValueError, match="num_particles is 7; expected an even number"):
        draw_count(7, 70, "full")


@pytest.mark.parametrize("full", [True, False])
def test_part_of_a_step_is_a_shorter_step(full):
    start = {"mean": torch.zeros(1, 3).double(), "root": torch.ones(1, 3).double()}
    if full:
        start["root"] = torch.eye(3).double()[None]
    found = []
    for lr in (1.0, 0.25):
        mean, root = (start[n][0].clone() for n in ("mean", "root"))
        precision = torch.linalg.inv(COVARIANCE)
        diagonal = precision.diagonal()
        pull = (diagonal * (mean - MEAN), diagonal * root - 1 / root)
        step(mean, root, quadratic(root, mean, precision, MEAN) if full else pull, lr=lr)
        found.append({"mean": mean[None], "root": root[None]})
    part = Normals(3, full).between(start, found[0], torch.tensor([0.25]).double())
    close(part["root"], found[1]["root"])
    still = Normals(3, full).between(start, found[0], torch.zeros(1).double())
    close(still["root"], start["root"])
    close(part["mean"], found[0]["mean"] / 4)
