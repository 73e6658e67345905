"""Validation that a client's results do not depend on other clients or on padding rows.

The same clients run together, and each alone with the same noise and other padding. Results that
differ by more than rounding show that a function of the method mixes clients, reads padding, or
draws random numbers that no seed of the run fixes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.metadata import no_statistics
from pyrofl.inference.definition.method import ClosedFormUpdate, GradientStep, Method, Phase
from pyrofl.inference.definition.optim import Adam
from pyrofl.inference.engine.state import RoundState, client_inputs, downloaded, uploaded
from pyrofl.inference.training.phases import train
from pyrofl.inference.validation.variants import (
    Wider,
    narrow_batch,
    with_even_rows,
    with_other_padding,
)
from pyrofl.tensors import Tensors, cut, refuse_inplace_writes, under

MAX_COPIED_BYTES = 2**26  # largest state in bytes that is compared before and after

CLIENTS = (
    "depends on the other clients of the batch",
    "operations along other axes than that of the clients, or values from the server",
)
PADDING = (
    "depends on padding, rows where batch.mask is False",
    "batch.rows() around sites, and sums over rows weighted by batch.counts",
)
AGAIN = (
    "gives other numbers each time it runs",
    "random numbers by pyro.sample in batch.clients(), and no state that changes between calls",
)
TRAINING = "training"


class Mixed(ValueError):
    """Error for client results that depend on other clients, padding or unseeded randomness."""


class Drew(ValueError):
    """Error raised if a function draws from a global random number generator."""


def client_part(together: Tensor, alone: Tensor, client: int, clients: int) -> Tensor | None:
    """Extract a client's part of a batched tensor, shaped as the result for that client alone.

    The first axis with one entry per client, and length 1 alone, is that of the clients; a later
    axis of rows is cut to those of the client. None if the shapes differ in another way.
    """
    if together.dim() != alone.dim():
        return None
    is_cut = False
    for axis, (many, few) in enumerate(zip(together.shape, alone.shape, strict=True)):
        if not is_cut and many == clients and few == 1:
            together, is_cut = together.narrow(axis, client, 1), True
        elif many > few:
            together = together.narrow(axis, 0, few)
        elif many < few:
            return None
    return together


def differs(one: Tensor | None, other: Tensor, before: Tensor | None = None) -> bool:
    """Return whether two tensors differ by more than rounding errors.

    If `before` is given, rounding is measured relative to the change from there.
    """
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return True
    if not one.is_floating_point() or not one.numel():
        return not torch.equal(one, other)
    good = one.isfinite() & other.isfinite()
    if not torch.equal(one.nan_to_num()[~good], other.nan_to_num()[~good]):
        return True
    one, other = torch.where(good, one, 0.0), torch.where(good, other, 0.0)
    size = torch.maximum(one.abs(), other.abs()).amax()
    single = one.dtype != torch.float64
    if before is None or before.shape != one.shape:
        bound = (1e-4 if single else 1e-7) * size
    else:
        moved = torch.where(good, torch.maximum((one - before).abs(), (other - before).abs()), 0.0)
        bound = (1e-3 if single else 1e-5) * moved.amax() + (1e-5 if single else 1e-10) * size
    return bool((one - other).abs().amax() > bound + 1e-12)


def _states(device: torch.device) -> dict[str, Any]:
    """Return the states of the global random generators, by library name."""
    states = {"torch": torch.get_rng_state(), "NumPy": np.random.get_state()}  # noqa: NPY002
    states["Python"] = random.getstate()
    if device.type == "cuda":
        states["CUDA"] = torch.cuda.get_rng_state(device)
    return states


def _set(states: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["NumPy"])  # noqa: NPY002
    random.setstate(states["Python"])
    if "CUDA" in states:
        torch.cuda.set_rng_state(states["CUDA"], device)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one[1], np.ndarray):  # NumPy's
        return bool((one[1] == other[1]).all()) and one[2:] == other[2:]
    return bool(one == other)


@contextmanager
def refuse_global_draws(function: str, device: torch.device) -> Iterator[None]:
    """Context manager that raises an error if its block draws from a global random generator."""
    before = _states(device)
    yield
    after = _states(device)
    drawn = [name for name, state in before.items() if not _equal(state, after[name])]
    if drawn:
        _set(before, device)
        raise Drew(
            f"{function} draws from the global generator of {drawn[0]}, which no seed fixes "
            "and all clients share; draw by pyro.sample inside batch.clients(), or from the "
            "generator in the function's arguments"
        )


@contextmanager
def scramble_generators(device: torch.device) -> Iterator[None]:
    """Context manager that temporarily changes the states of the global random generators."""
    before = _states(device)
    torch.default_generator.manual_seed(2**40 + 1)
    np.random.seed(12_345)  # noqa: NPY002
    random.seed(12_345)
    try:
        yield
    finally:
        _set(before, device)


@contextmanager
def refuse_changes(function: str, *states: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager that raises ValueError if its block modifies the given tensors in place."""
    tensors = [(n, v.detach()) for state in states for n, v in state.items()]
    small = sum(v.numel() * v.element_size() for _, v in tensors) <= MAX_COPIED_BYTES
    copies = [v.clone() for _, v in tensors] if small else []
    with refuse_inplace_writes(function, *states):
        yield
    for (name, value), copy in zip(tensors, copies, strict=False):
        if not torch.allclose(value, copy, rtol=0, atol=0, equal_nan=True):
            raise ValueError(
                f"{function} writes into {name!r} in place; return new tensors instead, such as "
                "value + change or value.clone()"
            )


