"""The federated loop: who takes part, what travels, and one round after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pyro
import torch
from torch import Tensor

from pyrofl.arguments import Count, Whole, checked
from pyrofl.data import Federation, Who
from pyrofl.inference.loop.local import train
from pyrofl.inference.loop.messages import (
    BadMessage,
    Form,
    Inbox,
    OnBadMessage,
    agreed,
    form_of,
    inbox,
    inspect,
    merged,
    unlike,
)
from pyrofl.inference.loop.origin import gone_on, rows_of
from pyrofl.inference.loop.participation import Draw, Stragglers, drawn, everyone
from pyrofl.inference.loop.state import ClientState, Round, chunks, meet, sent, to_data
from pyrofl.inference.method import Method
from pyrofl.inference.mistakes import check as refuse_wrong
from pyrofl.inference.seeds import Seed, Stream, separate, stream
from pyrofl.inference.servers.averages import CannotMerge
from pyrofl.tensors import Tensors, as_tensors, cut, join_up, pick, role, under, unwritten
from pyrofl.turns import in_turn

TOLD = 3  # reasons in one line


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
        start: a Round to go on from, of the same clients with the same training rows.
        stragglers: clients that do part of their work, or are not heard.
        on_bad_message: "reject" goes on without the client, "raise" stops the run.
        state_memory: bytes of all clients' private state that may be in memory; what is larger is
            mapped from a temporary file. None sets no bound.
        keep_messages: False folds messages into one as they come, where the merge is `Pooled`: a
            chunk's are all that are in memory, and those of a Round are [0, ...].
        check: before round one, refuse a method that would give wrong numbers, see `check`.

    Raises:
        ValueError: if `check` refuses, a draw does not fit the clients, start is of other clients
            or rows, or messages are not to be kept and the method cannot fold them.
        BadMessage: in a round, if a message is bad and `on_bad_message` is "raise".
    """
    refuse_inference_mode()
    seed, slow = separate(seed), stragglers or Stragglers()
    at = by_round(method)
    if start is not None and server is not None:
        raise ValueError("start and server are both given; expected one of them to begin with")
    if start is not None:
        start = gone_on(start, data)
    if (begun := start.number if start else 0) < rounds:
        inbox(at(begun), {}, torch.zeros(0), keep_messages)
        if check and not begun:
            refuse_wrong(at(0), data, chunk=chunk, server=start.server if start else server)

    step = partial(
        advance, seed=seed, chunk=chunk, memory=state_memory, keep_messages=keep_messages
    )

    def go(state: Round) -> Iterator[Round]:
        for number in range(state.number, rounds):
            now, source = at(number), stream(seed, Stream.WHO, number)
            asked = ids = drawn(participation(source, data.clients), data.clients)
            if trains is not None:
                ids = drawn(trains(source, data.clients), data.clients)
            elif now.all_train:
                ids = torch.arange(data.clients)
            heard = slow.heard(asked, data.names, seed, number)
            now = slow.working(now, data.names, seed, number)
            state = step(now, data, state, ids, heard, asked[~torch.isin(asked, heard)])
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


def refuse_inference_mode() -> None:
    """Refuse to train where torch makes tensors that can have no gradient."""
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "torch.inference_mode() is on; expected to fit outside of it, as there are no "
            "gradients inside"
        )


