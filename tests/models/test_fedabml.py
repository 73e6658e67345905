"""FedABML on quadratic clients, where priors, posteriors and their gradients are known."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import exp, log

import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch import Tensor
from toys import last

from pyrofl.data import Batch, Cohort, Federation
from pyrofl.data.loaders.conjugate import ConjugateTask, gaussian_means
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import bernoulli
from pyrofl.inference.engine.start import first
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.inference.fit import fit
from pyrofl.models import fedabml, fedavg, guides, likelihoods, priors
from pyrofl.nets import build
from pyrofl.tensors import Tensors, generator, role

PROMISES = {"fedabml": Promises(random=True, message=(2 * toys.ALL, 2 * toys.ALL))}

PRODUCT = (0.3895, 1.3263)  # mean of the exact global posterior of the quadratic pair


def gaussian(d: int, **options: object) -> Method:
    """Build FedABML for y = x'w + Normal(0, 1) with full batches."""
    options = {"batch": None} | options
    usual = {"likelihood": likelihoods.normal(), "kl": 1.0, "epochs": 5}
    return fedabml.build(build("linear", (d,), 1), **(usual | options))


def solved(method: Method, task: ConjugateTask) -> Method:
    """Put the exact posterior over independent normals in the place of gradient steps."""

    def infer(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        s2 = (2 * local["log_scale/w"]).exp()
        inverse = task.precision + torch.diag_embed(1 / s2)
        right = task.precision @ task.mean[..., None] + (local["loc/w"] / s2)[..., None]
        mean = torch.linalg.solve(inverse, right)[..., 0]
        return {"mu/w": mean, "pi/w": -inverse.diagonal(dim1=1, dim2=2).log() / 2}

    begin, train = method.phases
    return replace(method, phases=(begin, Phase((infer, *train.updates[1:]))))


def start(loc: tuple[float, ...], sd: float | None = None) -> Tensors:
    m = torch.tensor(loc, dtype=torch.float64)
    return {"loc/w": m} | ({"log_scale/w": torch.full_like(m, log(sd))} if sd else {})


def pull_to(task: ConjugateTask, s2: float) -> Tensor:
    """Solve sum_i (Lam_i + I / s2)^-1 Lam_i (mu_i - m) = 0."""
    eye = torch.eye(2, dtype=torch.float64)
    a = torch.linalg.solve(task.precision + eye / s2, task.precision)
    return torch.linalg.solve(a.sum(0), (a @ task.mean[..., None]).sum(0))[:, 0]


def one_datum(**tensors: float) -> tuple[Tensors, Batch]:
    """Return the local state of one client with one parameter, and its one row."""
    local = {
        n.replace("__", "/"): torch.tensor([[v]], dtype=torch.float64) for n, v in tensors.items()
    }
    one = torch.ones(1, 1, dtype=torch.float64)
    return local, Batch(one[..., None], one, one.bool(), one[0], torch.tensor([0]))


# The step on the prior


POINT = {"loc__w": 0.3, "log_scale__w": -0.2, "mu__w": 1.1, "pi__w": -0.7}


def test_the_plain_step_goes_down_the_kl_divergence():
    local, row = one_datum(**POINT)
    method = gaussian(1, natural=False, lr_prior=0.1)
    changed = method.phases[1].updates[1]({}, local, row)
    slope = {n: float(local[n] - v) / 0.1 for n, v in changed.items()}
    assert slope["loc/w"] == pytest.approx(-1.1935, abs=5e-5)
    assert slope["log_scale/w"] == pytest.approx(-0.3226, abs=5e-5)
    m, nu = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.3, -0.2))
    q = dist.Normal(local["mu/w"][0, 0], local["pi/w"][0, 0].exp())
    torch.distributions.kl_divergence(q, dist.Normal(m, nu.exp())).backward()
    close(m.grad, slope["loc/w"])
    close(nu.grad, slope["log_scale/w"])


