"""Dropout posteriors: divergence, coordinates, product, programs against Pyro, pruning."""

from __future__ import annotations

from itertools import product as every
from math import exp, log
from typing import Any, NamedTuple

import pytest
import torch
import toys
from checks import close
from pyro.infer import Trace_ELBO
from torch import Tensor
from torch.distributions import kl_divergence

from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import elbo, traces, with_rows
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Loss
from pyrofl.inference.training.noise import ClientNoise
from pyrofl.models import metavd
from pyrofl.models.guides.dropout import (
    DROPOUT_GUIDES,
    HierarchicalKL,
    clamp_log,
    dropout_rate,
    hierarchical_prior,
    log_alpha,
    log_variance,
    mode_of_normal_product,
    normal_event,
)
from pyrofl.models.likelihoods import categorical
from pyrofl.models.metavd import pruning
from pyrofl.models.metavd.programs import DropoutLayers, likelihood_of_mean, warm_up
from pyrofl.models.metavd.programs import objective as loss_of
from pyrofl.tensors import Tensors, generator, under

THETA, ALPHA = 1.7, 0.3
SHAPE = {"w": torch.Size([1])}


def leaf(value: float) -> Tensor:
    return torch.full((1, 1, 1), value, dtype=torch.float64, requires_grad=True)


def divergence(coordinates: str, theta: Tensor, s: Tensor) -> Tensor:
    """Return the KL divergence of one weight from its prior."""
    q = DROPOUT_GUIDES[coordinates](SHAPE)
    none = torch.zeros(1, 0)
    batch = Batch(none, none, none.bool(), torch.ones(1), torch.zeros(1).long())
    mean, variance = q.moments({}, {"mu/w": theta, "pi/w": s}, batch)
    return kl_divergence(
        normal_event(mean["w"], variance["w"], 1),
        hierarchical_prior(mean["w"], variance["w"], 1, coordinates),
    ).sum()


def test_the_divergence_depends_on_alpha_alone():
    theta, s = leaf(THETA), leaf(log(ALPHA))
    kl = divergence("alpha", theta, s)
    assert float(kl.detach()) == pytest.approx(0.733169, abs=5e-7)
    assert float(kl.detach()) == pytest.approx(0.5 * log(1 + 1 / ALPHA), abs=1e-12)
    slopes = torch.autograd.grad(kl, [theta, s])
    close(slopes[0].flatten(), [0.0])
    # dKL/d alpha = -1 / (2 alpha (1 + alpha)), and d alpha / d s = alpha.
    close(slopes[1].flatten(), [-1 / (2 * (1 + ALPHA))])


def test_the_divergence_in_log_variances():
    theta, s = leaf(THETA), leaf(log(ALPHA * THETA**2))
    kl = divergence("logvar", theta, s)
    assert float(kl.detach()) == pytest.approx(0.733169, abs=5e-7)
    assert float(kl.detach()) == pytest.approx(
        0.5 * log(1 + THETA**2 / exp(float(s.detach()))), abs=1e-12
    )
    slopes = torch.autograd.grad(kl, [theta, s])
    close(slopes[0].flatten(), [0.0])
    close(slopes[1].flatten(), [-0.5 * THETA**2 / (THETA**2 + exp(float(s.detach())))])


@pytest.mark.parametrize("coordinates", DROPOUT_GUIDES)
def test_beyond_its_bounds_a_spread_has_no_slope(coordinates):
    for s in (-9.0, 9.0):
        (slope,) = torch.autograd.grad(divergence(coordinates, leaf(0.3), raw := leaf(s)), raw)
        close(slope.flatten(), [0.0])


def test_starts_have_the_noise_they_are_asked_for():
    center = {"w": torch.tensor([0.5], dtype=torch.float64)}
    none = torch.zeros(1, 0)
    batch = Batch(none, none, none.bool(), torch.ones(1), torch.zeros(1).long())
    for family, variance in ((log_variance, 0.04), (log_alpha, 0.04 * 0.25)):
        q = family(SHAPE, init_scale=0.2)
        mean, found = q.moments({}, {n: v[None] for n, v in q.start(center).items()}, batch)
        close(mean["w"], [[0.5]])
        close(found["w"], [[variance]])
    close(log_variance(SHAPE).start(center)["pi/w"], [-8.5])