def first(method: Method, data: Federation, seed: Seed, server: Tensors | None = None) -> Round:
    """Return the state before round one; rows that `init` has of clients are dealt by name."""
    if server is None:
        server = as_tensors(
            "what init returns", method.init(stream(seed, Stream.START), data.clients)
        )
        place = torch.tensor(sorted(range(data.clients), key=data.names.__getitem__)).argsort()
        server = server | {n: v[place] for n, v in pick(server, method.per_client).items()}
    server = to_data(as_tensors("server", server), data)
    seen, names = torch.zeros(data.clients, dtype=torch.bool), data.names[: data.clients]
    return Round(0, server, {}, seen, names=names, rows=rows_of(data))


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
) -> Round:
    """Make one round: clients `ids` train, those of them in `reporters` report, the server merges.

    A client whose message is not merged goes back to the private state that it had: one that is
    among the `silent`, whose message, private state or loss is bad, see `inspect` and `agreed`, or
    whose server cannot merge. Others that do not report keep what they made, as no message of
    theirs is missed. If nobody reports, or the merge is not finite, the server keeps its state. The
    merge may write into the server's state: what it is given is a copy.

    Raises:
        ValueError: if a function of the method writes into tensors that are not its own, or gives
            something else than a dict of tensors of the expected shape.
    """
    refuse_inference_mode()
    reporters = reporters[torch.isin(reporters, ids)].sort().values
    silent = reporters[:0] if silent is None else silent
    own = {n: v.clone() for n, v in state.server.items()}
    letters = inbox(method, own, reporters, keep_messages)
    with ClientState(state.private, data.clients, memory) as keeper:
        done = [
            _train_chunk(method, data, state, data.who(some), reporters, seed, keeper, letters)
            for some in chunks(method, data, state, ids, chunk, seed)
        ]
        votes = [(c.form, c.reasons.count("")) for c in done]
        form = agreed(votes, form_of(state.message), state.server)
        for c in done:
            if odd := unlike(c.form, form):
                keeper.take_back(c.told["ids"])
                c.reasons = [
                    r or f"{data.names[i]}: {odd}"
                    for r, i in zip(c.reasons, c.told["ids"].tolist(), strict=True)
                ]
        reasons = [reason for c in done for reason in c.reasons]
        told = join_up(c.told for c in done) | {"good": torch.tensor([not r for r in reasons])}
        told = cut(told, told["ids"].argsort())
        heard = told["good"] & torch.isin(told["ids"], reporters)
        who, server, bad = data.who(told["ids"][heard]), state.server, list[str]()
        message = letters.left(form, who)
        try:
            if len(who.ids):
                source = stream(seed, Stream.MERGE, state.number)
                with torch.no_grad(), pyro.validation_enabled(False), unwritten("merge", message):
                    new = letters.merged(form, message, who, source)
                new = to_data(as_tensors("what merge returns", new), data)
                server, bad = merged(server, new, len(who.ids))
        except CannotMerge as error:
            bad = [f"the server: {error}"]
        lost = torch.cat([silent, who.ids.cpu()[: len(who.ids) * bool(bad)]])
        keeper.take_back(lost)
        seen = state.seen.clone()
        seen[told["ids"][told["good"] & ~torch.isin(told["ids"], lost)]] = True
        return Round(
            number=state.number + 1,
            server=server,
            private=keeper.close(),
            seen=seen,
            who=who,
            message=message,
            trained=told["ids"],
            rejected=(*filter(None, reasons), *bad),
            loss=role("loss", told),
            begun=role("begun", told),
            steps=told["steps"],
            silent=silent,
            down=told["down"],
            up=told["up"][heard],
            names=state.names,
            rows=state.rows,
        )


@dataclass
class _Chunk:
    """What clients that trained side by side leave behind besides their messages and state."""

    form: Form
    reasons: list[str]  # what is wrong with each, or ""
    told: Tensors  # ids, steps, losses, bytes: [C]


def _train_chunk(
    method: Method,
    data: Federation,
    state: Round,
    who: Who,
    reporters: Tensor,
    seed: Seed,
    keeper: ClientState,
    letters: Inbox,
) -> _Chunk:
    """Train clients side by side; hand in their state and the messages of the reporters."""
    received, private = meet(method, data, state, who, seed)
    local, loss, steps, begun = train(
        method, received, private | received, data, who, seed=seed, number=state.number
    )
    mine = {n: local[n] for n in private}
    with torch.no_grad():
        message = sent(method, received, local)
    watched = mine | {f"its loss of {n}": v for n, v in loss.items()}
    reasons = inspect(message, watched, who, data.names, method.rules)
    ids, good, form = who.ids.cpu(), torch.tensor([not r for r in reasons]), form_of(message)
    heard = good & torch.isin(ids, reporters)
    keeper.write(ids[good], cut(mine, good.nonzero().flatten().to(data.x.device)))
    letter = cut(message, heard.nonzero().flatten().to(data.x.device)) if bool(good.any()) else {}
    letters.take(form, data.who(ids[heard]), letter)
    up = torch.zeros(len(ids), dtype=torch.long)
    up[heard] = method.weigh(letter) if letter else 0
    down = method.weigh(received) if received else torch.zeros_like(up)
    told = {"ids": ids, "steps": steps, "down": down, "up": up}
    return _Chunk(form, reasons, told | under("loss", loss) | under("begun", begun))
