"""A newcomer's posterior is its prior without rows, and the exact one with them."""

from __future__ import annotations

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from torch import Tensor

import pyrofl
from pyrofl.data import Batch, Federation
from pyrofl.inference.checks.new_clients import restrict_new_client
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.definition.programs import Program
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.models import pvi
from pyrofl.tensors import Tensors, generator

SIZES = [12, 4, 8, 20]
ASKED = (0, 1, 2, 5, 20)


def federation() -> Federation:
    """Return three clients that train and one that joins later."""
    g = generator(4)
    means = 3 + 1.5 * torch.randn(4, generator=g, dtype=torch.float64)
    y = torch.cat(
        [m + torch.randn(n, generator=g).double() for m, n in zip(means, SIZES, strict=True)]
    )
    rows = torch.arange(len(y)).split(SIZES)
    names = ("Ada", "Bea", "Cleo", "Dora")
    return Federation(y.new_ones(len(y), 1), y, rows, [r[:0] for r in rows], names, held_out=1)


def hierarchy(centered: bool) -> Program:
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            if centered:
                theta = pyro.sample("theta", dist.Normal(mu, 1.5))
            else:
                eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
                theta = pyro.deterministic("theta", mu + 1.5 * eta)
            with batch.rows():
                pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)

    return model


def exact(n: int) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of (mu, theta) of the newcomer, given n of its rows and others'.

    Sufficient are the clients' means: normal around theta_j with variance 1 / n_j.
    """
    data = federation()
    prior = torch.full((5, 5), 25.0).double()
    prior[1:, 1:] += 2.25 * torch.eye(4)
    parts = [*data.train[:3], data.train[3][:n]]
    seen = [j for j, part in enumerate(parts) if len(part)]
    means = torch.stack([data.y[parts[j]].mean() for j in seen])
    at = [j + 1 for j in seen]
    noise = torch.tensor([1 / len(parts[j]) for j in seen]).double().diag()
    gain = prior[:, at] @ torch.linalg.inv(prior[at][:, at] + noise)
    mean, covariance = gain @ means, prior - gain @ prior[at]
    return mean[[0, 4]], covariance[[0, 4]][:, [0, 4]]


def trained(centered: bool = True) -> tuple[Method, pyrofl.RoundState]:
    data = federation()
    method = pvi.hierarchical(
        hierarchy(centered), data, shared="mu", damping=1.0, num_particles=8, steps=6
    )
    return method, toys.last(method, data, 1)


@pytest.mark.parametrize("n", ASKED)
@pytest.mark.parametrize("centered", [True, False])
def test_it_is_the_exact_posterior_after_every_row(centered, n):
    method, state = trained(centered)
    method, data, i = restrict_new_client(method, federation(), "Dora", n)
    cohort = data.cohort(torch.tensor([i]))
    _, local = prepared(method, data, state, cohort, adaptation="train")
    assert not isinstance(local, list)
    to_theta = torch.eye(2) if centered else torch.tensor([[1.0, 0.0], [1.0, 1.5]])
    to_theta = to_theta.double()
    root = to_theta @ local["root"][0]
    mean, covariance = exact(n)
    close(to_theta @ local["mean"][0], mean, 1e-6)
    close(root @ root.T, covariance, 1e-6)


def test_its_draws_are_those_of_the_exact_posterior():
    method, state = trained()
    found = pyrofl.checks.new_client_posterior(method, federation(), state, "Dora", ASKED, 4000)
    for n in ASKED:
        mean, covariance = exact(n)
        drawn = torch.stack([found[n]["mu"], found[n]["theta"]], 1)
        assert drawn.shape == (4000, 2)
        sd = covariance.diagonal().sqrt()
        assert ((drawn.mean(0) - mean).abs() < 4 * sd / 4000**0.5).all()
        assert ((drawn.std(0) / sd - 1).abs() < 4 / 8000**0.5).all()


def test_who_has_not_trained_knows_what_the_server_knows():
    method, state = trained()
    ids = torch.tensor([3])
    found = pyrofl.posterior(method, federation(), state, 4000, ids=ids)["mu"][:, 0]
    mean, covariance = exact(0)
    assert abs(found.mean() - mean[0]) < 4 * covariance[0, 0] ** 0.5 / 4000**0.5
    assert abs(found.std() / covariance[0, 0] ** 0.5 - 1) < 4 / 8000**0.5


def test_it_narrows_from_row_to_row():
    method, state = trained()
    found = pyrofl.checks.new_client_posterior(method, federation(), state, "Dora", ASKED, 2000)
    widths = [float(found[n]["theta"].std()) for n in ASKED]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == len(ASKED)
    assert list(found) == list(ASKED)


def test_the_state_stays_and_other_arguments_pass():
    method, state = trained()
    before = {n: v.clone() for n, v in state.server.items()}
    method = replace(method, adapt=method.phases)
    one, two = (
        pyrofl.checks.new_client_posterior(
            method, federation(), state, "Dora", (0, 3), 50, adaptation=how
        )
        for how in ("train", "fine_tune")
    )
    for n in (0, 3):
        toys.assert_same(one[n], two[n])
    toys.assert_same(state.server, before)


def test_no_row_is_seen_by_any_move_either():
    seen = []

    def look(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        seen.append(int(batch.mask.sum()))
        return {"mean": local["mean"]}

    method, state = trained()
    method = replace(method, phases=(Phase((look,)),))
    pyrofl.checks.new_client_posterior(method, federation(), state, "Dora", (0, 1, 4), 5)
    assert seen == [0, 1, 4]


@pytest.mark.parametrize(
    ("client", "sizes", "words"),
    [
        ("Ada", (1,), r"client is 'Ada'; expected the name of a held-out client: \['Dora'\]"),
        ("Dora", (1, 21), "size is 21; expected 0 to 20, the number of Dora's rows"),
        ("Dora", (-1,), "size is -1"),
    ],
)
def test_who_cannot_join_is_named(client, sizes, words):
    method, state = trained()
    with pytest.raises(ValueError, match=words):
        pyrofl.checks.new_client_posterior(method, federation(), state, client, sizes, 5)
