"""The table of how far each site moves, and fits that stop by it."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from torch import Tensor

import pyrofl
from pyrofl.data import Batch, Federation
from pyrofl.inference.fitted_run.checkpoints import load, save
from pyrofl.inference.monitoring.status import (
    CONVERGED_CHANGES,
    MAX_AGGREGATIONS,
    convergence_status,
)
from pyrofl.models import fedavg, pfedvem, pvi
from pyrofl.tensors import Tensors, generator

CLIENTS, ROWS = 4, 10


def line(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let all clients share a line; all is normal."""
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, 2.0))
        b = pyro.sample("b", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Normal(a + (b * batch.x).sum(-1), 1.0), obs=batch.y)


@pytest.fixture(scope="module")
def data() -> Federation:
    rng = generator(1)
    x = torch.randn(CLIENTS * ROWS, 2, generator=rng, dtype=torch.float64)
    y = 3 + x.sum(1) + torch.randn(len(x), generator=rng, dtype=torch.float64)
    none = tuple(torch.empty(0, dtype=torch.long) for _ in range(CLIENTS))
    return Federation(x, y, torch.arange(len(x)).split(ROWS), none)


def method(data: Federation, damping: float | None) -> pyrofl.Method:
    return pvi.hierarchical(line, data, shared="a b", damping=damping, steps=4, num_particles=8)


def moved(data: Federation, damping: float, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return by how many sds each mean and sd moves in each round, and how far the means are away.

    [rounds, 3] each. Natural parameters go a share `damping` of what is left of their way, so that
    after k rounds (1 - damping)^k of it is left.
    """
    rows = torch.cat([torch.ones(len(data.x), 1), data.x], 1)
    first = torch.diag(torch.tensor([1 / 4, 1.0, 1.0], dtype=torch.float64))  # the prior's
    whole, shift = first + rows.T @ rows, rows.T @ data.y
    left = [(1 - damping) ** k for k in range(rounds + 1)]
    covariances = [torch.linalg.inv(whole + share * (first - whole)) for share in left]
    means = torch.stack([(1 - v) * c @ shift for v, c in zip(left, covariances, strict=True)])
    sds = torch.stack([c.diagonal().sqrt() for c in covariances])
    end = torch.linalg.solve(whole, shift)
    return means.diff(dim=0).abs() / sds[1:], sds.diff(dim=0).abs() / sds[1:], (means - end) / sds


def of_sites(each: Tensor) -> Tensor:
    """Return the larger of the two entries of b: [rounds, 3] -> [rounds, 2]."""
    return torch.stack([each[:, 0], each[:, 1:].amax(1)], 1)


def test_the_table_shows_the_closed_form(data: Federation):
    damping = 0.5
    run = pyrofl.fit(method(data, damping), data, 8, progress=False)
    table = run.parameter_changes()
    assert list(table) == ["round", "site", "mean", "sd", "norm"]
    assert table["round"].tolist() == [k for k in range(1, 9) for _ in range(2)]
    assert table["site"].tolist() == ["a", "b"] * 8
    assert table["norm"].isna().all()
    means, sds, _ = (of_sites(v) for v in moved(data, damping, 8))
    close(torch.tensor(table["mean"].to_numpy()).reshape(8, 2), means, 1e-8)
    close(torch.tensor(table["sd"].to_numpy()).reshape(8, 2), sds, 1e-8)
    late = means[5:] / means[4:-1]  # where precisions are nearly there, each round leaves 1 - r
    assert ((late - (1 - damping)).abs() < 0.02).all()


@pytest.mark.parametrize("damping", [0.5, 1.0])
def test_a_fit_stops_at_the_first_round_at_which_all_is_quiet(data: Federation, damping: float):
    means, sds, left = moved(data, damping, 30)
    both = torch.cat([means, sds], 1)
    quiet = [
        bool((both[k - MAX_AGGREGATIONS : k] <= CONVERGED_CHANGES["mean"]).all())
        for k in range(MAX_AGGREGATIONS, 30)
    ]
    run = pyrofl.fit(method(data, damping), data, 30, stop_when="converged", progress=False)
    assert run.status.kind == "converged"
    assert run.state.number == quiet.index(True) + MAX_AGGREGATIONS
    assert left[run.state.number].abs().max() < CONVERGED_CHANGES["mean"]
    for k in range(1, run.state.number):
        assert convergence_status(run.records[:k]).kind == "not converged"


@pytest.mark.slow
def test_a_fit_that_stopped_goes_on_as_if_it_had_not(data: Federation, tmp_path):
    build = method(data, 0.5)
    asked = {"stop_when": "converged", "eval_every": 3, "progress": False}
    whole = pyrofl.fit(build, data, 100, **asked)
    had = []
    part = pyrofl.fit(build, data, 4, callback=lambda run: had.append(run.state.number), **asked)
    assert had == [1, 2, 3, 4]
    save(
        part.copy(history=[r for r in part.history if r["round"] != 4]),
        tmp_path / "run.safetensors",
    )
    rest = pyrofl.fit(
        build, data, 100, resume_from=load(tmp_path / "run.safetensors", build, data), **asked
    )
    assert [r.moved for r in rest.records] == [r.moved for r in whole.records]
    assert rest.history == whole.history
    assert rest.history[-1]["round"] == whole.state.number  # tested where it stopped
    again = pyrofl.fit(build, data, 100, resume_from=whole, **asked)
    assert again.state.number == whole.state.number
    assert again.history == whole.history
    further = pyrofl.fit(build, data, whole.state.number + 2, resume_from=whole, progress=False)
    assert len(further.records) == whole.state.number + 2


def test_a_fit_stops_where_it_diverged(blobs: Federation):
    lost = fedavg.build(toys.net(), lr=10.0)
    run = pyrofl.fit(lost, blobs, 20, stop_when="converged", progress=False)
    assert run.state.number == 3  # one bad round may be followed by a better one
    assert run.status.kind == "diverged"


def test_tensors_without_a_distribution_have_a_norm(blobs: Federation):
    run = pyrofl.fit(pfedvem.build(toys.net()), blobs, 2, progress=False)
    table = run.parameter_changes()
    assert table[["mean", "sd"]].isna().all().all()
    assert (table["norm"] > 0).all()
    assert {name.partition("/")[0] for name in table["site"]} == {"base", "loc"}


def test_a_wrong_word_is_refused(data: Federation):
    with pytest.raises(ValueError, match="stop_when is 'done'; expected one of converged"):
        pyrofl.fit(method(data, 0.5), data, 3, stop_when="done")  # type: ignore[call-overload]


def test_arviz_sees_what_moved(data: Federation):
    run = pyrofl.fit(method(data, 0.5), data, 3, progress=False)
    longer = pyrofl.fit(method(data, 0.5), data, 4, seed=1, progress=False)
    found = pyrofl.to_arviz([run, longer], 2)["sample_stats"]
    assert found["moved_mean"].dims == ("chain", "round", "site")
    table = run.parameter_changes().pivot(index="round", columns="site", values="sd")
    assert (found["moved_sd"].to_numpy()[0, :3] == table.to_numpy()).all()
    assert math.isnan(found["moved_sd"].sel(chain=0, round=4, site="b"))
    assert "moved_norm" not in found
