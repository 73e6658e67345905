"""The state between rounds, and what clients hold of it when they meet the server."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from weakref import ref

import torch
from torch import Tensor

from pyrofl.data import Federation, Roster, Who
from pyrofl.inference.loop.one_copy import Lost, OneCopy
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Seed, Stream, stream
from pyrofl.summaries import Summarised
from pyrofl.tensors import Tensors, as_tensors, size_in_bytes, unwritten

COPIED = 64_000_000  # bytes of all clients' state up to which every round can be looked at
ROWS_BYTES = 200_000_000  # stacked rows of clients trained side by side, padding included
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # of the processor, on Linux

nobody = partial(torch.zeros, 0, dtype=torch.long)


@dataclass(frozen=True, repr=False)
class Round(Summarised):
    """The state after a round; passed back to `federate`, the run goes on from it bitwise.

    Attributes:
        number: rounds done.
        server: what the server knows.
        private: what clients keep, [J, ...]; rows of clients never seen are zero. Where this is
            large, there is one copy: the next round overwrites it, and asking this one raises.
        seen: [J] bool, the clients that keep something: that have trained at least once, and not in
            vain, see `advance`.
        who: those that reported, sorted; their messages are `message`, [M, ...], or [0, ...] if
            they were not kept.
        trained: ids of those that trained, sorted.
        rejected: "client: what was wrong" of those whose message or state was bad; also of the
            server, if the merge was not finite and it keeps its state.
        loss: mean loss of every gradient step by its names, [trained]; finite unless rejected.
        begun: loss of the first step of each client in this round, as `loss`.
        steps: gradient steps that each client made, in all phases, [trained].
        silent: ids of those that were to report and failed to, sorted; see `Stragglers`.
        down: bytes sent to each client that trained, [trained].
        up: bytes sent by each client that reported, [M].
        names: of the clients that train; () if unknown.
        rows: [J, 2], how many training rows each has and a hash of them; None if unknown.
        constants: hash of the frozen weights and buffers of the method's networks; "" if there are
            none, or if unknown.
    """

    number: int
    server: Tensors
    private: Tensors
    seen: Tensor
    who: Who = field(default_factory=lambda: Who(nobody(), torch.zeros(0)))
    message: Tensors = field(default_factory=dict)
    trained: Tensor = field(default_factory=nobody)
    rejected: tuple[str, ...] = ()
    loss: Tensors = field(default_factory=dict)
    steps: Tensor = field(default_factory=nobody)
    silent: Tensor = field(default_factory=nobody)
    down: Tensor = field(default_factory=nobody)
    up: Tensor = field(default_factory=nobody)
    begun: Tensors = field(default_factory=dict)
    names: tuple[str, ...] = ()
    rows: Tensor | None = None
    constants: str = ""

    @property
    def title(self) -> str:
        """The number of rounds done."""
        return f"State after round {self.number}"

    def kept(self, ids: Tensor) -> Tensors:
        """Return the private state of clients that were seen, [C, ...]."""
        if isinstance(self.private, OneCopy):
            return self.private.rows(ids)
        return {n: v.index_select(0, ids) for n, v in self.private.items()}

    def of_all(self, values: Tensors) -> Tensors:
        """Return values [trained] as those of all clients, [J]: NaN of those that did not train."""
        none = {n: v.new_full(self.seen.shape, torch.nan, device="cpu") for n, v in values.items()}
        return {n: none[n].scatter(0, self.trained, v.cpu()) for n, v in values.items()}

    def summary(self) -> dict[str, str]:
        """Tell what it is."""
        trained, reported, silent = (len(v) for v in (self.trained, self.who.ids, self.silent))
        try:
            private = _listed(self.private)
        except ValueError:
            private = "overwritten by a later round"
        return {
            "server": _listed(self.server),
            "private": f"{private}; {int(self.seen.sum())} clients were seen",
            "clients": f"{trained} trained, {reported} reported, {silent} were silent",
            "rejected": "; ".join(self.rejected) or "nobody",
        }


def _listed(names: Iterable[str]) -> str:
    """Name some tensors."""
    first = list(names)[:4]
    more = len(list(names)) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "") or "nothing"


def to_data(tensors: Tensors, data: Federation | Roster) -> Tensors:
    """Move tensors to the device and, if they are real numbers, the type of the data."""
    return {
        n: v.detach().to(data.device, data.dtype if v.is_floating_point() else None)
        for n, v in tensors.items()
    }


def sent_down(method: Method, server: Tensors, who: Who) -> Tensors:
    """Return what some clients receive."""
    with unwritten("download", server):
        return as_tensors("what download returns", method.download(server, who))


def at_hand(
    method: Method, data: Federation, state: Round, received: Tensors, who: Who, seed: Seed
) -> Tensors:
    """Return the private state of some clients, that of newcomers new."""
    private = as_tensors(
        "what join returns", method.join(received, who, stream(seed, Stream.START))
    )
    private = to_data(private, data)
    ids = who.ids.cpu()
    known = torch.isin(ids, state.seen.nonzero().flatten())
    kept = state.kept(ids[known]) if bool(known.any()) else {}
    all_known = bool(known.all())
    for name, new in private.items():
        if name in kept and all_known:
            private[name] = kept[name].to(new)
            continue
        # As that of others lies, so that steps which are recorded for these are those of newcomers.
        private[name] = new.clone(memory_format=torch.contiguous_format)
        if name in kept:
            private[name][known] = kept[name].to(new)
    return private


def meet(
    method: Method, data: Federation, state: Round, who: Who, seed: Seed
) -> tuple[Tensors, Tensors]:
    """Return what some clients receive now and their private state, that of newcomers new."""
    received = sent_down(method, state.server, who)
    return received, at_hand(method, data, state, received, who, seed)


def sent_up(method: Method, received: Tensors, local: Tensors) -> Tensors:
    """Return the messages of clients that have trained."""
    try:
        with unwritten("upload", received, local):
            return as_tensors("what upload returns", method.upload(received, local))
    except KeyError as error:
        raise ValueError(
            f"phases leave clients without {error}, which upload reads; expected phases that make "
            "it, or another upload"
        ) from error


@cache
def chunk_bytes() -> int:
    """Return the bytes of stacked state that are trained side by side: twice the cache's size.

    Smaller chunks pay for more steps in Python, larger ones for memory: measured, flat around it.
    """
    try:
        size = int(CACHE.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        size = 2**25
    return min(max(2 * size, 2**25), 3 * 2**25)


def chunks(
    method: Method, data: Federation, state: Round, ids: Tensor, chunk: int | None, seed: Seed
) -> Iterator[Tensor]:
    """Split clients into groups that are trained side by side, the largest clients first."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; expected None or at least 1")
    ids = ids[data.sizes[ids].argsort(descending=True, stable=True)]
    if chunk is not None:
        yield from ids.split(int(chunk))
        return
    received, private = meet(method, data, state, data.who(ids[:1]), seed)
    most = max(1, chunk_bytes() // max(size_in_bytes(private | received), 1))
    row = data.x[0].numel() * data.x.element_size()
    while len(ids):  # all clients of a chunk are padded to its first, the longest
        fit = min(most, max(1, ROWS_BYTES // max(row * int(data.sizes[ids[0]]), 1)))
        some, ids = ids[:fit], ids[fit:]
        yield some


class ClientState:
    """Private state [J, ...] during a round; of its tensors more than `memory` bytes are mapped."""

    def __init__(self, old: Tensors, seen: Tensor, memory: int | None) -> None:
        """Begin with that of the round before; `seen` [J] are clients that keep something."""
        self.old, self.seen, self.memory = old, seen, memory
        self.new: Tensors = {}
        self.lent: Tensors | None = None  # of `old`, to be written into
        self.undo: Lost = []
        self.large = isinstance(old, OneCopy) and old.large

    def __enter__(self) -> ClientState:
        """Begin a round."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Take everything back if the round fails on its way."""
        if kind is not None:
            self.take_back(torch.arange(len(self.seen)))
            if self.lent and isinstance(self.old, OneCopy):
                self.old.lost = None

    def write(self, ids: Tensor, mine: Tensors) -> None:
        """Write down what some clients keep, [C, ...]."""
        if self.lent is None:
            self.lent = self.old.lend(self.undo) if isinstance(self.old, OneCopy) else {}
        clients, seen = len(self.seen), self.seen[ids]
        total = clients * sum(v.shape[1:].numel() * v.element_size() for v in mine.values())
        self.large |= total > COPIED
        for name, value in mine.items():
            if name not in self.new:
                self.new[name] = self._begin(name, value, total)
            table = self.new[name]
            if name in self.lent:
                newcomers = ids[~seen]
                nothing = table.new_zeros(()).expand(len(newcomers), *table.shape[1:])
                self.undo += (name, newcomers, nothing), (name, ids[seen], table[ids[seen]])
            table[ids] = value.to(table.device)

    def _begin(self, name: str, like: Tensor, total: int) -> Tensor:
        if self.lent and name in self.lent:
            return self.lent[name]
        old: Tensor | None = self.old.get(name)
        shape = (len(self.seen), *like.shape[1:])
        if self.memory is not None and total > self.memory:
            new = mapped(shape, like.dtype)
            return new if old is None else new.copy_(old)
        return like.new_zeros(shape) if old is None else old.clone()

    def take_back(self, ids: Tensor) -> None:
        """Make the state of some clients again what it was before the round."""
        if not len(ids):
            return
        lent = self.lent or {}
        for name, table in self.new.items():
            if name not in lent:
                table[ids] = self.old[name][ids] if name in self.old else 0
        for name, written, value in self.undo:
            again = torch.isin(written, ids)
            lent[name][written[again]] = value[again]

    def close(self) -> Tensors:
        """Return the state after the round; where that is large, the old one is stale."""
        if not self.new:
            return self.old
        new = OneCopy(dict.items(self.old))
        new.looked = bool(dict.keys(self.old) - self.new.keys())  # as these are the old ones
        new.update(self.new)
        new.large = self.large
        if self.lent and isinstance(self.old, OneCopy):
            self.old.stale = self.old.large
            new.before = ref(self.old)
        return new


def mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in a temporary file (see TMPDIR) that is gone once nobody uses them."""
    handle, path = tempfile.mkstemp(prefix="pyrofl-")
    try:
        count = torch.Size(shape).numel()
        size = count * dtype.itemsize
        if hasattr(os, "posix_fallocate") and size:  # or writing would kill the process
            os.posix_fallocate(handle, 0, size)
        return torch.from_file(path, shared=True, size=count, dtype=dtype).view(shape)
    finally:
        os.close(handle)
        with suppress(PermissionError):  # some systems keep a file until it is closed
            os.unlink(path)
