"""One federated round: server request, local training, replies and server aggregation.

`round.run_round` runs a round: it sends a `RoundRequest` to the clients by a `Backend`, collects
their replies and aggregates the messages. `round.LocalClients` is the backend of clients in this
process; `pyrofl.inference.transport` has those of remote clients.
"""
