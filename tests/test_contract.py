"""What every method promises, whoever wrote it. Methods are found by their file names."""

from __future__ import annotations

import io
import pkgutil
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from importlib import import_module
from types import CodeType, FunctionType, MethodType
from typing import TypeVar

import numpy as np
import promises
import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from pyro.infer.autoguide import AutoNormal
from pyro.poutine.messenger import Messenger
from torch import Generator, Tensor

import pyrofl.models
from pyrofl.data import Batch, Cohort, Federation
from pyrofl.experiments.settings import argument_types
from pyrofl.inference.acceleration import groups
from pyrofl.inference.acceleration.groups import buckets
from pyrofl.inference.acceleration.row_space import first_layer, rewriting
from pyrofl.inference.definition.aggregator import Aggregator
from pyrofl.inference.definition.elbo import Directed, Elbo, OfGradients, On, TransformedLoss
from pyrofl.inference.definition.metadata import (
    PER_CLIENT,
    POSITIVE,
    REPORTED,
    SHARED,
    marked_names,
)
from pyrofl.inference.definition.method import GradientStep, Method
from pyrofl.inference.definition.optim import Sgd
from pyrofl.inference.definition.programs import Program, Proximal, Supervised, flat
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import Stragglers, bernoulli, fixed
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState, client_inputs
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.inference.posteriors import export
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.models import fedhb, guides, priors
from pyrofl.tensors import Tensors, client_bytes, generator, matches, role

MODULES = {
    m.name: import_module(f"pyrofl.models.{m.name}")
    for m in pkgutil.iter_modules(pyrofl.models.__path__)
}
METHODS = sorted(n for n, module in MODULES.items() if hasattr(module, "build"))

ALL = torch.arange(12)

Result = TypeVar("Result")

everywhere = pytest.mark.parametrize("name", METHODS)
on_archetypes = pytest.mark.parametrize("name", promises.others_slow(METHODS))


@cache
def built(name: str) -> Method:
    """Build a method with the settings of its paper."""
    return make(name)


def make(name: str, **settings: object) -> Method:
    """Build a method with some settings of its own."""
    method: Method = MODULES[name].build(toys.net(), **promises.of(name).settings, **settings)
    return method


@cache
def data() -> Federation:
    return toys.blobs()


@cache
def usual(name: str, chunk_size: int = 12) -> tuple[RoundState, ...]:
    """Return three rounds in which some clients report."""
    return tuple(
        federate(built(name), data(), 3, participation=bernoulli(0.5), chunk_size=chunk_size)
    )


@cache
def begun(name: str) -> RoundState:
    """Return the first round of all clients."""
    return next(federate(built(name), data(), 1))


def tried(work: Callable[[], Result]) -> tuple[Result | None, str]:
    """Return what comes of it, and how it is refused."""
    try:
        return work(), ""
    except ValueError as error:
        return None, str(error)


def replaced(method: Method, part: str, value: object) -> Method | None:
    """Replace a part; None if that is refused in a line that names it and what to do."""
    other, refusal = tried(lambda: replace(method, **{part: value}))
    assert other or re.fullmatch(f"{part} was replaced, but .+; pass .+ build.+", refusal), refusal
    return other


def differ(a: RoundState, b: RoundState) -> bool:
    """Say whether the states of server or clients are not the same."""
    return any(
        one.keys() != other.keys() or any(not torch.equal(one[n], other[n]) for n in one)
        for one, other in ((a.server, b.server), (a.client_states, b.client_states))
    )


def sends(name: str) -> bool:
    """Say whether anything comes down to clients, and what they make of it goes up."""
    method = built(name)
    return bool(method.download(first(method, data(), 0).server, data().cohort(ALL)))


def tensors(state: RoundState) -> Iterator[Tensor]:
    for part in (state.server, state.client_states, state.message):
        yield from part.values()


def test_the_methods_are_found():
    assert {"fedavg", "fedprox", "local", "pfedvem"} <= set(METHODS)
    assert "guides" not in METHODS
    assert promises.told().keys() <= set(METHODS)


