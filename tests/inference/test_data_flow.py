"""The data flow of a method has the sizes that real rounds count, tensor by tensor."""

from __future__ import annotations

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from promises import others_slow
from toys import ALL, BASE, FEATURES, HEAD, blobs, last, net

import pyrofl
from pyrofl import datasets, federations, participation
from pyrofl.cli.output import cards
from pyrofl.experiments.methods import builds
from pyrofl.models import (
    conjugate,
    fedavg,
    fedbe,
    fedper,
    fisher,
    likelihood_factors,
    metavd,
    pfedmb,
    pfedvem,
    pvi,
    two_stage,
    virtual,
)

RAGGED = (3, 40, 7, 12)
QUICK = ("fedavg", "fedper", "pfedvem", "pfedmb", "pvi", "virtual", "ifca", "local")


def counted(parts):
    return {part.role: part.numbers for part in parts}


@pytest.mark.parametrize("name", others_slow(builds(), QUICK))
def test_the_parts_of_every_method_add_up_to_the_bytes_of_its_rounds(name):
    method, data = cards.made(name, cards.network()), cards.rows()
    flow, state = pyrofl.get_data_flow(method, data), last(method, data, 2, check=False)
    assert (flow.bytes_down, flow.bytes_up) == (
        int(state.bytes_down.sum()),
        int(state.bytes_up.sum()),
    )
    sent = {n.partition("/")[0] for n in state.message}
    assert {part.role.partition(" ")[0] for part in flow.up} == sent
    assert sum(counted(flow.up).values()) == sum(v[0].numel() for v in state.message.values())
    stored = [*flow.stays, *flow.stored]
    assert sum(p.numbers for p in stored) == sum(
        v[0].numel() for v in state.get_client_states(torch.arange(1)).values()
    )
    assert sum(part.numbers for part in flow.server if part.role != "unlabeled rows") == sum(
        v.numel() for v in state.server.values()
    )


@pytest.mark.parametrize(
    "method",
    [
        pfedvem.build(net(), batch=5),
        pfedmb.build(net(), batch=5),
        metavd.build(net(), batch=5, prune=0.3),
        fisher.build(net(), epochs=1, batch=5),
    ],
    ids=["pfedvem", "pfedmb", "metavd", "fisher"],
)
@pytest.mark.parametrize("share", [None, 0.5])
def test_ragged_clients_with_minibatches_and_partial_participation(method, share):
    data = blobs(RAGGED)
    drawn = participation.everyone if share is None else participation.fraction(share)
    flow = pyrofl.get_data_flow(method, data, participation=drawn, seed=3)
    state = last(method, data, 2, participation=drawn, seed=3, chunk_size=1)
    each = [sum(sizes) for sizes in zip(*(part.bytes for part in flow.up), strict=True)]
    assert sorted(each) == sorted(state.bytes_up.tolist())
    each = [sum(sizes) for sizes in zip(*(part.bytes for part in flow.down), strict=True)]
    assert sorted(each) == sorted(state.bytes_down.tolist())
    assert (flow.clients, flow.rows, flow.row_numbers) == (4, (3, 40), FEATURES + 1)


def test_a_remote_clients_message_has_the_tensors_and_bytes_of_the_flow():
    data, method = blobs(RAGGED), pfedvem.build(net())
    server = pyrofl.Server(method, data.names, data.sizes, data.dtype)
    request = server.configure_train({"here": list(data.names)})["here"]
    reply = pyrofl.Client(method, data).train(request)
    tensors = {n: v for n, v in reply.items() if n.startswith("up/")}
    flow = pyrofl.get_data_flow(method, data)
    assert flow.bytes_up == sum(v.nbytes for v in tensors.values()) > 0


def test_a_run_is_described_by_its_next_round():
    data = blobs(RAGGED)
    run = pyrofl.fit(pfedvem.build(net()), data, 2, progress=False)
    flow = pyrofl.get_data_flow(run)
    assert (flow.bytes_down, flow.bytes_up) == (
        run.records[-1].bytes_down,
        run.records[-1].bytes_up,
    )
    assert run.state.number == 2  # the run is unchanged
    assert flow.first_round is None


