"""States of the clients of one machine, and how requests of a remote server read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyrofl.data import Cohort
from pyrofl.data.shard import Shard
from pyrofl.inference.engine.client_states import none
from pyrofl.inference.engine.state import RoundState
from pyrofl.tensors import Tensors, cut


@dataclass(frozen=True)
class ClientRecord:
    """State of one client: committed, and pending until the server confirms its aggregation."""

    merged: int = 0  # last round with an aggregated message; 0 is none
    client_state: Tensors | None = None  # client state; None for a new client
    round: int = 0  # round of the pending state; 0 is none
    pending: Tensors = field(default_factory=dict)  # client state after that round

    def settled(self, accepted: int) -> ClientRecord:
        """Commit the pending client state if it belongs to round `accepted`; else drop it.

        A pending state of another round is discarded.
        """
        if self.round and self.round == accepted:
            return ClientRecord(accepted, self.pending)
        return ClientRecord(self.merged, self.client_state)


def as_sent(ids: Tensor) -> Callable[[Tensors, Cohort], Tensors]:
    """Return a download function that reads tensors already received, in place of server state."""

    def download(server: Tensors, some: Cohort) -> Tensors:
        """Return the received tensors of the clients in a cohort."""
        place = (some.ids.cpu()[:, None] == ids).int().argmax(1)
        return cut(server, place.to(some.ids.device))

    return download


def state_of(
    shard: Shard, rounds: int, server: Tensors, records: Mapping[str, ClientRecord]
) -> RoundState:
    """Build the previous round's state from received server tensors and stored client records."""
    states, seen = none(shard.clients, len(records)), torch.zeros(shard.clients, dtype=torch.bool)
    for name, one in records.items():
        if one.client_state is not None:
            at = torch.tensor([shard.names.index(name)])
            seen[at] = True
            states = states.updated(
                states.write(at, {n: v[None] for n, v in one.client_state.items()})
            )
    return RoundState(rounds, server, states, seen)
