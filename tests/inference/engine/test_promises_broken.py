"""Functions of a method that do not keep to the rules, and callers that come from elsewhere."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import toys
from pyro.infer.autoguide import AutoNormal
from torch import Generator, Tensor

from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.method import Method
from pyrofl.inference.dependencies import get_dependencies
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import everyone, fixed
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.inference.fit import fit
from pyrofl.models import fedavg, pfedbayes, pvi, scaffold
from pyrofl.models.guides.automatic import from_pyro
from pyrofl.tensors import Tensors


def made(**changes: object) -> Method:
    return replace(fedavg.build(toys.net(), batch=8), **changes)


def in_place(server: Tensors, message: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
    for name, value in server.items():
        value.copy_(message[name].mean(0))
    return server


def afresh(server: Tensors, message: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
    return {name: message[name].mean(0) for name in server}


def test_a_merge_that_writes_in_place_changes_no_state_that_was_kept(blobs):
    method, start = made(aggregate=in_place), first(made(), blobs, 0)
    before = {n: v.clone() for n, v in start.server.items()}
    states = list(federate(method, blobs, 3, resume_from=start))
    toys.assert_same(start.server, before)
    for found, expected in zip(states, federate(made(aggregate=afresh), blobs, 3), strict=True):
        toys.assert_same_round(found, expected)


def test_the_librarys_aggregation_gets_no_copy_of_the_server(blobs):
    method = scaffold.build(toys.net(), batch=8)
    one, two = federate(method, blobs, 2)
    assert two.server["server/clients"].data_ptr() == one.server["server/clients"].data_ptr()


def test_a_merge_that_fails_half_way_leaves_the_server_as_it_was(blobs):
    def half(server: Tensors, message: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        first, *_ = server
        server[first].fill_(7.0)
        return {n: v * torch.nan for n, v in server.items()}

    start = first(made(), blobs, 0)
    state = run_round(made(aggregate=half), blobs, start, torch.arange(3), torch.arange(3))
    assert state.rejected[0].startswith("the server: aggregated ")
    toys.assert_same(state.server, first(made(), blobs, 0).server)


def test_a_merge_may_add_what_travels(blobs):
    def more(server: Tensors, message: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        return afresh(server, message, cohort, generator) | {"seen": torch.zeros(2)}

    for draw, count in ((everyone, 12), (fixed(1), 1)):
        states = list(federate(made(aggregate=more), blobs, 3, participation=draw))
        assert not any(state.rejected for state in states)
        assert states[-1].message["seen"].shape == (count, 2)


def message_in_place(server: Tensors, message: Tensors, cohort: Cohort, g: Generator) -> Tensors:
    return {n: v.mul_(0.5).sum(0) for n, v in message.items()}


def download_in_place(server: Tensors, cohort: Cohort) -> Tensors:
    for value in server.values():
        value.add_(1.0)
    return {n: v.expand(len(cohort.ids), *v.shape) for n, v in server.items()}


def upload_in_place(received: Tensors, local: Tensors) -> Tensors:
    return {n: local[n].sub_(v) for n, v in received.items()}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"aggregate": message_in_place},
            r"aggregate writes into 'w/.*' in place; expected it to return",
        ),
        ({"download": download_in_place}, "download writes into 'w/.*' in place; expected it to"),
        ({"upload": upload_in_place}, "upload writes into 'w/.*' in place; expected it to return"),
        (
            {"aggregate": lambda s, m, w, g: m},
            "aggregate returns 'w/.*' with a row for each of the 12 reporting clients",
        ),
        (
            {"aggregate": lambda s, m, w, g: None},
            "what aggregate returns is a NoneType; expected a dict",
        ),
        (
            {"aggregate": lambda s, m, w, g: {"a": 0.5}},
            "what aggregate returns holds 'a', a float; expect",
        ),
        ({"init": lambda g, c: [torch.ones(1)]}, "what init returns is a list; expected a dict"),
        (
            {"init_client": lambda r, w, g: None},
            "what init_client returns is a NoneType; expected a dict",
        ),
        ({"download": lambda s, w: None}, "what download returns is a NoneType; expected a dict"),
        ({"upload": lambda r, m: (1,)}, "what upload returns is a tuple; expected a dict of"),
    ],
)
def test_what_a_function_may_not_do_is_said(blobs, changes, told):
    with pytest.raises(ValueError, match=told):
        list(federate(made(**changes), blobs, 1))


def test_an_argument_that_there_is_not_is_refused(blobs):
    with pytest.raises(ValueError, match="unknown argument 'participaton'; did you mean particip"):
        fit(made(), blobs, 1, participaton=None)
    with pytest.raises(TypeError, match=r"federate\(\) got an unexpected keyword .*participaton"):
        federate(made(), blobs, 1, participaton=None)


def test_no_grad_around_a_fit_changes_nothing_and_inference_mode_is_refused(blobs):
    expected = fit(made(), blobs, 1, progress=False)
    with torch.no_grad():
        found = fit(made(), blobs, 1, progress=False)
    toys.assert_same_round(found.state, expected.state)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"inference_mode\(\) is on"):
        fit(made(), blobs, 1)
    rounds = federate(made(), blobs, 1)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"inference_mode\(\) is on"):
        next(rounds)


METHODS = (lambda: made(), lambda: pfedbayes.build(toys.net(), batch=8))


def test_rounds_of_several_runs_may_take_turns(blobs):
    alone = [list(federate(m(), blobs, 3)) for m in METHODS]
    turns = zip(*(federate(m(), blobs, 3) for m in METHODS), strict=True)
    for expected, found in zip(zip(*alone, strict=True), turns, strict=True):
        for one, other in zip(expected, found, strict=True):
            toys.assert_same_round(one, other)


def test_threads_may_fit_and_test_at_once(blobs):
    def job(at: int) -> tuple[object, Tensor]:
        method = METHODS[at % 2]()
        state = toys.last(method, blobs, 3)
        return state, evaluate(method, blobs, state, draws=3).values["accuracy"]

    alone = [job(at) for at in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(job, range(2)))
    for at, (state, accuracy) in enumerate(together):
        toys.assert_same_round(state, alone[at % 2][0])
        assert torch.equal(accuracy, alone[at % 2][1])


MAKERS = {
    "a method": lambda data: pvi.build(toys.net()),
    "a guide": lambda data: from_pyro(AutoNormal, data, model=toys.tempered),
    "relations": lambda data: get_dependencies(made(), data),
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_another_thread_makes_does_not_change_a_fit(name, blobs):
    method, often = made(), sys.getswitchinterval()
    alone = list(federate(method, blobs, 2))
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(lambda: list(federate(method, blobs, 2)))
            while not running.done():
                MAKERS[name](blobs)
    finally:
        sys.setswitchinterval(often)
    for found, expected in zip(running.result(), alone, strict=True):
        toys.assert_same_round(found, expected)


def test_threads_draw_the_start_that_each_draws_alone(blobs):
    method, often = made(), sys.getswitchinterval()
    alone = first(method, blobs, 0).server
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            starts = []
            for _ in range(300):
                pool.submit(torch.nn.Linear, 8, 8)  # which draws, too
                starts.append(pool.submit(first, method, blobs, 0))
            together = [one.result().server for one in starts]
    finally:
        sys.setswitchinterval(often)
    for server in together:
        toys.assert_same(server, alone)


def test_a_model_sees_rows_of_its_own_clients_in_the_padding(blobs):
    seen: dict[int, set[int]] = {}
    method = made()

    def model(received: Tensors, local: Tensors, batch: Batch) -> object:
        for i, x in zip(batch.ids.tolist(), batch.x, strict=True):
            seen.setdefault(i, set()).update(map(hash, map(tuple, x.tolist())))
        return method.model(received, local, batch)

    list(federate(replace(method, model=model), blobs, 1, check=False))
    for i, rows in seen.items():
        assert rows <= {hash(tuple(row)) for row in blobs.x[blobs.train[i]].tolist()}
