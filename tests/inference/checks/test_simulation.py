"""Ranks are uniform where the guide holds the posterior, and far from it where it does not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
import xarray
from checks import close
from scipy.stats import chi2, kstest
from torch import Generator, Tensor

import pyrofl
from pyrofl import checks
from pyrofl.data import Batch, Cohort, Federation
from pyrofl.inference.checks.replicas import (
    compact,
    first_of,
    rounds_of,
    side_by_side,
    with_modified_batches,
    with_responses,
)
from pyrofl.inference.checks.simulation import Ranks, rank, simulated
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.metadata import SHARED, Metadata
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import adam, sgd
from pyrofl.inference.definition.programs import Program
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.start import first
from pyrofl.models import fald, fedavg, guides, pfedvem, pvi
from pyrofl.models.guides import correlated
from pyrofl.models.likelihoods import normal
from pyrofl.nets import build
from pyrofl.returned import ClientError
from pyrofl.tensors import Tensors, generator, spread_out

ROWS = torch.arange(14).split([8, 5, 1])
X = torch.randn(14, 2, generator=generator(0), dtype=torch.float64)
X[:, 1] = 0.9 * X[:, 0] + 0.45 * X[:, 1]


def template(held_out: int = 0) -> Federation:
    names = ("Ada", "Bea", "Cleo")
    return Federation(X, 0 * X[:, 0], ROWS, [r[:0] for r in ROWS], names, held_out=held_out)


def hierarchy(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Let means of clients be mu + 1.5 eta_j; all is normal, and mu and eta_j are correlated."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + 1.5 * eta)
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def regression(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 0.5), obs=batch.y)


def alone(family: guides.Family) -> Method:
    """Fit `regression` by SVI, every client for itself."""
    q = family({"w": torch.Size([2])}, init_scale=0.3)
    steps = [GradientStep(q.names, adam(lr), elbo(8)) for lr in (0.1, 0.02, 0.004)]
    return Method(
        init=lambda generator, clients: {},
        init_client=lambda received, cohort, generator: spread_out(
            q.start({"w": 0 * X[0]}), len(cohort.ids)
        ),
        model=regression,
        guide=q.program,
        phases=tuple(Phase((step,), epochs=100) for step in steps),
        aggregate=lambda server, message, cohort, generator: server,
    )


def prior_only(width: float = 1.0, shared: str = "") -> Method:
    """Return what draws from N(0, width^2) whatever the data; they say nothing here."""

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            w = pyro.sample("w", dist.Normal(received["at"], 1.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(0.0 * w, 1.0), obs=batch.y)

    def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            pyro.sample("w", dist.Normal(local["at"], width))

    return Method(
        init=lambda generator, clients: {"at": torch.zeros((), dtype=torch.float64)},
        model=model,
        guide=guide,
        phases=(Phase((lambda received, local, batch: {"at": local["at"]},)),),
        aggregate=lambda server, message, cohort, generator: server,
        metadata=Metadata({shared: SHARED}),
    )


# Proof: 200 replications.


def test_a_full_covariance_is_calibrated_on_a_normal_hierarchy():
    method = pvi.hierarchical(
        hierarchy, template(), shared="mu", damping=1.0, num_particles=8, steps=4
    )
    found = pyrofl.checks.sbc(method, template(), rounds=1)
    assert found.p_value > 0.01
    assert found.failed == ()
    assert found.ranks["mu"].dims == ("replication",)
    assert found.ranks["theta"].dims == ("replication", "client")
    assert found.ranks.sizes == {"replication": 200, "client": 3}
    assert found.ranks["eta"]["client"].values.tolist() == ["Ada", "Bea", "Cleo"]
    coverage = found.coverage()
    assert coverage["level"].values.tolist() == [0.5, 0.8, 0.95]
    error = np.sqrt(coverage["level"] * (1 - coverage["level"]) / 200)
    for name in found.ranks:
        assert (np.abs(coverage[name] - coverage["level"]) < 4 * error).all()


def test_a_diagonal_one_is_not():
    method = pvi.hierarchical(
        hierarchy,
        template(),
        shared="mu",
        covariance="diagonal",
        damping=0.5,
        num_particles=8,
        steps=4,
    )
    found = pyrofl.checks.sbc(method, template(), rounds=8)
    table = found.table()
    assert found.p_value < 1e-6
    assert table.loc["mu", "p"] < 1e-6
    assert table.loc["mu", "95%"] < 0.8


def test_corrected_draws_of_a_diagonal_one_are():
    method = pvi.hierarchical(
        hierarchy, template(), shared="mu", covariance="diagonal", damping=0.5, steps=4
    )
    how = {"rounds": 4, "replications": 100, "draws": 99}
    assert pyrofl.checks.sbc(method, template(), **how).table().loc["mu", "p"] < 1e-4
    found = pyrofl.checks.sbc(method, template(), corrected=True, **how)
    assert found.failed == found.uncorrected == ()
    assert found.p_value > 0.01
    error = math.sqrt(0.8 * 0.2 / 100)
    assert (abs(found.table()["80%"] - 0.8) < 4 * error).all()


def test_draws_that_cannot_be_corrected_are_those_of_the_guide_and_named():
    with pytest.warns(UserWarning, match="draws of 20 of 20 replications are not corrected: 0, 1"):
        found = pyrofl.checks.sbc(prior_only(), template(), 1, 20, 19, bins=2, corrected=True)
    assert found.uncorrected[3] == (
        "3: clients share no random variable, and the server state is a point"
    )
    plain = pyrofl.checks.sbc(prior_only(), template(), 1, 20, 19, bins=2)
    assert plain.uncorrected == ()
    xarray.testing.assert_equal(found.ranks, plain.ranks)


@pytest.mark.parametrize("family", [correlated.full_covariance, guides.mean_field])
def test_svi_is_calibrated_if_its_family_holds_the_posterior(family):
    found = pyrofl.checks.sbc(alone(family), template(), rounds=1)
    assert found.ranks["w"].dims == ("replication", "client", "w_dim_0")
    table = found.table()
    if family is correlated.full_covariance:
        assert found.p_value > 0.01
        assert (table["95%"] > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 200)).all()
    else:
        assert found.p_value < 1e-6
        assert table.loc["w[Ada, 0]", "95%"] < 0.8


# The machinery.


def test_ranks_count_draws_below_the_truth_and_break_ties_at_random():
    draws = torch.tensor([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]])
    assert rank(draws, torch.tensor([2.5, 9.0]), generator(0)).tolist() == [2, 3]
    ties = [int(rank(draws, torch.tensor([2.5, 5.0]), generator(i))[1]) for i in range(400)]
    counts = np.bincount(ties, minlength=4)
    assert (np.abs(counts - 100) < 4 * math.sqrt(400 * 0.25 * 0.75)).all()


def ranks_of(values: np.ndarray, draws: int = 199) -> Ranks:
    return Ranks(xarray.Dataset({"w": (("replication",), values.astype(float))}), draws, 20)


def test_every_rank_once_is_as_uniform_as_can_be():
    found = ranks_of(np.arange(200))
    assert found.p_value == 1.0
    close(torch.tensor(found.coverage()["w"].values), [0.5, 0.8, 0.95])
    assert found.places["w"].values[[0, -1]].tolist() == [0.0025, 0.9975]


def test_levels_are_those_that_intervals_between_draws_have():
    coverage = ranks_of(np.arange(20).repeat(10), 19).coverage([0.5, 0.97])
    close(torch.tensor(coverage["level"].values), [0.5, 1.0])
    close(torch.tensor(coverage["w"].values), [0.5, 1.0])
    with pytest.raises(ValueError, match="expected numbers between 0 and 1"):
        ranks_of(np.arange(200)).coverage([0.0])


def test_the_p_value_is_that_of_the_chi_square_test():
    # 10 expected in each of 20 bins: one has 20, one has 0.
    values = np.arange(200)
    values[:10] = 15
    found = ranks_of(values)
    assert math.isclose(found.p_value, chi2.sf(20.0, 19), rel_tol=1e-12)


def test_p_values_of_many_coordinates_are_adjusted():
    values = np.stack([np.arange(200), np.arange(200)], -1).astype(float)
    values[:40, 0] = 15
    found = Ranks(xarray.Dataset({"w": (("replication", "k"), values)}), 199, 20)
    table = found.table()
    assert list(table.index) == ["w[0]", "w[1]"]
    assert table.loc["w[0]", "p_holm"] == 2 * table.loc["w[0]", "p"]
    assert table.loc["w[1]", "p_holm"] == 1.0
    assert found.p_value == table["p_holm"].min()


def test_places_of_a_client_have_names():
    data = {
        "mu": (("replication",), [0.0, 9.0]),
        "w": (("replication", "client"), [[0.0, 9.0]] * 2),
    }
    found = Ranks(xarray.Dataset(data, {"client": ["Ada", "Bea"]}), 9, 2)
    own = found.of_client("Bea")
    assert {n: v.tolist() for n, v in own.items()} == {"mu": [0.05, 0.95], "w": [0.95, 0.95]}


def test_truths_and_data_come_from_the_prior():
    method = pvi.hierarchical(hierarchy, template(), shared="mu", num_particles=8)
    begin = first(method, template(), 0)
    sites, y = simulated(method, compact(template()), begin, 2000)
    assert {n: v.axes for n, v in sites.items()} == {
        "mu": ("draw",),
        "eta": ("draw", "client"),
        "theta": ("draw", "client"),
    }
    mu, eta, theta = (sites[n].value for n in ("mu", "eta", "theta"))
    close(theta, mu[:, None] + 1.5 * eta)
    assert kstest(mu.numpy() / 2, "norm").pvalue > 0.01
    assert kstest(eta.flatten().numpy(), "norm").pvalue > 0.01
    owner = torch.tensor([0] * 8 + [1] * 5 + [2])
    assert kstest((y - theta[:, owner]).flatten().numpy(), "norm").pvalue > 0.01
    assert abs(float(torch.corrcoef(eta.T)[0, 1])) < 4 / math.sqrt(2000)


def test_functions_of_shared_sites_have_one_rank_in_a_replication():
    def doubled(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
            double = pyro.deterministic("double", 2 * mu)
            with batch.rows():
                pyro.sample("y", dist.Normal(double, 1.0), obs=batch.y)

    method = pvi.hierarchical(doubled, template(), shared="mu")
    ranks = checks.sbc(method, template(), rounds=1, replications=40, draws=19).ranks
    assert ranks["double"].dims == ("replication",)
    np.testing.assert_array_equal(ranks["double"], ranks["mu"])


def test_replications_neither_share_noise_nor_truth():
    # The data say nothing and the guide is the prior: draws and truth are the same in law.
    for shared in ("", "w"):
        found = pyrofl.checks.sbc(prior_only(shared=shared), template(), 1, replications=400)
        assert found.p_value > 0.01
        places = found.places["w"].values.reshape(400, -1)[:, 0]
        assert kstest(places, "uniform").pvalue > 0.01
        assert abs(np.corrcoef(places[1:], places[:-1])[0, 1]) < 4 / math.sqrt(400)


def test_a_posterior_too_narrow_or_too_wide_is_told_apart():
    narrow = pyrofl.checks.sbc(prior_only(0.5), template(), 1).table()
    wide = pyrofl.checks.sbc(prior_only(2.0), template(), 1).table()
    # An interval of 95% of N(0, w^2) holds N(0, 1) with probability erf(1.96 w / sqrt 2).
    for table, width in ((narrow, 0.5), (wide, 2.0)):
        expected = math.erf(1.96 * width / math.sqrt(2))
        error = 4 * math.sqrt(expected * (1 - expected) / 200) + 0.01
        assert (table["95%"] - expected).abs().max() < error
        assert table["p"].max() < 1e-3


def test_the_prior_is_taken_at_a_given_state_of_the_server():
    server = {"at": torch.tensor(7.0, dtype=torch.float64)}
    found = pyrofl.checks.sbc(prior_only(), template(), 1, 100, 19, server=server)
    assert found.p_value > 0.01  # truth and draws are both around 7
    sites, _ = simulated(
        prior_only(), compact(template()), first(prior_only(), template(), 0, server), 100
    )
    assert abs(float(sites["w"].value.mean()) - 7) < 4 / math.sqrt(300)


def test_a_method_whose_server_moves_is_ranked_too():
    net = build("linear", (2,), 1)
    method = pfedvem.build(net, head="*", likelihood=normal(0.5), init_scale=0.5, head_epochs=2)
    found = pyrofl.checks.sbc(lambda number: method, template(), 2, 40, 19)
    assert set(found.ranks) == set(net.shapes)
    assert found.ranks.notnull().all().to_array().all()
    assert found.bins == 4


def test_a_server_state_that_grows_every_round_is_ranked_too():
    chain = fald.build(build("linear", (2,), 1), likelihood=normal(0.5), epochs=1, batch=None)
    method = replace(chain, metadata=chain.metadata.extend({"w": SHARED}))
    found = pyrofl.checks.sbc(method, template(), 3, 20, 19, bins=2)
    assert found.ranks.notnull().all().to_array().all()


def test_a_fit_that_is_not_finite_is_told():
    def spoil(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        high = batch.y[:, 0] > 1.5
        return {"at": local["at"] + torch.where(high, torch.nan, 0.0)}

    method = replace(prior_only(), phases=(Phase((spoil,)),))
    with pytest.warns(UserWarning, match="of 100 fits are not finite"):
        found = pyrofl.checks.sbc(method, template(), 1, 100, 19)
    gone = found.ranks["w"].isnull()
    assert (gone.all("client") == gone.any("client")).all()
    assert len(found.failed) == int(gone.any("client").sum()) > 0
    assert "in round 1" in found.failed[0]
    assert np.isfinite(found.p_value)
    always = Phase((lambda received, local, batch: {"at": local["at"] * torch.nan},))
    with pytest.raises(ValueError, match="all fits failed"):
        pyrofl.checks.sbc(replace(prior_only(), phases=(always,)), template(), 1, 10, 19, bins=2)


def test_a_replication_that_diverged_is_told_unless_asked_for():
    """Steps of 10 on a quadratic of curvature 1 double the distance and more, where y is high."""

    def loss(model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch):
        high = torch.where(batch.y[:, 0] > 1.5, 1.0, 0.01)
        return high * (local["at"] - 1.0).square() / 2

    step = GradientStep("at", sgd(10.0), loss)
    method = replace(prior_only(), phases=(Phase((step,), epochs=4),))
    method = replace(
        method, aggregate=lambda server, message, cohort, generator: {"at": message["at"].mean()}
    )
    with pytest.warns(UserWarning, match="of 30 fits are not finite or diverged"):
        found = pyrofl.checks.sbc(method, template(), 3, 30, 19, bins=2)
    assert 0 < len(found.failed) < 30
    assert all("diverged since round 1: the loss of at rose from 0." in r for r in found.failed)
    allowed = pyrofl.checks.sbc(method, template(), 3, 30, 19, bins=2, allow_diverged=True)
    assert not allowed.failed
    assert bool(allowed.ranks.notnull().all().to_array().all())


def test_an_error_in_the_rows_of_a_client_fails_its_replication_alone():
    def refuse(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        if bool((high := batch.y[:, 0] > 1.5).any()):
            assert int(batch.ids.max()) < 3  # those of the template
            positions = high.nonzero().flatten().tolist()
            raise ClientError("rows without a density", batch.ids[high].tolist(), positions)
        return {"at": local["at"]}

    method = replace(prior_only(), phases=(Phase((refuse,)),))
    with pytest.warns(UserWarning, match="because of rows without a density"):
        found = pyrofl.checks.sbc(method, template(), 1, 100, 19, chunk_size=7)
    gone = found.ranks["w"].isnull()
    begin = first(prior_only(), compact(template()), 0, None)
    _, y = simulated(prior_only(), compact(template()), begin, 100)
    rows = torch.tensor([int(rows[0]) for rows in compact(template()).train])
    expected = (y.reshape(100, -1)[:, rows] > 1.5).any(1)
    assert gone.any("client").values.tolist() == gone.all("client").values.tolist()
    assert gone.all("client").values.tolist() == expected.tolist()
    assert len(found.failed) == int(expected.sum()) > 5


@pytest.mark.parametrize("raises", [False, True])
def test_a_server_that_cannot_merge_is_told_of_its_copy_alone(raises):
    def nudge(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        return {"at": local["at"] + torch.where(batch.y[:, 0] > 1.5, 0.001, 0.0)}

    def aggregate(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        if not bool((message["at"] > 0).any()):
            return {"at": server["at"] + 0.5}
        if raises:
            raise AggregationError("too few; expected more")
        return {"at": server["at"] * torch.nan}

    method = replace(prior_only(), phases=(Phase((nudge,)),), aggregate=aggregate)
    with pytest.warns(UserWarning, match="of 60 fits are not finite"):
        found = pyrofl.checks.sbc(method, template(), 1, 60, 19)
    told = "too few; expected more" if raises else "aggregated at is nan; expected a finite number"
    assert 0 < len(found.failed) < 60
    assert all(f": the server: {told} in round 1" in reason for reason in found.failed)

    data, y = compact(template()), torch.zeros(3, 14, dtype=torch.float64)
    y[1] = 2.0
    begin, refused = first(method, data, 0), dict[int, str]()
    (state,) = federate(
        side_by_side(method, 3, refused),
        with_responses(data, y),
        1,
        resume_from=first_of(begin.server, 3, 3),
        check=False,
    )
    assert [float(copy.server["at"]) for copy in rounds_of(state, 3)] == [0.5, 0.0, 0.5]
    assert refused == {1: f"the server: {told}"}


def test_what_it_cannot_do_is_refused():
    net = toys.net()
    with pytest.raises(ValueError, match="the prior has no draws"):
        pyrofl.checks.sbc(fedavg.build(net), toys.blobs(), 1, 20, 19, bins=2)
    with pytest.raises(ValueError, match="draws \\+ 1 must be a multiple"):
        pyrofl.checks.sbc(prior_only(), template(), 1, 200, 100)
    with pytest.raises(
        ValueError, match="replications is 1; expected a whole number of at least 2"
    ):
        pyrofl.checks.sbc(prior_only(), template(), 1, 1)

    def two(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            w = pyro.sample("w", dist.Normal(received["at"], 1.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(w, 1.0), obs=batch.y)
                pyro.sample("z", dist.Normal(w, 1.0), obs=batch.y)

    with pytest.raises(ValueError, match=r"responses inside batch.rows\(\) are \['y', 'z'\]"):
        pyrofl.checks.sbc(replace(prior_only(), model=two), template(), 1, 20, 19, bins=2)


# Copies side by side.


def counted(program: Program | None = None) -> tuple[Method, list[list[int]]]:
    """Return PVI whose model writes down which clients it sees."""
    seen: list[list[int]] = []

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        seen.append(batch.ids.tolist())
        hierarchy(received, local, batch)

    method = pvi.hierarchical(model, template(), shared="mu", damping=1.0, num_particles=8, steps=4)
    return method, seen


def test_copies_train_as_each_would_alone():
    # With 8 draws the steps of a normal model have no noise, so results are equal.
    method, seen = counted()
    data = compact(template(held_out=1))
    assert data.names == ("Ada", "Bea")
    y = torch.randn(3, 13, generator=generator(5), dtype=torch.float64)
    begin = first(method, data, 0)
    many = with_responses(data, y)
    assert many.names[2:4] == ("1/Ada", "1/Bea")
    seen.clear()
    *_, state = federate(
        side_by_side(method, 2), many, 2, resume_from=first_of(begin.server, 3, 2), check=False
    )
    assert {i for ids in seen for i in ids} == {0, 1}
    for r, copy in enumerate(rounds_of(state, 2)):
        own = with_responses(data, y[r : r + 1])
        *_, known = federate(method, own, 2, resume_from=begin)
        toys.assert_same(copy.server, known.server, 1e-7, 1e-9)
        close(copy.client_states["mean"], known.client_states["mean"], 1e-7)
        # The columns of a root have no sign of their own.
        mine, other = (v.client_states["root"] for v in (copy, known))
        close(mine @ mine.mT, other @ other.mT, 1e-7)
        assert copy.number == known.number == 2
        assert copy.seen.all()


def test_a_server_that_is_empty_stays_so():
    method, data = alone(guides.mean_field), compact(template())
    y = torch.zeros(2, 14, dtype=torch.float64)
    *_, state = federate(
        side_by_side(method, 3),
        with_responses(data, y),
        1,
        resume_from=first_of({}, 2, 3),
        check=False,
    )
    assert [copy.server for copy in rounds_of(state, 3)] == [{}, {}]


def test_epochs_are_asked_by_the_number_in_the_copy():
    def epochs(ids: Tensor) -> Tensor:
        assert int(ids.max()) < 3
        return ids + 1

    method = replace(prior_only(), phases=(replace(prior_only().phases[0], epochs=epochs),))
    data = compact(template())
    many = with_responses(data, torch.zeros(4, 14, dtype=torch.float64))
    begin = first(prior_only(), data, 0)
    *_, state = federate(
        side_by_side(method, 3), many, 1, resume_from=first_of(begin.server, 4, 3), check=False
    )
    assert state.number == 1


def test_seeing_changes_what_all_programs_see():
    method, seen = counted()
    method = with_modified_batches(method, lambda batch: replace(batch, ids=batch.ids + 40))
    seen.clear()
    toys.last(method, template(), 1)
    assert {i for ids in seen for i in ids} == {40, 41, 42}


def test_few_replications_are_said_and_columns_name_the_levels_of_their_draws():
    with pytest.warns(UserWarning, match="20 replications permit 2 bins of ranks, .* 100"):
        found = pyrofl.checks.sbc(prior_only(), template(), 1, 20, 19)
    assert list(found.table())[-3:] == ["50%", "80%", "90%"]