@everywhere
def test_results_call_a_method_by_its_name(name):
    assert make(name).name == name
    assert repr(make(name)).startswith(f"Method {name}\n")


def test_a_name_may_have_several_marks():
    facts = {"table": (PER_CLIENT, REPORTED), "mu": SHARED, "tau": (POSITIVE, SHARED)}
    assert (marked_names(facts, PER_CLIENT), marked_names(facts, REPORTED)) == ("table", "table")
    assert marked_names(facts, SHARED) == "mu tau"


@on_archetypes
def test_clients_may_be_trained_side_by_side_or_one_by_one(name):
    # Up to rounding; the papers' settings have momentum, and the clients 3 to 40 rows.
    for one, more in zip(usual(name, 1), usual(name), strict=True):
        toys.assert_same_round(one, more, rtol=1e-8, atol=1e-9)


@on_archetypes
@pytest.mark.parametrize(
    "chunk_size",
    [5, pytest.param(1, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.slow)],
)
def test_rounds_as_written_have_the_same_results(name, chunk_size):
    written = federate(
        built(name),
        data(),
        3,
        participation=bernoulli(0.5),
        chunk_size=chunk_size,
        record=False,
        check=False,
    )
    for one, accelerated in zip(written, usual(name), strict=True):
        toys.assert_same_round(one, accelerated, rtol=1e-8, atol=1e-9)
        toys.assert_same(one.first_loss, accelerated.first_loss, rtol=1e-8, atol=1e-9)
        assert torch.equal(one.steps, accelerated.steps)


@on_archetypes
def test_full_batches_may_be_padded_in_groups(name, monkeypatch):
    def sizes(counts: Tensor, worth: int | None = None) -> list[Tensor]:
        found.append(buckets(counts, worth))
        return found[-1]

    method = built(name)
    if all(phase.batch for phase in method.phases):
        method = replace(method, phases=tuple(replace(p, batch=None) for p in method.phases))
    together, apart = (
        federate(method, data(), 3, participation=bernoulli(0.5), chunk_size=12) for _ in range(2)
    )
    whole = next(together)
    found: list[list[Tensor]] = []
    monkeypatch.setattr(groups, "STEP_COST_ROWS", 0)  # a group for every number of rows
    monkeypatch.setattr(groups, "buckets", sizes)
    toys.assert_same_round(next(apart), whole, rtol=1e-8, atol=1e-9)
    assert max(map(len, found)) > 3


def steps_by_rows(method: Method) -> bool:
    """Say whether a phase moves the first layer along rows, and to the center of a prior."""
    received, private = client_inputs(
        method, data(), first(method, data(), 0), toys.who(data(), 0), 0
    )
    local = private | received
    if method.name == "ifca":  # its first phase chooses the model that is trained
        local |= {n: v[:, 0] for n, v in role("cluster", received).items()}

    def along(move: object) -> bool:
        """Say whether a move is plain SGD on an ELBO that sees the layer as sums."""
        if not isinstance(move, GradientStep) or not isinstance(move.optim, Sgd):
            return False
        core, model, guide, own = move.loss, method.model, method.guide, False
        while isinstance(core, (Directed, OfGradients, On, TransformedLoss)):
            if isinstance(core, On):
                model, guide = core.model, core.guide
            elif isinstance(core, TransformedLoss):
                own = own or core.view.__module__ == fedhb.__name__
            core = core.loss
        if not isinstance(model, Supervised) or not isinstance(core, Elbo):
            return False
        home = model.homes(guide, local).get("fc1.weight", "")
        near = model.prior is flat or isinstance(model.prior, Proximal)
        near = near or home.partition("/")[0] == model.points
        moved = matches(home, move.names) or matches(f"own/{home}", move.names)
        return bool(home) and near and moved and not own

    # SCAFFOLD counts its steps in a closed form, which reads no layer.
    steps = [
        [u for u in phase.updates if isinstance(u, GradientStep) or method.name != "scaffold"]
        for phase in method.phases
    ]
    return any(updates and all(map(along, updates)) for updates in steps)


