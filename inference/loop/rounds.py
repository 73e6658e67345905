"""The federated loop: who takes part, what travels, and one round after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import pyro
import torch
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.loop.client_state import Keeper
from pyrofl.inference.loop.inbox import inbox
from pyrofl.inference.loop.local import train
from pyrofl.inference.loop.messages import (
    BadMessage,
    CannotMerge,
    Form,
    OnBadMessage,
    agreed,
    form_of,
    inspect,
    merged,
    unlike,
)
from pyrofl.inference.loop.participation import Draw, drawn, everyone
from pyrofl.inference.loop.state import Round, by_name, chunks, meet, to_data
from pyrofl.inference.loop.stragglers import Stragglers
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Seed, Stream, separate, stream
from pyrofl.tensors import Tensors, cut, join_up, role, under

TOLD = 3  # reasons in one line


def federate(
    method: Method | Callable[[int], Method],
    data: Federation,
    rounds: int,
    *,
    seed: Seed = 0,
    participation: Draw = everyone,
    trains: Draw | None = None,
    chunk: int | None = None,
    server: Tensors | None = None,
    start: Round | None = None,
    stragglers: Stragglers | None = None,
    on_bad_message: OnBadMessage = "reject",
    state_memory: int | None = None,
    keep_messages: bool = True,
) -> Iterator[Round]:
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
        start: a Round to go on from.
        stragglers: clients that do part of their work, or are not heard.
        on_bad_message: "reject" goes on without the client, "raise" stops the run.
        state_memory: bytes of all clients' private state that may be in memory; what is larger is
            mapped from a temporary file. None sets no bound.
        keep_messages: False folds messages into one as they come, where the merge is `Pooled`: a
            chunk's are all that are in memory, and those of a Round are [0, ...].

    Raises:
        ValueError: if rounds, chunk or a seed is negative, a draw does not fit the clients, or
            messages are not to be kept and the method cannot fold them.
        BadMessage: in a round, if a message is bad and `on_bad_message` is "raise".
    """
    seed = separate(seed)
    if rounds < 0 or (chunk is not None and chunk < 1):
        raise ValueError(f"rounds is {rounds}, chunk {chunk}; expected >= 0 and >= 1")
    if on_bad_message not in get_args(OnBadMessage) or (state_memory or 0) < 0:
        raise ValueError(
            f"on_bad_message is {on_bad_message!r}, state_memory {state_memory}; expected one of "
            f"{get_args(OnBadMessage)}, and None or >= 0 bytes"
        )
    slow = stragglers or Stragglers()
    at = method if not isinstance(method, Method) else lambda _: method
    if start is not None and (server is not None or len(start.seen) != data.clients):
        raise ValueError(
            f"start is a round of {len(start.seen)} clients; expected {data.clients}, and no "
            "server state besides"
        )
    if (begun := start.number if start else 0) < rounds:
        inbox(at(begun), {}, torch.zeros(0), keep_messages)
    step = partial(
        advance, seed=seed, chunk=chunk, memory=state_memory, keep_messages=keep_messages
    )

    def go(state: Round) -> Iterator[Round]:
        for number in range(state.number, rounds):
            now = at(number)
            source = stream(seed, Stream.WHO, number)
            asked = drawn(participation(source, data.clients), data.clients)
            if trains is not None:
                ids = drawn(trains(source, data.clients), data.clients)
            else:
                ids = torch.arange(data.clients) if now.all_train else asked
            heard = slow.heard(asked, data.names, seed, number)
            now = slow.working(now, data.names, seed, number)
            state = step(now, data, state, ids, heard)
            state = replace(state, silent=asked[~torch.isin(asked, heard)].sort().values)
            if on_bad_message == "raise" and state.rejected:
                more = [f"and {len(state.rejected) - TOLD} more"][: len(state.rejected) > TOLD]
                raise BadMessage("; ".join([*state.rejected[:TOLD], *more]))
            yield state

    return go(start or first(at(0), data, seed, server))


def first(method: Method, data: Federation, seed: Seed, server: Tensors | None = None) -> Round:
    """Return the state before round one."""
    if server is None:
        server = by_name(
            method.init(stream(seed, Stream.START), data.clients), method.per_client, data
        )
    return Round(0, to_data(server, data), {}, torch.zeros(data.clients, dtype=torch.bool))


