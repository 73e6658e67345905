"""Federated rounds with clients on other machines or in worker processes.

`Server` and `Client` exchange requests and replies over a transport, such as Flower:

    server = Server(method, names, sizes, dtype, seed, state=folder)     at the server, without rows
    client = Client(method, data, seed, state=folder)                    at every site

    for _ in range(rounds):
        orders = server.configure_train()
        server.aggregate_train({name: train(name, order) for name, order in orders.items()})
    questions = server.configure_evaluate(model="personal")
    scores = server.aggregate_evaluate({name: test(name, spec) for name, spec in questions.items()})

where `train` and `test` call client.train(order) and client.evaluate(spec) at the site `name`.

Both sides build the same method; clients need not have what only a server needs, such as FedBE's
unlabeled rows (`distil="none"`). `pyrofl.validate_method(method, data)` validates it on a client's
own data.

Requests and replies are flat dicts: tensors with the axis of clients first, numbers and names. Any
transport that preserves tensors can send them; `federate` gives the same results without one.

Commit and rollback: a client stores its new state of a round as pending. The next request has the
last round with an aggregated message; if that is the pending one it is committed, otherwise the
client returns to its previous state. So replies may be lost, and servers and clients may stop at
any time. Clients without a request may be offline; a selected client without a reply is `silent`.

After the last round, `correction` weighs posterior draws of the shared sites by the clients'
marginal likelihoods, as `to_arviz` does with all rows in one process.

With engine="ray" (`pool`, `worker`, `ray`) every worker process has the rows and states of some
clients. Results are equal up to rounding. Workers trust each other and the caller: they exchange
programs, requests and replies by pickle, so all machines must have one owner; sites that must not
share their rows use `Server` and `Client`.
"""

from pyrofl.inference.transport.client import Client
from pyrofl.inference.transport.server import Server

__all__ = ["Client", "Server"]