@on_archetypes
def test_clients_with_few_rows_may_train_in_their_space(name, monkeypatch):
    moved: list[str] = []
    expected = usual(name)  # made before what is patched below
    # Choices made before are kept there.
    monkeypatch.setattr(rewriting, "ALTERNATIVES_BY_PHASE", {})
    real = first_layer.RowSpaceWeights.begin

    def counted(self: first_layer.RowSpaceWeights, *args: object) -> object:
        moved.extend(self.moving)
        return real(self, *args)

    monkeypatch.setattr(rewriting, "pays", lambda phase, *_: phase.batch is not None)
    monkeypatch.setattr(first_layer.RowSpaceWeights, "begin", counted)
    method = built(name)
    short = federate(method, data(), 2, participation=bernoulli(0.5), chunk_size=12)
    for one, other in zip(short, expected, strict=False):
        toys.assert_same_round(one, other, rtol=1e-8, atol=1e-9)
    assert bool(moved) == steps_by_rows(method), moved
    moved.clear()
    opaque = replaced(method, "model", lambda *args: method.model(*args))
    if opaque is not None:
        (written,) = federate(opaque, data(), 1, participation=bernoulli(0.5), chunk_size=12)
        toys.assert_same_round(written, expected[0], rtol=1e-8, atol=1e-9)
        assert not moved, "a program that cannot be looked into runs as it is written"


@on_archetypes
def test_equal_seeds_give_equal_bits(name):
    options = {"participation": bernoulli(0.5), "chunk_size": 12}
    again = list(federate(built(name), data(), 3, **options))
    for a, b in zip(again, usual(name), strict=True):
        toys.assert_same_round(a, b)
    *_, other = federate(built(name), data(), 3, seed=1, **options)
    assert any(
        not torch.equal(v, b) for v, b in zip(tensors(other), tensors(again[-1]), strict=True)
    )


@on_archetypes
def test_the_order_in_which_clients_are_drawn_changes_nothing(name):
    method, start = built(name), usual(name)[0]
    ids = torch.tensor([1, 3, 4, 7, 10, 11])
    mixed = ids[torch.tensor([3, 5, 0, 1, 4, 2])]
    a, b = (run_round(method, data(), start, i, i) for i in (ids, mixed))
    toys.assert_same_round(a, b, rtol=1e-9, atol=1e-10)
    assert b.reporters.ids.tolist() == ids.tolist() == b.trained.tolist()


@on_archetypes
def test_permuting_clients_permutes_results(name):
    # What a client draws follows its name, so draws, minibatches and failures move with it.
    method = make(name, **promises.of(name).unordered)
    order = torch.randperm(12, generator=generator(2))
    parts = {n: [getattr(data(), n)[i] for i in order] for n in ("train", "test", "names")}
    permuted = replace(data(), **parts)
    stragglers = Stragglers(0.2, 0.5)
    *_, a = federate(method, data(), 2, stragglers=stragglers)
    *_, b = federate(method, permuted, 2, stragglers=stragglers)
    close = {"rtol": 1e-8, "atol": 1e-9}
    # A table, or with an axis in front what an optimizer remembers of it.
    tables = [n.strip("*") for n in method.per_client.split()]
    rows = [n for n in a.server if matches(n, method.per_client) or any(t in n for t in tables)]
    at = {n: int(len(a.server[n]) == 1) for n in rows if a.server[n].dim()}
    server = {n: v.index_select(at[n], order) if n in at else v for n, v in a.server.items()}
    toys.assert_same(b.server, server, **close)
    for part in ("client_states", "loss"):
        expected = {n: v[order] for n, v in getattr(a, part).items()}
        toys.assert_same(getattr(b, part), expected, **close)
    assert {data().names[i] for i in a.reporters.ids} == {
        permuted.names[i] for i in b.reporters.ids
    }
    for view in method.views:
        one, other = (
            evaluate(method, d, state, model=view, draws=2, adaptation="train")
            for d, state in ((data(), a), (permuted, b))
        )
        toys.assert_same(other.values, {n: v[order] for n, v in one.values.items()}, 1e-6, 1e-6)


