"""Predicted rounds, bytes and seconds are those of the fit."""

from __future__ import annotations

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys

import pyrofl
from pyrofl.data import Federation
from pyrofl.data.outlines import outline
from pyrofl.inference import hmc as sampler
from pyrofl.inference.engine.participation import fixed
from pyrofl.models import fedavg, pvi
from pyrofl.tensors import generator

SIZES = (3, 1, 9, 4)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the server's chains."""
    for name, value in {
        "NUM_METRIC_UPDATES": 1,
        "ITERATIONS_PER_UPDATE": 10,
        "THINNING": 1,
    }.items():
        monkeypatch.setattr(sampler, name, value)


def counts() -> Federation:
    """Return four ragged clients with whole numbers as responses."""
    y = torch.randn(sum(SIZES), generator=generator("plan")).double().exp().round()
    train = torch.arange(len(y)).split(SIZES)
    return Federation(0 * y[:, None], y, train, [r[:0] for r in train])


def effects(family):
    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            tau = pyro.sample("tau", dist.HalfNormal(1.0))
            effect = pyro.sample("effect", dist.Normal(mu, tau))
            with batch.rows():
                pyro.sample("y", family(effect), obs=batch.y)

    return program


def test_a_method_that_is_exact_after_one_round_needs_one():
    data = counts()
    method = pyrofl.hierarchical(effects(lambda e: dist.Normal(e, 1.0)), data, shared="mu tau")
    found = pyrofl.plan(method, data, exchange_seconds=30.0)
    assert found.rounds == (1, 1)
    run = pyrofl.fit(method, data, progress=False)
    sent = sum(record.bytes_down + record.bytes_up for record in run.records)
    assert found.total_bytes == (sent, sent)
    seconds = found.pilot.records[0].seconds + 30
    assert found.total_seconds == pytest.approx((seconds, seconds))


@pytest.mark.slow
def test_the_range_of_likelihood_factors_has_the_rounds_of_the_fit():
    data = counts()
    method = pyrofl.hierarchical(effects(lambda e: dist.Poisson(e.exp())), data, shared="mu tau")
    found = pyrofl.plan(method, data, seed=3)
    run = pyrofl.fit(method, data, seed=3, progress=False)
    low, high = found.rounds
    assert low <= run.state.number <= high
    sent = sum(record.bytes_down + record.bytes_up for record in run.records)
    assert sent == run.state.number * (found.bytes_down + found.bytes_up)
    # The pilot is the beginning of the fit.
    run = pyrofl.fit(method, data, resume_from=found.pilot, progress=False)
    assert low <= run.state.number <= high


def test_given_rounds_are_multiplied():
    data = toys.blobs()
    found = pyrofl.plan(fedavg.build(toys.net()), data, 7, exchange_seconds=2.0)
    run = pyrofl.fit(fedavg.build(toys.net()), data, 7, progress=False)
    sent = sum(record.bytes_down + record.bytes_up for record in run.records)
    assert found.rounds == (7, 7)
    assert found.total_bytes == (sent, sent)
    known = replace(found, first_seconds=5.0, seconds=1.5)
    assert known.total_seconds == (5 + 6 * 1.5 + 7 * 2, 5 + 6 * 1.5 + 7 * 2)
    assert "0:00:28 (hours:minutes:seconds)" in repr(known)
    assert f"{sent:,.0f} bytes" in repr(known)


def test_rounds_without_a_rule_are_not_predicted():
    data = toys.blobs()
    found = pyrofl.plan(fedavg.build(toys.net()), data)
    assert (found.rounds, found.total_seconds, found.total_bytes) == (None, None, None)
    assert "not predicted: no rule predicts when this method converges" in repr(found)
    assert found.bytes_up == found.pilot.records[1].bytes_up > 0
    rows = counts()
    method = pvi.hierarchical(
        effects(lambda e: dist.Normal(e, 1.0)), rows, shared="mu tau", num_particles=16, steps=4
    )
    assert pyrofl.plan(method, rows).rounds == (10, 32)
    part = pyrofl.plan(method, rows, participation=fixed(2))
    assert part.rounds is None
    assert "some clients do not report in every round" in part.why
    with pytest.raises(ValueError, match="data has no rows; pass simulated rows"):
        pyrofl.plan(method, outline(rows.names, SIZES, (1,)))


def test_the_tables_of_a_regression_are_planned_as_they_are_fitted():
    pandas, _ = pytest.importorskip("pandas"), pytest.importorskip("formulae")
    frames = {
        name: pandas.DataFrame({"x": [0.5 * i for i in range(n)], "y": [i % 3 for i in range(n)]})
        for name, n in {"A": 5, "B": 9, "C": 7}.items()
    }
    tables = pyrofl.federations.from_frames(frames)
    method = pyrofl.regression("y ~ x + (1 | client)", tables)
    found, run = pyrofl.plan(method, tables), pyrofl.fit(method, tables, progress=False)
    assert found.rounds == (len(run.records), len(run.records))
    assert found.bytes_up == run.records[-1].bytes_up