def advance(
    method: Method,
    data: Federation,
    state: Round,
    ids: Tensor,
    reporters: Tensor,
    *,
    seed: Seed = 0,
    chunk: int | None = None,
    memory: int | None = None,
    keep_messages: bool = True,
) -> Round:
    """Make one round: clients `ids` train, those of them in `reporters` report, the server merges.

    A client whose message, private state or loss is bad neither reports nor keeps it, see `inspect`
    and `agreed`. If nobody reports, or the merge is not finite, the server keeps its state.
    """
    reporters = reporters[torch.isin(reporters, ids)].sort().values
    letters = inbox(method, state.server, reporters, keep_messages)
    parts: list[_Part] = []
    with Keeper(state.private, data.clients, memory) as keeper:
        for some in chunks(method, data, state, ids, chunk, seed):
            part, mine, sent = _train_chunk(method, data, state, some, reporters, seed)
            keeper.write(part.kept, mine)
            letters.take(part.form, data.who(part.heard), sent)
            parts.append(part)
        form = agreed([(part.form, len(part.kept)) for part in parts], form_of(state.message))
        parts = [_believed(part, form, keeper, data) for part in parts]
        heard = torch.cat([part.heard for part in parts])
        who, server, bad = data.who(heard.sort().values), state.server, list[str]()
        letters.close(form, who)
        try:
            if len(heard):
                with torch.no_grad(), pyro.validation_enabled(False):
                    new = letters.merged(who, stream(seed, Stream.MERGE, state.number))
                server, bad = merged(server, to_data(new, data))
        except CannotMerge as error:
            bad = [f"the server: {error}"]
        order = torch.cat([part.trained for part in parts]).argsort()
        each = cut(join_up([part.each for part in parts]), order)
        seen = state.seen.clone()
        seen[torch.cat([part.kept for part in parts])] = True
        return Round(
            number=state.number + 1,
            server=server,
            private=keeper.close(),
            seen=seen,
            who=who,
            message=letters.left(),
            trained=ids.sort().values,
            rejected=(*(reason for part in parts for reason in part.rejected), *bad),
            loss=role("loss", each),
            steps=each["steps"],
            down=each["down"],
            up=torch.cat([part.up for part in parts])[heard.argsort()],
        )


@dataclass(frozen=True)
class _Part:
    """What one chunk of clients leaves behind."""

    form: Form
    trained: Tensor
    kept: Tensor  # ids whose state is good
    heard: Tensor  # those of them that report
    rejected: Sequence[str]
    each: Tensors  # what is recorded of every one, [trained]
    up: Tensor  # [heard]


def _train_chunk(
    method: Method,
    data: Federation,
    state: Round,
    ids: Tensor,
    reporters: Tensor,
    seed: Seed,
) -> tuple[_Part, Tensors, Tensors]:
    who = data.who(ids)
    received, private = meet(method, data, state, who, seed)
    local, loss, steps = train(
        method, received, private | received, data, who, seed=seed, number=state.number
    )
    mine = {n: local[n] for n in private}
    with torch.no_grad():
        message = _upload(method, received, local)
    watched = mine | {f"its loss of {n}": v for n, v in loss.items()}
    reasons = inspect(message, watched, who, data.names, method.rules)
    good = torch.tensor([not reason for reason in reasons])
    report = good & torch.isin(ids, reporters)
    kept, heard = (index.nonzero().flatten().to(data.x.device) for index in (good, report))
    sent = cut(message, heard) if len(kept) else {}
    part = _Part(
        form=form_of(message),
        trained=ids,
        kept=ids[good],
        heard=ids[report],
        rejected=[reason for reason in reasons if reason],
        each=under("loss", loss) | {"steps": steps, "down": _weigh(method, received, len(ids))},
        up=_weigh(method, sent, len(heard)),
    )
    return part, cut(mine, kept), sent


def _upload(method: Method, received: Tensors, local: Tensors) -> Tensors:
    """Return the messages."""
    try:
        return method.upload(received, local)
    except KeyError as error:
        raise ValueError(
            f"phases leave clients without {error}, which upload reads; expected phases that make "
            "it, or another upload"
        ) from error


def _believed(part: _Part, expected: Form, keeper: Keeper, data: Federation) -> _Part:
    """Leave out the clients of a part if their messages have not the form that they must have."""
    odd = unlike(part.form, expected)
    if not odd or not len(part.kept):
        return part
    keeper.take_back(part.kept)
    told = (*part.rejected, *(f"{data.names[i]}: {odd}" for i in part.kept.tolist()))
    return replace(part, kept=part.kept[:0], heard=part.heard[:0], up=part.up[:0], rejected=told)


def _weigh(method: Method, tensors: Tensors, clients: int) -> Tensor:
    return method.weigh(tensors) if tensors else torch.zeros(clients, dtype=torch.long)
