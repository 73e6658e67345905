"""LR-BPFL: without corrections it is FedAvg; its mean-field posteriors have a closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

import pyrofl
from pyrofl.data import Federation
from pyrofl.inference.definition.method import GradientStep, Method
from pyrofl.inference.engine.federate import federate
from pyrofl.models import fedavg, guides, likelihoods, lrbpfl
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, generator, role, under

SITES = [f"{layer}.weight.{end}" for layer in ("fc1", "head") for end in "ac"]
PROMISES = {
    "lrbpfl": Promises(
        message=(toys.ALL, toys.ALL),
        sites={n: (f"{n}_dim_0", f"{n}_dim_1") for n in SITES},
        random=True,
    )
}


def test_without_width_of_the_prior_it_is_fedavg():
    options = {"epochs": 2, "batch": 4, "momentum": 0.9}
    narrow = {"prior_scale": 1e-13, "lr_correction": 0.0, "guide": guides.delta}
    half = pyrofl.participation.fraction(0.5)
    found, known = (
        list(federate(method, toys.blobs(), 4, participation=half, chunk_size=2))[-1].server
        for method in (
            lrbpfl.build(toys.net(), lr_base=0.05, **narrow, **options),
            fedavg.build(toys.net(), lr=0.05, **options),
        )
    )
    for name, value in role("w", known).items():
        close(found[f"base/{name}"], value, 1e-9)


def logits(method: Method, base: Tensors, factors: Tensors, x: Tensor) -> Tensor:
    """Return the outputs for given weights [*p] and factors [C, R, n] of some clients."""
    clients, rows = x.shape[:2]
    parts = torch.arange(clients * rows).split(rows)
    y = torch.zeros(clients * rows).long()
    batch = Federation(x.flatten(0, 1), y, parts, parts, classes=("a", "b", "c")).batch(
        torch.arange(clients)
    )
    local = {n: v.expand(clients, 1, *v.shape) for n, v in under("base", base).items()}
    known = {n: v[:, None] for n, v in factors.items()}
    with pyro.poutine.trace() as found, pyro.condition(data=known):
        method.model(local, local, batch)
    return found.trace.nodes["y"]["fn"].logits


@pytest.mark.parametrize("rank", [1, 3])
def test_outputs_are_sums_over_the_ranks_as_in_the_authors_layers(rank):
    """Their layer computes sum_r c_r * (W (a_r * x)), and a convolution so by channels."""
    conv, linear = nn.Conv2d(2, 4, 3), nn.Linear(16, 3)
    net = Network(nn.Sequential(conv, nn.ReLU(), nn.Flatten(), linear).double())
    method = lrbpfl.build(net, rank=rank)
    g = generator(3)
    base = {n: torch.randn(*s, generator=g).double() for n, s in net.shapes.items()}
    sizes = {"0.weight.a": 2, "0.weight.c": 4, "3.weight.a": 16, "3.weight.c": 3}
    factors = {n: torch.randn(2, rank, s, generator=g).double() for n, s in sizes.items()}
    x = torch.randn(2, 5, 2, 4, 4, generator=g).double()
    found = logits(method, base, factors, x)
    for j in range(2):
        h, out = torch.zeros(5, 4, 2, 2).double(), torch.zeros(5, 3).double()
        for r in range(rank):
            a, c = (factors[f"0.weight.{end}"][j, r][:, None, None] for end in "ac")
            h = h + c * torch.conv2d(a * x[j], base["0.weight"])
        h = (h + base["0.bias"][:, None, None]).relu().flatten(1)
        for r in range(rank):
            a, c = (factors[f"3.weight.{end}"][j, r] for end in "ac")
            out = out + c * ((a * h) @ base["3.weight"].T)
        out = out + base["3.bias"]
        close(found[j], out - out.logsumexp(-1, keepdim=True), 1e-11)


def test_the_numbers_are_those_of_the_authors_code():
    """Of their LRBayesLinear without bias, rank 2, with standard deviations of 0."""

    def sines(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.arange(1, 1 + count).double().sin().view(shape)

    net = Network(nn.Linear(3, 2, bias=False).double())
    factors = {"weight.a": 1 + sines(2, 3) / 2, "weight.c": 1 - sines(2, 2) / 3}
    one = {n: v[None] for n, v in factors.items()}
    found = logits(lrbpfl.build(net, rank=2), {"weight": sines(2, 3)}, one, 2 * sines(1, 2, 3))
    outputs = torch.tensor(
        [[4.90088437797918, -5.300908646662448], [-4.872112553731736, 5.373709469917005]],
        dtype=torch.float64,
    )
    close(found[0], outputs.log_softmax(-1), 1e-12)


def test_point_corrections_of_one_client_are_a_loop_of_torch():
    """A step on the factors, with the normal prior divided by the rows, then one on the weights."""
    data, net = toys.blobs((12,)), toys.net()
    method = lrbpfl.build(
        net, guide=guides.delta, epochs=3, batch=None, lr_correction=0.02, lr_base=0.05, kl=0.5
    )
    (start,) = federate(method, data, 1)
    first = pyrofl.inference.engine.start.first(method, data, 0).server
    w = {n: v.clone().requires_grad_() for n, v in role("base", first).items()}
    _, own = pyrofl.inference.engine.state.client_inputs(
        method,
        data,
        pyrofl.inference.engine.start.first(method, data, 0),
        data.cohort(torch.tensor([0])),
        0,
    )
    f = {n: v[0].clone().requires_grad_() for n, v in role("mu", own).items()}
    x, y = data.x[data.train[0]], data.y[data.train[0]]

    def loss(kl: float) -> Tensor:
        masks = {n: f[f"{n}.c"].T @ f[f"{n}.a"] for n in ("fc1.weight", "head.weight")}
        v = {n: p * masks[n] if n in masks else p for n, p in w.items()}
        away = sum(((p - 2**-0.5) ** 2).sum() for p in f.values()) / (2 * 0.1**2)
        return cross_entropy(net.apply(v, x), y) + kl * away / len(y)

    parts = [
        (torch.optim.Adam(f.values(), lr=0.02), 0.5),
        (torch.optim.SGD(w.values(), lr=0.05, momentum=0.9), 0.0),
    ]
    for _ in range(3):
        for optim, kl in parts:
            optim.zero_grad()
            loss(kl).backward()
            optim.step()
    for name, value in w.items():
        close(start.server[f"base/{name}"], value.detach(), 1e-10)
    for name, value in f.items():
        close(start.client_states[f"mu/{name}"][0], value.detach(), 1e-10)


# The mean-field posterior of a normal linear model: outputs sum_r c_r sum_i a_ri u_i, u = W x.

RANK, SD, WIDTH = 2, 0.5, 0.6
W = torch.tensor([[1.0, -0.7, 0.4]]).double()


def regressions() -> Federation:
    """Return two clients with masks of their own, of 30 and 9 rows."""
    g = generator(8)
    x = torch.randn(45, 3, generator=g).double()
    masks = torch.tensor([[1.5, 0.4, 1.0], [0.6, 1.6, -0.5]]).double()
    parts = torch.arange(45).split([30, 9, 3, 3])
    y = torch.zeros(45).double()
    for rows, mask in zip((*parts,), (*masks, *masks), strict=True):
        noise = SD * torch.randn(len(rows), generator=g).double()
        y[rows] = x[rows] @ (W[0] * mask) + noise
    return Federation(x, y, parts[:2], parts[2:])


def regression(**settings: object) -> Method:
    net = Network(nn.Linear(3, 1, bias=False).double(), pretrained=True)
    net.module.weight.data.copy_(W)
    options = {"rank": RANK, "prior_scale": WIDTH, "kl": 1.0, "lr_base": 0.0, "batch": None}
    return lrbpfl.build(net, likelihood=likelihoods.normal(SD), **(options | settings))


def free_energy(q: Tensors, x: Tensor, y: Tensor) -> Tensor:
    """Return the negative ELBO of a client, which is a sum of moments of independent normals."""
    u = x * W
    mean, sd = role("mu", q), {n: softplus(v) for n, v in role("pi", q).items()}
    a, c = (mean[f"weight.{end}"] for end in "ac")
    va, vc = (sd[f"weight.{end}"].square() for end in "ac")
    z, vz = u @ a.T, u.square() @ va.T  # [B, R]
    center, spread = c[:, 0] * z, (c[:, 0] ** 2 + vc[:, 0]) * (z**2 + vz) - (c[:, 0] * z) ** 2
    error = (y - center.sum(1)) ** 2 + spread.sum(1)
    fit = (error / (2 * SD**2) + math.log(SD * math.sqrt(2 * math.pi))).sum()
    prior = dist.Normal(torch.tensor(RANK**-0.5).double(), WIDTH)
    pairs = ((dist.Normal(mean[n], sd[n]), prior) for n in mean)
    return fit + sum(torch.distributions.kl_divergence(*pair).sum() for pair in pairs)


def optimum(q: Tensors, x: Tensor, y: Tensor) -> Tensors:
    """Return the mean-field posterior to which descent leads from q."""
    found = {n: v.clone().requires_grad_() for n, v in q.items()}
    optim = torch.optim.LBFGS(
        found.values(), lr=0.5, max_iter=2000, tolerance_grad=1e-10, tolerance_change=1e-15
    )

    def closure() -> Tensor:
        optim.zero_grad()
        value = free_energy(found, x, y)
        value.backward()
        return value

    optim.step(closure)
    return {n: v.detach() for n, v in found.items()}


def begun(method: Method, data: Federation) -> Tensors:
    """Return the clients' states before training."""
    state = pyrofl.inference.engine.start.first(method, data, 0)
    cohort = data.cohort(torch.arange(2))
    received, own = pyrofl.inference.engine.state.client_inputs(method, data, state, cohort, 0)
    return received | own


