"""IVON-ADMM: its server's step is the paper's, and its limit the mean-field posterior."""

from __future__ import annotations

import pyro.distributions as dist
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
from pyrofl.models import ivonadmm, likelihoods, priors
from pyrofl.nets import build

PROMISES = {
    "ivonadmm": Promises(
        together="*",
        random=True,
        message=(2 * toys.ALL, 2 * toys.ALL + 1),
        any_number="shift",
    )
}


@pytest.mark.parametrize("damping", [0.3, 1.0])
def test_clients_and_server_make_the_steps_of_the_paper(damping):
    """S = (1 - a) mean_j S_j + a (S0 + sum_j V_j),  V_j <- V_j + rho damping (S_j - S); so for S m.

    The mean is over the clients that report, and the sum over all.
    """
    rho, data = 0.4, toys.blobs()
    method = ivonadmm.build(
        toys.net(), rho=rho, damping=damping, epochs=1, prior=priors.fixed(dist.Normal, 0.2, 0.5)
    )
    state = first(method, data, 0)
    q, clients = normal(state.server), len(data.train)
    duals = {n: state.server[f"server/total/{n}"].expand(clients, -1) / clients for n in q}
    prior = {"shift": 0.2 / 0.25, "precision": 1 / 0.25}
    alpha, half = 1 / (1 + rho * clients), pyrofl.participation.fraction(0.5)
    for state in federate(method, data, 3, participation=half, chunk_size=2):
        message, who = state.message, state.reporters.ids
        assert 0 < len(who) < clients
        for n in q:
            duals[n] = duals[n].index_add(0, who, rho * damping * (message[n] - q[n]))
            close(
                state.client_states[f"own/{n}"][who], duals[n][who], 1e-6
            )  # the start is in single precision
            dual = prior[n] + duals[n].sum(0)
            q[n] = (1 - alpha) * message[n].mean(0) + alpha * dual
        found = normal(state.server)
        for n, value in q.items():
            close(found[n], value, 1e-7 * float(value.abs().max()))


@pytest.mark.parametrize(
    ("batch", "epochs"), [(None, 20), pytest.param(8, 10, marks=pytest.mark.slow)]
)
def test_its_limit_is_the_mean_field_posterior(batch, epochs):
    """Averages of rounds equal the optimum within four standard errors, from ten blocks of rounds.

    The square in the curvature's update adds about (1 - beta2) var(f) / (2 h) to h. Clients with
    equal parameters keep var(f), which grows with the gradients at the consensus, so small that
    this is 1%.
    """
    task = linear_regression(5, 3, [24, 9, 16, 12, 15], noise=0.7, between=0.0)
    exact, covariance = posterior(task)
    precision = torch.linalg.inv(covariance).diagonal()
    settings = {"temperature": 1.0, "rho": 0.5, "damping": 0.5, "beta2": 0.998, "lr": 0.05}
    method = ivonadmm.build(
        build("linear", (3,), 1),
        likelihood=likelihoods.normal(),
        prior=PRIOR,
        init_scale=0.2,
        batch=batch,
        epochs=epochs,
        **settings,
    )
    found = [normal(s.server) for s in federate(method, task.federation, 400) if s.number > 200]
    assert_mean_field(found, exact, precision)


def test_it_learns():
    data = toys.blobs()
    begun, *_, done = federate(ivonadmm.build(toys.net()), data, 6)
    assert done.loss["slope"].mean() < begun.loss["slope"].mean()
