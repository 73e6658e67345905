"""Messages as they arrive at the server, chunk by chunk: all, or one that stands for them."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrofl.data import Who
from pyrofl.inference.loop.messages import CannotMerge, Form
from pyrofl.inference.method import Fold, Method
from pyrofl.tensors import Tensors, cut, join_up


class Kept:
    """Holds every message until the merge, in a table for each form.

    Args:
        asked: ids of those whose message may come, sorted.
    """

    def __init__(self, asked: Tensor) -> None:
        """Begin."""
        self.asked = asked
        self.tables: dict[Form, Tensors] = {}
        self.message: Tensors = {}

    def take(self, form: Form, who: Who, sent: Tensors) -> None:
        """Take the messages [C, ...] of some clients, all of one form."""
        table = self.tables.setdefault(form, {})
        if len(who.ids) == len(self.asked):  # all at once: one copy, of these clients alone
            table |= {n: v.index_select(0, who.ids.argsort()) for n, v in sent.items()}
            return
        for name, value in sent.items():
            if name not in table:
                table[name] = value.new_empty(len(self.asked), *value.shape[1:])
            table[name][torch.searchsorted(self.asked, who.ids.cpu())] = value

    def close(self, form: Form, who: Who) -> tuple[Tensors, Who]:
        """Return what the server merges, and whose it is; `who` were heard, in this form."""
        self.message = self.tables.get(form, {})
        if len(who.ids) < len(self.asked):
            self.message = cut(self.message, torch.searchsorted(self.asked, who.ids.cpu()))
        return self.message, who

    def left(self) -> Tensors:
        """Return what remains of the messages after the round: [M, ...], or [0, ...]."""
        return self.message


class Folded:
    """Folds what comes into one message for each form: no more than a chunk's are in memory.

    Args:
        fold: of the method.
    """

    def __init__(self, fold: Fold) -> None:
        """Begin."""
        self.fold = fold
        self.running: dict[Form, tuple[Tensors, Who]] = {}
        self.failed: dict[Form, Exception] = {}
        self.message: Tensors = {}

    def take(self, form: Form, who: Who, sent: Tensors) -> None:
        """Take the messages [C, ...] of some clients, all of one form."""
        try:
            self.running[form] = self._folded(form, who, sent)
        except (CannotMerge, KeyError) as error:  # which matters if they are those to be merged
            self.failed[form] = error

    def _folded(self, form: Form, who: Who, sent: Tensors) -> tuple[Tensors, Who]:
        nobody = Who(who.ids[:0], who.size[:0], who.each[:0])
        before, senders = self.running.get(form, (cut(sent, slice(0)), nobody))
        if not len(who.ids):
            return before, senders
        message, sender = self.fold(sent, who)
        if not len(senders.ids):
            return message, sender
        pairs = (senders.ids, sender.ids), (senders.size, sender.size), (senders.each, sender.each)
        both = Who(*map(torch.cat, pairs))
        return self.fold(join_up([before, message]), both)

    def close(self, form: Form, who: Who) -> tuple[Tensors, Who]:
        """Return what the server merges, and whose it is; `who` were heard, in this form.

        Raises:
            CannotMerge: if they could not be folded.
        """
        if form in self.failed:
            raise self.failed[form]
        self.message, sender = self.running.get(form, ({}, who))
        return self.message, sender

    def left(self) -> Tensors:
        """Return what messages look like, without any."""
        return {n: v[:0].clone() for n, v in self.message.items()}


def folding(method: Method, keep_messages: bool) -> Fold | None:
    """Return how messages are folded, if they are not to be kept.

    Raises:
        ValueError: if the method's merge needs all of them.
    """
    if keep_messages:
        return None
    if method.fold is None:
        raise ValueError(
            "keep_messages is False and this method's merge needs all messages at once; expected "
            "a merge that is a weighted mean of them, with its `fold`, or keep_messages=True"
        )
    return method.fold
