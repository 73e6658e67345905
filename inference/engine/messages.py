"""Client messages at the server: validation, and storage or averaging until aggregation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Generator, Tensor

from pyrofl.data import Cohort, Federation
from pyrofl.inference.definition.aggregator import Aggregator, Weighed
from pyrofl.inference.definition.metadata import FINITE, POSITIVE, Rule
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, Stream, Streams, stream
from pyrofl.returned import as_tensors, calling
from pyrofl.tensors import Tensors, cut, is_measured, pick

MAX_REASONS = 3  # reasons in one line

MessageForm = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Names, shapes [*p] and types of a message's tensors, in the order of their names."""


class BadMessage(RuntimeError):
    """Error raised for an invalid client message if `on_bad_message` is "raise"."""


def validate_messages(
    message: Tensors,
    client_states: Tensors,
    cohort: Cohort,
    names: Sequence[str],
    rules: Sequence[tuple[str, Rule]] = (),
) -> list[str]:
    """Validate messages and client states; return the first error of each client, or "" for none.

    >>> cohort = Cohort(torch.tensor([1]), torch.ones(1))
    >>> rules = [("tau", POSITIVE)]
    >>> validate_messages({"tau": torch.tensor([-0.1])}, {}, cohort, ("a", "b"), rules)
    ['b: tau is -0.1; expected > 0']
    """
    ids = cohort.ids.tolist()
    for name, value in message.items():
        if value.shape[:1] != (len(ids),):
            odd = f"{name} has shape {list(value.shape)}; expected shape [{len(ids)}, ...]"
            return [f"{names[i]}: {odd}" for i in ids]
    errors = [""] * len(ids)
    duties = list(_tensors_with_rules(message, client_states, cohort, rules))
    # A sum is finite only if all entries are; sums that overflow are checked again.
    sums = [value.sum().abs() for _, value, rule in duties if rule is FINITE]
    finite = bool(torch.stack([v.to(sums[0]) for v in sums]).sum().isfinite())
    for name, value, rule in duties:
        if rule is FINITE and finite:
            continue
        is_valid = rule.validate(name, value)
        good = is_valid.reshape(len(ids), is_valid.shape[1:].numel()).all(1)  # [C]
        for c in (~good).nonzero().flatten().tolist():
            errors[c] = (
                errors[c] or f"{names[ids[c]]}: {_violation(name, value[c], is_valid[c], rule)}"
            )
    return errors


def _tensors_with_rules(
    message: Tensors, client_states: Tensors, cohort: Cohort, rules: Sequence[tuple[str, Rule]]
) -> Iterator[tuple[str, Tensor, Rule]]:
    """Yield each tensor of messages and client states, with a rule that it must satisfy."""
    yield "its size", cohort.size, FINITE
    yield "its size", cohort.size, POSITIVE
    for name, value in (*message.items(), *client_states.items()):
        if is_measured(value):
            yield name, value, FINITE
    for patterns, rule in rules:
        for name, value in pick(message, patterns).items():
            yield name, value, rule


def _violation(name: str, value: Tensor, is_valid: Tensor, rule: Rule) -> str:
    """Return an error text for the first entry of a client's tensor that violates a rule."""
    at = tuple((~is_valid).nonzero()[0].tolist())
    shown = f"{value[at].item():.6g}" if is_valid.shape == value.shape else "not"
    return f"{name}{list(at) if at else ''} is {shown}; expected {rule.text}"


def form_of(message: Tensors) -> MessageForm:
    """Return the names, shapes and types of the tensors of a message [C, *p]."""
    return tuple((n, tuple(v.shape[1:]), v.dtype) for n, v in sorted(message.items()))


