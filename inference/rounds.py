"""The federated loop: who takes part, what travels, and one round after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import pyro
import torch
from torch import Tensor

from pyrofl.data import Federation, Who
from pyrofl.inference.local import Stream, train
from pyrofl.inference.messages import (
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
from pyrofl.inference.method import Method
from pyrofl.inference.participation import Draw, drawn, everyone
from pyrofl.inference.private import Keeper
from pyrofl.inference.state import Round, chunks, meet, to_data
from pyrofl.inference.stragglers import Stragglers
from pyrofl.tensors import Tensors, cut, generator, join_up, role, under


def federate(
    method: Method | Callable[[int], Method],
    data: Federation,
    rounds: int,
    *,
    seed: int = 0,
    participation: Draw = everyone,
    trains: Draw | None = None,
    chunk: int | None = None,
    server: Tensors | None = None,
    start: Round | None = None,
    stragglers: Stragglers | None = None,
    on_bad_message: OnBadMessage = "reject",
    state_memory: int | None = None,
) -> Iterator[Round]:
    """Run federated rounds, yielding the state after each.

    Args:
        method: a method, or round number (from 0) -> method, for schedules that depend on it.
        data: the federation, whose device and floating-point type are used throughout.
        rounds: number of the last round; a run started at round r makes rounds - r of them.
        seed: with the round and the client, fixes all random numbers.
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

    Raises:
        ValueError: if rounds, chunk or seed is negative, or a draw does not fit the clients.
        BadMessage: in a round, if a message is bad and `on_bad_message` is "raise".
    """
    if rounds < 0 or seed < 0 or (chunk is not None and chunk < 1):
        raise ValueError(
            f"rounds is {rounds}, seed {seed}, chunk {chunk}; expected >= 0, >= 0 and >= 1"
        )
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

    def go(state: Round) -> Iterator[Round]:
        for number in range(state.number, rounds):
            now = at(number)
            generator_ = generator(seed, Stream.WHO, number)
            asked = drawn(participation(generator_, data.clients), data.clients)
            if trains is not None:
                ids = drawn(trains(generator_, data.clients), data.clients)
            else:
                ids = torch.arange(data.clients) if now.all_train else asked
            heard, now = slow.heard(asked, seed, number), slow.working(now, seed, number)
            state = advance(
                now, data, state, ids, heard, seed=seed, chunk=chunk, memory=state_memory
            )
            state = replace(state, silent=asked[~torch.isin(asked, heard)].sort().values)
            if on_bad_message == "raise" and state.rejected:
                raise BadMessage("; ".join(state.rejected))
            yield state

    return go(start or first(at(0), data, seed, server))


def first(method: Method, data: Federation, seed: int, server: Tensors | None = None) -> Round:
    """Return the state before round one."""
    if server is None:
        server = method.init(generator(seed, Stream.START), data.clients)
    return Round(0, to_data(server, data), {}, torch.zeros(data.clients, dtype=torch.bool))


def advance(
    method: Method,
    data: Federation,
    state: Round,
    ids: Tensor,
    reporters: Tensor,
    *,
    seed: int = 0,
    chunk: int | None = None,
    memory: int | None = None,
) -> Round:
    """Make one round: clients `ids` train, those of them in `reporters` report, the server merges.

    A client whose message, private state or loss is bad neither reports nor keeps it, see `inspect`
    and `agreed`. If nobody reports, or the merge is not finite, the server keeps its state.
    """
    with Keeper(state.private, data.clients, memory) as keeper:
        some = chunks(method, data, state, ids, chunk, seed)
        reporters = reporters[torch.isin(reporters, ids)].sort().values
        parts, who, message = _gather(method, data, state, some, reporters, keeper, seed)
        server, bad = state.server, list[str]()
        if len(who.ids):
            try:
                with torch.no_grad(), pyro.validation_enabled(False):
                    source = generator(seed, Stream.MERGE, state.number)
                    new = method.merge(server, message, who, source)
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
            message=message,
            trained=ids.sort().values,
            rejected=(*(reason for part in parts for reason in part.rejected), *bad),
            loss=role("loss", each),
            steps=each["steps"],
            down=each["down"],
            up=_weigh(method, message, len(who.ids)),
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


def _gather(
    method: Method,
    data: Federation,
    state: Round,
    some: Iterable[Tensor],
    reporters: Tensor,
    keeper: Keeper,
    seed: int,
) -> tuple[list[_Part], Who, Tensors]:
    """Let chunks train; return what they leave behind, and who is heard with what message."""
    parts: list[_Part] = []
    tables: dict[Form, Tensors] = {}  # one for each form, so that no message is ever held twice
    for ids in some:
        part, mine, sent = _train_chunk(method, data, state, ids, reporters, seed)
        keeper.write(part.kept, mine)
        table = tables.setdefault(part.form, {})
        for name, value in sent.items():
            if name not in table:
                table[name] = value.new_empty(len(reporters), *value.shape[1:])
            table[name][torch.searchsorted(reporters, part.heard)] = value
        parts.append(part)
    form = agreed([(part.form, len(part.kept)) for part in parts], form_of(state.message))
    parts = [_believed(part, form, keeper, data) for part in parts]
    heard = torch.cat([part.heard for part in parts]).sort().values
    message = tables.get(form, {})
    if len(heard) < len(reporters):
        message = {n: v[torch.searchsorted(reporters, heard)] for n, v in message.items()}
    return parts, data.who(heard), message


def _train_chunk(
    method: Method,
    data: Federation,
    state: Round,
    ids: Tensor,
    reporters: Tensor,
    seed: int,
) -> tuple[_Part, Tensors, Tensors]:
    who = data.who(ids)
    received, private = meet(method, data, state, who, seed)
    local, loss, steps = train(
        method, received, private | received, data, who, seed=seed, number=state.number
    )
    mine = {n: local[n] for n in private}
    with torch.no_grad():
        message = method.upload(received, local)
    watched = mine | {f"its loss of {n}": v for n, v in loss.items()}
    reasons = inspect(message, watched, who, data.names, method.rules)
    good = torch.tensor([not reason for reason in reasons])
    report = good & torch.isin(ids, reporters)
    part = _Part(
        form=form_of(message),
        trained=ids,
        kept=ids[good],
        heard=ids[report],
        rejected=[reason for reason in reasons if reason],
        each=under("loss", loss) | {"steps": steps, "down": _weigh(method, received, len(ids))},
    )
    kept, sent = (index.nonzero().flatten().to(data.x.device) for index in (good, report))
    return part, cut(mine, kept), cut(message, sent) if len(kept) else {}


def _believed(part: _Part, expected: Form, keeper: Keeper, data: Federation) -> _Part:
    """Leave out the clients of a part if their messages have not the form that they must have."""
    odd = unlike(part.form, expected)
    if not odd or not len(part.kept):
        return part
    keeper.take_back(part.kept)
    told = (*part.rejected, *(f"{data.names[i]}: {odd}" for i in part.kept.tolist()))
    return replace(part, kept=part.kept[:0], heard=part.heard[:0], rejected=told)


def _weigh(method: Method, tensors: Tensors, clients: int) -> Tensor:
    return method.weigh(tensors) if tensors else torch.zeros(clients, dtype=torch.long)
