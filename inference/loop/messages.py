"""What is accepted from clients: every message is looked at before it is merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from pyrofl.data import Who
from pyrofl.inference.facts import FINITE, POSITIVE, Rule
from pyrofl.tensors import Tensors, pick

OnBadMessage = Literal["reject", "raise"]


class BadMessage(RuntimeError):
    """A message that cannot be merged, in a run that is to stop then."""


class CannotMerge(ValueError):
    """Good messages that a merge can make nothing of; the server keeps its state, and it is told.

    Raised by merges, such as Krum's with too few messages.
    """


Form = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Names, shapes [*p] and types of a message's tensors, in the order of their names."""


def inspect(
    message: Tensors,
    private: Tensors,
    who: Who,
    names: Sequence[str],
    rules: Mapping[str, Rule] | None = None,
) -> list[str]:
    """Return the first thing that is wrong with each client's message or private state, or "".

    Args:
        message: what the clients send, [C, *p].
        private: what they would keep, [C, *p]; it must be finite.
        who: the C clients; a size must be positive.
        names: of all clients, by id.
        rules: patterns of names, separated by spaces -> what else must hold for a message.

    >>> who = Who(torch.tensor([1]), torch.ones(1))
    >>> inspect({"tau": torch.tensor([-0.1])}, {}, who, ("a", "b"), {"tau": POSITIVE})
    ['b: tau is -0.1; expected > 0']
    """
    ids = who.ids.tolist()
    for name, value in message.items():
        if value.shape[:1] != (len(ids),):
            odd = f"{name} has shape {list(value.shape)}; expected shape [{len(ids)}, ...]"
            return [f"{names[i]}: {odd}" for i in ids]
    found = [""] * len(ids)
    for name, value, rule in _duties(message, private, who, rules or {}):
        # A sum is finite only if all is, and one pass; what overflows is looked at again.
        if rule is FINITE and bool(value.sum().isfinite()):
            continue
        holds = rule.holds(value)
        good = holds.reshape(len(ids), holds.shape[1:].numel()).all(1)
        if bool(good.all()):
            continue
        for c in (~good).nonzero().flatten().tolist():
            found[c] = found[c] or f"{names[ids[c]]}: {_named(name, value[c], holds[c], rule)}"
    return found


def _duties(
    message: Tensors, private: Tensors, who: Who, rules: Mapping[str, Rule]
) -> Iterator[tuple[str, Tensor, Rule]]:
    """Yield what must hold for which tensor, a message before what stays at home."""
    yield "its size", who.size, FINITE
    yield "its size", who.size, POSITIVE
    for name, value in (*message.items(), *private.items()):
        if value.is_floating_point():
            yield name, value, FINITE
    for patterns, rule in rules.items():
        for name, value in pick(message, patterns).items():
            yield name, value, rule


def form_of(message: Tensors) -> Form:
    """Return the form of a message [C, *p]."""
    return tuple((n, tuple(v.shape[1:]), v.dtype) for n, v in sorted(message.items()))


def agreed(votes: Iterable[tuple[Form, int]], last: Form) -> Form:
    """Return the form that the messages of a round must have.

    It is the last round's, if that has a name in common with what most clients sent, who decide
    otherwise, the first of equals.

    Args:
        votes: forms, and how many clients have sent them.
        last: form of the last round's messages.
    """
    count: Counter[Form] = Counter()
    for form, clients in votes:
        count[form] += clients
    most = max(count, key=count.__getitem__, default=last)
    return last if {name for name, *_ in most} & {name for name, *_ in last} else most


def unlike(form: Form, expected: Form) -> str:
    """Say in which tensor a message has not the form that it should have, or "".

    >>> unlike((("w", (3,), torch.half),), (("w", (2,), torch.half),))
    'w has shape [3]; expected shape [2]'
    """
    known = {name: (shape, dtype) for name, shape, dtype in expected}
    names = {name for name, *_ in form}
    for name in sorted(names ^ known.keys()):
        return f"{name} is {'missing' if name in known else 'there'}; expected {sorted(known)}"
    for name, shape, dtype in form:
        if shape != known[name][0]:
            return f"{name} has shape {list(shape)}; expected shape {list(known[name][0])}"
        if dtype != known[name][1]:
            return f"{name} is {dtype}; expected {known[name][1]}"
    return ""


def _named(name: str, value: Tensor, holds: Tensor, rule: Rule) -> str:
    """Name the first entry of a client's tensor [*p] that breaks a rule."""
    at = tuple((~holds).nonzero()[0].tolist())
    shown = f"{float(value[at]):.6g}" if holds.shape == value.shape else "not"
    return f"{name}{list(at) if at else ''} is {shown}; expected {rule.text}"


def merged(old: Tensors, new: Tensors) -> tuple[Tensors, list[str]]:
    """Return the server's next state: the old one, if the new one is not finite or lacks a tensor.

    Returns:
        The state, and what was wrong: one line or none.
    """
    for name in old:
        if name not in new:
            return old, [f"the server: merged lacks {name}; expected what it held before"]
    for name, value in new.items():
        if not value.is_floating_point() or bool(value.sum().isfinite()):
            continue
        if not bool((holds := value.isfinite()).all()):
            return old, [f"the server: merged {_named(name, value, holds, FINITE)}"]
    return new, []


def kinds(rejected: Iterable[str]) -> dict[str, int]:
    """Count what was wrong by what was expected instead.

    >>> kinds(["a: tau is -1; expected > 0", "b: tau is -2; expected > 0"])
    {'> 0': 2}
    """
    return dict(Counter(reason.rpartition("; expected ")[2] for reason in rejected))
