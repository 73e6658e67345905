"""Metadata of methods: rules and roles of tensors by their names, and settings of a federation.

    metadata=Metadata({"tau": POSITIVE, "mu log_tau": SHARED}, train_all_clients=True)

Patterns of names are separated by spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from pyrofl.arguments import Number, check_fields
from pyrofl.data import Batch, Cohort
from pyrofl.inference.budget import PrivacyAccountant
from pyrofl.inference.programs import Program
from pyrofl.returned import as_numbers, as_tensors, calling
from pyrofl.tensors import Tensors, pick, role, sparse


@dataclass(frozen=True)
class Rule:
    """What entries of a message must be; a client that breaks a rule is rejected.

    Attributes:
        text: ends the sentence "found ...; expected".
        holds: value [C, *p] -> bool [C, ...], over all or the leading axes.
    """

    text: str
    holds: Callable[[Tensor], Tensor]

    def validate(self, name: str, value: Tensor) -> Tensor:
        """Return which entries of a tensor [C, *p] hold, bool [C, ...]; see `holds`."""
        what = f"rule {self.text!r} of {name!r}"
        with calling(what):
            found = as_numbers(what, self.holds(value), (len(value), -1), torch.bool)
        if found.shape != value.shape[: found.dim()]:
            shape = list(value.shape)
            raise ValueError(
                f"{what} has shape {list(found.shape)}; expected {shape}, or its start"
            )
        return found


@dataclass(frozen=True)
class WireCost:
    """What a tensor costs on the wire where that is not all its entries.

    Attributes:
        bytes: (name, all tensors that travel with it [C, ...]) -> bytes [C].
    """

    bytes: Callable[[str, Tensors], Tensor]

    def count(self, name: str, tensors: Tensors) -> Tensor:
        """Return the bytes of a tensor, int64 [C]; see `bytes`."""
        what = f"the wire cost of {name!r}"
        with calling(what):
            found = self.bytes(name, tensors)
        return as_numbers(what, found, (len(tensors[name]),), torch.long).long()


@dataclass(frozen=True)
class Mark:
    """A fact without any number, such as `SHARED` and `PER_CLIENT`."""

    text: str


@dataclass(frozen=True)
class Moments:
    """Of tensors that state a distribution: how far its sites move is counted in their sds.

    Attributes:
        of: all tensors -> site -> mean and standard deviation, [*p] each.
    """

    of: Callable[[Tensors], dict[str, tuple[Tensor, Tensor]]]

    def compute(self, tensors: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        """Return site -> mean and standard deviation; see `of`."""
        with calling("moments"):
            found = {n: (mean, sd) for n, (mean, sd) in self.of(tensors).items()}
        for site, (mean, sd) in found.items():
            of_mean = as_tensors("moments", {site: mean})[site]
            as_numbers(f"the sd of {site!r} by moments", sd, tuple(of_mean.shape), None)
        return found


@dataclass(frozen=True)
class Factors:
    """Of tables with a row for every client: what each says of the shared sites, a factor of all.

    Attributes:
        others: the `View` in which shared sites follow the product of all other clients' factors.
        densities: (server, cohort, draws of shared sites [S, *p], their log prior [S]) -> log
            densities [S], the first two normalised: under what all clients say; under what all
            others say; and the latter with what this client's factor held of the prior.
        without: (run, client, rounds) -> its last `RoundState`, in which all others have had so
            many rounds without the client, whose own factor and state are what they were.
    """

    others: Callable[[Tensors, Tensors], Any]
    densities: Callable[[Tensors, Any, Tensors, Tensor], tuple[Tensor, Tensor, Tensor]]
    without: Callable[[Any, str, int], Any]


@dataclass(frozen=True)
class Monitor:
    """Of one number that the server holds, [], named after what it tells: every round notes it.

    Attributes:
        high: where it is above this in the last round, `Run.notes` has `why`; None never does.
        why: what that means and what to do, the end of a sentence.
        words: what the number is, for the axis of a figure; "" is its name.
    """

    high: Number | None = None
    why: str = ""
    words: str = ""


@dataclass(frozen=True)
class Optimal:
    """Of the normal of sites that clients share: a fit that has converged has its best ELBO.

    Attributes:
        mean: name of its mean in what programs read as local, [C, n] with n >= d.
        root: name of a root of its covariance, [C, n, n], or [C, n] of standard deviations.
        sites: name -> number of entries without constraints, d in all; they come first.
    """

    mean: str
    root: str
    sites: Mapping[str, int]


def normals(loc: str, width: str, sd: Callable[[Tensor], Tensor]) -> dict[str, Moments]:
    """Say that "LOC/SITE" and "WIDTH/SITE" state a normal: its mean, and what `sd` makes its sd."""

    def of(tensors: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        wide = role(width, tensors)
        return {n: (v, sd(wide[n])) for n, v in role(loc, tensors).items()}

    return {f"{loc}/* {width}/*": Moments(of)}


FINITE = Rule("a finite number", torch.isfinite)
POSITIVE = Rule("> 0", lambda value: value > 0)
NOT_NEGATIVE = Rule(">= 0", lambda value: value >= 0)
SHARE = Rule("0 to 1", lambda value: (value >= 0) & (value <= 1 + 1e-6))  # but for rounding

SPARSE = WireCost(lambda name, tensors: sparse({name: tensors[name]}))
"""Zeros stay at home."""

SHARED = Mark("one for all clients")
"""Of sites: every client has a copy, such as of a population's mean; with the auxiliary sites of
their guide. Their guide reads nothing of the client's own, so draws agree once the noise does."""

