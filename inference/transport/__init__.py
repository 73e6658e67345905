"""Rounds whose clients are elsewhere: on other machines, or in processes of their own.

`Server` and `Client` exchange orders and replies over a wire, such as Flower:

    server = Server(method, names, sizes, dtype, seed, state=folder)     at the server, without rows
    client = Client(method, data, seed, state=folder)                    at every site

    for _ in range(rounds):
        orders = server.configure_train()
        server.aggregate_train({name: train(name, order) for name, order in orders.items()})
    questions = server.configure_evaluate(model="personal")
    scores = server.scores({name: test(name, asked) for name, asked in questions.items()})

where `train` and `test` call client.train(order) and client.evaluate(asked) at the site `name`.

Both sides build the same method; clients need not have what only a server needs, such as FedBE's
unlabeled rows (`distil="none"`). `pyrofl.validate_method(method, data)` validates it on a client's
own data.

Orders and replies are flat dicts: tensors with an axis for clients in front, numbers and names.
They go through any wire that keeps tensors as they are; `federate` is the same without a wire.

Commit and rollback: a client keeps what it made of a round as pending. The next order states the
last round whose message was merged; if that is the pending one it is committed, or else the client
goes back to what it had. So replies may be lost, and servers and clients may stop at any time.
Who has no order may be down: a client that is called and does not reply is `silent` in the round.

With engine="ray" (`pool`, `worker`, `ray`) every worker process has the rows of some clients, and
what these keep stays with it. What comes of it is the same up to rounding. Workers trust each other
and the caller: they share programs, requests and replies by pickle, so that this is for the
machines of one owner; sites that keep their rows from others use `Server` and `Client`.
"""

from pyrofl.inference.transport.client import Client
from pyrofl.inference.transport.server import Server

__all__ = ["Client", "Server"]
