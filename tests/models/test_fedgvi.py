"""FedGVI: its limit is PVI, its losses and divergences have closed forms; it resists bad labels."""

from __future__ import annotations

import math
from dataclasses import replace

import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch import Tensor, nn

import pyrofl
from pyrofl.inference.engine.federate import federate
from pyrofl.models import fedgvi, likelihoods, pvi
from pyrofl.nets import Network, build

PROMISES = {
    "fedgvi": Promises(
        together="*", random=True, settings={"epochs": 6}, message=(2 * toys.ALL, 2 * toys.ALL + 1)
    )
}


def test_with_the_log_loss_and_the_kl_divergence_it_is_pvi():
    options = {"epochs": 4, "batch": 3, "warm_start": 2, "num_particles": 4}
    half = pyrofl.participation.fraction(0.5)
    found, known = (
        list(federate(method, toys.blobs(), 5, participation=half, chunk_size=2))[-1].server
        for method in (
            fedgvi.build(toys.net(), loss="log", divergence="kl", **options),
            pvi.build(toys.net(), **options),
        )
    )
    assert found.keys() == known.keys()
    for name, value in known.items():
        close(found[name], value, 1e-8)


def normal(mean: float, variance: float, w: Tensor) -> Tensor:
    return torch.exp(-((w - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)


@pytest.mark.parametrize("order", [0.4, 0.9, 1.7, 2.5])
def test_the_divergence_is_its_integral(order):
    w = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    q, p = normal(0.3, 0.5, w), normal(-0.4, 0.9, w)
    whole = torch.trapezoid(q**order * p ** (1 - order), w)
    expected = whole.log() / (order * (order - 1))
    moments = (torch.tensor(v, dtype=torch.float64) for v in (0.3, 0.5, -0.4, 0.9))
    close(fedgvi.renyi(*moments, order), expected, 1e-9)


def test_the_divergence_tends_to_kl():
    moments = [torch.tensor(v, dtype=torch.float64) for v in (0.3, 0.5, -0.4, 0.9)]
    mean, variance, center, spread = moments
    q, p = dist.Normal(mean, variance.sqrt()), dist.Normal(center, spread.sqrt())
    close(fedgvi.renyi(*moments, 1 + 1e-6), torch.distributions.kl_divergence(q, p), 1e-5)


def test_the_numbers_are_those_of_the_authors_code():
    # alpha_renyi_spherical(loc_1, loc_2, var_1, var_2, {"D": 1}, 2.5) of their Divergences.
    moments = (torch.tensor(v, dtype=torch.float64) for v in (0.3, -0.4, 0.5, 0.9))
    mean, center, variance, spread = moments
    found = fedgvi.renyi(mean, variance, center, spread, 2.5)
    lin = 2.5 * 0.9 - 1.5 * 0.5
    parts = 0.49 / (2 * lin), math.log(0.5) / 5, math.log(0.9) / 3, math.log(lin) / 7.5
    assert float(found) == pytest.approx(parts[0] - parts[1] + parts[2] - parts[3], abs=1e-12)


LOGITS = torch.tensor([[0.3, -1.2, 0.7], [2.0, 0.0, -0.5]]).double()
CASES = {
    "categorical": (dist.Categorical(logits=LOGITS), torch.tensor([0, 2])),
    "bernoulli": (dist.Bernoulli(logits=LOGITS[:, 0]), torch.tensor([1.0, 0.0]).double()),
    "normal": (dist.Normal(LOGITS[:, 0], 0.7), torch.tensor([0.1, 5.0]).double()),
}


@pytest.mark.parametrize("kind", CASES)
def test_losses_are_their_formulas(kind):
    fn, y = CASES[kind]
    p = fn.log_prob(y).exp()
    for r in (0.2, 0.8, 1.0):
        if kind != "normal":
            close(fedgvi.gce(fn, y, r), (1 - p**r) / r, 1e-12)
        if kind == "normal":
            grid = torch.linspace(-40, 40, 400_001).double()[:, None]
            whole = torch.trapezoid(fn.log_prob(grid).exp() ** (1 + r), grid[:, 0], dim=0)
        else:
            values = fn.enumerate_support().expand(-1, 2)
            whole = (fn.log_prob(values).exp() ** (1 + r)).sum(0)
        found = fedgvi.density_power(fn, y, r)
        close(found, -(p**r) / r + 1 / r + whole / (1 + r), 1e-8)
        loss = fedgvi.Robust(lambda outputs, x: fn, "beta", r)(LOGITS, LOGITS)
        close(loss.log_prob(y), -found, 1e-12)
    close(fedgvi.density_power(fn, y, 1e-7), 1 - fn.log_prob(y), 1e-5)


@pytest.mark.slow
def test_wrong_labels_of_some_clients_do_less_harm_than_to_pvi():
    data = pyrofl.federations.split(pyrofl.datasets.load("digits"), "iid", 6, seed=0)
    wrong = data.y.clone()
    for rows in data.train[:3]:  # of half of the clients, half of the labels
        bad = rows[: len(rows) // 2]
        wrong[bad] = (data.y[bad] + 3) % 10
    bad = replace(data, y=wrong)
    net = build("mlp:30", tuple(data.x.shape[1:]), 10)
    scores = {}
    for name, method in (("fedgvi", fedgvi.build(net, lr=0.02)), ("pvi", pvi.build(net, lr=0.02))):
        run = pyrofl.fit(method, bad, 15, seed=0, progress=False)
        scores[name] = run.evaluate().mean("accuracy")
    assert scores["fedgvi"] > scores["pvi"] + 0.01
    assert scores["fedgvi"] > 0.85


WRONG = {
    "order": (
        {"renyi_order": 1.0},
        "renyi_order is 1.0; expected another number, or divergence='kl'",
    ),
    "prior": (
        {"prior": pyrofl.priors.fixed(dist.Laplace)},
        "prior is not a normal with fixed moments",
    ),
    "layers": ({"net": build("linear", (3,), 2 - 1)}, "neither linear layers nor convolutions"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_suit_is_refused(case):
    options, reason = WRONG[case]
    with pytest.raises(ValueError, match=reason):
        fedgvi.build(**{"net": toys.net(), **options})


def test_a_likelihood_that_does_not_suit_the_loss_is_refused_before_round_one():
    net = Network(nn.Sequential(nn.Linear(toys.FEATURES, 1)))
    method = fedgvi.build(net, likelihood=likelihoods.normal())
    data = toys.blobs()
    with pytest.raises(ValueError, match=r"the likelihood is Normal, and loss is 'gce'; expected"):
        pyrofl.fit(method, replace(data, y=data.y.float(), classes=()), 1, progress=False)