def test_products_of_normals():
    mean = torch.tensor([[1.0], [3.0]]).double()
    alpha, share = torch.tensor([[0.5], [2.0]]).double(), torch.tensor([0.25, 0.75]).double()
    assert float(mode_of_normal_product(mean, alpha * mean**2, share)) == pytest.approx(
        1.1538, abs=5e-5
    )
    assert float(mode_of_normal_product(mean, alpha, share)) == pytest.approx(1.8571, abs=5e-5)
    close(mode_of_normal_product(mean, torch.full_like(mean, 0.3), share), [0.25 + 2.25], 1e-9)
    # The mode of sum_m g_m log N(w; m_m, v_m).
    rng = generator(4)
    m = torch.randn(5, 3, generator=rng, dtype=torch.float64)
    v = torch.rand(5, 3, generator=rng, dtype=torch.float64) + 0.1
    g = torch.rand(5, generator=rng, dtype=torch.float64)
    w = mode_of_normal_product(m, v, g).requires_grad_()
    total = (g[:, None] * torch.distributions.Normal(m, v.sqrt()).log_prob(w)).sum()
    (slope,) = torch.autograd.grad(total, w)
    close(slope, torch.zeros(3), 1e-8)


def test_exact_posteriors_multiply_to_the_joint_optimum(quadratic):
    # Clients of the quadratic pair with their diagonals alone: posteriors N(mu_j, 1 / Lam_j).
    precision = quadratic.precision.diagonal(dim1=1, dim2=2)
    joint = (precision * quadratic.mean).sum(0) / precision.sum(0)
    close(
        mode_of_normal_product(quadratic.mean, 1 / precision, torch.ones(2).double()), joint, 1e-9
    )
    slope = (precision * (joint - quadratic.mean)).sum(0)
    close(slope, [0.0, 0.0])


def test_a_rate_of_nine_tenths_is_nine_times_the_square():
    theta = torch.tensor([1.0, -2.0, 0.5]).double()
    assert (dropout_rate(theta, 9.001 * theta**2) > 0.9).all()
    assert not (dropout_rate(theta, 8.999 * theta**2) > 0.9).any()
    close(dropout_rate(theta, 0.25 * theta**2), [0.2] * 3, 1e-11)


def test_the_divergence_warms_up():
    assert warm_up(0.0) == pytest.approx(0.00247, abs=5e-6)
    assert warm_up(0.0) == 1 / (1 + exp(6))
    assert warm_up(0.02) == 1 / (1 + exp(-6))
    assert warm_up(0.01) == 0.5
    assert warm_up(0.021) == warm_up(None) == warm_up(1.0) == 1


# Programs


IDS = (1, 3, 0)  # of 40, 12 and 3 rows
NET = toys.net("mlp:6,5")
LAYER = {"fc2.weight": NET.shapes["fc2.weight"]}


class Found(NamedTuple):
    """The programs of MetaVD, and those that draw the outputs of layers."""

    model: Any
    q: Any
    coordinates: Any
    pruned: bool

    def pair(self, sampling: str, likelihood: Any = categorical) -> tuple[Any, Any]:
        if sampling == "activations":
            parts = NET, self.q, LAYER, likelihood, None, self.coordinates, self.pruned
            return DropoutLayers(*parts).programs()
        return built(self.coordinates, self.pruned, likelihood).model, self.q.program


def built(coordinates: Any, pruned: bool = False, likelihood: Any = categorical) -> Method:
    return metavd.build(
        NET,
        bayesian="fc2.weight",
        coords=coordinates,
        init_scale=0.3,
        prune="snip" if pruned else None,
        likelihood=likelihood,
    )


def objective(
    found: Found,
    sampling: str,
    draws: int,
    pool_logits: bool,
    beta: float | None = None,
    done: float | None = None,
) -> Loss:
    pair = found.pair(sampling, likelihood_of_mean(categorical) if pool_logits else categorical)
    return loss_of(pair, LAYER["fc2.weight"].numel(), draws, beta, done)


def programs(coordinates: Any, pruned: bool = False) -> tuple[Found, Tensors, Batch]:
    method = built(coordinates, pruned)
    whole = under("loc", NET.init(generator(0)))
    start = whole | method.guide.start({n: whole[f"loc/{n}"] for n in LAYER})
    local = {n: v.requires_grad_() for n, v in toys.stacked(start, len(IDS)).items()}
    found = Found(method.model, method.guide, coordinates, pruned)
    return found, local, toys.blobs().batch(torch.tensor(IDS))


def noise() -> ClientNoise:
    return ClientNoise([generator(5, c) for c in range(len(IDS))])