class Filled(Federation):
    """A federation whose padded rows hold a million instead of a row."""

    def gather(self, cohort: Cohort, rows: Tensor, mask: Tensor, *known: Tensor | None) -> Batch:
        batch = super().gather(cohort, rows, mask, *known)
        padded = ~mask.reshape(*mask.shape, *(1 for _ in batch.x.shape[mask.dim() :]))
        label = torch.where(mask, batch.y, len(self.classes) - 1)
        return replace(batch, x=batch.x.masked_fill(padded, 1e6), y=label)


@on_archetypes
def test_padding_changes_nothing(name):
    filled = Filled(**{n: getattr(data(), n) for n in Federation.__dataclass_fields__})
    ids = torch.arange(12)
    assert filled.batch(ids).x.max() == 1e6
    states = federate(built(name), filled, 3, participation=bernoulli(0.5), chunk_size=12)
    for found, expected in zip(states, usual(name), strict=True):
        toys.assert_same_round(found, expected, rtol=1e-9, atol=1e-11)


@on_archetypes
def test_nothing_global_is_touched(name):
    pyro.get_param_store().clear()
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())  # noqa: NPY002
    validation = pyro.settings.get()
    list(federate(built(name), data(), 1, participation=fixed(4)))
    assert len(pyro.get_param_store()) == 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
    assert random.getstate() == before[2]
    assert pyro.settings.get() == validation


@on_archetypes
def test_the_callers_random_state_does_not_matter(name):
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        method = make(name)
        (state,) = federate(method, data(), 1, participation=bernoulli(0.5), chunk_size=12)
    toys.assert_same_round(state, usual(name)[0])


@everywhere
def test_the_message_holds_what_the_paper_sends(name):
    state, method = begun(name), built(name)
    count = len(state.reporters.ids)
    up = sum(v[0].numel() for v in state.message.values())
    received = method.download(state.server, state.reporters)
    down = sum(v[0].numel() for v in received.values())
    assert (up, down) == (promises.of(name).message or (up, down))
    assert all(len(v) == count for v in [*state.message.values(), *received.values()])
    assert (
        state.bytes_up.tolist() == method.message_bytes(state.message).tolist()
        if up
        else not state.bytes_up.any()
    )
    assert int(state.bytes_up.max()) <= 8 * up
    assert int(state.bytes_down.max()) <= client_bytes(received)


@everywhere
def test_nothing_private_travels_but_what_the_paper_sends(name):
    state = begun(name)
    _, private = client_inputs(built(name), data(), state, state.reporters, 0)
    assert private.keys() & state.message.keys() == promises.of(name).sent


@everywhere
def test_the_message_survives_a_file(name):
    message = begun(name).message
    file = io.BytesIO()
    torch.save(message, file)
    file.seek(0)
    toys.assert_same(torch.load(file, weights_only=True), message)
    assert not any(v.requires_grad for v in tensors(begun(name)))


@on_archetypes
def test_who_does_not_report_leaves_the_server_alone(name):
    method, start = built(name), usual(name)[0]
    reporters = torch.tensor([2, 5, 6])
    silent = run_round(method, data(), start, torch.arange(12), reporters, chunk_size=12)
    x = data().x.clone()
    for i in (0, 1, 9):
        x[data().train[i]] += 1
    other = replace(data(), x=x)
    moved = run_round(method, other, start, torch.arange(12), reporters, chunk_size=12)
    toys.assert_same(moved.server, silent.server)
    toys.assert_same(moved.message, silent.message)
    assert silent.reporters.ids.tolist() == [2, 5, 6]
    nobody = run_round(
        method, data(), start, torch.arange(12), torch.zeros(0).long(), chunk_size=12
    )
    toys.assert_same(nobody.server, start.server)