def test_the_gradient_vanishes_at_the_mean_field_posterior():
    """Of 24 gradients by 60 times 400 draws none is 4.5 standard errors off; elsewhere one is."""
    data, method = regressions(), regression(num_particles=400)
    before = begun(method, data)
    starts = [{n: v[j] for n, v in before.items() if "weight." in n} for j in range(2)]
    ends = [
        optimum(q, data.x[rows], data.y[rows]) for q, rows in zip(starts, data.train, strict=True)
    ]
    step = method.phases[0].updates[0]
    assert isinstance(step, GradientStep)
    batch = data.batch(torch.arange(2))
    worst = []
    for q in (ends, starts):
        local = {n: torch.stack([one[n] for one in q]) for n in q[0]}
        grads = []
        with pyrofl.tensors.seeded(4):
            for _ in range(60):
                at = {n: v.clone().requires_grad_() for n, v in local.items()}
                known = before | at
                loss = step.loss(method.model, method.guide, before, known, batch)
                found = torch.autograd.grad(loss.sum(), list(at.values()))
                grads.append(torch.cat([v.flatten() for v in found]))
        all_ = torch.stack(grads)
        assert all_.shape[1] == 2 * 2 * RANK * 4
        worst.append(float((all_.mean(0) / (all_.std(0) / 60**0.5)).abs().max()))
    assert worst[0] < 4.5
    assert worst[1] > 20


