"""Parsing and validation of remote clients' replies before aggregation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyrofl.arguments import check_name
from pyrofl.data import Cohort, Roster
from pyrofl.inference.definition.metadata import MODERATE, JointRule, metadata_of_class
from pyrofl.inference.definition.method import GradientStep, Method
from pyrofl.inference.engine.messages import MessageForm, form_of, validate_messages, vote_on_forms
from pyrofl.inference.engine.requests import Reply, RunningRound
from pyrofl.inference.engine.state import RoundState, nobody
from pyrofl.inference.transport.message_checks import (
    MAX_QUOTED_CHARACTERS,
    MAX_SHOWN_CHARACTERS,
    column,
    one_line,
    own_client_names,
    tensors,
    texts,
    whole_number,
)
from pyrofl.tensors import Tensors, cut, is_measured

MAX_STEPS = 10**12  # gradient steps of a client in a round


@dataclass(frozen=True)
class ReplyParser:
    """Parser and validator of the replies to the training requests of one round."""

    method: Method
    roster: Roster
    number: int  # of the round, from 1
    trained: Tensor  # ids of clients with a request
    reporters: Tensor  # ids of clients that must send a message
    down: Tensor  # [J], bytes sent to each client
    holders: Mapping[str, Sequence[str]]  # sender -> names of the clients that it answers for
    server: Tensors  # state before the round

    def read(self, replies: Mapping[str, Mapping[str, Any]]) -> tuple[list[Reply], list[str]]:
        """Return all valid training replies, and a text "name: reason" for each invalid one."""
        valid, refused, used_ids = list[Reply](), list[str](), set[int]()
        for holder in sorted(replies):
            try:
                reply = self._reply(holder, replies[holder])
                reply_ids = set(reply.report["ids"].tolist())
                if reply_ids & used_ids:
                    raise ValueError(
                        "it replies for clients with another reply; expected one reply per client"
                    )
            except Exception as error:  # whatever a reply of others causes
                refused.append(
                    f"{one_line(holder, MAX_QUOTED_CHARACTERS)}: "
                    f"{one_line(str(error), 2 * MAX_SHOWN_CHARACTERS)}"
                )
                continue
            used_ids |= reply_ids
            valid.append(reply)
        return _with_all_losses(valid), refused

    def _reply(self, holder: str, flat: Mapping[str, Any]) -> Reply:
        """Parse the reply of one machine; raise ValueError if it is invalid."""
        ids, names = self._ids(holder, flat), texts(flat, "names")
        if (late := whole_number(flat, "round")) != self.number:
            raise ValueError(f"its reply is of round {late}; expected round {self.number}")
        sends = column(flat, "sends", len(ids), torch.bool)
        if not bool(torch.isin(ids[sends], self.reporters).all()):
            raise ValueError("it sends a message without a request; expected none")
        reasons, steps = texts(flat, "odd"), column(flat, "steps", len(ids), torch.long)
        if len(reasons) != len(ids):
            raise ValueError(f"odd has {len(reasons)} texts; expected {len(ids)}, one per client")
        if not bool(((steps >= 0) & (steps <= MAX_STEPS)).all()):
            raise ValueError(f"steps are {steps.tolist()[:3]}; expected 0 to {MAX_STEPS:,}")
        message = tensors("up", flat)
        cohort = self.roster.cohort(ids[sends])
        errors = self._inspected(message, cohort) if len(cohort.ids) else []
        error_by_position = dict(zip(_at(sends), errors, strict=True))
        silent = torch.isin(ids, self.reporters) & ~sends
        missing = {c: f"{names[c]}: it sends no message; expected one" for c in _at(silent)}
        client_reasons = [self._with_name(names[c], reason) for c, reason in enumerate(reasons)]
        every = [
            reason or (error_by_position | missing).get(c, "")
            for c, reason in enumerate(client_reasons)
        ]
        good = [c for c in error_by_position if not every[c]]
        row = torch.tensor([list(error_by_position).index(c) for c in good], dtype=torch.long)
        letter = cut(message, row) if good else {}
        up = torch.zeros(len(ids), dtype=torch.long)
        up[good] = self.method.message_bytes(letter) if letter else 0
        about = {"ids": ids, "steps": steps, "down": self.down[ids], "up": up}
        losses = self._losses(flat, len(ids), torch.tensor([not reason for reason in every]))
        return Reply(self.roster.cohort(ids[good]), letter, form_of(message), every, about | losses)

    def _ids(self, holder: str, flat: Mapping[str, Any]) -> Tensor:
        """Return the ids of a reply's clients; raise ValueError for clients without a request."""
        names = own_client_names(holder, flat, self.holders)
        ids = torch.tensor([self.roster.names.index(name) for name in names], dtype=torch.long)
        if not len(ids) or not bool(torch.isin(ids, self.trained).all()):
            raise ValueError(
                "it has no request in this round; expected replies of requested clients"
            )
        return ids

    def _inspected(self, message: Tensors, cohort: Cohort) -> list[str]:
        """Return the first error of each client's message, or "" for none."""
        names = self.roster.names
        measured = {n: v for n, v in message.items() if is_measured(v)}
        single = validate_messages(message, {}, cohort, names, self.method.rules)
        large = validate_messages(measured, {}, cohort, names, [("*", MODERATE)])
        errors = [one or other for one, other in zip(single, large, strict=True)]
        good = [c for c, reason in enumerate(errors) if not reason]
        row = torch.tensor(good, dtype=torch.long)
        for _, rule in metadata_of_class(self.method.metadata.tensors, JointRule) if good else ():
            some = self.roster.cohort(cohort.ids[row])
            holds = rule.validate_message(self.server, cut(message, row), some)
            for c in (c for c, held in zip(good, holds, strict=True) if not held):
                errors[c] = f"{names[int(cohort.ids[c])]}: {rule.text}"
        return errors

    def _with_name(self, name: str, reason: str) -> str:
        """Return a client's own reason for rejecting its message, in one line with its name."""
        text = one_line(reason)
        return text if not text or text.startswith(f"{name}: ") else f"{name}: {text}"

    def _losses(self, flat: Mapping[str, Any], count: int, good: Tensor) -> Tensors:
        """Return the losses in a reply by name, with one value per client, [C]."""
        steps = (u for phase in self.method.phases for u in phase.updates)
        step_names = {u.names for u in steps if isinstance(u, GradientStep)}
        losses = Tensors()
        for what in ("loss", "begun"):
            for n in tensors(what, flat):
                check_name(n, tuple(step_names), f"{what} of")
                value = column(flat, f"{what}/{n}", count, self.roster.dtype)
                if what == "loss" and not bool(value[good].isfinite().all()):
                    raise ValueError(f"its loss of {n} is not finite; expected finite numbers")
                losses[f"{what}/{n}"] = torch.where(value.isfinite(), value, torch.nan)
        return losses


