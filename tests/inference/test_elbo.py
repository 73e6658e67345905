"""The loss of every client is Pyro's, values and gradients, whatever the guide."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import (
    Directed,
    elbo,
    latent,
    log_densities,
    traces,
    with_rows,
)
from pyrofl.inference.definition.programs import Loss, Program, Supervised, flat
from pyrofl.inference.training.noise import ClientNoise
from pyrofl.inference.training.schedules import make_schedule
from pyrofl.models import guides
from pyrofl.models.guides.automatic import from_pyro
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import fixed
from pyrofl.tensors import Tensors, generator, role

IDS = (1, 3, 0)  # of 40, 12 and 3 rows, so that most of the batch is padding

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def noise(clients: int, seed: int = 5) -> ClientNoise:
    return ClientNoise([generator(seed, c) for c in range(clients)])


def setting(name: str, ids: tuple[int, ...] = IDS) -> tuple[Program, Program, Tensors, Batch]:
    """Return model, guide, leaves [C, *p] and the batch for a family of guides."""
    data = toys.blobs()
    model, guide = toys.FAMILIES[name](data)
    start = guide.start(toys.net().init(generator(0)) if "mu/*" in guide.names else {})
    local = {n: v.requires_grad_() for n, v in toys.stacked(start, len(ids)).items()}
    return model, guide.program, local, data.batch(torch.tensor(ids))


def ours(
    loss: Loss, model: Program, guide: Program, local: Tensors, batch: Batch
) -> tuple[Tensor, list[Tensor]]:
    with noise(len(batch)):
        value = loss(model, guide, {}, local, batch)
    assert value.shape == (len(batch),)
    return value.detach(), gradients(value.sum(), local)


def pyros(
    oracle: type[Trace_ELBO],
    model: Program,
    guide: Program,
    local: Tensors,
    batch: Batch,
    draws: int | None = None,
) -> tuple[Tensor, list[Tensor]]:
    measure = oracle(
        num_particles=draws or 1, vectorize_particles=draws is not None, max_plate_nesting=2
    )
    with noise(len(batch)):
        rows = with_rows(local, len(batch))
        value = measure.differentiable_loss(model, guide, {}, rows, batch)
    return torch.as_tensor(value).detach(), gradients(value, local)


def gradients(value: Tensor, local: Tensors) -> list[Tensor]:
    return list(
        torch.autograd.grad(value, list(local.values()), allow_unused=True, materialize_grads=True)
    )


def assert_pyros(ours: tuple[Tensor, list[Tensor]], pyros: tuple[Tensor, list[Tensor]]) -> None:
    close(ours[0].sum(), pyros[0].to(ours[0]))
    close(ours[1], pyros[1])
    assert any(g.abs().max() > 1e-3 for g in ours[1])


@pytest.mark.parametrize("draws", [None, 1, 4])
@pytest.mark.parametrize("family", toys.FAMILIES)
def test_loss_is_trace_elbo(family, draws):
    case = setting(family)
    found = ours(elbo(draws, analytic=False), *case)
    assert_pyros(found, pyros(Trace_ELBO, *case, draws))


@pytest.mark.parametrize("draws", [None, 4])
@pytest.mark.parametrize("family", ["mean_field", "gamma and beta"])
def test_analytic_loss_is_trace_mean_field_elbo(family, draws):
    case = setting(family)
    assert_pyros(ours(elbo(draws), *case), pyros(TraceMeanField_ELBO, *case, draws))


@pytest.mark.parametrize("copies", [1, 4])
@pytest.mark.parametrize("draws", [None, 1, 4])
def test_a_plate_of_the_programs_own_is_summed(copies, draws):
    def site(loc: Tensor | float, scale: float) -> Tensor:
        with pyro.plate("copies", copies, dim=-4), batch.clients():
            return pyro.sample("z", dist.Normal(loc, scale))

    def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
        site(local["mean"], 1.0)

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        z = site(0.0, 2.0)
        with batch.clients(), batch.rows():
            pyro.sample("y", dist.Normal(0 * z.sum(0), 1.0), obs=batch.x[..., 0])

    batch = toys.blobs().batch(torch.tensor(IDS))
    mean = torch.tensor([0.0, 1.0, -2.0]).double()
    with noise(len(batch)):
        found = elbo(draws)(model, guide, {}, {"mean": mean}, batch)
    each = torch.tensor(2.0).log() + (1 + mean.square()) / 8 - 0.5
    rows = dist.Normal(0.0, 1.0).log_prob(batch.x[..., 0]) * batch.mask
    close(found, copies * each - rows.sum(1), rtol=1e-6, atol=1e-6)


def test_directions_are_added_to_the_gradient_alone():
    def loss(model: object, guide: object, received: Tensors, local: Tensors, batch: object):
        return local["w"].square().sum(1) + local["b"]

    w = torch.randn(3, 2, generator=generator(0)).requires_grad_()
    b = torch.zeros(3, requires_grad=True)
    along = {"w": torch.randn(3, 2, generator=generator(1)), "b": torch.ones(3)}
    directed = Directed(loss, ("w", "b"), lambda name, received, local: received[name])
    value = directed(None, None, along, {"w": w, "b": b}, None)
    assert torch.equal(value, loss(None, None, along, {"w": w, "b": b}, None))
    scale = torch.tensor([1.0, 0.0, 2.0])
    of_w, of_b = torch.autograd.grad((scale * value).sum(), (w, b), create_graph=True)
    torch.testing.assert_close(of_w, scale[:, None] * (2 * w + along["w"]))
    assert torch.equal(of_b, 2 * scale)
    (second,) = torch.autograd.grad(of_w.sum(), w)
    assert torch.equal(second, (2 * scale)[:, None].expand(3, 2))


def test_a_value_that_does_not_fit_names_its_site():
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients(), batch.rows():
            pyro.sample("count", dist.Poisson(torch.ones(()).double()), obs=batch.x[..., 0])

    batch = toys.blobs().batch(torch.tensor(IDS))
    with pyro.validation_enabled(True), pytest.raises(ValueError, match="site 'count'"):
        elbo()(model, lambda *_: None, {}, {}, batch)


def test_a_divergence_is_taken_once_for_all_draws():
    model, guide, local, batch = setting("mean_field")
    with noise(len(batch)):
        q, p = traces(model, guide, {}, local, batch, num_particles=4)
    for name, site in latent(q):
        assert site["value"].shape[0] == 4
        _, ratio = log_densities(site, p.nodes[name], analytic=True)
        assert ratio.shape == (len(batch), 1)


def test_analytic_loss_counts_the_jacobian_of_an_automatic_guide():
    # TraceMeanField_ELBO drops it, so the oracle is Trace_ELBO here.
    case = setting("AutoNormal")
    assert_pyros(ours(elbo(), *case), pyros(Trace_ELBO, *case))
    model, guide, local, batch = case
    with noise(len(batch)):
        q, _ = traces(model, guide, {}, local, batch)
    assert q.nodes["rate_unconstrained"]["infer"]["is_auxiliary"]
    assert q.nodes["rate"]["fn"].log_density.abs().min() > 1e-3


def test_full_covariance_with_one_client_is_trace_elbo():
    data = toys.blobs()
    guide = from_pyro(AutoMultivariateNormal, data, model=toys.tempered)
    local = {n: v.requires_grad_() for n, v in toys.stacked(guide.start({}), 1).items()}
    case = (toys.tempered, guide.program, local, data.batch(torch.tensor([3])))
    assert_pyros(ours(elbo(analytic=False), *case), pyros(Trace_ELBO, *case))


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_every_client_has_the_value_it_has_alone(family):
    model, guide, local, batch = setting(family)
    together, grads = ours(elbo(3), model, guide, local, batch)
    for c, i in enumerate(IDS):
        alone = {n: v[c : c + 1].detach().requires_grad_() for n, v in local.items()}
        with ClientNoise([generator(5, c)]):
            value = elbo(3)(model, guide, {}, alone, toys.blobs().batch(torch.tensor([i])))
        close(value.detach(), together[c : c + 1])
        close(gradients(value.sum(), alone), [g[c : c + 1] for g in grads])


# Discrete sites, one for each row: Pyro charges a row's draw with that row's costs.


def row_switch(
    received: Tensors, local: Tensors, batch: Batch, *, guide: bool = False, scale: float = 1.0
) -> None:
    with batch.clients():
        one = torch.ones((), dtype=batch.x.dtype)
        level = dist.Normal(local["q/a"], softplus(local["q/b"])) if guide else dist.Normal(0, one)
        level = pyro.sample("level", level)
        with batch.rows(), poutine.scale(scale=scale):
            odds = dist.Bernoulli(logits=local["q/c"] + 0 * batch.x[..., 0])
            on = pyro.sample("on", odds if guide else dist.Bernoulli(0.3 * one))
            if not guide:
                logits = (level + on)[..., None] * batch.x[..., :5]
                pyro.sample("y", dist.Categorical(logits=logits), obs=batch.y)


@pytest.mark.parametrize("draws", [None, 3])
def test_row_level_score_function_is_pyros(draws):
    data = toys.blobs((12, 12, 12))
    local = toys.own_parameters(torch.Generator().manual_seed(2), 3)
    leaves = {n: local[n].requires_grad_() for n in ("q/a", "q/b", "q/c")}
    guide = partial(row_switch, guide=True)
    # Half of the rows, so that the plate scales.
    batch = data.batch(torch.arange(3)).split(2)[0]
    found = ours(elbo(draws, analytic=False), row_switch, guide, leaves, batch)
    assert_pyros(found, pyros(Trace_ELBO, row_switch, guide, leaves, batch, draws))


def test_padding_adds_nothing_to_a_row_level_score_function():
    local = toys.own_parameters(torch.Generator().manual_seed(2), 1)
    data = toys.blobs((12, 40))
    short, padded = data.batch(torch.tensor([0])), data.batch(torch.tensor([0, 1]))
    found = []
    for batch in (short, padded):
        leaves = {n: local[n].expand(len(batch)).clone() for n in ("q/a", "q/b", "q/c")}
        leaves = {n: v.requires_grad_() for n, v in leaves.items()}
        guide = partial(row_switch, guide=True)
        value, grads = ours(elbo(2), row_switch, guide, leaves, batch)
        found.append((value[0], [g[0] for g in grads]))
    close(found[0], found[1])


def test_score_function_is_the_gradient_of_the_expectation():
    # With one yes-or-no site the expectation is a sum of two terms.
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            on = pyro.sample("on", dist.Bernoulli(torch.full((), 0.3, dtype=torch.float64)))
            with batch.rows():
                logits = (0.1 + 0.2 * on)[..., None] * batch.x[..., :5]
                pyro.sample("y", dist.Categorical(logits=logits), obs=batch.y)

    def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            pyro.sample("on", dist.Bernoulli(logits=local["a"]))

    batch = toys.blobs().batch(torch.tensor([3]))
    a = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
    nll = torch.stack([cross(batch, 0.1 + 0.2 * on) for on in (0, 1)])
    q = torch.stack([1 - a.sigmoid(), a.sigmoid()]).squeeze()
    prior = torch.tensor([0.7, 0.3], dtype=torch.float64)
    (exact,) = torch.autograd.grad((q * (nll + q.log() - prior.log())).sum(), a)
    estimates = []
    for seed in range(60):
        with noise(1, seed):
            value = elbo(200)(model, guide, {}, {"a": a}, batch)
        estimates.append(torch.autograd.grad(value.sum(), a)[0])
    found = torch.cat(estimates)
    assert abs(found.mean() - exact) < 4 * found.std() / 60**0.5


def cross(batch: Batch, factor: float) -> Tensor:
    """Return the total cross-entropy of the first client's rows."""
    return cross_entropy(factor * batch.x[0, :, :5], batch.y[0], reduction="sum")