@on_archetypes
def test_a_client_that_turns_bad_changes_nothing_for_others(name):
    method, start = built(name), usual(name)[0]
    ids, bad = torch.arange(12), [1, 4]
    others = torch.tensor([i for i in range(12) if i not in bad])
    spoilt = run_round(toys.poisoned(method, *bad), data(), start, ids, ids, chunk_size=12)
    clean = run_round(method, data(), start, ids, others, chunk_size=12)
    toys.assert_same(spoilt.server, clean.server)
    named = {reason.split(":")[0] for reason in spoilt.rejected}
    if clean.message or clean.client_states:
        assert named == {"client 1", "client 4"}
        assert torch.equal(spoilt.reporters.ids, others)
    for n, v in spoilt.client_states.items():
        assert torch.equal(v[others], clean.client_states[n][others])
        if n in start.client_states:
            assert torch.equal(v[bad], start.client_states[n][bad])


@on_archetypes
def test_a_client_with_hopeless_data_is_left_out(name):
    x = data().x.clone()
    x[data().train[3]] = 1.7e308 * x[data().train[3]].sign()
    hopeless = replace(data(), x=x)
    (state,) = federate(built(name), hopeless, 1, chunk_size=12)
    assert [reason.split(":")[0] for reason in state.rejected] == ["client 3"]
    assert 3 not in state.reporters.ids.tolist()
    assert all(bool(v.isfinite().all()) for v in tensors(state) if v.is_floating_point())


@on_archetypes
def test_all_clients_turn_bad(name):
    method = toys.poisoned(built(name), *range(12))
    (state,) = federate(method, data(), 1, chunk_size=12)
    toys.assert_same(state.server, first(method, data(), 0).server)
    assert not bool(state.seen.any())


@on_archetypes
def test_the_loss_falls_and_predictions_get_better_in_four_rounds(name):
    start, one = first(built(name), data(), 0), begun(name)
    *_, done = federate(built(name), data(), 4, resume_from=one)
    rises = promises.of(name).rises
    names = one.loss.keys() - rises
    assert names or rises
    assert all(done.loss[n].mean() < one.loss[n].mean() for n in names)
    before, after = (evaluate(built(name), data(), s).mean("nll") for s in (start, done))
    assert after < before


@on_archetypes
def test_inputs_are_not_changed(name):
    method, state, federation = built(name), usual(name)[0], toys.blobs()
    copies = [v.clone() for v in tensors(state)] + [federation.x.clone(), federation.y.clone()]
    seen = state.seen.clone()
    run_round(method, federation, state, torch.arange(12), torch.arange(6))
    now = [*tensors(state), federation.x, federation.y]
    assert all(torch.equal(a, b) for a, b in zip(now, copies, strict=True))
    assert torch.equal(state.seen, seen)


@on_archetypes
@pytest.mark.parametrize(
    "dtype", promises.others_slow([torch.float32, torch.float64], [torch.float32])
)
def test_states_have_the_type_of_the_data(name, dtype):
    (state,) = federate(built(name), toys.blobs((5, 12), dtype), 1)
    real = [v for v in tensors(state) if v.is_floating_point()]
    assert real
    assert {v.dtype for v in real} == {v.dtype for v in state.loss.values()} == {dtype}


@on_archetypes
def test_newcomers_and_held_out_clients_can_be_met(name):
    held = toys.blobs(held_out=3)
    *_, state = federate(built(name), held, 2, participation=fixed(2))
    received, private = client_inputs(built(name), held, state, toys.who(held, 11, 0), 0)
    for view in built(name).views.values():
        seen = view(received, private | received)
        for local in seen if isinstance(seen, list) else [seen]:
            assert all(len(v) == 2 for v in local.values())
    for n, v in private.items():
        assert (len(v), v.shape[1:]) == (2, state.client_states[n].shape[1:])
        assert bool(v.isfinite().all())


