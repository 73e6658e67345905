"""A site of several clients trains them in chunks by memory, as `federate` does."""

from __future__ import annotations

import pytest
import toys

from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine import state
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.transport import Client, Server
from pyrofl.models import pfedvem, scaffold

DATA = toys.blobs()


def trained(method: Method) -> RoundState:
    """Return the round after three, of one site that has all clients, in another order."""
    server, client = Server(method, DATA.names, DATA.sizes, DATA.dtype, 0), Client(method, DATA, 0)
    for _ in range(3):
        orders = server.configure_train({"site": DATA.names[::-1]})
        last = server.aggregate_train({name: client.train(order) for name, order in orders.items()})
    assert last.rejected == ()
    return last


@pytest.mark.parametrize("build", [pfedvem.build, scaffold.build])
def test_chunks_of_one_client_give_what_one_chunk_gives(build, monkeypatch):
    whole = trained(build(toys.net()))
    monkeypatch.setattr(state, "chunk_bytes", lambda: 1)
    apart = trained(build(toys.net()))
    toys.assert_same(whole.server, apart.server, rtol=0, atol=1e-12)
    toys.assert_same(whole.loss, apart.loss, rtol=0, atol=1e-12)
    assert whole.steps.tolist() == apart.steps.tolist()
