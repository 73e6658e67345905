"""Metadata of methods: validation rules and roles of tensors by name, and round settings.

    metadata=Metadata({"tau": POSITIVE, "mu log_tau": SHARED}, train_all_clients=True)

Patterns of names are separated by spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

import torch
from torch import Generator, Tensor

from pyrofl.arguments import Number, check_fields
from pyrofl.data import Batch, Cohort, Federation
from pyrofl.inference.definition.budget import PrivacyAccountant
from pyrofl.inference.definition.programs import Program
from pyrofl.returned import as_numbers, as_tensors, calling
from pyrofl.tensors import Tensors, pick, role, sparse_bytes


@dataclass(frozen=True)
class Rule:
    """Validation rule for a tensor in messages; clients that violate it are rejected.

    Attributes:
        text: end of the message "found ...; expected".
        holds: value [C, *p] -> bool [C, ...], over all or the leading axes.
    """

    text: str
    holds: Callable[..., Tensor]

    def validate(self, name: str, value: Tensor) -> Tensor:
        """Return which entries of a tensor [C, *p] satisfy the rule, as bool [C, ...]."""
        what = f"rule {self.text!r} of {name!r}"
        with calling(what):
            is_valid = as_numbers(what, self.holds(value), (len(value), -1), torch.bool)
        if is_valid.shape != value.shape[: is_valid.dim()]:
            shape = list(value.shape)
            raise ValueError(
                f"{what} has shape {list(is_valid.shape)}; expected {shape}, or its leading axes"
            )
        return is_valid


@dataclass(frozen=True)
class JointRule(Rule):
    """Rule for several tensors of a remote client's message, and the server's state.

    Attributes:
        text: reason for rejecting a client that violates it.
        holds: (server, message [C, ...], cohort) -> bool [C].
    """

    holds: Callable[[Tensors, Tensors, Cohort], Tensor]

    def validate_message(self, server: Tensors, message: Tensors, cohort: Cohort) -> list[bool]:
        """Return whether each client's message satisfies the rule."""
        what = f"rule {self.text!r}"
        with torch.no_grad(), calling(what):
            is_valid = self.holds(server, message, cohort)
        held: list[bool] = as_numbers(what, is_valid, (len(cohort.ids),), torch.bool).tolist()
        return held


@dataclass(frozen=True)
class WireCost:
    """Metadata of a tensor that is sent in compressed form: its message size.

    Attributes:
        bytes: (name, all tensors of the message [C, ...]) -> bytes [C].
    """

    bytes: Callable[[str, Tensors], Tensor]

    def count(self, name: str, tensors: Tensors) -> Tensor:
        """Return the number of bytes that each client needs to send a tensor, int64 [C]."""
        what = f"the wire cost of {name!r}"
        with calling(what):
            num_bytes = self.bytes(name, tensors)
        return as_numbers(what, num_bytes, (len(tensors[name]),), torch.long).long()


@dataclass(frozen=True)
class Mark:
    """Label of tensors or sites, such as `SHARED` or `PER_CLIENT`, without parameters."""

    text: str