def test_the_divergence_and_its_slopes_are_torchs():
    rng = generator(2)
    mean = torch.randn(2, 1, 4, 3, generator=rng, dtype=torch.float64)
    variance = (0.5 * torch.randn(2, 1, 4, 3, generator=rng).double()).exp().requires_grad_()
    prior = hierarchical_prior(mean, variance, 2, "alpha")
    q = normal_event(mean, variance, 2)
    known, found = kl_divergence(q, prior), HierarchicalKL.apply(mean, variance, 2)
    close(found.detach(), known.detach())
    slopes = [torch.autograd.grad(v.sum(), variance)[0] for v in (found, known)]
    close(*slopes)
    assert torch.autograd.gradgradcheck(lambda v: HierarchicalKL.apply(mean, v, 2), variance)


@pytest.mark.parametrize("draws", [None, 4])
@pytest.mark.parametrize(
    ("coordinates", "sampling"), list(every(DROPOUT_GUIDES, ["activations", "weights"]))
)
def test_losses_are_pyros(coordinates, sampling, draws):
    found, local, batch = programs(coordinates)
    pair = found.pair(sampling)
    with noise():
        ours = elbo(draws, analytic=False)(*pair, {}, local, batch).sum()
    oracle = Trace_ELBO(
        num_particles=draws or 1, vectorize_particles=draws is not None, max_plate_nesting=2
    )
    with noise():
        pyros = oracle.differentiable_loss(*pair, {}, with_rows(local, len(IDS)), batch)
    close(ours.detach(), pyros.detach(), 1e-9)
    for a, b in zip(
        torch.autograd.grad(ours, list(local.values())),
        torch.autograd.grad(pyros, list(local.values())),
        strict=True,
    ):
        close(a, b, 1e-9)


@pytest.mark.parametrize("coordinates", DROPOUT_GUIDES)
def test_draws_of_activations_and_of_weights_have_one_expectation(coordinates):
    found, local, batch = programs(coordinates)
    values = []
    for sampling in ("activations", "weights"):
        loss = objective(found, sampling, 1000, False, beta=10.0)
        with torch.no_grad(), noise():
            parts = [loss(found.model, found.q, {}, local, batch) for _ in range(8)]
        values.append(torch.stack(parts))
    error = (values[0].var(0) + values[1].var(0)).div(8).sqrt()
    assert (error < 0.02).all()
    assert ((values[0] - values[1]).mean(0).abs() < 4 * error).all()


@pytest.mark.parametrize("sampling", ["activations", "weights"])
def test_the_loss_is_the_mean_of_both_parts(sampling):
    # beta = 10 multiplies the mean divergence per weight; None divides its sum by the rows.
    found, local, batch = programs("logvar")
    theta, s = (local[f"{part}/fc2.weight"].detach() for part in ("loc", "spread"))
    kl = 0.5 * torch.log1p(theta.square() / s.exp()).flatten(1)

    def loss(beta: float | None, elapsed: float | None = None) -> Tensor:
        with torch.no_grad(), noise():
            run = objective(found, sampling, 3, False, beta, elapsed)
            return run(found.model, found.q, {}, local, batch)

    nothing = loss(0.0)
    close(loss(10.0) - nothing, 10 * kl.mean(1), 1e-9)
    close(loss(None) - nothing, kl.sum(1) / batch.size, 1e-9)
    close(loss(10.0, elapsed=0.0) - nothing, 10 * kl.mean(1) / (1 + exp(6)), 1e-9)


@pytest.mark.parametrize("sampling", ["activations", "weights"])
def test_logits_can_be_averaged_before_the_likelihood(sampling):
    found, local, batch = programs("logvar")

    def loss(draws: int, pool_logits: bool) -> Tensor:
        with torch.no_grad(), noise():
            run = objective(found, sampling, draws, pool_logits, 0.0)
            return run(found.model, found.q, {}, local, batch)

    close(loss(1, True), loss(1, False))
    many, apart = (loss(200, pool_logits) for pool_logits in (True, False))
    # Jensen: the loss at the average is below the average of the losses.
    assert (many < apart).all()