@pytest.mark.parametrize(
    ("method", "stays", "up"),
    [
        (fedper.build(net()), {"w (head)": HEAD}, {"w (fc1)": BASE}),
        (virtual.build(net()), {"mean": HEAD, "root": HEAD}, {"shift": BASE, "precision": BASE}),
        (fedavg.build(net()), {}, {"w": ALL}),
    ],
    ids=["fedper", "virtual", "fedavg"],
)
def test_a_personal_head_stays_at_the_client(method, stays, up):
    flow = pyrofl.get_data_flow(method, blobs(RAGGED))
    assert counted(flow.up) == up
    found = counted(flow.stays)
    assert {role: found.get(role) for role in stays} == stays
    assert bool(found) is bool(stays)


def test_what_a_message_repeats_under_another_name_does_not_stay():
    flow = pyrofl.get_data_flow(pfedvem.build(net()), blobs(RAGGED))
    assert counted(flow.stays) == {"pi": HEAD}  # standard deviations of the head
    assert counted(flow.stored) == {"mu": HEAD, "own": BASE, "tau": 1}
    assert counted(flow.up) == {"tau": 1, "base": BASE, "mean": HEAD}


def test_unlabeled_rows_are_at_the_server():
    data = blobs(RAGGED)
    flow = pyrofl.get_data_flow(fedbe.build(net(), server_data=data.x[:7], batch=5), data)
    (rows,) = (part for part in flow.server if part.role == "unlabeled rows")
    assert (rows.numbers, rows.bytes) == (7 * FEATURES, (7 * FEATURES * 8,))


def schools(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


def rate(received, local, batch):
    with batch.clients():
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Bernoulli(p), obs=batch.y)


S = 50  # draws
EIGHT = federations.split(datasets.load("eight_schools"), "groups", 8)


@pytest.mark.parametrize(
    ("build", "numbers"),
    [
        # A normal factor of two variables: two numbers of shift, three of a symmetric precision.
        (pvi.hierarchical, {"shift": 2, "precision": 3}),
        # Of mu and theta, with the whole matrix; and two sums of rows, as of any linear model.
        pytest.param(
            likelihood_factors.hierarchical,
            {"shift": 2, "precision": 4, "square": 1, "count": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            partial(two_stage.hierarchical, draws=S),
            {"draws": S, "log_p1": S, "r_hat": 1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["pvi", "likelihood_factors", "two_stage"],
)
def test_programs_send_as_many_numbers_as_their_formulas(build, numbers):
    flow = pyrofl.get_data_flow(build(schools, EIGHT, shared="mu tau"), EIGHT)
    assert counted(flow.up) == numbers
    assert {len(part.bytes) for part in flow.up} == {8}


def test_factors_of_clients_are_at_the_server():
    flow = pyrofl.get_data_flow(pvi.hierarchical(schools, EIGHT, shared="mu tau"), EIGHT)
    tables = {part.role: part.numbers for part in flow.server if part.per_client}
    assert tables == {"server/shift": 8 * 2, "server/precision": 8 * 3}


def test_conjugate_models_send_sums_of_counts():
    rows = torch.arange(9).split([1, 3, 5])
    coins = pyrofl.Federation(torch.zeros(9, 1), torch.arange(9.0) % 2, rows, rows)
    flow = pyrofl.get_data_flow(conjugate.method(rate, coins), coins)
    assert counted(flow.up) == {"change": 2 + 1}  # both parameters of Beta, and a count of rows


def test_once_a_client_sends_its_name_and_size():
    flow = pyrofl.get_data_flow(fedavg.build(net()), blobs(RAGGED))
    assert [(part.numbers, part.bytes) for part in flow.once] == [(1, (16,) * 4)]  # "client 0"


def test_a_run_has_its_own_data_and_a_method_has_none():
    data = blobs(RAGGED)
    with pytest.raises(ValueError, match=r"data is missing; pass get_data_flow\(method, data\)"):
        pyrofl.get_data_flow(fedavg.build(net()))
    run = pyrofl.fit(fedavg.build(net()), data, 1, progress=False)
    with pytest.raises(ValueError, match="data is given with a run, which has its own"):
        pyrofl.get_data_flow(run, data)


def test_the_summary_lists_places_and_sizes():
    told = str(pyrofl.get_data_flow(fedper.build(net()), blobs(RAGGED)))
    assert told.startswith("Data flow of fedper")
    assert f"stays at a client  w (head) ({HEAD})" in told