def test_clients_reach_their_mean_field_posteriors():
    """Within 0.1 nats of the optimum that descent from the same start finds."""
    data = regressions()
    method = regression(num_particles=64, epochs=500, lr_correction=0.01)
    before = begun(method, data)
    state = toys.last(method, data, 2, chunk_size=1)
    for j, rows in enumerate(data.train):
        x, y = data.x[rows], data.y[rows]
        start = {n: v[j] for n, v in before.items() if "weight." in n}
        best = float(free_energy(optimum(start, x, y), x, y))
        own = {n: v[j] for n, v in state.client_states.items()}
        assert best < float(free_energy(own, x, y)) < best + 0.1 < float(free_energy(start, x, y))


def test_corrections_undo_what_clients_do_to_features():
    """Every client flips the signs of features of its own: no weights suit all."""
    data = toys.blobs((40,) * 6)
    x, g = data.x.clone(), generator(0)
    for train, test in zip(data.train, data.test, strict=True):
        signs = 2.0 * torch.randint(2, (toys.FEATURES,), generator=g) - 1
        x[train], x[test] = x[train] * signs, x[test] * signs
    data = replace(data, x=x)
    wide = lrbpfl.build(toys.net(), rank=1, prior_scale=1.0, epochs=10)
    scores = [
        pyrofl.fit(method, data, 12, progress=False).evaluate().mean("nll")
        for method in (wide, fedavg.build(toys.net(), lr=0.03))
    ]
    assert scores[0] < scores[1] - 0.5


def test_new_clients_adapt_their_corrections_alone():
    data = toys.blobs(held_out=2)
    run = pyrofl.fit(lrbpfl.build(toys.net(), fine_tune=3), data, 2, progress=False)
    told = {a: run.evaluate(adaptation=a).values["nll"][-2:] for a in ("none", "fine_tune")}
    assert not torch.equal(told["none"], told["fine_tune"])
    assert told["fine_tune"].isfinite().all()


@pytest.mark.parametrize(
    ("corrected", "reason"),
    [
        ("fc9.*", r"no parameter matches 'fc9\.\*'"),
        ("*.bias", r"no weight of two axes matches '\*\.bias'; expected some of fc1.weight, head"),
    ],
)
def test_weights_without_factors_are_refused(corrected, reason):
    with pytest.raises(ValueError, match=reason):
        lrbpfl.build(toys.net(), corrected=corrected)
