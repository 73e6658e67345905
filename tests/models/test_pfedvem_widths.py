"""The variant of pFedVEM that learns the widths of heads, and the warning without it."""

from __future__ import annotations

from dataclasses import replace

import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from torch import Tensor
from torch.nn.functional import softplus
from toys import last

import pyrofl
from pyrofl.data import Federation
from pyrofl.data.loaders import datasets
from pyrofl.data.loaders.conjugate import ConjugateTask, conjugate
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import bernoulli
from pyrofl.inference.engine.state import RoundState
from pyrofl.models import fedavg, guides, likelihoods, pfedvem, pvi
from pyrofl.nets import build
from pyrofl.partitions import federations
from pyrofl.tensors import generator, role, seeded

SIZES = (3, 40, 7, 12, 25)


def task(d: int = 3) -> ConjugateTask:
    """Return ragged clients of a linear regression with noise of standard deviation 1."""
    rng = generator(3)
    x = [torch.randn(n, d, generator=rng).double() for n in SIZES]
    return conjugate(x, [v.sum(1) + torch.randn(len(v), generator=rng).double() for v in x])


def gaussian(d: int, **options: object) -> Method:
    """Build the variant for y = x'w + Normal(0, 1), with w personal and Bayesian throughout."""
    net = build("linear", (d,), 1)
    return pfedvem.build(net, likelihood=likelihoods.normal(), **{"prior_scale": 1.0} | options)


def widths(state: RoundState) -> Tensor:
    """Return the standard deviations of all clients' heads, [J, d]."""
    own = role("pi", dict(state.client_states))
    return torch.cat([softplus(v).flatten(1) for v in own.values()], 1)


# The closed forms


@pytest.mark.parametrize("guide", [guides.mean_field, guides.log_mean_field])
def test_widths_are_the_optimum_for_ragged_linear_clients_from_any_start(guide):
    linear = task()
    options = {"participation": bernoulli(0.6), "chunk_size": 2}
    ends = []
    for start in (0.1, 1.0):
        method = gaussian(3, init_scale=start, guide=guide)
        state = last(method, linear.federation, 12, **options)
        tau, own = state.client_states["tau"], state.client_states["pi/w"]
        sd = softplus(own) if guide is guides.mean_field else own.exp()
        close(sd, (linear.precision.diagonal(dim1=1, dim2=2) + tau[:, None]).rsqrt(), 1e-9)
        ends.append(sd)
    assert ((ends[0] / ends[1]).log().abs() < 0.01).all()


def test_the_confidence_is_the_mode_under_its_prior():
    linear, s, d = task(), 0.7, 3
    method = gaussian(d, prior_scale=s)
    before, after = federate(method, linear.federation, 2)
    mean, variance = before.client_states["mu/w"], widths(before).square()
    spread = variance.sum(1) + (mean - before.server["loc/w"]).square().sum(1)
    close(after.message["tau"], 2 * d / (spread + d * s**2))
    rho = (1 / after.message["tau"]).requires_grad_()
    terms = (-d / 2 * rho.log() - spread / (2 * rho)).sum()
    # The ELBO's terms in rho = 1 / tau, and the log density of log rho under its prior.
    prior = (-d / 2 * rho.log() - d * s**2 / (2 * rho)).sum()
    (slope,) = torch.autograd.grad(terms + prior, rho)
    close(slope, torch.zeros(5), 1e-9)


def test_widths_are_those_of_a_head_on_the_clients_own_base():
    rng = generator(5)
    rows = torch.arange(sum(SIZES)).split(SIZES)
    x = torch.randn(sum(SIZES), 4, generator=rng).double()
    data = Federation(x, x.sum(1), rows, rows)
    net = build("mlp:6", (4,), 1)
    options = {"likelihood": likelihoods.normal(), "batch": 3, "lr_base": 0.01, "lr_head": 0.01}
    state = last(pfedvem.build(net, prior_scale=1.0, **options), data, 3, chunk_size=2)
    own, tau = state.client_states, state.client_states["tau"]
    for j, some in enumerate(rows):
        hidden = torch.relu(x[some] @ own["own/fc1.weight"][j].T + own["own/fc1.bias"][j])
        features = torch.cat([hidden, torch.ones(len(some), 1).double()], 1)
        close(widths(state)[j], (features.square().sum(0) + tau[j]).rsqrt(), 1e-9)


@pytest.mark.parametrize("weights", [None, (1.0, 3.0)])
def test_a_minibatch_represents_all_rows_of_its_client(weights):
    # Every row has the same information, so that each minibatch gives the client's total exactly.
    signs = torch.randint(0, 2, (sum(SIZES), 3), generator=generator(1)).double() * 2 - 1
    rows = torch.arange(sum(SIZES)).split(SIZES)
    data = Federation(signs, signs.sum(1), rows, rows)
    total = torch.tensor(SIZES).double()
    if weights:
        each = torch.tensor(weights).double()[torch.arange(sum(SIZES)) % 2]
        data = replace(data, weights=each)
        total = torch.stack([each[some].sum() for some in rows])
    method = gaussian(3)
    *first, (update,), finish = (phase.updates for phase in method.phases)
    size = None if weights else 4
    phases = (*map(Phase, first), Phase((update,), 1, size), Phase(finish))
    state = last(replace(method, phases=phases), data, 2, chunk_size=2)
    tau = state.client_states["tau"]
    close(widths(state), (total + tau).rsqrt()[:, None].expand(5, 3), 1e-9)


