"""Roster of clients as known to the server: their names and numbers of training rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor


class Cohort(NamedTuple):
    """Ids and numbers of training rows of the clients along the leading axis of stacked tensors."""

    ids: Tensor  # [C] int64, position in the federation
    size: Tensor  # [C] number of training rows, in the data's floating-point type


class Roster:
    """Names and numbers of training rows of the training clients, without the rows.

    It has the attributes of a `Federation` that the server's part of a round reads.
    """

    device = torch.device("cpu")

    def __init__(
        self, names: Sequence[str], sizes: Sequence[int] | Tensor, dtype: torch.dtype
    ) -> None:
        """Validate the names, the numbers of training rows and the floating-point type.

        Raises:
            ValueError: names the invalid client or type, and what is valid.
        """
        self.names = names_of("names", names)
        numbers = sizes.tolist() if torch.is_tensor(sizes) else list(sizes)
        if len(numbers) != len(self.names) or not numbers:
            raise ValueError(
                f"names and sizes differ in length: {len(self.names)}, {len(numbers)}; expected "
                "one entry per client, and at least one"
            )
        for name, size in zip(self.names, numbers, strict=True):
            if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
                raise ValueError(f"{name} has {size!r} training rows; expected at least one")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype!r}; expected torch.float32 or torch.float64")
        self.sizes, self.dtype = torch.tensor(numbers), dtype

    @property
    def clients(self) -> int:
        """Number of training clients."""
        return len(self.names)

    def cohort(self, ids: Tensor) -> Cohort:
        """Return ids and numbers of training rows of the given clients."""
        return Cohort(ids.cpu(), self.sizes[ids.cpu()].to(self.dtype))


def names_of(what: str, words: Iterable[str]) -> tuple[str, ...]:
    """Return names as a tuple; raise ValueError unless all are distinct, non-empty strings.

    >>> names_of("names", ["a", "b"])
    ('a', 'b')
    """
    if isinstance(words, str | Mapping) or not isinstance(words, Iterable):
        raise ValueError(f"{what} is a {type(words).__name__}; expected a tuple or list")
    words = tuple(words)
    for j, word in enumerate(words):
        if not isinstance(word, str) or not word:
            raise ValueError(f"{what}[{j}] is {word!r}; expected a string that is not empty")
    if len(set(words)) != len(words):
        twice = Counter(words).most_common(1)[0][0]
        raise ValueError(f"{what}: expected distinct names, found {twice!r} twice")
    return words
