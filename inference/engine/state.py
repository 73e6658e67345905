"""State of a federated run after each round, and the clients' downloads and uploads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from pyrofl.data import Cohort, Federation, Roster
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, Stream, stream
from pyrofl.inference.engine.client_states import ClientStates
from pyrofl.returned import as_tensors, calling
from pyrofl.summaries import Summarized
from pyrofl.tensors import Tensors, client_bytes, refuse_inplace_writes

ROWS_BYTES = 200_000_000  # stacked rows of a vectorized batch of clients, including padding
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # of the processor, on Linux

nobody = partial(torch.zeros, 0, dtype=torch.long)


@dataclass(frozen=True, repr=False)
class RoundState(Summarized):
    """State of a run after a round, from which `federate` can resume with bitwise equal results.

    Attributes:
        number: number of completed rounds.
        server: tensors of the server.
        client_states: name -> states of all clients [J, ...]; rows of unseen clients are zero.
        seen: [J] bool, clients with a state: those that were trained and accepted at least once,
            see `run_round`.
        reporters: reporting clients, sorted; their messages are `message`, [M, ...], or [0, ...]
            if they were not kept.
        trained: ids of training clients, sorted.
        rejected: "client: reason" of clients with an invalid message or state; also of the server,
            if the aggregation was not finite and it keeps its state.
        loss: mean loss of every gradient step by its names, [trained], in its last phase; finite
            unless rejected.
        first_loss: loss of the first step of each client in this round, as `loss`.
        steps: number of gradient steps of each client, in all phases, [trained].
        silent: ids of selected reporters that dropped out, sorted; see `Stragglers`.
        bytes_down: bytes sent to each training client, [trained].
        bytes_up: bytes sent by each reporting client, [M].
        names: names of the training clients; () if unknown.
        rows: [J, 2], number of training rows of each client and their hash; None if unknown.
        constants: hash of the frozen weights and buffers of the method's networks; "" if there are
            none, or if unknown.
    """

    number: int
    server: Tensors
    client_states: Mapping[str, Tensor]
    seen: Tensor
    reporters: Cohort = field(default_factory=lambda: Cohort(nobody(), torch.zeros(0)))
    message: Tensors = field(default_factory=dict)
    trained: Tensor = field(default_factory=nobody)
    rejected: tuple[str, ...] = ()
    loss: Tensors = field(default_factory=dict)
    steps: Tensor = field(default_factory=nobody)
    silent: Tensor = field(default_factory=nobody)
    bytes_down: Tensor = field(default_factory=nobody)
    bytes_up: Tensor = field(default_factory=nobody)
    first_loss: Tensors = field(default_factory=dict)
    names: tuple[str, ...] = ()
    rows: Tensor | None = None
    constants: str = ""

    @property
    def title(self) -> str:
        """Return the title of the printed summary, with the number of rounds."""
        return f"State after round {self.number}"

    def get_client_states(self, ids: Tensor) -> Tensors:
        """Return the stacked states of the given clients, name -> [C, ...]."""
        if isinstance(self.client_states, ClientStates):
            return self.client_states.select(ids)
        return {n: v.index_select(0, ids) for n, v in self.client_states.items()}

    def of_all(self, values: Tensors) -> Tensors:
        """Expand values of the trained clients to all clients, [J], with NaN for untrained ones."""
        none = {n: v.new_full(self.seen.shape, torch.nan, device="cpu") for n, v in values.items()}
        return {n: none[n].scatter(0, self.trained, v.cpu()) for n, v in values.items()}

    def overview(self) -> dict[str, str]:
        """Return the printed summary of the round state, as label -> text."""
        trained, reported, silent = (
            len(v) for v in (self.trained, self.reporters.ids, self.silent)
        )
        return {
            "server": _listed(self.server),
            "private": f"{_listed(self.client_states)}; {int(self.seen.sum())} clients were seen",
            "clients": f"{trained} trained, {reported} reported, {silent} dropped out",
            "rejected": "; ".join(self.rejected) or "no client",
        }


def _listed(names: Iterable[str]) -> str:
    """Join the first four names by commas, and add the number of further names."""
    first = list(names)[:4]
    more = len(list(names)) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "") or "nothing"


def to_data(tensors: Tensors, data: Federation | Roster) -> Tensors:
    """Move tensors to the device of the data, and cast floating-point ones to the data's type."""
    return {
        n: v.detach().to(data.device, data.dtype if v.is_floating_point() else None)
        for n, v in tensors.items()
    }


