"""Messages as they arrive at the server, chunk by chunk: all, or one that stands for them."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from pyrofl.data import Who
from pyrofl.inference.loop.messages import CannotMerge, Form
from pyrofl.inference.method import Method
from pyrofl.inference.servers.pooled import Pooled, Weighed
from pyrofl.tensors import Tensors, cut


class Kept:
    """Holds every message until the merge, in a table for each form.

    Args:
        method: merges them.
        server: its state.
        asked: ids of those whose message may come, sorted.
    """

    def __init__(self, method: Method, server: Tensors, asked: Tensor) -> None:
        """Begin."""
        self.method, self.server, self.asked = method, server, asked
        self.by_form: dict[Form, Tensors] = {}
        self.message: Tensors = {}

    def take(self, form: Form, who: Who, sent: Tensors) -> None:
        """Take the messages [C, ...] of some clients, all of one form."""
        held = self.by_form.setdefault(form, {})
        if len(who.ids) == len(self.asked):  # all at once: one copy, of these clients alone
            held |= {n: v.index_select(0, who.ids.argsort()) for n, v in sent.items()}
            return
        for name, value in sent.items():
            if name not in held:
                held[name] = value.new_empty(len(self.asked), *value.shape[1:])
            held[name][torch.searchsorted(self.asked, who.ids.cpu())] = value

    def close(self, form: Form, who: Who) -> None:
        """Leave what is to be merged; `who` were heard, in this form."""
        self.message = self.by_form.get(form, {})
        if len(who.ids) < len(self.asked):
            self.message = cut(self.message, torch.searchsorted(self.asked, who.ids.cpu()))

    def merged(self, who: Who, source: Generator) -> Tensors:
        """Return the server's next state.

        Raises:
            CannotMerge: if the method's merge says so.
        """
        return self.method.merge(self.server, self.message, who, source)

    def left(self) -> Tensors:
        """Return what remains of the messages after the round: [M, ...], or [0, ...]."""
        return self.message


class Folded:
    """Folds what comes into one for each form: no more than a chunk's messages are in memory.

    Args:
        merge: of the method.
        server: its state.
    """

    def __init__(self, merge: Pooled, server: Tensors) -> None:
        """Begin."""
        self.merge, self.server = merge, server
        self.by_form: dict[Form, Weighed] = {}
        self.failed: dict[Form, Exception] = {}
        self.form: Form = ()
        self.message: Tensors = {}

    def take(self, form: Form, who: Who, sent: Tensors) -> None:
        """Take the messages [C, ...] of some clients, all of one form."""
        self.message = self.message or {n: v[:0].clone() for n, v in sent.items()}
        if not len(who.ids):
            return
        try:
            more = self.merge.fold(self.merge.weigh(self.server, sent, who))
            known = [self.by_form[form]] if form in self.by_form else []
            self.by_form[form] = self.merge.fold(*known, more) if known else more
        except (CannotMerge, KeyError) as error:  # which matters if they are those to be merged
            self.failed[form] = error

    def close(self, form: Form, who: Who) -> None:
        """Leave what is to be merged, in this form."""
        self.form = form

    def merged(self, who: Who, source: Generator) -> Tensors:
        """Return the server's next state.

        Raises:
            CannotMerge: if messages could not be folded, or the method's merge says so.
        """
        if self.form in self.failed:
            raise self.failed[self.form]
        return self.merge.close(self.server, self.by_form[self.form])

    def left(self) -> Tensors:
        """Return what messages look like, without any."""
        return self.message


def inbox(method: Method, server: Tensors, asked: Tensor, keep_messages: bool) -> Kept | Folded:
    """Return what takes the messages of a round.

    Raises:
        ValueError: if they are not to be kept and the method's merge needs all of them.
    """
    if keep_messages:
        return Kept(method, server, asked)
    if not isinstance(method.merge, Pooled) or method.merge.how != "mean":
        raise ValueError(
            "keep_messages is False and this method's merge needs all messages at once; expected "
            "a merge that is Pooled by weighted means, or keep_messages=True"
        )
    return Folded(method.merge, server)
