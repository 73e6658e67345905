"""Who leaves is forgotten and who joins is counted, as if the others had been fitted alone."""

from __future__ import annotations

from dataclasses import replace

import programs
import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close

import pyrofl
from pyrofl.data import Batch, Federation
from pyrofl.data.loaders import datasets
from pyrofl.inference.fitted_run.run import Run
from pyrofl.models import fedavg, pvi
from pyrofl.partitions import federations
from pyrofl.tensors import Tensors, generator

SIZES = [12, 4, 8, 20]


def people(*names: str, held_out: int = 0) -> Federation:
    """Return these of four clients, whose rows are always the same."""
    g = generator(4)
    y = 3 + torch.randn(sum(SIZES), generator=g, dtype=torch.float64)
    rows = dict(zip(("Ada", "Bea", "Cleo", "Dora"), torch.arange(len(y)).split(SIZES), strict=True))
    mine = [rows[n] for n in names]
    return Federation(y[:, None] * 0 + 1, y, mine, [r[:0] for r in mine], names, held_out=held_out)


def hierarchy(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        theta = pyro.sample("theta", dist.Normal(mu, 1.5))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def fitted(data: Federation, rounds: int = 2, start: Run | None = None) -> Run:
    method = pvi.hierarchical(hierarchy, data, shared="mu", damping=1.0, num_particles=8, steps=6)
    begun = start.state.number if start else 0
    return pyrofl.fit(method, data, begun + rounds, resume_from=start, progress=False)


def moments(run: Run) -> torch.Tensor:
    """Return mean and variance of mu, which is one variable."""
    shift, precision = (float(run.state.server[n]) for n in ("shift", "precision"))
    return torch.tensor([shift / precision, 1 / precision])


def exact(*names: str) -> tuple[float, float]:
    """Return mean and variance of mu given the means of these clients' rows, in closed form."""
    data = people(*names)
    noise = [1.5**2 + 1 / len(r) for r in data.train]
    precision = 1 / 25 + sum(1 / v for v in noise)
    mean = sum(float(data.y[r].mean()) / v for r, v in zip(data.train, noise, strict=True))
    return mean / precision, 1 / precision


def test_where_all_is_normal_a_client_is_forgotten_at_once():
    run = fitted(people("Ada", "Bea", "Cleo", "Dora"))
    close(moments(run), exact("Ada", "Bea", "Cleo", "Dora"), 1e-6)
    left = pyrofl.leave(run, "Bea")
    close(moments(left), exact("Ada", "Cleo", "Dora"), 1e-6)
    assert left.data.names == ("Ada", "Cleo", "Dora")
    again = fitted(left.data, 2, left)
    close(moments(again), exact("Ada", "Cleo", "Dora"), 1e-6)
    assert again.state.number == 4
    alone = fitted(people("Ada", "Cleo", "Dora"))
    for name, value in alone.to_arviz(4000)["posterior"].items():
        other = again.to_arviz(4000)["posterior"][name]
        assert abs(float(value.mean() - other.mean())) < 4 * float(value.std()) / 2000**0.5
    close(moments(run), exact("Ada", "Bea", "Cleo", "Dora"), 1e-6)  # the run is what it was


@pytest.mark.parametrize("order", [("Ada", "Bea", "Cleo", "Dora"), ("Dora", "Cleo", "Ada", "Bea")])
def test_who_joins_counts_after_a_round(order):
    run = fitted(people("Ada", "Cleo"))
    more = pyrofl.join(run, people(*order))
    close(moments(more), exact("Ada", "Cleo"), 1e-6)
    assert more.state.seen.tolist() == [n in ("Ada", "Cleo") for n in order]
    close(moments(fitted(more.data, 1, more)), exact(*order), 1e-6)
    gone = pyrofl.leave(fitted(more.data, 1, more), "Dora")
    close(moments(gone), exact("Ada", "Bea", "Cleo"), 1e-6)


@pytest.mark.parametrize("change", ["join", "leave"])
def test_damping_that_adapts_begins_anew_at_a_half(change):
    """It has fallen to 1 / M, or stands at 1, when nothing is left to follow."""
    trio = people("Ada", "Cleo", "Dora")
    method = pvi.hierarchical(hierarchy, trio, shared="mu", num_particles=8, steps=6)
    run = pyrofl.fit(method, trio, 25, progress=False)
    close(moments(run), exact("Ada", "Cleo", "Dora"), 1e-6)
    everybody = ("Ada", "Bea", "Cleo", "Dora")
    other = pyrofl.join(run, people(*everybody)) if change == "join" else pyrofl.leave(run, "Ada")
    assert float(other.state.server["server/damping"]) == 0.5
    after = pyrofl.fit(method, other.data, 26, resume_from=other, progress=False)
    expected = exact(*(everybody if change == "join" else ("Cleo", "Dora")))
    half = (1 / float(moments(other)[1]) + 1 / expected[1]) / 2
    assert 1 / float(moments(after)[1]) == pytest.approx(half, rel=1e-6)


def test_a_held_out_client_joins():
    run = fitted(people("Ada", "Cleo", "Bea", held_out=1))
    more = pyrofl.join(run, people("Ada", "Cleo", "Bea"))
    close(moments(fitted(more.data, 1, more)), exact("Ada", "Bea", "Cleo"), 1e-6)


def test_a_prior_that_is_not_normal_is_shared_out_anew():
    """Its share is 1 / J at each client; HalfCauchy(5) of eight schools."""
    data = federations.split(datasets.load("eight_schools"), "groups").to("cpu", torch.float64)
    method = pvi.hierarchical(programs.eight_schools, data, shared="mu tau", steps=2)
    run = pyrofl.fit(method, data, 2, progress=False)
    left = pyrofl.leave(run, data.names[2])
    assert float(run.state.server["share"]) == 1 / 8
    assert float(left.state.server["share"]) == 1 / 7
    more = pyrofl.join(left, data)
    assert float(more.state.server["share"]) == 1 / 8
    after = pyrofl.fit(method, left.data, 4, resume_from=left, progress=False)
    assert not any(record.rejected for record in after.records)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda run: pyrofl.leave(run, "Eve"),
            "unknown client that trains 'Eve'; expected one of A",
        ),
        (lambda run: pyrofl.leave(run, "Dora"), "unknown client that trains 'Dora'"),
        (
            lambda run: pyrofl.leave(pyrofl.leave(run, "Ada"), "Bea"),
            "'Bea' is the only client that tra",
        ),
        (
            lambda run: pyrofl.join(run, run.data),
            "have the 2 clients of the run; expected one more",
        ),
        (
            lambda run: pyrofl.join(run, people("Ada", "Cleo", "Dora")),
            "unknown client of the run .*B",
        ),
        (
            lambda run: pyrofl.join(run, shifted()),
            "'Ada' has other training rows in the run; expect",
        ),
    ],
)
def test_what_cannot_be_is_said(change, told):
    with pytest.raises(ValueError, match=told):
        change(fitted(people("Ada", "Bea", "Dora", held_out=1)))