def test_the_plain_step_is_per_datum_and_weighted_by_lambda():
    local, row = one_datum(**POINT)
    once = gaussian(1, natural=False, lr_prior=0.1).phases[1].updates[1]({}, local, row)
    weak = gaussian(1, natural=False, lr_prior=0.1, kl=0.3)
    many = replace(row, size=torch.tensor([5.0]).double())
    changed = weak.phases[1].updates[1]({}, local, many)
    for n, v in changed.items():
        close(v - local[n], (once[n] - local[n]) * 0.3 / 5)


def test_the_plain_step_does_not_overshoot():
    # A step of rate lambda / n above the prior's variance would land beyond the posterior's mean.
    local, row = one_datum(**POINT | {"log_scale__w": -4.0})
    moved = gaussian(1, natural=False, lr_prior=5.0, kl=3.0).phases[1].updates[1]({}, local, row)
    close(moved["loc/w"], local["mu/w"])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_natural_step_mixes_moments(share):
    local, row = one_datum(**POINT)
    changed = gaussian(1, lr_prior=share).phases[1].updates[1]({}, local, row)
    first = (1 - share) * 0.3 + share * 1.1
    second = (1 - share) * (exp(-0.4) + 0.3**2) + share * (exp(-1.4) + 1.1**2)
    close(changed["loc/w"], [[first]])
    close((2 * changed["log_scale/w"]).exp() + changed["loc/w"].square(), [[second]])


def test_the_natural_step_is_the_gradient_over_the_fisher_information():
    # Of a normal it is 1 / s^2 for m and 2 for nu, as a short step shows.
    m, nu, mean, variance = (torch.tensor([[v]]).double() for v in (0.3, -0.2, 1.1, 0.5))
    share = 1e-6
    found = fedabml.step_to(m, nu, mean, variance, share)
    slopes = fedabml.gradient(m, nu, mean, variance)
    close((found[0] - m) / share, -slopes[0] * (2 * nu).exp(), 1e-5)
    close((found[1] - nu) / share, -slopes[1] / 2, 1e-5)


@pytest.mark.parametrize("natural", [True, False])
def test_a_prior_is_never_narrower_than_the_floor(natural):
    local, row = one_datum(loc__w=0.0, log_scale__w=-9.2, mu__w=0.0, pi__w=-30.0)
    changed = gaussian(1, natural=natural, lr_prior=1.0).phases[1].updates[1]({}, local, row)
    close(changed["log_scale/w"], [[log(1e-4)]])


@pytest.mark.parametrize("options", [{"epochs": 0}, {"lr": 0.0}, {"lr": 0.0, "natural": False}])
def test_without_steps_the_prior_stays(quadratic, options):
    method = gaussian(2, **options)
    state = last(method, quadratic.federation, 2, server_state=start((0.2, -0.3), 0.7))
    close(state.server["loc/w"], (0.2, -0.3))
    close(state.server["log_scale/w"], [log(0.7)] * 2)


# The posterior