@pytest.mark.parametrize("sampling", ["activations", "weights"])
def test_what_came_down_as_zero_has_no_value_noise_or_slope(sampling):
    found, local, batch = programs("logvar", pruned=True)
    received = {"loc/fc2.weight": local["loc/fc2.weight"].detach().clone()}
    dropped = torch.zeros(LAYER["fc2.weight"], dtype=torch.bool)
    dropped[1] = dropped[:, 2] = True
    received["loc/fc2.weight"][:, dropped] = 0
    with torch.no_grad():
        local["loc/fc2.weight"][:, dropped] = 0
    loss = objective(found, sampling, 2, False, 10.0)
    with noise():
        value = loss(found.model, found.q, received, local, batch)
    names = ["loc/fc2.weight", "spread/fc2.weight"]
    for name, slope in zip(
        names, torch.autograd.grad(value.sum(), [local[n] for n in names]), strict=True
    ):
        assert bool((slope[:, dropped] == 0).all()), name
        assert bool((slope[:, ~dropped] != 0).any()), name
    with torch.no_grad():
        local["spread/fc2.weight"][:, dropped] = 5.0
        with noise():
            close(loss(found.model, found.q, received, local, batch), value.detach(), 1e-9)


def test_the_posterior_program_draws_the_layer_alone():
    found, local, batch = programs("logvar")
    with noise():
        q, p = traces(found.model, found.q.program, {}, local, batch, 2)
    assert {n for n in q.nodes if n in NET.shapes} == {"fc2.weight"}
    assert p.nodes["y"]["fn"].batch_shape == (2, 3, 40)


# Pruning


def test_dropped_weights_stay_at_home():
    theta = torch.tensor([[1.0, 0.1, -2.0], [0.1, 1.0, 1.0]]).double()
    s = torch.log(torch.tensor([[0.5, 0.5, 40.0], [0.01, 8.0, 10.0]])).double()
    tensors = {"loc/w": theta, "spread/w": s, "loc/b": torch.zeros(2, 1)}

    def moments(t: Tensors) -> tuple[Tensors, Tensors]:
        return {"w": t["loc/w"]}, {"w": t["spread/w"].exp()}

    sent = pruning.drop(tensors, moments, 0.9)
    keep = torch.tensor([[True, False, False], [True, True, False]])  # sigma^2 <= 9 theta^2
    close(sent["loc/w"], theta * keep)
    close(sent["spread/w"], s * keep)
    assert sent["loc/b"] is tensors["loc/b"]
    close(pruning.fill(sent, {"spread/w": s - 1})["spread/w"], torch.where(keep, s, s - 1))
    found = pruning.report(tensors, moments, 0.9, ["w"])
    close(found["sparsity"], [2 / 3, 1 / 3])
    close(found["dropout_rate"], (s.exp() / (s.exp() + theta**2)).mean(1), 1e-9)
    close(pruning.report(sent, moments, None, ["w"])["sparsity"], [2 / 3, 1 / 3])
    close(pruning.report(tensors, moments, None, ["w"])["sparsity"], [0.0, 0.0])
    known = pruning.fill(sent, {"loc/w": torch.full((3,), 7.0).double()})
    close(known["loc/w"], torch.where(keep, theta, 7.0))


def test_snip_keeps_the_sensitive_weights_for_good():
    theta = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.1]).double()
    gradient = {"loc/w": torch.tensor([0.1, 0.01, -1.0, 0.02, 5.0]).double()}
    server = {"loc/w": theta}
    moved = {"loc/w": theta - gradient["loc/w"]}
    first = pruning.snip(server, gradient, moved, ["w"], 0.6)
    keep = torch.tensor([0, 0, 1, 0, 1]).bool()  # |theta g| = .1 .02 .5 .06 .5
    assert torch.equal(first["server/keep/w"], keep)
    close(first["loc/w"], moved["loc/w"] * keep)
    again = pruning.snip(first, {"loc/w": -gradient["loc/w"]}, moved, ["w"], 0.6)
    assert torch.equal(again["server/keep/w"], keep)


def test_limits_are_checked():
    tensors = {"loc/w": torch.ones(1, 1)}
    assert pruning.drop(tensors, lambda t: ({}, {}), None) is tensors
    for prune in (1.0, 0.0, "other"):
        with pytest.raises(ValueError, match=rf"prune is '?{prune}'?; expected a number"):
            metavd.build(NET, prune=prune)
    with pytest.raises(ValueError, match=r"prune is 0\.9 where no weight is random"):
        metavd.build(NET, prune=0.9, dropout="none")
    metavd.build(NET, prune="snip", dropout="none")
    with pytest.raises(ValueError, match="sparsity is 1"):
        metavd.build(NET, prune="snip", sparsity=1.0)


def test_a_start_right_at_the_bound_can_move():
    s = torch.tensor([-9.0, -8.5, 0.0, 8.5, 9.0], requires_grad=True)
    value = clamp_log(s)
    close(value.detach(), [-8.5, -8.5, 0.0, 8.5, 8.5])
    value.sum().backward()
    close(s.grad, [0.0, 1.0, 1.0, 1.0, 0.0])
