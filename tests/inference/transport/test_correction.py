"""Remote clients correct posterior draws as one process does, whatever is lost or repeated."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from sites import some

import pyrofl
from pyrofl import federations
from pyrofl.data import Federation
from pyrofl.data.outlines import facts, outline_federation
from pyrofl.inference import hmc as sampler
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors.guided_sites import CannotCorrect
from pyrofl.inference.posteriors.importance_sampling import Request
from pyrofl.inference.posteriors.shared import SharedDraws, corrected_shared
from pyrofl.inference.privacy import private
from pyrofl.inference.transport import Client, Server
from pyrofl.inference.transport.correction import configure_draws, reporter
from pyrofl.inference.transport.message_checks import InvalidRequestError
from pyrofl.models import pvi

SIZES = (3, 1, 40, 6, 25, 2, 9)
HOLDERS = {"one": ("f", "a"), "two": ("c",), "three": ("b", "g", "e", "d")}
ALONE = {name: (name,) for name in "abcdefg"}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the server's chains."""
    for name, value in {"NUM_METRIC_UPDATES": 1, "THINNING": 1}.items():
        monkeypatch.setattr(sampler, name, value)


def tables() -> dict[str, pd.DataFrame]:
    """Return ragged tables of 0 and 1; the wards of a client are levels, which some lack."""
    rng, found = np.random.default_rng(3), {}
    for name, size in zip("abcdefg", SIZES, strict=True):
        x, ward = rng.normal(size=size), rng.integers(0, 3, size)
        y = rng.random(size) < 1 / (1 + np.exp(-rng.normal(0.3, 0.8) - 0.7 * x))
        found[name] = pd.DataFrame({"x": x, "ward": [f"w{w}" for w in ward], "y": y * 1.0})
    return found


def regression() -> tuple[Any, Federation]:
    """Return a logistic regression with effects of clients and of their wards."""
    data = federations.from_frames(tables())
    method = pyrofl.regression("y ~ x + (1 | client)", data, family="bernoulli")
    return method, method.prepare(data)