@on_archetypes
def test_the_posterior_reaches_arviz(name, tmp_path):
    run = pyrofl.Run(built(name), data(), usual(name)[-1])
    export.save(run.to_arviz(2, groups="all"), tmp_path / "posterior.nc")
    found = export.load(tmp_path / "posterior.nc")
    drawn = run.posterior(2)
    for site, value in found["posterior"].data_vars.items():
        # What all clients have together, in every draw, has no axis of clients.
        alike = torch.allclose(drawn[site], drawn[site][:, :1], rtol=1e-4, atol=1e-5)
        one = ("chain", "draw") if alike else ("chain", "draw", "client")
        assert alike or not matches(site, built(name).shared)
        assert value.dims == (*one, *(f"{site}_dim_{i}" for i in range(value.ndim - len(one))))
    assert found["log_likelihood"]["y"].dims == ("chain", "draw", "row")
    rows = found["observed_data"]["y"]
    names = [data().names[i] for i, part in enumerate(data().train) for _ in part]
    assert rows["row_client"].values.tolist() == names
    assert rows.values.tolist() == data().y[torch.cat(data().train)].tolist()


# What a server makes of messages.


def reason(aggregate: object) -> str:
    """Return the first docstring of an aggregation, or of what it is made of."""
    function = getattr(aggregate, "func", aggregate)
    if text := getattr(function, "__doc__", None):
        return str(text)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return next(filter(None, (reason(part) for part in cells if callable(part))), "")


@on_archetypes
@pytest.mark.parametrize(
    "chunk_size", [5, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, None))]
)
def test_messages_are_folded_or_the_merge_says_why_not(name, chunk_size):
    method, start, some = built(name), usual(name)[0], ALL[ALL % 3 != 0]
    if not isinstance(method.aggregate, Aggregator):
        assert re.search("(?i)(all|every) (the )?messages?", reason(method.aggregate)), name
        with pytest.raises(ValueError, match=r"keep_messages is False, but .+; use .+"):
            run_round(method, data(), start, ALL, some, chunk_size=chunk_size, keep_messages=False)
        return
    kept, folded = (
        run_round(method, data(), start, ALL, some, chunk_size=chunk_size, keep_messages=keep)
        for keep in (True, False)
    )
    toys.assert_same(folded.server, kept.server, rtol=1e-10, atol=1e-11)
    none = {n: v[:0] for n, v in kept.message.items()}
    toys.assert_same_round(replace(folded, server=kept.server), replace(kept, message=none))


