"""Differential privacy: settings, and the privacy budget spent by the rounds of a run.

Two federations are neighbors if they differ in one client, whose contribution is replaced by zeros
in one of them: privacy protects clients, not rows. A run is (epsilon, delta)-private if for all
neighbors and all sets of results P(result in set) <= e^epsilon P'(result in set) + delta.

The accountant is Google's dp-accounting, with Renyi orders; it is an extra: pip
install -e '.[privacy]'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal, NamedTuple

from torch import Generator

from pyrofl.arguments import Range, Whole, check_fields
from pyrofl.tensors import Tensors

Finite = Annotated[float, Range(0, open_low=True, open_high=True)]
SEEDED = "not private: seeded"
Chance = Annotated[float, Range(0, 1, open_low=True, open_high=True)]


@dataclass(frozen=True)
class Privacy:
    """Settings of differential privacy: clipping and noise of the clients' contributions.

    Attributes:
        clip: largest norm, over all tensors, of a client's contribution to a sum.
        noise_multiplier: standard deviation of the noise of a sum, in units of `clip`.
        delta: probability that the bound epsilon fails; smaller than 1 over the clients.
        where: "server" adds noise to the sum over clients: clients trust the server, but not the
            readers of its state. With "client" each client adds the same noise to its own message,
            and trusts no one.
        max_weight: for methods that weight clients by sent values, as pFedVEM by confidences: the
            weight that counts as 1; larger ones are reduced to it. Weights by numbers of rows,
            which are secret, are replaced by equal weights.
        seed: None draws the noise from the operating system's entropy. A number makes it
            repeatable, for teaching and tests: anyone with the number can subtract the noise,
            so all outputs then state "not private: seeded".
    """

    clip: Finite
    noise_multiplier: Finite
    delta: Chance = 1e-5
    where: Literal["server", "client"] = "server"
    max_weight: Finite = 1.0
    seed: Whole | None = None

    def __post_init__(self) -> None:
        check_fields(self)


class Sampling(NamedTuple):
    """Client sampling scheme of a round, as needed by the privacy accountant."""

    law: Literal["all", "without replacement", "each by itself"]
    expected: float  # expected clients of a round
    redraw_probability: float = (
        0.0  # probability that a client participates because an empty draw was rejected
    )


class PrivacySpent(NamedTuple):
    """Privacy spent by a run: its epsilon and delta, and the epsilon of each client.

    The run's epsilon holds against observers of the server's states who do not know which clients
    took part; a client's epsilon also against those who know. `bound` names the analysis that
    gives it. `seeded` is True where the noise can be repeated from a seed, and then subtracted.
    """

    epsilon: float
    delta: float
    clients: tuple[float, ...]
    bound: str
    seeded: bool = False

    @property
    def label(self) -> str:
        """Return the table label of the privacy loss epsilon, with a note if noise is seeded."""
        return f"epsilon ({SEEDED})" if self.seeded else "epsilon"

    def __str__(self) -> str:
        text = f"epsilon {self.epsilon:.4g} at delta {self.delta:g} per client ({self.bound})"
        if large := too_large(self.delta, len(self.clients)):
            text = f"{text}; {large}"
        return f"{text}; {SEEDED}" if self.seeded else text


def too_large(delta: float, clients: int) -> str:
    """Return a warning if delta is too large for the number of clients, or else ""."""
    if delta * clients < 1:
        return ""
    return (
        f"delta is {delta:g}, with {clients} clients: publishing all rows of one client drawn at "
        f"random would be as private; set delta well below 1 / {clients}"
    )


@dataclass(frozen=True)
class PrivacyAccountant:
    """Accountant that computes the differential privacy spent by a run.

    Attributes:
        privacy: Bounds and noise.
        clients: Number of training clients.
        sampling: Sampling of a round's clients.
        privatize: Client: (received, message [C, ...], one generator per client) -> message with
            noise, of the same names and shapes; None if the server adds the noise.
    """

    privacy: Privacy
    clients: int
    sampling: Sampling
    privatize: Callable[[Tensors, Tensors, Sequence[Generator]], Tensors] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if dp-accounting is not installed."""
        if find_spec("dp_accounting") is None:
            raise ValueError(
                "privacy needs dp-accounting to compute epsilon, which is not installed; run "
                "pip install -e '.[privacy]' in the clone"
            )

    def spent(self, rounds: int, times: Sequence[int]) -> PrivacySpent:
        """Return the privacy spent, given the run's number of rounds and each client's, [J]."""
        if len(times) != self.clients:
            raise ValueError(
                f"the method was made private for {self.clients} clients, but {len(times)} train; "
                "call privacy.private again for this number of clients"
            )
        noise, delta, law = self.privacy.noise_multiplier, self.privacy.delta, self.sampling.law
        seeded = self.privacy.seed is not None
        epsilon_by_rounds = {
            n: _epsilon("REPLACE_SPECIAL", ("Gaussian", noise), n, delta) for n in {*times}
        }
        each = tuple(epsilon_by_rounds[n] for n in times)
        worst, assumption = (
            max(each, default=0.0),
            "Gaussian noise in each round that it took part in",
        )
        if self.privacy.where == "client" or law == "all":
            return PrivacySpent(worst, delta, each, assumption, seeded)
        share = self.sampling.expected / self.clients
        if law == "each by itself":
            event: tuple[Any, ...] = ("PoissonSampled", share, ("Gaussian", noise))
            bound, relation = f"Poisson sampling, fraction {share:g}", "REPLACE_SPECIAL"
        else:  # replacing a contribution by zeros is a replacement; its bound is twice the clip
            many = round(self.sampling.expected)
            event = ("SampledWithoutReplacement", self.clients, many, ("Gaussian", noise / 2))
            bound = f"sampling {many} of {self.clients} without replacement, replace-one"
            relation = "REPLACE_ONE"
        left = delta - rounds * self.sampling.redraw_probability
        amplified = _epsilon(relation, event, rounds, left) if left > 0 else worst
        if amplified >= worst:
            return PrivacySpent(worst, delta, each, assumption, seeded)
        return PrivacySpent(
            amplified, delta, each, f"{bound}; the participation seed must be secret", seeded
        )


def _epsilon(relation: str, event: tuple[Any, ...], times: int, delta: float) -> float:
    """Return the epsilon of a private mechanism, such as Gaussian noise, applied `times` times."""
    if not times:
        return 0.0
    from dp_accounting import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(neighboring_relation=NeighboringRelation[relation])
    return float(accountant.compose(_event(event), times).get_epsilon(delta))


def _event(words: tuple[Any, ...]) -> Any:
    """Convert a nested tuple, such as ("Gaussian", 1.0), to a dp-accounting event."""
    import dp_accounting

    name, *values = words
    inner = [_event(v) if isinstance(v, tuple) else v for v in values]
    return getattr(dp_accounting, f"{name}DpEvent")(*inner)