# What the weights mean.


def weighted(program: Program, sites: Callable[[str], bool], scale: float) -> Program:
    """Scale the latent sites of a program, whichever it has."""

    class Scale(poutine.messenger.Messenger):
        def _pyro_sample(self, msg: dict) -> None:
            if sites(msg["name"]):
                msg["scale"] = msg["scale"] * scale

    def run(*arguments: object) -> object:
        with Scale():
            return program(*arguments)

    return run


@pytest.mark.parametrize("family", ["mean_field", "AutoNormal", "discrete"])
def test_kl_weight_is_a_scale_on_the_latent_sites_of_both(family):
    model, guide, local, batch = setting(family)
    both = [weighted(p, lambda name: name != "y", 0.3) for p in (model, guide)]
    found = ours(elbo(2, kl=0.3, analytic=False), model, guide, local, batch)
    close(found, ours(elbo(2, analytic=False), *both, local, batch))
    assert_pyros(found, pyros(Trace_ELBO, *both, local, batch, 2))


def test_kl_weight_may_depend_on_the_client():
    model, guide, local, batch = setting("mean_field")
    none, whole = (ours(elbo(2, kl=k), model, guide, local, batch)[0] for k in (0.0, 1.0))
    per_datum = elbo(2, kl=lambda received, local, batch: 1 / batch.size)
    value, _ = ours(per_datum, model, guide, local, batch)
    close(value, none + (whole - none) / batch.size)
    assert (whole - none).min() > 1


