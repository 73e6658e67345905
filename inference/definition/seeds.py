"""Seeds of a run, and independent random number streams for each purpose.

Partitions use NumPy's streams instead, keyed by (seed, purpose); see `federations`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral
from typing import Any

from torch import Generator

from pyrofl.tensors import generator


class Stream(IntEnum):
    """Purposes for which a run has separate random number streams.

    The comments name the further parts of each stream's key.

    A client is identified by its name: its draws depend neither on its position in the federation
    nor on the other clients.
    """

    START = 1  # initial server state, and the common initial values of clients
    WHO = 2  # round: training and reporting clients
    WORK = 3  # round, client: fraction of its work that a client does, and whether it drops out
    ORDER = 4  # round, client: order of a client's rows, as it trains from that round's state
    NOISE = 5  # round, client: Monte Carlo noise of a client that trains
    MERGE = 6  # round: draws of the server
    TEST = 7  # round, client: draws of the guide; without client: of shared sites
    PRIOR = 8  # the same, of the prior
    ROWS = 9  # TEST or PRIOR, round, client: replicated responses; SAMPLER, chain
    SAMPLER = 10  # chain: draws of Pyro's samplers and automatic guides
    PRIVACY = 12  # round, client: noise of a message, see `PrivacyAccountant.privatize`
    CONFORMAL = 13  # client: calibration rows; client, purpose: uniform numbers of scores
    CALIBRATION = 11  # seeds of replications; and, by those seeds, ties of ranks


SEED_OF = {Stream.START: "init", Stream.WHO: "participation", Stream.WORK: "participation"}


@dataclass(frozen=True)
class Seeds:
    """Separate seeds of a run for initialization, participation and noise.

    Partitions have their own seed, see `federations.split`.

    Attributes:
        init: seed of the initial server state and the common initial values of clients.
        participation: seed of client sampling, dropout and stragglers.
        noise: seed of minibatches, Monte Carlo noise, and draws of the server and of evaluations.
    """

    init: int = 0
    participation: int = 0
    noise: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
                raise ValueError(f"seed of {name} is {value!r}; expected a whole number >= 0")


Seed = int | Seeds
"""One seed for all, or several."""


def separate(seed: Seed) -> Seeds:
    """Return `Seeds`, which contains a seed for each purpose; an int is used for all of them."""
    return seed if isinstance(seed, Seeds) else Seeds(seed, seed, seed)


def later(seed: Seed, k: int) -> Seed:
    """Return a seed increased by k; of several seeds (`Seeds`), each is increased by k."""
    if not isinstance(seed, Seeds):
        return seed + k
    return Seeds(seed.init + k, seed.participation + k, seed.noise + k)


def resumed_seed(seed: Seed | None, last: Seed | None) -> Seed:
    """Return the given seed, else the resumed run's, else 0; raise ValueError if both differ."""
    if seed is None or last is None:
        return next(value for value in (seed, last, 0) if value is not None)
    if separate(seed) != separate(last):
        raise ValueError(
            f"seed is {seed}, but the resumed run has seed {last}; pass that seed or None"
        )
    return seed


def stream(seed: Seed, purpose: Stream, *key: int | str) -> Generator:
    """Return the random generator of a run for a purpose and a key; see `Stream`."""
    return generator(getattr(separate(seed), SEED_OF.get(purpose, "noise")), purpose, *key)


class Streams(Sequence[Generator]):
    """Sequence of random generators of clients, each created when it is first needed."""

    def __init__(self, make: Callable[[str], Generator], names: Sequence[str]) -> None:
        """Store the clients' names and the function that creates a client's generator."""
        self.make, self.names = make, names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return Streams(self.make, self.names[at])
        return self.make(self.names[at])
