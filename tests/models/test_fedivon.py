"""FedIVON: its server multiplies the clients' normals, and one client finds its posterior."""

from __future__ import annotations

import pytest
import torch
import toys
from checks import close
from promises import Promises
from regressions import PRIOR, assert_mean_field, normal, posterior

import pyrofl
from pyrofl.data.loaders.conjugate import linear_regression
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.start import first
from pyrofl.models import fedivon, likelihoods
from pyrofl.nets import build

PROMISES = {
    "fedivon": Promises(
        random=True,
        message=(2 * toys.ALL + 1, 2 * toys.ALL + 2),
        any_number="shift",
    )
}


def test_the_server_multiplies_the_clients_normals():
    """With partial participation, the product of the reporting clients stands for all clients."""
    data, half = toys.blobs(), pyrofl.participation.fraction(0.5)
    for state in federate(fedivon.build(toys.net()), data, 3, participation=half, chunk_size=2):
        scale = len(data.train) / len(state.reporters.ids)
        assert scale > 1
        for n, found in normal(state.server).items():
            total = state.message[n].sum(0) * scale
            close(found, total, 1e-7 * float(total.abs().max()))


def test_clients_start_from_their_part_of_the_precision():
    """Without steps, client j sends the received normal with the precision S n_j / n."""
    data = toys.blobs()
    method = fedivon.build(toys.net(), epochs=0, init_scale=0.01)
    begun = normal(first(method, data, 0).server)
    *_, one, two = federate(method, data, 2)
    for n, value in begun.items():
        equal = (value / len(data.train)).expand(len(data.train), -1)
        close(one.message[n], equal, 1e-7 * float(value.abs().max()))
        share = (one.message["count"] / one.message["count"].sum())[:, None]
        close(two.message[n], value * share, 1e-7 * float(value.abs().max()))


@pytest.mark.parametrize("batch", [None, 8])
def test_one_client_finds_its_mean_field_posterior(batch):
    """Averages of rounds equal the optimum within four standard errors, from ten blocks of rounds.

    The curvature's second-order term adds (1 - beta2) var(f) / (2 h^2) to the precision, here 1%.
    """
    task = linear_regression(1, 3, [40], noise=0.7, between=0.4)
    exact, covariance = posterior(task)
    precision = torch.linalg.inv(covariance).diagonal()
    method = fedivon.build(
        build("linear", (3,), 1),
        likelihood=likelihoods.normal(),
        prior=PRIOR,
        temperature=1.0,
        beta2=0.995,
        lr=0.03,
        init_scale=0.5,
        fine_tune=0,
        epochs=20 if batch is None else 4,
        batch=batch,
    )
    found = [normal(s.server) for s in federate(method, task.federation, 400) if s.number > 200]
    assert_mean_field(found, exact, precision)


def test_it_learns():
    data = toys.blobs()
    begun, *_, done = federate(fedivon.build(toys.net()), data, 6)
    assert done.loss["slope"].mean() < begun.loss["slope"].mean()


def test_without_fine_tuning_there_is_no_personal_model():
    assert "personal" not in fedivon.build(toys.net(), fine_tune=0).views
    assert "personal" in fedivon.build(toys.net()).views