def test_no_kl_still_learns_discrete_sites():
    model, guide, local, batch = setting("discrete")
    value, grads = ours(elbo(2, kl=0.0), model, guide, local, batch)
    assert dict(zip(local, grads, strict=True))["q/side"].abs().max() > 1e-3
    pyros_value, _ = pyros(
        Trace_ELBO,
        *(weighted(p, lambda name: name != "y", 1e-12) for p in (model, guide)),
        local,
        batch,
        2,
    )
    close(value.sum(), pyros_value.to(value))


def test_mean_is_per_datum():
    case = setting("mean_field")
    total, per_datum = ours(elbo(2), *case)[0], ours(elbo(2, mean=True), *case)[0]
    close(per_datum * torch.tensor([40.0, 12.0, 3.0], dtype=torch.float64), total)


def test_analytic_and_sampled_kl_agree_in_expectation():
    case = setting("mean_field")[:2], setting("mean_field")[2:]
    (model, guide), (local, batch) = case
    found = {}
    for analytic in (True, False):
        values = []
        for seed in range(40):
            with noise(len(batch), seed), torch.no_grad():
                values.append(elbo(250, analytic=analytic)(model, guide, {}, local, batch))
        found[analytic] = torch.stack(values)
    gap = found[True] - found[False]
    assert (gap.mean(0).abs() < 4 * gap.std(0) / 40**0.5).all()
    assert gap.std() > 1e-3