@dataclass(frozen=True)
class Moments:
    """Metadata of tensors that define a distribution: its means and standard deviations.

    Parameter changes are measured in these standard deviations.

    Attributes:
        of: all tensors -> site -> mean and standard deviation, [*p] each.
        undamped: whether a round in which all clients report applies their updates in full, so
            that one small change shows convergence.
        noise: of moments that are computed from draws: server -> the largest change from one round
            to the next, in standard deviations, that their Monte Carlo error explains.
        optimal: of a normal posterior that maximizes the ELBO: names of two local tensors that
            begin with its mean [C, n] and a root of its covariance, [C, n, n], or [C, n] of
            standard deviations.
    """

    of: Callable[[Tensors], dict[str, tuple[Tensor, Tensor]]]
    undamped: bool = False
    noise: Callable[[Tensors], float] | None = None
    optimal: tuple[str, str] | None = None

    def compute(self, tensors: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the mean and standard deviation of each sample site, [*p] each."""
        with calling("moments"):
            moments = {n: (mean, sd) for n, (mean, sd) in self.of(tensors).items()}
        for site, (mean, sd) in moments.items():
            of_mean = as_tensors("moments", {site: mean})[site]
            as_numbers(f"the sd of {site!r} by moments", sd, tuple(of_mean.shape), None)
        return moments


@dataclass(frozen=True)
class Factors:
    """Metadata of server tensors that hold each client's factor of the shared posterior.

    The tensors have a row for each client.

    Attributes:
        others: the `View` in which shared sites follow the product of all other clients' factors.
        densities: (server, cohort, draws of shared sites [S, *p], their log prior [S]) -> log
            densities [S] under the factors of all clients; under those of all others; and the
            latter with the part of the prior in this client's factor.
        replace: (server, factors of all clients by name [J, ...], generator) -> server with these
            factors; AggregationError if their product is not a distribution.
        without: (run, client, rounds) -> its last `RoundState` after further rounds without the
            client; the client's own factor and state are unchanged.
        normalized: whether the first two densities are normalized; if not, their common constant
            and the estimate of their ratio do not matter.
    """

    others: Callable[[Tensors, Tensors], Any]
    densities: Callable[[Tensors, Any, Tensors, Tensor], tuple[Tensor, Tensor, Tensor]]
    replace: Callable[[Tensors, Tensors, Generator], Tensors]
    without: Callable[[Any, str, int], Any]
    normalized: bool = True


@dataclass(frozen=True)
class Monitor:
    """Metadata of a number in the server state that is recorded in each round.

    Attributes:
        high: limit above which `Run.warnings` reports `why` after the last round; None for none.
        why: meaning and remedy of a high value, the end of a sentence.
        words: label of the number in figures; "" is its name.
        required: whether a run has not converged while the number is above its limit.
        lasting: whether further rounds do not help once it is so in two successive rounds.
    """

    high: Number | None = None
    why: str = ""
    words: str = ""
    required: bool = False
    lasting: bool = False

    def exceeded(self, value: float) -> bool:
        """Return whether a value is above the limit."""
        return self.high is not None and value > self.high


def normals(loc: str, width: str, sd: Callable[[Tensor], Tensor]) -> dict[str, Moments]:
    """Return `Moments` of normals with means in tensors "LOC/SITE" and sds from "WIDTH/SITE"."""

    def of(tensors: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        wide = role(width, tensors)
        return {n: (v, sd(wide[n])) for n, v in role(loc, tensors).items()}

    return {f"{loc}/* {width}/*": Moments(of)}


FINITE = Rule("a finite number", torch.isfinite)
POSITIVE = Rule("> 0", lambda value: value > 0)
NOT_NEGATIVE = Rule(">= 0", lambda value: value >= 0)
MODERATE = Rule(
    "at most 1e100, or 1e30 in single precision",  # so that products do not overflow
    lambda value: value.abs() <= (1e100 if value.dtype == torch.float64 else 1e30),
)
SHARE_RULE = Rule("0 to 1", lambda value: (value >= 0) & (value <= 1 + 1e-6))  # up to rounding

SPARSE = WireCost(lambda name, tensors: sparse_bytes({name: tensors[name]}))
"""Message size without zero entries."""

SHARED = Mark("one for all clients")
"""Of sites: every client has a copy of one value, such as of a population's mean; includes the
auxiliary sites of their guide. Their guide must not read tensors of a single client."""

PER_CLIENT = Mark("a row for every client")
"""Of server tensors [J, *p]: the rows of `init` belong to the clients in the order of names."""

REPORTED = Mark("reported as a statistic of clients")
"""Of server tensors with a row per client, reported without the prefix "server/"."""

INCOMPARABLE = Mark("a loss that rises by design")
"""Of the names of a gradient step: its losses in different rounds cannot be compared, as that of a
Markov chain, which leaves the mode, or one with a warm-up."""

CHANGES = Mark("sent as a change of the server's value")
"""Of all sent tensors: the server sums the differences of messages from its own tensors of the same
names. Noise may be added to these differences, so rules of a message need not hold any more."""

EXACT = Mark("a sum of exact messages")
"""Of server tensors that a message may change only by the numbers that its client records as sent:
clipping and noise would break the sum, so privacy is refused."""

TensorMetadata = Rule | WireCost | Moments | Factors | Monitor | Mark

MetadataByPattern = Mapping[str, TensorMetadata | tuple[TensorMetadata, ...]]
"""Patterns of names, separated by spaces -> metadata of the matching tensors."""


def keep_server_state(server: Tensors, cohort: Cohort) -> Tensors:
    """Return the server state unchanged when clients lose their states."""
    return server


def no_statistics(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    """Return an empty dict: the method has no client statistics."""
    return {}


@dataclass(frozen=True)
class LocalPair:
    """Model and guide of the distribution that clients fit, where it is not that of the method.

    `Method.to_pyro` returns them. In PVI this is the likelihood of a client's rows with the cavity
    distribution in the place of the prior.

    Attributes:
        model: The Pyro model.
        guide: The Pyro guide.
        names: Patterns of the local tensors that are parameters of the guide.
        download: (server, cohort) -> what the programs read of the server; None is the method's.
        start: (received, local, batch) -> tensors [C, *p] from which clients start in a round;
            ValueError where the model has no distribution.
        loss_difference: How the clients' own loss differs from the pair's ELBO, or empty.
    """

    model: Program
    guide: Program
    names: str
    download: Callable[[Tensors, Cohort], Tensors] | None
    start: Callable[[Tensors, Tensors, Batch], Tensors]
    loss_difference: str = ""


@dataclass(frozen=True)
class Metadata:
    """Metadata of a method: roles and rules of its tensors, and settings of its rounds.

    Attributes:
        tensors: Patterns of names -> rules of messages, message sizes, shared sites, distributions,
            tables with a row for every client.
        train_all_clients: Whether every client trains in every round; participation then selects
            the reporting clients.
        statistics: Client statistics besides scores: a function (received, local, batch) -> name:
            [C], or [C, *p] for `to_arviz` only, where "NAME/SITE" has the axes of the site.
        reset_clients: (server, cohort) -> server's state after these clients have lost theirs and
            start again by `init_client`; ValueError if it cannot be computed.
        reads: {"model": ...} and {"guide": ...}: the programs that functions of the method use
            directly, such as moments of the guide. `dataclasses.replace` of one raises ValueError.
        sites: Description of the shared and the client-specific sites; printed by `fit`.
        privacy: Differential privacy of the server's states, see `privacy.private`.
        pair: What `Method.to_pyro` returns instead of the method's own model and guide; a string
            states why there is none.
        alternative: data -> another method for the same model, which `fit` continues with if
            further rounds of this one do not help.
    """

    tensors: MetadataByPattern = field(default_factory=dict)
    train_all_clients: bool = False
    statistics: Callable[[Tensors, Tensors, Batch], Tensors] = no_statistics
    reset_clients: Callable[[Tensors, Cohort], Tensors] = keep_server_state
    reads: Mapping[str, Program] = field(default_factory=dict)
    sites: str = ""
    privacy: PrivacyAccountant | None = None
    pair: LocalPair | str | None = None
    alternative: Callable[[Federation], Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.train_all_clients, bool):
            raise ValueError(
                f"train_all_clients is {self.train_all_clients!r}; expected True or False"
            )
        if other := self.reads.keys() - {"model", "guide"}:
            raise ValueError(f"reads has the keys {sorted(other)}; valid are 'model' and 'guide'")
        for name, facts in self.tensors.items():
            if not isinstance(name, str):
                raise ValueError(
                    f"metadata has the key {name!r}; expected a string of name patterns"
                )
            for one in facts if isinstance(facts, tuple) else (facts,):
                if not isinstance(one, get_args(TensorMetadata)):
                    raise ValueError(
                        f"metadata of {name!r} is {facts!r}; expected a Rule, WireCost, Moments, "
                        "Factors, Monitor or Mark"
                    )
                try:
                    check_fields(one)
                except ValueError as error:
                    raise ValueError(f"metadata of {name!r}: {error}") from error

    def count(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Compute the method's client statistics, such as the number of pruned weights."""
        with calling("statistics"):
            statistics = self.statistics(received, local, batch)
        return as_tensors("what statistics returns", statistics, len(batch))

    def extend(self, tensors: MetadataByPattern | None = None, **changes: Any) -> Metadata:
        """Return a copy with metadata of additional tensors and other changed attributes."""
        return replace(self, tensors={**self.tensors, **(tensors or {})}, **changes)


Kind = TypeVar("Kind", JointRule, Rule, WireCost, Moments, Factors, Monitor, Mark)


def monitored_numbers(metadata: MetadataByPattern, server: Tensors) -> dict[str, float]:
    """Return the monitored numbers in the server state, by name without "server/"."""
    seen = pick(server, " ".join(names for names, _ in metadata_of_class(metadata, Monitor)))
    for name, value in seen.items():
        as_numbers(f"{name!r}, which a Monitor watches,", value, (), None)
    return {n.removeprefix("server/"): float(v) for n, v in seen.items()}


def unfinished_reason(
    metadata: MetadataByPattern,
    seen: Mapping[str, float],
    lasting: bool = False,
    times: float = 1.0,
) -> str:
    """Return why a run cannot have converged, given its monitored numbers; "" if it can.

    `lasting` numbers are those of which two successive rounds show that no further round helps.
    With `times`, the limits are that many times as high.
    """
    return "; ".join(
        f"{name} is {seen[name]:.2g}: {fact.why}"
        for names, fact in metadata_of_class(metadata, Monitor)
        if fact.required
        and fact.lasting == lasting
        and fact.exceeded(seen[name := names.removeprefix("server/")] / times)
    )


def metadata_of_class(metadata: MetadataByPattern, kind: type[Kind]) -> list[tuple[str, Kind]]:
    """Return all metadata of one class, such as `Monitor`, each after its name patterns."""
    each = ((n, f if isinstance(f, tuple) else (f,)) for n, f in metadata.items())
    return [(names, fact) for names, facts in each for fact in facts if isinstance(fact, kind)]


def marked_names(metadata: MetadataByPattern, mark: Mark) -> str:
    """Return the name patterns with a given label, such as `SHARED`, joined by spaces."""
    return " ".join(names for names, fact in metadata_of_class(metadata, Mark) if fact == mark)