PER_CLIENT = Mark("a row for every client")
"""Of what the server holds, [J, *p]: the rows that `init` gives are dealt in the order of names."""

REPORTED = Mark("told as a statistic of clients")
"""Of what the server holds of every client, without its "server/"."""

INCOMPARABLE = Mark("a loss that rises as it should")
"""Of what a gradient step moves: its loss in this round is not to be compared with that of others,
as it is the energy of a chain, which wanders away from a peak, or a term of it is warming up."""

CHANGES = Mark("sent as a change of what the server has")
"""Of all that clients send, by names of the server's, which adds up what messages differ from what
it has: noise may be added to that difference, and rules of a message need not hold any more."""

TensorMetadata = Rule | WireCost | Moments | Factors | Monitor | Optimal | Mark

MetadataByPattern = Mapping[str, TensorMetadata | tuple[TensorMetadata, ...]]
"""Patterns of names, separated by spaces -> what holds for them."""


def keep_server_state(server: Tensors, cohort: Cohort) -> Tensors:
    """Return the server's state unchanged, where nothing in it depends on a client's state."""
    return server


def no_statistics(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    """Return no client statistics."""
    return {}


@dataclass(frozen=True)
class Metadata:
    """Metadata of a method: what holds for its tensors, and how it is run.

    Attributes:
        tensors: Patterns of names -> rules that messages must obey, sites that all clients share,
            tables with a row for every client, costs on the wire.
        train_all_clients: Whether every client trains in every round; participation then decides
            who reports.
        statistics: What the paper reports about clients besides scores: a closed-form update
            (received, local, batch) -> name: [C], or [C, *p] for `to_arviz` alone, where
            "NAME/SITE" has the axes of the site.
        reset_clients: (server, cohort) -> server's state after these clients have lost theirs and
            start again by `init_client`; ValueError if it cannot be computed.
        reads: {"model": ...} and {"guide": ...}: the programs that functions of the method use
            directly, such as moments of the guide. `dataclasses.replace` of one is refused.
        sites: Which sites of the model clients share, and which are their own; printed by `fit`.
        privacy: Differential privacy of the server's states, see `privacy.private`.
    """

    tensors: MetadataByPattern = field(default_factory=dict)
    train_all_clients: bool = False
    statistics: Callable[[Tensors, Tensors, Batch], Tensors] = no_statistics
    reset_clients: Callable[[Tensors, Cohort], Tensors] = keep_server_state
    reads: Mapping[str, Program] = field(default_factory=dict)
    sites: str = ""
    privacy: PrivacyAccountant | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.train_all_clients, bool):
            raise ValueError(f"train_all_clients is {self.train_all_clients!r}; expected a bool")
        if other := self.reads.keys() - {"model", "guide"}:
            raise ValueError(f"reads has {sorted(other)}; expected 'model' or 'guide'")
        for name, known in self.tensors.items():
            if not isinstance(name, str):
                raise ValueError(f"metadata has the name {name!r}; expected patterns of names")
            for one in known if isinstance(known, tuple) else (known,):
                if not isinstance(one, get_args(TensorMetadata)):
                    raise ValueError(
                        f"metadata of {name!r} is {known!r}; expected a Rule or its like"
                    )
                try:
                    check_fields(one)
                except ValueError as error:
                    raise ValueError(f"metadata of {name!r}: {error}") from error

    def count(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Return the statistics of clients, [C, ...] each; see `statistics`."""
        with calling("statistics"):
            found = self.statistics(received, local, batch)
        return as_tensors("what statistics returns", found, len(batch))

    def extend(self, tensors: MetadataByPattern | None = None, **changes: Any) -> Metadata:
        """Return a copy with the metadata of more tensors, and other values of attributes."""
        return replace(self, tensors={**self.tensors, **(tensors or {})}, **changes)


Kind = TypeVar("Kind", Rule, WireCost, Moments, Factors, Monitor, Optimal, Mark)


def watched(metadata: MetadataByPattern, server: Tensors) -> dict[str, float]:
    """Return the numbers of the server's that are `Monitor`, by their names without "server/"."""
    seen = pick(server, " ".join(of_kind(metadata, Monitor)))
    for name, value in seen.items():
        as_numbers(f"{name!r}, which a Monitor watches,", value, (), None)
    return {n.removeprefix("server/"): float(v) for n, v in seen.items()}


def of_kind(metadata: MetadataByPattern, kind: type[Kind]) -> dict[str, Kind]:
    """Return patterns -> their fact of a kind."""
    each = ((n, f if isinstance(f, tuple) else (f,)) for n, f in metadata.items())
    return {names: fact for names, known in each for fact in known if isinstance(fact, kind)}


def marked(metadata: MetadataByPattern, mark: Mark) -> str:
    """Return the patterns that have a mark, as one."""
    each = ((n, f if isinstance(f, tuple) else (f,)) for n, f in metadata.items())
    return " ".join(names for names, known in each if any(fact == mark for fact in known))