def rows_of(batch: Batch) -> Tensors:
    """Return the tensors of a batch that programs must not modify, by name."""
    return {f"batch.{n}": getattr(batch, n) for n in ("x", "y", "mask", "size")}


def with_steady_adam(method: Method) -> Method:
    """Return a method in which Adam does not enlarge gradients that are 0 up to rounding.

    Adam divides a gradient by its own size, so that a parameter without effect, such as the bias of
    the keys of attention, moves at full speed in a random direction.
    """

    def steady(move: GradientStep | ClosedFormUpdate) -> GradientStep | ClosedFormUpdate:
        if not isinstance(move, GradientStep) or not isinstance(move.optim, Adam):
            return move
        options = {**move.optim.options, "eps": 1.0}
        return replace(move, optim=replace(move.optim, options=options))

    def phases(some: tuple[Phase, ...]) -> tuple[Phase, ...]:
        return tuple(replace(phase, updates=tuple(map(steady, phase.updates))) for phase in some)

    return replace(method, phases=phases(method.phases), adapt=phases(method.adapt))


def update_name(move: object) -> str:
    """Return the name of an update of a training phase, for error messages."""
    if isinstance(move, GradientStep):
        return f"step {move.names!r}"
    function = getattr(move, "move", move)  # of a recording update
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__name__", type(function).__name__))


class TrialRound(NamedTuple):
    """Tensors of some clients in one round, [C, ...] each, before and after training."""

    received: Tensors
    client_states: Tensors
    local: Tensors  # once they have trained
    losses: Tensors

    @property
    def before_training(self) -> Tensors:
        """Received tensors and client states before training, by name."""
        return self.client_states | self.received

    def parts(self) -> Iterator[tuple[str, Tensors, Tensors]]:
        """Yield the tensors of a test round by source, with their values before training."""
        yield "download", self.received, {}
        yield "init_client", self.client_states, {}
        yield TRAINING, self.local, self.before_training
        yield TRAINING, under("the loss of", self.losses), {}


Difference = tuple[str, str] | None  # where a tensor comes from, and its name


