"""The state between rounds, and what clients hold of it when they meet the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from pyrofl.data import Federation, Who
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Seed, Stream, stream
from pyrofl.summaries import Summarised
from pyrofl.tensors import Tensors, matches, size_in_bytes

ROWS_BYTES = 200_000_000  # stacked rows of clients trained side by side, padding included
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # of the processor, on Linux


@dataclass(frozen=True, repr=False)
class Round(Summarised):
    """The state after a round; passed back to `federate`, the run goes on from it bitwise.

    Attributes:
        number: rounds done.
        server: what the server knows.
        private: what clients keep, [J, ...]; rows of clients never seen are zero. Where this is
            large, there is one copy: the next round overwrites it, and asking this one raises.
        seen: [J] bool, the clients that have trained at least once.
        who: those that reported, sorted; their messages are `message`, [M, ...], or [0, ...] if
            they were not kept.
        trained: ids of those that trained, sorted.
        rejected: "client: what was wrong" of those whose message or state was bad; also of the
            server, if the merge was not finite and it keeps its state.
        loss: mean loss of every gradient step by its names, [trained]; finite unless rejected.
        steps: gradient steps that each client made, in all phases, [trained].
        silent: ids of those that were to report and failed to, sorted; see `Stragglers`.
        down: bytes sent to each client that trained, [trained].
        up: bytes sent by each client that reported, [M].
    """

    number: int
    server: Tensors
    private: Tensors
    seen: Tensor
    who: Who = field(default_factory=lambda: Who(torch.zeros(0, dtype=torch.long), torch.zeros(0)))
    message: Tensors = field(default_factory=dict)
    trained: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    rejected: tuple[str, ...] = ()
    loss: Tensors = field(default_factory=dict)
    steps: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    silent: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    down: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    up: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @property
    def title(self) -> str:
        """The number of rounds done."""
        return f"State after round {self.number}"

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


def to_data(tensors: Tensors, data: Federation) -> Tensors:
    """Move tensors to the device and, if they are real numbers, the type of the data."""
    device = data.x.device
    return {
        n: v.detach().to(device, data.dtype if v.is_floating_point() else None)
        for n, v in tensors.items()
    }


def by_name(server: Tensors, per_client: str, data: Federation) -> Tensors:
    """Deal rows that the server has for every client [J, *p] by their names, not their places."""
    order = sorted(range(data.clients), key=data.names.__getitem__)
    place = torch.tensor(order).argsort()
    return {n: v[place] if matches(n, per_client) else v for n, v in server.items()}


def meet(
    method: Method, data: Federation, state: Round, who: Who, seed: Seed
) -> tuple[Tensors, Tensors]:
    """Return what some clients receive now and their private state, that of newcomers new."""
    received = method.download(state.server, who)
    fresh = to_data(method.join(received, who, stream(seed, Stream.START)), data)
    known = torch.zeros(len(who.ids), dtype=torch.bool)
    inside = who.ids.cpu() < data.clients
    known[inside] = state.seen[who.ids.cpu()[inside]]
    private = {}
    for name, value in fresh.items():
        private[name] = value
        if name in state.private and bool(known.any()):
            old = state.private[name][who.ids.cpu()[known]].to(value)
            if bool(known.all()):
                private[name] = old
            else:
                private[name] = value.clone(memory_format=torch.contiguous_format)
                private[name][known] = old
    return received, private


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
    method: Method,
    data: Federation,
    state: Round,
    ids: Tensor,
    chunk: int | None,
    seed: Seed,
) -> Iterator[Tensor]:
    """Split clients into groups that are trained side by side, the largest clients first.

    Raises:
        ValueError: if chunk is less than 1.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; expected None or at least 1")
    order = data.sizes[ids].argsort(descending=True, stable=True)
    ids = ids[order]
    if chunk is not None:
        yield from ids.split(chunk)
        return
    received, private = meet(method, data, state, data.who(ids[:1]), seed)
    most = max(1, chunk_bytes() // max(size_in_bytes(private | received), 1))
    row = data.x[0].numel() * data.x.element_size()
    while len(ids):  # all clients of a chunk are padded to its first, the longest
        fit = max(1, ROWS_BYTES // max(row * int(data.sizes[ids[0]]), 1))
        some, ids = ids[: min(most, fit)], ids[min(most, fit) :]
        yield some