@on_archetypes
def test_another_merge_takes_effect_or_is_refused(name):
    method, start = built(name), usual(name)[0]
    ids = usual(name)[1].trained
    plain = run_round(method, data(), start, ids, ids, chunk_size=12)

    def keep(server: Tensors, message: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        return server

    def middle(values: Tensors, weight: Tensor, before: Tensors) -> Tensors:
        return {n: v.median(0).values for n, v in values.items()}

    others: list[object] = [keep]
    if isinstance(method.aggregate, Aggregator):
        others += [replace(method.aggregate, rule=how) for how in ("median", "trimmed:0.2", middle)]
    for aggregate in others:
        other = replaced(method, "aggregate", aggregate)
        if other is None:
            continue
        state = run_round(other, data(), start, ids, ids, chunk_size=12)
        toys.assert_same(state.client_states, plain.client_states)
        if aggregate is keep:
            toys.assert_same(state.server, start.server)
        if plain.message:
            assert differ(state, plain)
        with pytest.raises(ValueError, match=r"keep_messages is False, but .+; use .+"):
            run_round(other, data(), start, ids, ids, chunk_size=12, keep_messages=False)


# What is replaced takes effect everywhere, or is refused.


def cooled(outputs: Tensor, x: Tensor) -> dist.TorchDistribution:
    """Let classes be nearer to equally likely."""
    return dist.Categorical(logits=outputs / 2)


class Cooled(Messenger):
    """Does so to the rows of any program."""

    def _pyro_sample(self, msg: dict[str, object]) -> None:
        if msg["name"] == "y":
            msg["fn"] = dist.Categorical(logits=msg["fn"].logits / 2)  # type: ignore[attr-defined]


class Turned(Messenger):
    """Draws what would have been drawn for the parameter beside."""

    def _pyro_sample(self, msg: dict[str, object]) -> None:
        fn, axes = msg["fn"], 0
        while isinstance(fn, dist.Independent):
            fn, axes = fn.base_dist, axes + fn.reinterpreted_batch_ndims
        if isinstance(fn, dist.Delta):
            msg["fn"] = dist.Delta(fn.v.roll(1, -1), fn.log_density, fn.event_dim).to_event(axes)
        if isinstance(fn, dist.Normal):
            msg["fn"] = dist.Normal(fn.loc.roll(1, -1), fn.scale).to_event(axes)


def under_effect(program: Program, effect: type[Messenger]) -> Program:
    """Run a program under an effect, which nobody sees from outside."""

    def changed(received: Tensors, local: Tensors, batch: Batch) -> object:
        with effect():
            return program(received, local, batch)

    return changed


def once(method: Method) -> RoundState:
    """Return the first round of everybody."""
    return next(federate(method, data(), 1, chunk_size=12))


def scores(method: Method, state: RoundState) -> dict[str, Tensor]:
    """Return all that evaluation says of a state."""
    return {
        f"{view} {metric}": value
        for view in method.views
        for metric, value in evaluate(method, data(), state, model=view, draws=2).values.items()
    }


def exported(method: Method, state: RoundState) -> Tensor:
    """Return the log likelihood of rows as ArviZ gets it, of the model that predicts."""
    asked = {"model": method.main_view, "groups": ["log_likelihood"]}
    found = pyrofl.Run(method, data(), state).to_arviz(2, **asked)
    return torch.from_numpy(found["log_likelihood"]["y"].values)


@on_archetypes
def test_another_model_takes_effect_everywhere_or_is_refused(name):
    method, asked = built(name), make(name, likelihood=cooled)
    state = once(asked)
    assert differ(state, once(method))
    told, rows = scores(asked, state), exported(asked, state)
    nll = f"{method.main_view} nll"
    assert not torch.allclose(told[nll], scores(method, state)[nll])
    assert not torch.allclose(rows, exported(method, state))
    other = replaced(method, "model", under_effect(method.model, Cooled))
    if other is not None:
        toys.assert_same_round(once(other), state, rtol=1e-9, atol=1e-10)
        toys.assert_same(scores(other, state), told, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(exported(other, state), rows, rtol=1e-9, atol=1e-10)


@everywhere
def test_a_replaced_program_is_used_or_the_message_names_swap(name):
    """Families and classes are no programs; other tests check that programs take effect."""
    method = built(name)
    for part, setting, wrong in (
        ("guide", "guide", guides.full_covariance),
        ("guide", "guide", AutoNormal),
        ("guide", "guide", "mean_field"),
        ("model", "prior", dist.Laplace),
        ("model", "prior", priors.fixed()),
    ):
        text = (
            rf"{part} is .*; expected a Pyro program .*; method.swap\({setting}=\.\.\.\) builds .*"
        )
        with pytest.raises(ValueError, match=text):
            replace(method, **{part: wrong})
    for part in ("guide", "model"):
        program = getattr(method, part)
        other, refusal = tried(
            lambda part=part, program=program: replace(
                method, **{part: lambda received, local, batch: program(received, local, batch)}
            )
        )
        assert other or "method.swap(" in refusal, refusal


@on_archetypes
def test_another_guide_takes_effect_everywhere_or_is_refused(name):
    method, state = built(name), usual(name)[1]
    view = method.main_view

    def drawn(method: Method) -> Tensors:
        return posterior(method, data(), state, 2, model=view)

    opaque = replaced(method, "guide", lambda *args: method.guide(*args))
    other = replaced(method, "guide", under_effect(method.guide, Turned))
    assert (opaque is None) == (other is None)
    if opaque is None or other is None:
        return
    toys.assert_same_round(once(opaque), once(method), rtol=1e-9, atol=1e-10)
    toys.assert_same(scores(opaque, state), scores(method, state), rtol=1e-9, atol=1e-10)
    toys.assert_same(drawn(opaque), drawn(method))
    assert differ(once(other), once(method))
    nll, rows = scores(method, state)[f"{view} nll"], exported(method, state)
    assert not torch.allclose(scores(other, state)[f"{view} nll"], nll)
    assert not torch.allclose(exported(other, state), rows)
    plain, turned = drawn(method), drawn(other)
    assert any(not torch.equal(turned[n], v) for n, v in plain.items())


def made_of(value: object, stop: object, seen: set[int]) -> Iterator[FunctionType]:
    """Yield the functions that something is made of, with what they close over."""
    if value is stop or id(value) in seen:
        return
    seen.add(id(value))
    inside: list[object] = []
    if isinstance(value, FunctionType):
        yield value
        inside += [cell.cell_contents for cell in value.__closure__ or ()]
    elif isinstance(value, MethodType):
        inside += [value.__func__, value.__self__]
    elif isinstance(value, partial):
        inside += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, tuple | list):
        inside += value
    elif isinstance(value, dict):
        inside += value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        inside += [getattr(value, f.name) for f in fields(value)]
    for part in inside:
        yield from made_of(part, stop, seen)


def attributes(code: CodeType) -> set[str]:
    """Return what a function looks up, its comprehensions included."""
    nested = (attributes(part) for part in code.co_consts if isinstance(part, CodeType))
    return {*code.co_names}.union(*nested)


@everywhere
def test_what_reads_a_program_by_itself_says_so(name):
    # A closed form of the old guide would go on beside the new one, and no number tells.
    method = built(name)
    for part in ("model", "guide"):
        program = getattr(method, part)
        known = {f: getattr(method, f) for f in Method.__dataclass_fields__ if f != part}
        for function in made_of(known, program, set()):
            known_names = attributes(function.__code__)
            for cell in function.__closure__ or ():
                found = cell.cell_contents
                if isinstance(found, Method) and part in known_names:
                    found = getattr(found, part)
                elif part == "guide" and "moments" not in known_names:
                    continue
                if found is program:
                    assert replaced(method, part, under_effect(program, Cooled)) is None, function


@on_archetypes
def test_without_phases_nobody_trains_or_it_is_refused(name):
    other = replace(built(name), phases=())
    for start in (first(other, data(), 0), usual(name)[0]):
        state, refusal = tried(lambda start=start: run_round(other, data(), start, ALL, ALL))
        if state is None:
            assert re.fullmatch(
                r"phases .+; expected .+|upload reads .+; compute it in a phase, .+", refusal
            ), refusal
            continue
        assert not state.loss
        assert not state.steps.any()
        for n, v in start.client_states.items():
            assert torch.equal(state.client_states[n][start.seen], v[start.seen])


@on_archetypes
@pytest.mark.parametrize("argument", ["prior", "guide"])
def test_a_prior_or_guide_of_ones_own_takes_effect_or_is_refused(name, argument):
    kinds = argument_types(MODULES[name].build)
    assert argument in kinds
    values: list[object] = [guides.delta, guides.mean_field]  # one of them is the usual one
    if argument == "prior":
        usual_one = (
            dist.Laplace
            if kinds["prior"] == priors.PriorFamily
            else priors.fixed(dist.Normal, 0.1, 0.3)
        )
        values = [promises.of(name).prior or usual_one]
    told = 0
    for value in values:
        state, refusal = tried(lambda value=value: once(make(name, **{argument: value})))
        assert state or re.fullmatch(rf".*{argument}.*; expected .+", refusal), refusal
        told += state is None or differ(state, once(built(name)))
    assert told