def test_loss_at_a_point_is_the_negative_log_joint():
    model, guide, local, batch = setting("delta")
    weights = with_rows(role("mu", local), len(batch))
    outputs = toys.net()(weights, batch.x)
    normal = dist.Normal(*torch.tensor([0.1, 0.7], dtype=torch.float64))
    for c, size in enumerate((40, 12, 3)):
        likelihood = cross_entropy(outputs[c, :size], batch.y[c, :size]) * size
        prior = sum(normal.log_prob(v[c]).sum() for v in local.values())
        close(ours(elbo(), model, guide, local, batch)[0][c], (likelihood - prior).detach())


def test_flat_prior_at_a_point_is_maximum_likelihood():
    _, guide, local, batch = setting("delta")
    model = Supervised(toys.net(), categorical, flat)
    outputs = toys.net()(with_rows(role("mu", local), len(batch)), batch.x)
    nll = cross_entropy(outputs[1, :12], batch.y[1, :12])
    close(ours(elbo(mean=True), model, guide, local, batch)[0][1], nll.detach())


@pytest.mark.parametrize("width", [1, 5, 7, 100])
def test_minibatches_of_an_epoch_add_up_to_the_whole_likelihood(width):
    _, guide, local, batch = setting("delta")
    model = Supervised(toys.net(), categorical, flat)
    whole, whole_grads = ours(elbo(), model, guide, local, batch)
    data = toys.blobs()
    schedule = make_schedule(
        [data.train[i] for i in IDS], [1, 1, 1], width, [generator(1, i) for i in IDS]
    )
    total, grads = torch.zeros_like(whole), [torch.zeros_like(g) for g in whole_grads]
    for rows, mask in zip(schedule.rows, schedule.mask, strict=True):
        part = data.gather(batch.cohort, rows, mask)
        share = mask.sum(1) / part.size
        leaves = {n: v.detach().requires_grad_() for n, v in local.items()}
        value = share * elbo()(model, guide, {}, leaves, part)
        total += value.detach()
        grads = [a + b for a, b in zip(grads, gradients(value.sum(), leaves), strict=True)]
    close(total, whole)
    close(grads, whole_grads)