def test_gradient_steps_can_only_end_at_the_exact_posterior(quadratic):
    method, data = gaussian(2, num_particles=4), quadratic.federation
    batch, s2 = data.batch(torch.arange(2)), 0.6
    m = torch.tensor([[0.4, -0.2], [0.4, -0.2]], dtype=torch.float64)
    prior = {"loc/w": m, "log_scale/w": torch.full_like(m, log(s2) / 2)}
    phi = [torch.zeros(2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    descent = torch.optim.LBFGS(phi, max_iter=200, tolerance_change=0, tolerance_grad=1e-12)

    def step() -> Tensor:
        descent.zero_grad()
        local = prior | {"mu/w": phi[0], "pi/w": phi[1]}
        loss = elbo(4)(method.model, method.guide, {}, local, batch).sum()
        loss.backward()
        return loss

    with toys.SigmaPoints():
        descent.step(step)
    mean, covariance = quadratic.posterior(m, torch.full((2,), 1 / s2))
    close(phi[0].detach(), mean, 1e-7)
    precision = torch.linalg.inv(covariance).diagonal(dim1=1, dim2=2)
    close((2 * phi[1]).exp().detach(), 1 / precision, 1e-7)


def test_clients_train_to_the_exact_posterior():
    # Many equal clients differ in their noise alone.
    task = gaussian_means([[1.0, 0.0]], [0.5])
    x, y = task.federation.x, task.federation.y
    rows = torch.arange(200 * len(y)).split(len(y))
    data = Federation(x.repeat(200, 1), y.repeat(200, *[1] * (y.dim() - 1)), rows, rows)
    # The step on theta ends at phi, so the message tells phi.
    method = gaussian(2, lr=0.3, lr_prior=1.0, steps=100, epochs=1, num_particles=20)
    state = last(method, data, 1, server_state=start((0.2, -0.1), 0.8))
    found = torch.cat([state.message["loc/w"], (2 * state.message["log_scale/w"]).exp()], 1)
    mean, covariance = task.posterior(torch.tensor([0.2, -0.1]), torch.tensor([0.8**-2]))
    exact = torch.cat([mean[0], covariance[0].diagonal()])
    error = found.std(0) / 200**0.5
    assert (error < 0.01).all()
    assert ((found.mean(0) - exact).abs() < 4 * error + 0.005).all()


# The server's fixed points


@pytest.mark.parametrize(
    ("s2", "point", "accuracy"),
    [
        (1e-5, PRODUCT, 1e-4),  # what the toy experiment measures the distance to
        (1.0, (0.1208, 1.1583), 5e-5),
        (1e6, (0.0, 1.0), 5e-5),  # FedAvg with many local steps
    ],
)
def test_the_fixed_point_lies_between_the_posterior_and_fedavg(quadratic, s2, point, accuracy):
    expected = pull_to(quadratic, s2)
    close(expected, point, accuracy)
    method = gaussian(
        2,
        guide=guides.delta,
        init_scale=s2**0.5,
        steps=150,
        epochs=1,
        lr=2 * 2 / (5 + 2 / s2),  # the loss is a mean over two rows
        lr_prior=1.0,
    )
    state = last(method, quadratic.federation, 1, server_state=start(tuple(expected.tolist())))
    close(state.server["loc/w"], expected, 1e-9)


def test_rounds_reach_the_fixed_point(quadratic):
    method = gaussian(
        2, guide=guides.delta, init_scale=1.0, steps=40, epochs=1, lr=0.4, lr_prior=1.0
    )
    state = last(method, quadratic.federation, 16)
    close(state.server["loc/w"], (0.1208, 1.1583), 1e-4)


def test_moment_matching_is_em_for_the_prior():
    task = gaussian_means([[-2.0], [-0.5], [0.4], [3.0]], [0.3] * 4)
    method = solved(gaussian(1, lr_prior=1.0, average="moments"), task)
    exact = start((0.225,), 3.001875**0.5)
    stays = last(method, task.federation, 1, server_state=exact, check=False)
    for n, v in exact.items():
        close(stays.server[n], v)
    state = last(method, task.federation, 60, server_state=start((0.0,), 1.0), check=False)
    close(state.server["loc/w"], [0.225], 1e-9)
    close((2 * state.server["log_scale/w"]).exp(), [3.001875], 1e-6)


def test_moment_matching_minimizes_the_divergence_from_all_clients():
    rng = generator(1)
    loc, nu = (torch.randn(5, 3, generator=rng).double() for _ in range(2))
    message = {"loc/w": loc, "log_scale/w": nu}
    aggregate = gaussian(3, average="moments").aggregate
    cohort = Cohort(torch.arange(5), torch.arange(1.0, 6.0).double())
    found = aggregate({n: v[0] for n, v in message.items()}, message, cohort, generator(0))
    m, width = found["loc/w"].requires_grad_(), found["log_scale/w"].requires_grad_()
    kl = torch.distributions.kl_divergence(dist.Normal(loc, nu.exp()), dist.Normal(m, width.exp()))
    kl.sum().backward()
    close(m.grad, [0.0] * 3)
    close(width.grad, [0.0] * 3)


@pytest.mark.parametrize(
    ("average", "sd"), [("mnu", 2.0), ("std", 2.5), ("moments", (8.5 + 9.0) ** 0.5)]
)
def test_the_server_averages_evenly_what_it_is_told_to(average, sd):
    message = {"loc/w": torch.tensor([[1.0], [7.0]]), "log_scale/w": torch.tensor([[1.0], [4.0]])}
    message["log_scale/w"] = message["log_scale/w"].log()
    cohort = Cohort(torch.arange(2), torch.tensor([10.0, 990.0]))
    server = gaussian(1, average=average).aggregate(
        start((0.0,), 1.0), message, cohort, generator(0)
    )
    close(server["loc/w"], [4.0])
    close(server["log_scale/w"].exp(), [sd], 1e-5)


# MAML, Reptile and pFedMe


def test_unrolled_with_a_delta_guide_is_maml(quadratic):
    # On the sum of two rows a rate of 0.1 is 0.2 on their mean, and a gradient twice theirs.
    method = gaussian(
        2,
        guide=guides.delta,
        meta_grad="unrolled",
        kl=0.0,
        steps=1,
        epochs=1,
        lr=0.2,
        lr_prior=2.0,
    )
    begin = start((0.2, -0.3))
    state = last(
        method,
        quadratic.federation,
        1,
        server_state=begin,
        participation=lambda *_: torch.tensor([1]),
    )
    close(begin["loc/w"] - state.server["loc/w"], (1.2756, -3.1965), 5e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_unrolled_is_the_derivative_of_the_loss_after_the_steps(quadratic, steps):
    s2, lr, lam = 0.5, 0.1, 0.7
    method = gaussian(
        2,
        guide=guides.delta,
        init_scale=s2**0.5,
        meta_grad="unrolled",
        kl=lam,
        steps=steps,
        epochs=1,
        lr=2 * lr,
        lr_prior=2.0,
    )
    m = torch.tensor([0.2, -0.3], dtype=torch.float64, requires_grad=True)
    h, mu, eye = quadratic.precision[1], quadratic.mean[1], torch.eye(2, dtype=torch.float64)
    w = m
    for _ in range(steps):
        w = w - lr * (h @ (w - mu) + lam * (w - m) / s2)
    ((w - mu) @ h @ (w - mu) / 2 + lam * (w - m).square().sum() / (2 * s2)).backward()
    assert not torch.allclose(m.grad, (eye - lr * h) @ h @ (m.detach() - mu))
    state = last(
        method,
        quadratic.federation,
        1,
        server_state={"loc/w": m.detach()},
        participation=lambda *_: torch.tensor([1]),
    )
    close(m.detach() - state.server["loc/w"], m.grad)


def test_unrolled_moves_the_spread_of_the_prior(quadratic):
    method = gaussian(2, meta_grad="unrolled", init_scale=0.5, lr=0.05, num_particles=200)
    state = last(method, quadratic.federation, 1, server_state=start((0.0, 0.0), 0.5))
    # Over seeds, with 200 draws, -0.033 and 0.020 with standard errors of 0.002.
    change = state.server["log_scale/w"] - log(0.5)
    assert (change[0] < -0.02, change[1] > 0.01) == (True, True)
    assert (state.server["loc/w"] - torch.tensor([0.0, 1.0])).norm() < 1


def test_with_a_delta_guide_the_printed_algorithm_is_reptile(quadratic):
    s2, lam, rate = 0.5, 0.7, 0.3
    common = {"guide": guides.delta, "init_scale": s2**0.5, "kl": lam, "epochs": 1, "lr": 0.1}
    # With a share of one the message is phi itself.
    phi = last(
        gaussian(2, lr_prior=1.0, **common),
        quadratic.federation,
        1,
        server_state=start((0.2, -0.3)),
    ).message["loc/w"]
    plain = last(
        gaussian(2, natural=False, lr_prior=rate, **common),
        quadratic.federation,
        1,
        server_state=start((0.2, -0.3)),
    )
    theta = torch.tensor([0.2, -0.3], dtype=torch.float64)
    close(plain.message["loc/w"], theta + rate * lam / (2 * s2) * (phi - theta))
    close(plain.server["loc/w"], plain.message["loc/w"].mean(0))


def test_without_pull_a_delta_guide_and_whole_steps_give_fedavg(quadratic):
    method = gaussian(2, guide=guides.delta, kl=0.0, steps=1, epochs=4, lr=0.1, lr_prior=1.0)
    plain = fedavg.build(
        build("linear", (2,), 1),
        likelihood=likelihoods.normal(),
        batch=None,
        epochs=4,
        lr=0.1,
        momentum=0.0,
    )
    one, other = (last(m, quadratic.federation, 3, seed=2) for m in (method, plain))
    close(one.server["loc/w"], other.server["w/w"])


# Variants


VARIANTS = list(
    product(
        enumerate([guides.log_mean_field, guides.mean_field, guides.delta]),
        enumerate(["mnu", "std", "moments"]),
        enumerate([{"natural": True}, {"natural": False}, {"meta_grad": "unrolled", "steps": 2}]),
    )
)
# Nine of them, in which every two settings meet once.
SQUARE = [v for v in VARIANTS if sum(number for number, _ in v) % 3 == 0]


@pytest.mark.parametrize(
    ("guide", "average", "step"),
    [
        pytest.param(*(what for _, what in v), marks=() if v in SQUARE else pytest.mark.slow)
        for v in VARIANTS
    ],
)
def test_every_variant_keeps_the_contract(guide, average, step):
    data = toys.blobs((5, 12, 8))
    options = {"epochs": 1, "steps": 2, "num_particles": 2, "batch": None} | step
    method = fedabml.build(toys.net("softmax"), guide=guide, average=average, **options)
    participation = bernoulli(0.6)
    alone, together = (
        list(federate(method, data, 2, participation=participation, chunk_size=chunk))
        for chunk in (1, 3)
    )
    for one, other in zip(alone, together, strict=True):
        toys.assert_same_round(one, other, rtol=1e-8, atol=1e-9)
    d = toys.FEATURES * toys.CLASSES + toys.CLASSES
    message = alone[-1].message
    assert sum(v[0].numel() for v in message.values()) == d * (1 if guide is guides.delta else 2)
    assert set(message) == set(alone[-1].server)
    everyone = [evaluate(method, data, state, part="train") for state in federate(method, data, 2)]
    assert everyone[1].mean("nll") < everyone[0].mean("nll")


def test_a_softplus_guide_gives_the_same_posterior_family(quadratic):
    ends = [
        last(
            gaussian(2, guide=guide, steps=150, epochs=1, lr=0.2, lr_prior=1.0, num_particles=20),
            quadratic.federation,
            1,
            server_state=start((0.2, -0.3), 0.7),
        )
        for guide in (guides.log_mean_field, guides.mean_field)
    ]
    close(ends[0].message["loc/w"], ends[1].message["loc/w"], 0.1)
    close(ends[0].message["log_scale/w"], ends[1].message["log_scale/w"], 0.1)


def test_the_prior_can_be_exchanged(tiny):
    net = build("mlp:5", (4,), 3)
    ends = [
        last(fedabml.build(net, prior=prior), tiny, 2).server["loc/head.weight"]
        for prior in (dist.Normal, dist.Laplace, priors.student_t(4))
    ]
    assert not torch.allclose(ends[0], ends[1])
    assert not torch.allclose(ends[0], ends[2])


def test_a_heavy_divergence_keeps_clients_near_the_prior(quadratic):
    apart = [
        last(gaussian(2, kl=kl, init_scale=0.5, lr=0.01, epochs=10), quadratic.federation, 1)
        .message["loc/w"]
        .std(0)
        .mean()
        for kl in (0.0, 1.0, 10.0)
    ]
    assert apart[0] > apart[1] > apart[2] > 0


def test_steps_do_not_overshoot_a_narrow_prior(quadratic):
    # Without a bound the pull would multiply every deviation by 1 - 0.2 / (2 * 0.01^2) = -999.
    for options in ({"guide": guides.delta}, {}):
        method = gaussian(2, init_scale=0.01, lr=0.2, lr_prior=1.0, fine_tune=0, **options)
        states = list(federate(method, quadratic.federation, 8, server_state=start((0, 0), 0.01)))
        assert not any(state.rejected for state in states)
        ends = torch.stack([state.server["loc/w"] for state in states])
        assert (ends.norm(dim=1) < 2).all()


# Personal and global models


SMALL = (5, 12, 8)


def quick(**options: object) -> Method:
    return fedabml.build(toys.net("softmax"), num_particles=2, steps=2, lr=0.01, **options)


def test_without_fine_tuning_a_client_has_the_prior():
    data = toys.blobs(SMALL)
    method = quick(fine_tune=0)
    state = last(method, data, 2)
    for draws in (None, 3):
        mine, everyones = (
            evaluate(method, data, state, model=model, draws=draws).values["nll"]
            for model in ("personal", "global")
        )
        assert torch.equal(mine, everyones)
    assert method.adapt == ()


def test_fine_tuning_starts_at_the_prior_and_leaves_it_frozen():
    data = toys.blobs(SMALL)
    method = quick(fine_tune=3)
    state = last(method, data, 2)
    found = {
        adaptation: evaluate(method, data, state, part="train", adaptation=adaptation).mean("nll")
        for adaptation in ("none", "fine_tune")
    }
    assert found["fine_tune"] < found["none"]
    cohort = data.cohort(torch.arange(3))
    received, local = prepared(method, data, state, cohort, adaptation="fine_tune")
    for n, v in received.items():
        assert torch.equal(local[n], v)
        assert not torch.equal(local[n.replace("loc/", "mu/").replace("log_scale/", "pi/")], v)


def test_new_clients_learn_more_in_more_epochs():
    held = toys.blobs((*SMALL, 9, 6), held_out=2)
    state = last(quick(), held, 1)
    nll = [
        evaluate(
            quick(fine_tune=f),
            held,
            state,
            adaptation="fine_tune" if f else "none",
            population="held_out",
            part="train",
        ).mean("nll")
        for f in (0, 1, 4, 10)
    ]
    assert nll == sorted(nll, reverse=True)


def test_more_steps_on_a_minibatch_learn_more_in_an_epoch():
    data = toys.blobs(SMALL)
    state = last(quick(), data, 1)
    once, often = (
        evaluate(
            quick(fine_tune=1, tune_steps=steps), data, state, adaptation="fine_tune", part="train"
        ).values["nll"]
        for steps in (1, 6)
    )
    assert (often < once).all()


def test_draws_of_the_prior_are_less_sure_than_its_mean(blobs):
    method = fedabml.build(toys.net(), init_scale=0.5, lr=0.0)
    state = first(method, blobs, 3)
    state.server["loc/head.weight"] *= 20
    mean, drawn = (
        evaluate(method, blobs, state, model="global", draws=draws).mean("entropy")
        for draws in (None, 50)
    )
    assert 0 <= mean < drawn <= log(toys.CLASSES)


def test_a_network_that_knows_nothing_has_the_largest_entropy(blobs):
    method = fedabml.build(toys.net())
    state = first(method, blobs, 3)
    nothing = {n: torch.zeros_like(v) for n, v in role("loc", state.server).items()}
    state.server.update({f"loc/{n}": v for n, v in nothing.items()})
    found = evaluate(method, blobs, state).values["entropy"]
    close(found, [log(toys.CLASSES)] * 12)


# What is refused


def test_a_regression_that_diverges_names_the_learning_rate():
    """Numbers of another unit than 1 make steps of the default learning rate too long."""
    noise = generator(0)
    x, y = (10 * torch.randn(4, 60, size, generator=noise) for size in (2, 1))
    sites = {f"s{j}": (x[j], y[j, :, 0], x[j, :3], y[j, :3, 0]) for j in range(4)}
    method = fedabml.build(build("linear", (2,), 1), likelihood=likelihoods.normal(1.0))
    run = fit(method, Federation.from_arrays(sites), 3, progress=False)
    with pytest.raises(ValueError, match="as training has diverged; lower the learning"):
        run.record_scores()
