"""The federated loop: who takes part, what travels, and one round after another."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import TypedDict

import torch
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor

from pyrofl.arguments import Count, Whole, checked
from pyrofl.data import Federation
from pyrofl.inference.budget import Privacy
from pyrofl.inference.description import refuse_other_constants
from pyrofl.inference.engines.start import Engine, starting
from pyrofl.inference.loop.carrier import Carrier, Order, Turn
from pyrofl.inference.loop.messages import BadMessage, OnBadMessage, inbox
from pyrofl.inference.loop.origin import gone_on
from pyrofl.inference.loop.participation import Draw, Stragglers, everyone
from pyrofl.inference.loop.server_half import Gathering, called, first
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.mistakes import check as refuse_wrong
from pyrofl.inference.privacy.noising import with_privacy
from pyrofl.inference.seeds import Seed, separate
from pyrofl.tensors import Tensors
from pyrofl.turns import in_turn

__all__ = ["advance", "by_round", "federate", "first", "refuse_surroundings"]

AROUND = {  # what people write for a handler of Pyro
    "ScaleMessenger": "poutine.scale",
    "MaskMessenger": "poutine.mask",
    "plate": "a plate",
}
TOLD = 3  # reasons in one line


class LoopOptions(TypedDict, total=False):
    """Arguments of `federate` that do not say what is fitted, and which round is the last."""

    participation: Draw
    trains: Draw | None
    chunk: int | None
    stragglers: Stragglers | None
    on_bad_message: OnBadMessage
    state_memory: int | None
    keep_messages: bool
    check: bool
    engine: Engine
    workers: int | None
    privacy: Privacy | None


@checked
def federate(
    method: Method | Callable[[int], Method],
    data: Federation,
    rounds: Whole,
    *,
    seed: Seed = 0,
    participation: Draw = everyone,
    trains: Draw | None = None,
    chunk: Count | None = None,
    server: Tensors | None = None,
    start: Round | None = None,
    stragglers: Stragglers | None = None,
    on_bad_message: OnBadMessage = "reject",
    state_memory: Whole | None = None,
    keep_messages: bool = True,
    check: bool = True,
    privacy: Privacy | None = None,
    engine: Engine = "local",
    workers: Count | None = None,
) -> Generator[Round, None, None]:
    """Run federated rounds, yielding the state after each.

    Args:
        method: a method, or round number (from 0) -> method, for schedules that depend on it.
        data: the federation, whose device and floating-point type are used throughout.
        rounds: number of the last round; a run started at round r makes rounds - r of them.
        seed: with the round and the client's name, fixes all random numbers; `Seeds` for several.
        participation: draws who reports.
        trains: draws who trains; those drawn to report who did not train stay silent. Default: the
            reporters, or everyone if `method.all_train`.
        chunk: clients trained side by side; default by the size of their state.
        server: first state, instead of `method.init`.
        start: a Round to go on from, of the same clients with the same training rows.
        stragglers: clients that do part of their work, or are not heard.
        on_bad_message: "reject" goes on without the client, "raise" stops the run.
        state_memory: bytes of all clients' private state that may be in memory; what is larger is
            mapped from a temporary file. None sets no bound.
        keep_messages: False folds messages into one as they come, where the merge is `Pooled`: a
            chunk's are all that are in memory, and those of a Round are [0, ...].
        check: before round one, refuse a method that would give wrong numbers, see `check`.
        privacy: clip what clients add to the server's sums and put noise on it; see
            `privacy.private`.
        engine: "local" trains in this process, "ray" in several; see `pyrofl.inference.engines`.
            They end with the rounds, or once the iterator is closed.
        workers: of Ray, each with some of the clients; default one for each core, or GPU.

    Raises:
        ValueError: if `check` refuses, privacy does not suit the method, a draw does not fit the
            clients, start is of other clients, rows or frozen weights, messages are not to be kept
            and the method cannot fold them, or the engine cannot start.
        BadMessage: in a round, if a message is bad and `on_bad_message` is "raise".
        ChildProcessError: in a round, if a worker dies.
    """
    refuse_surroundings()
    seed, slow = separate(seed), stragglers or Stragglers()
    at = by_round(with_privacy(method, privacy, data.clients, participation))
    if start is not None and server is not None:
        raise ValueError("start and server are both given; expected one of them to begin with")
    if start is not None:
        start = gone_on(start, data)
        refuse_other_constants(at(max(start.number - 1, 0)), start.constants)
    if (begun := start.number if start else 0) < rounds:
        inbox(at(begun), {}, torch.zeros(0), keep_messages)
        if check and not begun:
            refuse_wrong(at(0), data, chunk=chunk, server=start.server if start else server)

    begin = starting(engine, workers, data)
    step = partial(
        advance, seed=seed, chunk=chunk, memory=state_memory, keep_messages=keep_messages
    )

    def go(state: Round) -> Generator[Round, None, None]:
        with begin() as carrier:
            for number in range(state.number, rounds):
                now = at(number)
                asked, ids = called(now, data.clients, seed, number, participation, trains)
                heard = slow.heard(asked, data.names, seed, number)
                now, silent = slow.working(now, data.names, seed, number), ~torch.isin(asked, heard)
                state = step(now, data, state, ids, heard, asked[silent], carrier=carrier)
                if on_bad_message == "raise" and state.rejected:
                    more = [f"and {len(state.rejected) - TOLD} more"][: len(state.rejected) > TOLD]
                    raise BadMessage("; ".join([*state.rejected[:TOLD], *more]))
                yield state

    return go(start or first(at(0), data, seed, server))


def by_round(method: Method | Callable[[int], Method]) -> Callable[[int], Method]:
    """Return what gives the method of a round, by its number from 0."""
    if isinstance(method, Method):
        return lambda _: method

    def at(number: int) -> Method:
        """Return the method of a round, or refuse what is none."""
        if not isinstance(made := method(number), Method):
            raise ValueError(
                f"method({number}) is a {type(made).__name__}; expected a Method for each round"
            )
        return made

    return at


@in_turn  # another thread may be inside a handler of its own
def refuse_surroundings() -> None:
    """Refuse to train inside of what changes the numbers of programs, or their gradients."""
    if _PYRO_STACK:
        kind = type(_PYRO_STACK[-1]).__name__
        raise ValueError(
            f"fit runs inside {AROUND.get(kind, kind)}, which would change what programs mean; "
            "expected to fit outside of it, and handlers of Pyro inside the programs"
        )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ValueError(
            "fit runs inside autocast, which would round what programs compute; expected to fit "
            "outside of it"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "torch.inference_mode() is on; expected to fit outside of it, as there are no "
            "gradients inside"
        )


@in_turn
def advance(
    method: Method,
    data: Federation,
    state: Round,
    ids: Tensor,
    reporters: Tensor,
    silent: Tensor | None = None,
    *,
    seed: Seed = 0,
    chunk: int | None = None,
    memory: int | None = None,
    keep_messages: bool = True,
    carrier: Carrier | None = None,
) -> Round:
    """Make one round: clients `ids` train, those of them in `reporters` report, the server merges.

    A client whose message is not merged goes back to the private state that it had: one that is
    among the `silent`, whose message, private state or loss is bad, see `inspect` and `agreed`, or
    whose server cannot merge. Others that do not report keep what they made, as no message of
    theirs is missed. If nobody reports, or the merge is not finite, the server keeps its state. The
    merge may write into the server's state: what it is given is a copy. The `carrier` brings the
    order to the clients; by default they are in this process.

    Raises:
        ValueError: if a function of the method writes into tensors that are not its own, or gives
            something else than a dict of tensors of the expected shape.
    """
    refuse_surroundings()
    reporters = reporters[torch.isin(reporters, ids)].sort().values
    gathering = Gathering(method, data, state, reporters, keep_messages)
    order = Order(method, state, ids, reporters, seed, chunk, memory)
    with (carrier or partial(Turn, data))(order) as turn:
        for reply in turn.replies():
            gathering.take(reply)
        after, kept = gathering.close(seed, reporters[:0] if silent is None else silent)
        private = turn.close(after.trained[~torch.isin(after.trained, kept)])
        seen = state.seen.clone()
        seen[kept] = True
        return replace(after, private=private, seen=seen)
