"""Check that a remote server samples clients as the accountant of a private method assumes."""

from __future__ import annotations

from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seeds
from pyrofl.inference.engine.participation import Draw, sampling_of


def refuse_other_sampling(method: Method, clients: int, participation: Draw, seed: Seeds) -> None:
    """Raise ValueError if epsilon would count a sampling that is not made, or that clients know.

    The seeds of init and noise are sent to the clients, who could predict a sample drawn by them.
    """
    promise = method.metadata.privacy
    if promise is None:
        return
    actual, counted = sampling_of(participation, clients), promise.sampling
    if promise.clients != clients or actual != counted:
        raise ValueError(
            f"the method was made private for {promise.clients} clients with sampling "
            f"{counted.law!r} of {counted.expected:g}, but this server has {clients} clients and "
            f"sampling {actual.law!r} of {actual.expected:g}; pass the same participation to both"
        )
    is_secret = seed.participation not in (seed.init, seed.noise)
    if promise.privacy.where == "server" and counted.law != "all" and not is_secret:
        raise ValueError(
            "epsilon counts sampling that clients cannot predict, but the seed of participation is "
            "one of those that are sent to clients; pass seed=pyrofl.Seeds(init=..., noise=..., "
            "participation=secrets.randbits(62)) to the server"
        )