def downloaded(method: Method, server: Tensors, cohort: Cohort) -> Tensors:
    """Return the tensors that the given clients download from the server."""
    with calling("download"), refuse_inplace_writes("download", server):
        return as_tensors("what download returns", method.download(server, cohort), len(cohort.ids))


def current_states(
    method: Method,
    data: Federation,
    state: RoundState,
    received: Tensors,
    cohort: Cohort,
    seed: Seed,
) -> Tensors:
    """Return the states of the given clients, initialized for new clients."""
    with calling("init_client"):
        new_states = method.init_client(received, cohort, stream(seed, Stream.START))
    private = to_data(as_tensors("what init_client returns", new_states, len(cohort.ids)), data)
    ids = cohort.ids.cpu()
    is_seen = torch.isin(ids, state.seen.nonzero().flatten())
    old_states = state.get_client_states(ids[is_seen]) if bool(is_seen.any()) else {}
    all_seen = bool(is_seen.all())
    for name, new in private.items():
        if name in old_states and all_seen:
            private[name] = old_states[name].to(new)
            continue
        # With the layout of other clients' states, so that recorded steps apply to new clients too.
        private[name] = new.clone(memory_format=torch.contiguous_format)
        if name in old_states:
            private[name][is_seen] = old_states[name].to(new)
    return private


def refuse_absent_states(
    method: Method, data: Federation, state: RoundState, ids: Tensor, view: str
) -> None:
    """Raise ValueError if a personal model needs client states that are stored remotely."""
    ids = ids[ids < len(state.seen)]  # held-out clients have no state
    seen = ids[state.seen.cpu()[ids]]
    if view == "global" or not len(seen) or len(state.client_states):
        return
    cohort = data.cohort(seen[:1])
    if method.init_client(
        downloaded(method, state.server, cohort), cohort, stream(0, Stream.START)
    ):
        raise ValueError(
            f"the state of {data.names[int(seen[0])]!r} is stored at the client, not here; use "
            "model='global', or a new client"
        )


def client_inputs(
    method: Method, data: Federation, state: RoundState, cohort: Cohort, seed: Seed
) -> tuple[Tensors, Tensors]:
    """Return the downloads and states of the given clients, initialized for new clients."""
    received = downloaded(method, state.server, cohort)
    return received, current_states(method, data, state, received, cohort, seed)


def uploaded(method: Method, received: Tensors, local: Tensors) -> Tensors:
    """Return the messages that trained clients send to the server."""
    with calling("upload"), refuse_inplace_writes("upload", received, local):
        try:
            return as_tensors("what upload returns", method.upload(received, local))
        except KeyError as error:
            raise ValueError(
                f"upload reads {error}, which no phase has computed; compute it in a phase, or "
                "change upload"
            ) from error


@cache
def chunk_bytes() -> int:
    """Return the size limit, in bytes, of a vectorized batch's client states, by CPU cache size.

    It is twice the size of the cache, within limits.

    Smaller chunks need more steps in Python, larger ones are limited by memory; the measured
    optimum is flat.
    """
    try:
        size = int(CACHE.read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        size = 2**25
    return min(max(2 * size, 2**25), 3 * 2**25)


def chunks(
    method: Method,
    data: Federation,
    state: RoundState,
    ids: Tensor,
    chunk_size: int | None,
    seed: Seed,
) -> Iterator[Tensor]:
    """Yield the client ids of each vectorized batch, the clients with most rows first."""
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; expected None or an integer >= 1")
    ids = ids[data.sizes[ids].argsort(descending=True, stable=True)]
    if chunk_size is not None:
        yield from ids.split(int(chunk_size))
        return
    received, private = client_inputs(method, data, state, data.cohort(ids[:1]), seed)
    most = max(1, chunk_bytes() // max(client_bytes(private | received), 1))
    row = data.x[0].numel() * data.x.element_size()
    while len(ids):  # all clients of a chunk are padded to its first, the longest
        fit = min(most, max(1, ROWS_BYTES // max(row * int(data.sizes[ids[0]]), 1)))
        some, ids = ids[:fit], ids[fit:]
        yield some
