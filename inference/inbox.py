"""Messages as they arrive at the server, chunk by chunk: all, or one that stands for them."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrofl.data import Who
from pyrofl.inference.method import Fold, Method
from pyrofl.tensors import Tensors, cut, join_up


class Kept:
    """Holds every message until the merge, in one table.

    Args:
        asked: ids of those whose message may come, sorted.
    """

    def __init__(self, asked: Tensor) -> None:
        """Begin."""
        self.asked = asked
        self.message: Tensors = {}

    def take(self, who: Who, sent: Tensors) -> None:
        """Take the messages [C, ...] of some clients."""
        for name, value in sent.items():
            if name not in self.message:
                self.message[name] = value.new_empty(len(self.asked), *value.shape[1:])
            self.message[name][torch.searchsorted(self.asked, who.ids.cpu())] = value

    def close(self, who: Who) -> tuple[Tensors, Who]:
        """Return what the server merges, and whose it is; `who` are those that were heard."""
        if len(who.ids) < len(self.asked):
            self.message = cut(self.message, torch.searchsorted(self.asked, who.ids.cpu()))
        return self.message, who

    def left(self) -> Tensors:
        """Return what remains of the messages after the round: [M, ...], or [0, ...]."""
        return self.message


class Folded:
    """Folds what comes into one message at once, so that a chunk's is all there is in memory.

    Args:
        fold: of the method.
    """

    def __init__(self, fold: Fold) -> None:
        """Begin."""
        self.fold = fold
        self.message: Tensors = {}
        self.who: Who | None = None

    def take(self, who: Who, sent: Tensors) -> None:
        """Take the messages [C, ...] of some clients."""
        if not len(who.ids):
            self.message = self.message or sent
            return
        message, sender = self.fold(sent, who)
        if self.who is not None:
            both = Who(*(torch.cat(pair) for pair in zip(self.who, sender, strict=True)))
            message, sender = self.fold(join_up([self.message, message]), both)
        self.message, self.who = message, sender

    def close(self, who: Who) -> tuple[Tensors, Who]:
        """Return what the server merges, and whose it is."""
        return self.message, self.who or who

    def left(self) -> Tensors:
        """Return what messages look like, without any."""
        return {n: v.new_empty(0, *v.shape[1:]) for n, v in self.message.items()}


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
