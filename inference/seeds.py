"""Seeds, and the stream of random numbers of every purpose; no two streams meet.

Who holds what is drawn from NumPy's streams instead, keyed by (seed, purpose); see `federations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral

from torch import Generator

from pyrofl.tensors import generator


class Stream(IntEnum):
    """What a random stream is for; its key goes on with what is named here.

    A client is named by its name: what it draws depends neither on its place in the federation nor
    on who else is there.
    """

    START = 1  # first server state, and the common start of clients
    WHO = 2  # round: who trains and who reports
    WORK = 3  # round, client: how much of its work a client does, and whether it is heard
    ORDER = 4  # round, client: order of a client's rows, as it trains from that round's state
    NOISE = 5  # round, client: Monte Carlo noise of a client that trains
    MERGE = 6  # round: draws of the server
    TEST = 7  # round, client: draws of the guide; without client: of the sites that clients share
    PRIOR = 8  # the same, of the prior
    ROWS = 9  # TEST or PRIOR, round, client: responses drawn again; SAMPLER, chain
    SAMPLER = 10  # chain: draws of Pyro's samplers and automatic guides
    PRIVACY = 12  # round, client: what a client adds to its message, see `Method.privatize`
    CALIBRATION = 11  # seeds of replications; and, by those seeds, ties of ranks


SEED_OF = {Stream.START: "init", Stream.WHO: "participation", Stream.WORK: "participation"}


@dataclass(frozen=True)
class Seeds:
    """Seeds of a run, of which one may change while what the others fix stays.

    Who holds what has a seed too, that of `federations.split`.

    Attributes:
        init: of the first server state and the common start of clients.
        participation: of who trains, reports, is heard, and does how much of its work.
        noise: of all else: order of rows, Monte Carlo noise, draws of the server and of tests.
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
    """Return the seed of each purpose."""
    return seed if isinstance(seed, Seeds) else Seeds(seed, seed, seed)


def later(seed: Seed, k: int) -> Seed:
    """Return the seed that is k numbers later; of several, each."""
    if not isinstance(seed, Seeds):
        return seed + k
    return Seeds(seed.init + k, seed.participation + k, seed.noise + k)


def continued(seed: Seed | None, last: Seed | None) -> Seed:
    """Return the seed of a run: the last one, where it goes on from another run, or else 0."""
    if seed is None or last is None:
        return next(known for known in (seed, last, 0) if known is not None)
    if separate(seed) != separate(last):
        raise ValueError(f"seed is {seed}; expected {last}, that of the start, or None")
    return seed


def stream(seed: Seed, purpose: Stream, *key: int | str) -> Generator:
    """Return a run's random generator of a purpose; `Stream` names its key: a round, a client."""
    return generator(getattr(separate(seed), SEED_OF.get(purpose, "noise")), purpose, *key)