@dataclass(frozen=True)
class TestRound:
    """Test round of some clients, which can be repeated with other clients or rows.

    Attributes:
        method: the method.
        data: the training clients, and perhaps a held-out one.
        state: state before the round.
        phases: local phases of the clients.
        who: ids of the clients, each of which also runs alone with more padding; None takes all,
            of which the last training client runs alone.
        alone: the only client that runs alone, or None.
    """

    method: Method
    data: Federation
    state: RoundState
    phases: tuple[Phase, ...]
    who: Tensor | None = None
    alone: int | None = None

    @property
    def ids(self) -> Tensor:
        """Ids of all clients that take part in the validation."""
        return torch.arange(len(self.data.train)) if self.who is None else self.who

    def run_round(self, ids: Tensor) -> TrialRound:
        """Run a test round for some clients; return their tensors before and after training."""
        cohort = self.data.cohort(ids)
        with refuse_global_draws("download or join", self.data.device):
            received, private = client_inputs(self.method, self.data, self.state, cohort, 0)
        local, loss, _, begun = train(
            self.method,
            received,
            private | received,
            self.data,
            cohort,
            seed=0,
            number=0,
            phases=self.phases,
            record=False,
        )
        return TrialRound(received, private, local, loss | under("first", begun))

    def refuse_mixed_clients(self, together: TrialRound, sites: Callable[[], None]) -> None:
        """Raise `Mixed` if a client's training result depends on other clients or on padding.

        `sites` raises first if a site of a program is the cause.
        """
        difference = self._first_difference(together)
        if difference is None:
            return
        sites()
        what, trial = difference[0], self
        if what == TRAINING:
            trial = next((t for t in self._prefixes() if t._first_difference()), self)
            difference = trial._first_difference() or difference
            what = update_name(trial.phases[-1].updates[-1])
        why, cure = trial._reason()
        raise Mixed(f"{what} gives a client {difference[1]!r}, which {why}; expected {cure}")

    def message(self, trial_round: TrialRound) -> Tensors:
        """Return the messages of the training clients; raise ValueError for wrong shapes."""
        clients = slice(self.data.clients)
        with torch.no_grad(), refuse_global_draws("upload", self.data.device):
            sent = uploaded(
                self.method, cut(trial_round.received, clients), cut(trial_round.local, clients)
            )
        for name, value in sent.items():
            if value.shape[:1] != (self.data.clients,):
                expected = f"[{self.data.clients}, {', '.join(map(str, value.shape[1:])) or '...'}]"
                raise ValueError(
                    f"upload sends {name!r} of shape {list(value.shape)} for {self.data.clients} "
                    f"clients; expected {expected}, with the axis of the clients in front"
                )
        return sent

    def refuse_mixed_results(self, trial_round: TrialRound) -> None:
        """Raise an error if an upload, view or statistic depends on other clients or padding."""
        count, batch = self.data.clients, self.data.batch(torch.arange(self.data.clients))
        rows, device = batch.mask.sum(1).tolist(), self.data.device

        def differing(most: int | None) -> Difference:
            """Return the first result that changes if a client is run alone.

            At most `most` rows of each client are compared.
            """
            together = self._results(trial_round, slice(count), narrow_batch(batch, most))
            for c in range(count) if count > 1 else ():
                one = slice(c, c + 1)
                client_batch = narrow_batch(
                    batch.select_clients(one), min(rows[c], most or rows[c])
                )
                with scramble_generators(device):
                    alone = self._results(trial_round, one, client_batch)
                for what, some in alone.items():
                    for name, value in some.items():
                        client_value = client_part(together[what][name], value, c, count)
                        if name not in together[what] or differs(client_value, value):
                            return what, name
            return None

        with torch.no_grad():
            change = differing(None)
            if change:
                why, cure = CLIENTS if differing(min(rows)) else PADDING
                raise Mixed(
                    f"{change[0]} gives a client {change[1]!r}, which {why}; expected {cure}"
                )

    def _results(self, trial_round: TrialRound, clients: slice, batch: Batch) -> dict[str, Tensors]:
        """Return the upload, main predictive model and statistics of some trained clients."""
        method, view = self.method, self.method.main_view
        cohort, device = self.data.cohort(self.ids[clients]), self.data.device
        received, local = (cut(t, clients) for t in (trial_round.received, trial_round.local))
        with refuse_global_draws("upload", device):
            results = {"upload": uploaded(method, received, local)}
        got = downloaded(method.deployed(view), self.state.server, cohort)
        # Use the clients' results as the download, which would otherwise be equal for all.
        got |= {n: local[n] for n in got.keys() & local.keys()}
        client_states = {n: local[n] for n in trial_round.client_states}
        with refuse_global_draws(f"view {view!r}", device):
            seen = method.read_view(view, got, client_states | got)
        if isinstance(seen, dict):
            results[f"view {view!r}"] = seen
            if method.metadata.statistics is not no_statistics:
                with refuse_global_draws("statistics", device):
                    results["statistics"] = method.metadata.count(got, seen, batch)
        return results

    def _prefixes(self) -> Iterator[TestRound]:
        """Yield test rounds limited to the first 1, 2, ... updates of the training phases."""
        for i, phase in enumerate(self.phases):
            for j in range(len(phase.updates)):
                last = replace(phase, updates=phase.updates[: j + 1])
                yield replace(self, phases=(*self.phases[:i], last))

    def _reason(self) -> tuple[str, str]:
        """Return why results of clients depend on each other, and how to fix it, as texts."""
        first = self.run_round(self.ids)
        with scramble_generators(self.data.device):
            again = self.run_round(self.ids)
        if _first(first, again, lambda one, other: one):
            return AGAIN
        return (
            CLIENTS
            if replace(self, data=with_even_rows(self.data))._first_difference()
            else PADDING
        )

    def _first_difference(self, together: TrialRound | None = None) -> Difference:
        """Return the first tensor that differs between a client trained alone and with others."""
        count = len(self.ids)
        together = together or self.run_round(self.ids)
        # The last has the fewest rows, so that it is padded.
        some = [self.data.clients - 1] if self.who is None else self.who.tolist()
        for client in some if self.alone is None else [self.alone]:
            with scramble_generators(self.data.device):
                alone = self._alone(torch.tensor([client]))
            at = self.ids.tolist().index(client)
            if difference := _first(
                together, alone, partial(client_part, client=at, clients=count)
            ):
                return difference
        return None

    def _alone(self, client: Tensor) -> TrialRound:
        """Run the test round of one client, with more padding if the clients have their own ids."""
        if self.who is not None:
            # A program may only support the clients' numbers of rows.
            with suppress(RuntimeError, ValueError, LookupError):
                return replace(self, data=with_other_padding(self.data, Wider)).run_round(client)
        return self.run_round(client)


def _first(
    together: TrialRound, alone: TrialRound, extract: Callable[[Tensor, Tensor], Tensor | None]
) -> Difference:
    """Return source and name of the first tensor that differs between two test rounds, or None."""
    for (what, some, _), (_, client_tensors, before) in zip(
        together.parts(), alone.parts(), strict=True
    ):
        for name, value in client_tensors.items():
            if name not in some or differs(extract(some[name], value), value, before.get(name)):
                return what, name
    return None