def logistic(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        slope = pyro.sample("slope", dist.Normal(mu, tau))
        pyro.deterministic("odds", (mu + slope).exp())
        with batch.rows():
            pyro.sample("y", dist.Bernoulli(logits=slope * batch.x[..., 0]), obs=batch.y)


def partitioned() -> tuple[Any, Federation]:
    """Return a program of slopes, fitted by PVI."""
    _, data = regression()
    return pvi.hierarchical(logistic, data, shared="mu tau"), data


class Study:
    """Rounds of a server and clients on machines, and the same fit in one process."""

    def __init__(self, made: Any, holders: Any, rounds: int, folder: Any = None) -> None:
        self.method, self.data = made()
        self.holders = holders
        self.run = pyrofl.fit(self.method, self.data, rounds, progress=False, chunk_size=1)
        self.server = Server(self.method, self.data.names, self.data.sizes, self.data.dtype)
        self.folder = folder
        self.clients = {name: self.client(name) for name in holders}
        for _ in range(rounds):
            orders = self.server.configure_train(holders)
            replies = {n: self.clients[n].train(o) for n, o in orders.items()}
            self.server.aggregate_train(replies)
        bare = outline_federation(facts(self.data))
        self.here = Run(self.method, bare, self.server.state, 0)

    def client(self, name: str) -> Client:
        """Return the client side of a machine, as after a restart if it has a folder."""
        state = self.folder and self.folder / name
        return Client(self.method, some(self.data, list(self.holders[name])), state=state)

    def corrected(self, send: Any = None, draws: int = 400) -> SharedDraws:
        """Return the corrected draws of the server."""
        send = send or (lambda asked: {n: self.clients[n].weigh(a) for n, a in asked.items()})
        return corrected_shared(self.here, reporter(self.server, send, self.holders), draws)

    def same(self, found: SharedDraws) -> None:
        """Compare draws and weights of server and clients with those of one process."""
        run = self.run.copy(state=replace(self.run.state, server=self.server.state.server))
        expected = run.to_arviz(400, progress=False)
        assert found.outcome == expected["posterior"].attrs["corrected"] == "yes"
        stats = expected["sample_stats"]
        assert float(found.diagnostics.k) == pytest.approx(stats["pareto_k"].item(), rel=1e-6)
        assert float(found.diagnostics.ess) == pytest.approx(
            stats["importance_ess"].item(), rel=1e-8
        )
        for name, value in found.values.items():
            other = expected["posterior"][name].values[0]
            np.testing.assert_allclose(value.view(other.shape), other, rtol=1e-8, atol=1e-8)
        for name, request in configure_draws(self.server, found, self.holders).items():
            own = self.clients[name].posterior(request)["posterior"]
            assert set(own) == set(expected["posterior"])
            for site, value in own.items():
                other = expected["posterior"][site]
                if "client" in other.dims:
                    other = other.sel(client=list(self.holders[name]))
                shape = value.values.shape
                np.testing.assert_allclose(value, other.values.reshape(shape), 1e-8, 1e-8)


@cache
def once(made: Any, rounds: int) -> Study:
    """Return a study of clients that are alone, for several tests."""
    return Study(made, ALONE, rounds)


# The odds exp(mu + slope) of clients with few rows have a heavy tail, which is reported.
@pytest.mark.filterwarnings("ignore:estimates of corrected draws .* for the sd of odds")
@pytest.mark.parametrize("made", [regression, partitioned])
def test_each_client_alone_has_the_posterior_of_one_process(made):
    study = once(made, 2)
    for name, value in study.run.state.server.items():
        torch.testing.assert_close(study.server.state.server[name], value, rtol=1e-8, atol=1e-8)
    study.same(study.corrected())


# The odds exp(mu + slope) of clients with few rows have a heavy tail, which is reported.
@pytest.mark.filterwarnings("ignore:estimates of corrected draws .* for the sd of odds")
@pytest.mark.parametrize("made", [regression, pytest.param(partitioned, marks=pytest.mark.slow)])
def test_machines_of_several_clients_have_the_correction_of_one_process(made, tmp_path):
    """Each request reaches a new process, which knows no more than its folder."""
    study = Study(made, HOLDERS, 2, tmp_path)
    count = 0

    def send(asked):
        nonlocal count
        count += 1
        replies = {}
        for name, one in asked.items():
            replies[name] = study.client(name).weigh(one)
            again = study.client(name).weigh(one)  # a repeated request has the same reply
            for n, v in replies[name].items():
                assert torch.equal(v, again[n]) if torch.is_tensor(v) else v == again[n]
            assert {n for n, v in again.items() if torch.is_tensor(v)} <= {"up/log_l", "up/noise"}
        return replies

    study.same(study.corrected(send))
    assert 2 < count <= (4 if made is regression else 8)


def test_a_client_without_the_exchange_before_is_refused_and_named():
    study = once(partitioned, 2)

    def send(asked):
        study.clients["d"]._weighed.clear()  # as after a restart without the file
        return {n: study.clients[n].weigh(one) for n, one in asked.items()}

    with pytest.raises(InvalidRequestError, match=r"^d: no reply to exchange 1 of the correction"):
        study.corrected(send)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda reply: None, "e: no reply"),
        (lambda reply: reply | {"round": 7}, "e: its reply is of"),
        (lambda reply: reply | {"names": ("a",)}, "e: its reply is of"),
        (lambda reply: reply | {"up/log_l": reply["up/log_l"] * float("nan")}, "e: its reply has"),
        (lambda reply: reply | {"up/log_l": reply["up/log_l"][:, :5]}, "e: "),
        (lambda reply: {"why": "no memory"}, "e: no memory"),
    ],
)
def test_a_bad_reply_leaves_draws_uncorrected_and_names_the_client(spoil, told):
    study = once(partitioned, 2)

    def send(asked):
        replies = {n: study.clients[n].weigh(one) for n, one in asked.items()}
        if "e" in replies:
            replies["e"] = spoil(replies["e"])
        return {n: reply for n, reply in replies.items() if reply is not None}

    with pytest.warns(UserWarning, match="draws are not corrected: not all clients .*" + told):
        found = study.corrected(send)
    assert told in found.outcome
    assert found.resampled_index is None
    alone = study.run.to_arviz(400, corrected=False)["posterior"]
    for name, value in found.values.items():
        np.testing.assert_allclose(value.flatten(), alone[name].values[0], rtol=1e-8)


def test_a_private_method_is_refused_at_the_client(monkeypatch):
    """A server that asks nevertheless gets no number."""
    pytest.importorskip("dp_accounting")
    study, sent = once(partitioned, 2), {}
    client = study.clients["d"]
    with pytest.raises(CannotCorrect):
        reporter(study.server, lambda asked: sent.update(asked) or {}, study.holders)(
            Request(torch.zeros(5, 2).double(), [1] * 7), 0
        )
    assert set(client.weigh(sent["d"])) == {"names", "round", "exchange", "up/log_l"}
    promise = pyrofl.Privacy(clip=1.0, noise_multiplier=1.0, where="client")
    promised = private(study.method, promise, 7).metadata.privacy
    metadata = replace(study.method.metadata, privacy=promised)
    monkeypatch.setattr(client, "at", lambda _: replace(study.method, metadata=metadata))
    with pytest.raises(InvalidRequestError, match="the run is private"):
        client.weigh(sent["d"])