def test_a_wrapped_delta_counts_its_density_too():
    def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            point = dist.Delta(local["w"], log_density=local["w"].square())
            pyro.sample("w", point.to_event(1))

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            pyro.sample("w", dist.Normal(torch.zeros_like(local["w"]), 1.0).to_event(1))

    batch = toys.blobs().batch(torch.tensor(IDS))
    local = {"w": torch.randn(3, 2, generator=generator(1), dtype=torch.float64).requires_grad_()}
    assert_pyros(
        ours(elbo(), model, guide, local, batch), pyros(Trace_ELBO, model, guide, local, batch)
    )


# What is refused.


def test_sites_must_be_the_same_in_model_and_guide():
    model, guide, local, batch = setting("gamma and beta")
    with noise(3), pytest.raises(ValueError, match=r"the guide lacks \['rate', 'share'\]"):
        elbo()(model, poutine.block(guide, hide=["rate", "share"]), {}, local, batch)
    with noise(3), pytest.raises(ValueError, match=r"the model lacks \['rate', 'share'\]"):
        elbo()(lambda *a: poutine.block(model, hide=["rate", "share"])(*a), guide, {}, local, batch)


@pytest.mark.parametrize("shape", [(), (2, 5), (5,)])
def test_tensor_without_a_client_axis_is_refused(shape):
    model, guide, local, batch = setting("gamma and beta")
    wrong = local | {"q/m": torch.zeros(shape, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"q/m has shape .* expected length 3"):
        elbo()(model, guide, {}, wrong, batch)


@pytest.mark.parametrize("draws", [0, -1])
def test_draws_are_counted_from_one(draws):
    with pytest.raises(
        ValueError, match=f"num_particles is {draws}; expected a whole number of at least 1"
    ):
        elbo(draws)


def test_one_bad_client_leaves_the_loss_of_others_alone():
    model, guide, local, batch = setting("mean_field")
    good, _ = ours(elbo(2), model, guide, local, batch)
    spoilt = {n: v.detach().clone() for n, v in local.items()}
    for v in spoilt.values():
        v[1] = torch.nan
    with pyro.validation_enabled(False):
        leaves = {n: v.requires_grad_() for n, v in spoilt.items()}
        value, grads = ours(elbo(2), model, guide, leaves, batch)
    assert value[1].isnan()
    close(value[[0, 2]], good[[0, 2]])
    assert all(g[[0, 2]].isfinite().all() for g in grads)


def test_priors_of_a_scale_family_are_pyros(blobs):
    # The prior's center and width reach the loss as they are written.
    model = Supervised(toys.net(), categorical, fixed(dist.Laplace, -0.2, 0.4))
    _, guide, local, batch = setting("mean_field")
    assert_pyros(
        ours(elbo(3, analytic=False), model, guide, local, batch),
        pyros(Trace_ELBO, model, guide, local, batch, 3),
    )


def test_a_scaled_prior_is_sampled_not_taken_in_closed_form(blobs):
    """The closed form knows one scale; a model that tempers its prior alone has another."""
    model = Supervised(toys.net(), categorical, fixed(dist.Normal, 0.1, 0.7))

    def tempered(received: Tensors, local: Tensors, batch: Batch) -> None:
        hidden = poutine.block(model, expose_types=["sample"])
        with poutine.scale(scale=0.1):
            hidden(received, local, batch)

    guide = guides.mean_field(toys.net().shapes, init_scale=0.1)
    local = toys.stacked(guide.start(toys.net().init(generator(0))), 12)
    batch = blobs.batch(torch.arange(12))
    losses = []
    for analytic in (True, False):
        with ClientNoise([generator(1, c) for c in range(12)]):
            losses.append(elbo(analytic=analytic)(tempered, guide.program, {}, local, batch))
    torch.testing.assert_close(*losses)


def test_auxiliary_sites_without_density_cost_nothing():
    # PyTorch's divergence of distributions masked by False is the number 0, not a tensor.
    batch = toys.blobs().batch(torch.arange(3))

    def noise(received, local, data):
        with data.clients():
            return pyro.sample("e", dist.Normal(torch.zeros(2), 1.0).to_event(1).mask(False))

    def model(received, local, data):
        noise(received, local, data)
        with data.clients(), data.rows():
            pyro.sample("y", dist.Categorical(logits=torch.zeros(toys.CLASSES)), obs=data.y)

    with ClientNoise([generator(c) for c in range(3)]):
        found = elbo(2)(model, noise, {}, {}, batch)
    expected = batch.size * math.log(toys.CLASSES)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