class Received(RunningRound):
    """Round whose replies have already arrived from remote clients, which store their states."""

    def __init__(self, replies: list[Reply]) -> None:
        self.read, self.rejected = replies, nobody()

    def __exit__(self, *_: object) -> None:
        """Leave the round's `with` block, without any action."""

    def replies(self) -> Iterator[Reply]:
        """Return an iterator over copies of the replies that remote clients have sent."""
        return map(replace, self.read)  # the round takes their messages away

    def close(self, rejected: Tensor) -> Tensors:
        """Store the ids of clients that must revert to their previous state; return no states."""
        self.rejected = rejected
        return {}


def agree_on_form(replies: Sequence[Reply], state: RoundState) -> tuple[MessageForm, list[Reply]]:
    """Return the form of messages that counts as correct, and replies without other messages.

    The server makes room for a message of every client, so others must not set its size.
    """
    votes = [(reply.form, reply.reasons.count("")) for reply in replies]
    form = vote_on_forms(votes, form_of(state.message), state.server)
    none = Cohort(nobody(), torch.zeros(0))
    return form, [
        reply if reply.form == form else replace(reply, sender=none, message={})
        for reply in replies
    ]


def is_confirmed(form: MessageForm, replies: Sequence[Reply], state: RoundState) -> bool:
    """Return whether a form is that of the last round, or of most of several clients."""
    num_of_form = sum(reply.reasons.count("") for reply in replies if reply.form == form)
    every = sum(reply.reasons.count("") for reply in replies)
    return form == form_of(state.message) or (num_of_form > 1 and 2 * num_of_form > every)


def empty_reply(state: RoundState) -> Reply:
    """Return an empty training reply, with tensor shapes as in the last message."""
    none = {n: nobody() for n in ("ids", "steps", "down", "up")}
    return Reply(Cohort(nobody(), torch.zeros(0)), {}, form_of(state.message), [], none)


def _at(which: Tensor) -> list[int]:
    return which.nonzero().flatten().tolist()


def _with_all_losses(replies: list[Reply]) -> list[Reply]:
    """Add missing losses as NaN, so that all replies have the same losses."""
    names = {n: v for reply in replies for n, v in reply.report.items() if v.is_floating_point()}
    for reply in replies:
        unknown = {n: v.new_full((len(reply.reasons),), torch.nan) for n, v in names.items()}
        reply.report = unknown | reply.report
    return replies
