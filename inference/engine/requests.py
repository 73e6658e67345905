"""Requests to clients and their replies, and the interface of what carries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyrofl.data import Cohort
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed
from pyrofl.inference.engine.messages import MessageForm, form_difference, form_of, vote_on_forms
from pyrofl.inference.engine.state import RoundState
from pyrofl.tensors import Tensors, cut, join_up


@dataclass(frozen=True)
class RoundRequest:
    """Server's request to clients to train in one round, with method and server state.

    Attributes:
        method: method of the round.
        state: the previous round. Of clients elsewhere it has no states: each has its own.
        ids: ids of training clients.
        reporters: sorted ids of clients that are to send a message.
        seed: seed of the run.
        chunk_size: clients per vectorized batch; None chooses it by the size of their state.
        record: False runs phases as written; True and None as `federate` explains.
        expected_rounds: expected number of rounds, with this one, in which a client trains; None
            if it is unknown.
    """

    method: Method
    state: RoundState
    ids: Tensor
    reporters: Tensor
    seed: Seed
    chunk_size: int | None = None
    record: bool | None = None
    expected_rounds: float | None = None


@dataclass
class Reply:
    """Reply of clients that trained in one vectorized batch: messages, losses and errors.

    Attributes:
        sender: clients of the messages: reporters with valid messages and states.
        message: their messages, [M, ...].
        form: form of the messages of all training clients.
        reasons: reason for rejecting each training client, or "".
        report: tensors [C] of all training clients: ids, steps, bytes `down` and `up`, and of each
            gradient step by its names `loss/NAMES`, the mean, and `begun/NAMES`, the first one.
    """

    sender: Cohort
    message: Tensors
    form: MessageForm
    reasons: list[str]
    report: Tensors


class RunningRound(AbstractContextManager["RunningRound", None], Protocol):
    """Interface of a training round in progress; if it fails, clients keep their old states."""

    def replies(self) -> Iterator[Reply]:
        """Train the clients, and yield their replies in a fixed order."""
        ...

    def close(self, rejected: Tensor) -> Mapping[str, Tensor]:
        """End the round and return all clients' states; `rejected` ids keep their old one."""
        ...


Backend = Callable[[RoundRequest], RunningRound]
"""Carries a request to the clients and their replies back: `round.LocalClients`, or a transport."""


def join_replies(replies: Sequence[Reply], ids: Tensor) -> Reply:
    """Join the replies of all vectorized client batches into one reply, ordered by client `ids`."""
    differences = (form_difference(reply.form, replies[0].form) for reply in replies)
    if odd := next(filter(None, differences), ""):
        raise ValueError(
            f"messages of clients in different chunks differ: {odd}; upload must not depend on the "
            "chunk"
        )
    report, reasons = join_up(r.report for r in replies), [x for r in replies for x in r.reasons]
    place = (ids[:, None] == report["ids"]).int().argmax(1)
    sent = torch.cat([reply.sender.ids for reply in replies])
    size = torch.cat([reply.sender.size for reply in replies])
    senders = ids[torch.isin(ids, sent.cpu())].to(sent.device)
    row = (sent == senders[:, None]).nonzero()[:, 1]
    message = cut(join_up(r.message for r in replies if r.message), row)
    reasons = [reasons[c] for c in place.tolist()]
    return Reply(Cohort(senders, size[row]), message, replies[0].form, reasons, cut(report, place))


def reject_other_forms(
    replies: Sequence[Reply], state: RoundState, names: Sequence[str]
) -> tuple[MessageForm, Tensors, list[str]]:
    """Reject messages with unexpected shapes or types.

    Returns:
        The names, shapes and types of the other messages; the report on all training clients
        sorted by id, [C], with "good" for those that are not rejected; and the reasons, by reply.
    """
    votes = [(reply.form, reply.reasons.count("")) for reply in replies]
    form = vote_on_forms(votes, form_of(state.message), state.server)
    reasons = list[str]()
    for reply in replies:
        odd = form_difference(reply.form, form)
        for reason, i in zip(reply.reasons, reply.report["ids"].tolist(), strict=True):
            reasons.append(reason or (f"{names[i]}: {odd}" if odd else ""))
    report = join_up(reply.report for reply in replies)
    report |= {"good": torch.tensor([not reason for reason in reasons], dtype=torch.bool)}
    return form, cut(report, report["ids"].argsort()), reasons