def test_widths_of_a_classifier_maximize_the_elbo():
    data = toys.blobs((30, 12, 7))
    net = build("softmax", (toys.FEATURES,), toys.CLASSES)
    method = pfedvem.build(net, prior_scale=1.0, num_particles=200)
    update = next(u for p in method.phases for u in p.updates if "widths" in str(u))
    batch, rng = data.batch(torch.arange(3)), generator(2)
    local = {f"mu/{n}": torch.randn(3, *s, generator=rng).double() for n, s in net.shapes.items()}
    local |= {n.replace("mu", "pi"): torch.zeros_like(v) for n, v in local.items()}
    local |= {"tau": torch.tensor([0.5, 2.0, 9.0]).double()}
    received = {n.replace("mu", "loc"): torch.zeros_like(v) for n, v in local.items() if "mu" in n}
    slopes = []
    with seeded(0):
        for _ in range(5):
            local = local | update(received, local, batch)
        pi = {n: v.requires_grad_() for n, v in local.items() if n.startswith("pi/")}
        for _ in range(40):
            loss = elbo(50)(method.model, method.guide, received, local, batch).sum()
            grads = torch.autograd.grad(loss, [*pi.values()])
            # By log sd: sd d/dsd, so that 0.1 is a tenth of the entropy's slope of -1.
            scale = [softplus(v) / torch.sigmoid(v) for v in pi.values()]
            parts = [(g * s).flatten(1) for g, s in zip(grads, scale, strict=True)]
            slopes.append(torch.cat(parts, 1).detach())
    found = torch.stack(slopes)
    error = found.std(0) / len(found) ** 0.5
    off = found.mean(0) / (error.square() + 0.05**2).sqrt()
    assert (off.abs() < 4.5).all()
    assert error.median() < 0.1


@pytest.mark.slow
def test_starts_tenfold_apart_end_with_equal_widths_on_digits():
    data = federations.split(datasets.load("digits"), "slices:5", clients=20)
    net = build("mlp:50", (64,), 10)
    ends = [
        widths(last(pfedvem.build(net, prior_scale=1.0, init_scale=start), data, 6))
        for start in (0.1, 1.0)
    ]
    gap = (ends[0] / ends[1]).log().abs()
    assert gap.median() < 0.02
    assert gap.flatten().quantile(0.99) < 0.1
    assert ends[1].min() < 0.75  # rows are informative of some weights


@pytest.mark.parametrize(
    "options", [{"m_step_iters": 2}, {"confidence_after_training": True}, {"head": "*"}]
)
def test_chunks_change_nothing_and_confidences_are_bounded(options):
    data = toys.blobs((3, 20, 7, 12))
    method = pfedvem.build(toys.net(), prior_scale=0.5, batch=4, lr_base=0.01, **options)
    one, two = (last(method, data, 3, chunk_size=size) for size in (1, 3))
    toys.assert_same_round(one, two, rtol=1e-9, atol=1e-10)
    assert (one.message["tau"] <= 2 / 0.5**2).all()


def test_an_unsplittable_network_has_the_same_widths(monkeypatch):
    data, net = toys.blobs((3, 20, 7)), toys.net()
    method = pfedvem.build(net, prior_scale=1.0)
    split = last(method, data, 2)
    monkeypatch.setattr(type(net), "split", lambda *_: None)
    whole = last(pfedvem.build(toys.net(), prior_scale=1.0), data, 2)
    close(widths(whole), widths(split), 1e-9)


@pytest.mark.parametrize("options", [{"prior": dist.Laplace}, {"guide": guides.delta}])
def test_widths_without_a_closed_form_are_refused(options):
    with pytest.raises(ValueError, match=r"prior_scale is 1\.0, whose widths have a closed"):
        pfedvem.build(toys.net(), prior_scale=1.0, **options)


# The warning


def test_unlearned_widths_are_reported(capsys):
    data = toys.blobs()
    run = pyrofl.fit(pfedvem.build(toys.net()), data, 3)
    (found,) = run.warnings
    assert found.startswith("standard deviations of head.weight, head.bias are still those of the")
    assert found.endswith("in pfedvem, set prior_scale=1, which has a closed form")
    assert found in capsys.readouterr().err
    learned = pyrofl.fit(pfedvem.build(toys.net(), prior_scale=1.0), data, 3, progress=False)
    assert learned.warnings == []


def test_the_warning_states_the_median_change_of_sites_whose_means_moved():
    data = toys.blobs((12, 9, 20))
    run = pyrofl.fit(pfedvem.build(toys.net(), init_scale=0.5), data, 3, progress=False)
    change = (widths(run.state) / 0.5).log().abs()
    assert f"(median change {float(change.median()):.1%})" in run.warnings[0]
    still = pfedvem.build(toys.net(), init_scale=0.5, lr_head=1e-12)
    assert pyrofl.fit(still, data, 3, progress=False).warnings == []


LEARNED = {"guide": guides.mean_field, "init_scale": 0.3, "lr": 0.3, "epochs": 30}


@pytest.mark.parametrize(
    "method",
    [
        pfedvem.build(toys.net(), guide=guides.delta),
        fedavg.build(toys.net(), **LEARNED),
        pvi.build(toys.net()),
    ],
    ids=["a point", "learned by gradients", "learned by natural gradients"],
)
def test_guides_without_widths_and_learned_widths_are_not_reported(method):
    assert pyrofl.fit(method, toys.blobs((12, 9, 20)), 3, progress=False).warnings == []


def test_the_same_guide_is_reported_if_its_rate_is_small():
    options = LEARNED | {"lr": 1e-3, "epochs": 5, "init_scale": 0.01}
    (found,) = pyrofl.fit(
        fedavg.build(toys.net(), **options), toys.blobs((12, 9, 20)), 3, progress=False
    ).warnings
    assert "raise the learning rate of the guide's scales" in found