def vote_on_forms(
    votes: Iterable[tuple[MessageForm, int]], last: MessageForm, server: Tensors
) -> MessageForm:
    """Return the tensor names, shapes and types that messages must have, by a vote of clients.

    It is the sent form, if all of several clients agree, or if new tensors have the form of the
    server's. Otherwise it is that of the last round, if it has a name in common with the most
    frequent form, or else the most frequent form, the first of equals.
    """
    count: Counter[MessageForm] = Counter()
    for form, clients in votes:
        count[form] += clients
    most = max(count, key=count.__getitem__, default=last)
    if count[most] == count.total():
        new = set(most) - set(last)
        if count[most] > 1 or new <= {(n, tuple(v.shape), v.dtype) for n, v in server.items()}:
            return most
    return last if {name for name, *_ in most} & {name for name, *_ in last} else most


def form_difference(form: MessageForm, expected: MessageForm) -> str:
    """Describe the first difference between a message's shapes or types and the expected ones."""
    entries = {name: (shape, dtype) for name, shape, dtype in expected}
    for name in sorted({name for name, *_ in form} ^ entries.keys()):
        return f"{name} is {'missing' if name in entries else 'there'}; expected {sorted(entries)}"
    for name, shape, dtype in form:
        if shape != entries[name][0]:
            return f"{name} has shape {list(shape)}; expected shape {list(entries[name][0])}"
        if dtype != entries[name][1]:
            return f"{name} is {dtype}; expected {entries[name][1]}"
    return ""


def validated_state(old: Tensors, new: Tensors, clients: int) -> tuple[Tensors, str]:
    """Validate an aggregated server state; return it and "", or the old state and the error.

    Raises:
        ValueError: if a tensor has a row for each aggregated client, or another shape or type than
            before.
    """
    for name, value in old.items():
        if name not in new:
            return old, (
                f"the server: aggregated state lacks {name}; expected all tensors of its state"
            )
        updated = new[name]
        if updated.shape == (clients, *value.shape):
            raise ValueError(
                f"aggregate returns {name!r} with a row for each of the {clients} reporting "
                f"clients; expected shape {list(value.shape)}, as before: average over clients"
            )
        alike = updated.is_floating_point() == value.is_floating_point()
        # Tensors of the server alone may grow, such as one teacher for each reporting client.
        grown = updated.shape != value.shape and not name.startswith("server/")
        if grown or not alike:
            raise ValueError(
                f"aggregate returns {name!r} as {updated.dtype} {list(updated.shape)}; expected "
                f"{value.dtype} {list(value.shape)}, as before"
            )
    for name, value in new.items():
        if not is_measured(value) or bool(value.sum().isfinite()):
            continue
        if not bool((is_valid := value.isfinite()).all()):
            return old, f"the server: aggregated {_violation(name, value, is_valid, FINITE)}"
    return new, ""


def privatize(
    method: Method,
    data: Federation,
    seed: Seed,
    number: int,
    received: Tensors,
    message: Tensors,
    cohort: Cohort,
    sends: Tensor,
) -> Tensors:
    """Return the messages of the clients that send one, with noise if the clients must add it.

    Args:
        method: the method.
        data: the federation.
        seed: seed of the run.
        number: number of the round, from 0.
        received: what the clients have received, [C, ...].
        message: messages of all of them, [C, ...].
        cohort: the clients.
        sends: which of them send a message, bool [C].
    """
    at = sends.nonzero().flatten()
    names = [data.names[i] for i in cohort.ids.cpu()[at].tolist()]
    at = at.to(data.device)
    message, promise = cut(message, at), method.metadata.privacy
    if promise is None or promise.privatize is None:
        return message
    sources = Streams(partial(stream, seed, Stream.PRIVACY, number), names)
    return as_tensors(
        "what privatize returns", promise.privatize(cut(received, at), message, sources)
    )


SERVER_FAILED_PREFIX = "the server: "  # of the reason for a round that failed


def join_reasons(reasons: Sequence[str]) -> str:
    """Join the first reasons for rejected messages by semicolons, and count the further ones."""
    more = len(reasons) - MAX_REASONS
    shown = [*reasons[:MAX_REASONS], f"and {more} more"] if more > 0 else reasons
    return "; ".join(shown)