def shifted() -> Federation:
    data = people("Ada", "Bea", "Cleo")
    return replace(data, y=data.y + 1)


def test_a_run_without_factors_is_refused():
    run = pyrofl.fit(fedavg.build(toys.net()), toys.blobs(), 1, progress=False)
    with pytest.raises(ValueError, match="keeps no factors of clients; expected a run of"):
        pyrofl.leave(run, "client 0")


@pytest.mark.slow
def test_after_some_rounds_it_is_a_fit_of_the_others():
    """In eight schools, within 0.05 of a standard deviation."""
    data = federations.split(datasets.load("eight_schools"), "groups").to("cpu", torch.float64)
    method = pvi.hierarchical(programs.eight_schools, data, shared="mu tau", num_particles=512)

    def means(run: Run) -> torch.Tensor:
        posterior = run.to_arviz(20_000)["posterior"]
        found = (posterior["mu"].values, np_log(posterior["tau"].values))
        return torch.tensor([float(v.mean()) for v in found] + [float(v.std()) for v in found])

    left = pyrofl.leave(pyrofl.fit(method, data, 30, progress=False), data.names[0])
    after = pyrofl.fit(method, left.data, 42, resume_from=left, progress=False)
    alone = pyrofl.fit(method, left.data, 30, seed=1, progress=False)
    found, expected = map(means, (after, alone))
    assert ((found - expected).abs() / expected[2:].repeat(2)).max() < 0.05


def np_log(values: object) -> torch.Tensor:
    return torch.as_tensor(values).log()


def test_a_client_that_joins_with_another_unit_is_named():
    data = people("Ada", "Bea", "Cleo", "Dora")
    y = data.y + 20.0  # far from 0
    run = fitted(replace(people("Ada", "Bea", "Cleo"), y=y), 1)
    other = replace(data, y=torch.where(torch.arange(len(y)) >= sum(SIZES[:3]), 88.42 * y, y))
    with pytest.warns(UserWarning, match="column y: the numbers in Dora are about"):
        pyrofl.join(run, other)