def count_by_rule(rejected: Iterable[str]) -> dict[str, int]:
    """Count rejected messages by the validation rule that they violated."""
    return dict(Counter(reason.rpartition("; expected ")[2] for reason in rejected))


class Inbox:
    """Server storage of the clients' messages of a round, until aggregation."""

    def __init__(self, method: Method, server: Tensors, reporters: Tensor) -> None:
        """Create an empty inbox for the messages of the reporting clients (sorted ids)."""
        self.method, self.server, self.reporters = method, server, reporters
        self.by_form: dict[MessageForm, Tensors] = {}

    def take(self, form: MessageForm, cohort: Cohort, sent: Tensors) -> None:
        """Store the messages [C, ...] of some clients, all with the same shapes and types."""
        held = self.by_form.setdefault(form, {})
        if not len(cohort.ids):  # a transport may have lost the shapes of no messages
            sent = {n: sent[n].new_empty(0, *shape, dtype=t) for n, shape, t in form if n in sent}
        if len(cohort.ids) == len(self.reporters):  # all at once: one copy
            held |= {n: v.index_select(0, cohort.ids.argsort()) for n, v in sent.items()}
            return
        for name, value in sent.items():
            if name not in held:
                held[name] = value.new_empty(len(self.reporters), *value.shape[1:])
            held[name][torch.searchsorted(self.reporters, cohort.ids.cpu())] = value

    def stored_messages(self, form: MessageForm, cohort: Cohort) -> Tensors:
        """Return the stored messages of the given clients, sorted by client: [M, ...]."""
        held = self.by_form.get(form, {})
        if len(cohort.ids) == len(self.reporters):
            return held
        return cut(held, torch.searchsorted(self.reporters, cohort.ids.cpu()))

    def aggregate_messages(
        self, form: MessageForm, message: Tensors, cohort: Cohort, source: Generator
    ) -> Tensors:
        """Aggregate the stored messages to a server state; raise AggregationError on failure."""
        return self.method.aggregate(self.server, message, cohort, source)


class AveragingInbox(Inbox):
    """Server inbox that averages the messages of a round on arrival, to save memory."""

    def __init__(self, aggregate: Aggregator, server: Tensors) -> None:
        self.aggregate, self.server = aggregate, server
        self.folded: dict[MessageForm, Weighed | Exception] = {}
        self.message: Tensors = {}

    def take(self, form: MessageForm, cohort: Cohort, sent: Tensors) -> None:
        """Add some clients' messages [C, ...] to the running weighted mean of the round."""
        self.message = self.message or {n: v[:0].clone() for n, v in sent.items()}
        before = self.folded.get(form)
        if not len(cohort.ids) or isinstance(before, Exception):
            return
        try:
            with calling("aggregate"):
                more = self.aggregate.fold(self.aggregate.weigh(self.server, sent, cohort))
                self.folded[form] = self.aggregate.fold(before, more) if before else more
        except ValueError as error:  # raised later if this form is aggregated
            self.folded[form] = error

    def stored_messages(self, form: MessageForm, cohort: Cohort) -> Tensors:
        """Return empty tensors with the messages' shapes and types, as messages are not stored."""
        return self.message

    def aggregate_messages(
        self, form: MessageForm, message: Tensors, cohort: Cohort, source: Generator
    ) -> Tensors:
        """Compute the server state from averaged messages; raise AggregationError on failure."""
        folded = self.folded[form]
        if isinstance(folded, Exception):
            raise folded
        return self.aggregate.close(self.server, folded, source)


def inbox(method: Method, server: Tensors, reporters: Tensor, keep_messages: bool) -> Inbox:
    """Create a round's message inbox; raise ValueError if it cannot average messages on arrival."""
    if keep_messages:
        return Inbox(method, server, reporters)
    if not isinstance(method.aggregate, Aggregator) or method.aggregate.rule != "mean":
        raise ValueError(
            "keep_messages is False, but this aggregation needs all messages at once; use an "
            "Aggregator of weighted means, or keep_messages=True"
        )
    return AveragingInbox(method.aggregate, server)
