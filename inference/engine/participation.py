"""Participation in rounds: sampling of clients, dropout and stragglers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from pyrofl.arguments import WORDS, Count, PositiveShare, Share, Whole, check_fields, checked
from pyrofl.inference.definition.budget import Sampling
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.definition.seeds import Seed, Stream, stream
from pyrofl.returned import calling

Draw = Callable[[Generator, int], Tensor]
"""(generator, clients) -> sampled ids, int64."""

WORDS[Draw] = "a function: participation.fraction(0.4), participation.fixed(10) or your own"


def everyone(_: Generator, clients: int) -> Tensor:
    """Return the ids of all clients: full participation in each round."""
    return torch.arange(clients)


@dataclass(frozen=True)
class SamplingDraw:
    """Client sampling function with known probabilities, as privacy accounting needs.

    Attributes:
        draw: function that samples the ids.
        sampling: number of clients -> probabilities.
    """

    draw: Draw
    sampling: Callable[[int], Sampling]

    def __call__(self, generator: Generator, clients: int) -> Tensor:
        """Return the ids of the sampled clients."""
        return self.draw(generator, clients)


def sampling_of(draw: Draw, clients: int) -> Sampling:
    """Return the sampling scheme of a client sampling function; raise ValueError if unknown."""
    if draw is everyone:
        return Sampling("all", clients)
    if isinstance(draw, SamplingDraw):
        return draw.sampling(clients)
    raise ValueError(
        f"participation is {getattr(draw, '__name__', type(draw).__name__)}, with unknown sampling "
        "probabilities; with privacy, use everyone, fixed, fraction or bernoulli"
    )


@checked
def fixed(count: Count) -> Draw:
    """Return a function that samples `count` clients uniformly without replacement."""

    def draw(generator: Generator, clients: int) -> Tensor:
        if count > clients:
            raise ValueError(
                f"count of participants is {count}; expected at most {clients}, the number of "
                "clients"
            )
        return torch.randperm(clients, generator=generator)[:count]

    return SamplingDraw(draw, lambda clients: Sampling("without replacement", count))


@checked
def fraction(share: PositiveShare) -> Draw:
    """Return a function that samples a fraction of the clients without replacement.

    It samples at least one client.
    """

    def many(clients: int) -> int:
        return max(1, round(share * clients))

    return SamplingDraw(
        lambda generator, clients: fixed(many(clients))(generator, clients),
        lambda clients: Sampling("without replacement", many(clients)),
    )


@checked
def bernoulli(probability: PositiveShare, min_clients: Whole = 2) -> Draw:
    """Return a function that samples each client independently with the given probability.

    It draws again while there are too few (pFedVEM).

    Raises:
        ValueError: when drawing, if there are fewer than `min_clients` clients, or a thousand draws
            returned too few.
    """

    def draw(generator: Generator, clients: int) -> Tensor:
        for _ in range(1000):
            ids = (torch.rand(clients, generator=generator) < probability).nonzero().flatten()
            if len(ids) >= min_clients:
                return ids
        raise ValueError(
            f"probability of reporting is {probability}; a thousand draws from {clients} clients "
            f"gave fewer than {min_clients} each; increase the probability or lower min_clients"
        )

    def sampling(clients: int) -> Sampling:
        from scipy.stats import binom

        enough = binom(clients, probability).sf(min_clients - 1)
        only = (
            probability * binom(clients - 1, probability).pmf(min_clients - 1)
            if min_clients
            else 0.0
        )
        return Sampling("each by itself", probability * clients, float(only / enough))

    return SamplingDraw(draw, sampling)


def validate_ids(ids: Tensor, clients: int) -> Tensor:
    """Return client ids in ascending order; raise ValueError if empty, repeated or unknown."""
    if not torch.is_tensor(ids) or ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        kind = f"{ids.dtype} {list(ids.shape)}" if torch.is_tensor(ids) else type(ids).__name__
        raise ValueError(f"a draw of clients returns {kind}; expected ids, int64 [C]")
    ids = ids.long().sort().values
    again = bool((ids[1:] == ids[:-1]).any())
    if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= clients or again:
        raise ValueError(
            f"drawn clients are {ids.tolist()}; expected at least one id, distinct, from 0 to "
            f"{clients - 1}"
        )
    return ids


def sample_clients(
    method: Method,
    clients: int,
    seed: Seed,
    number: int,
    participation: Draw,
    training_clients: Draw | None,
) -> tuple[Tensor, Tensor]:
    """Sample the reporting and the training clients of a round; return their sorted ids."""
    source = stream(seed, Stream.WHO, number)
    with calling("a draw of clients"):
        reporters = validate_ids(participation(source, clients), clients)
        if training_clients is not None:
            return reporters, validate_ids(training_clients(source, clients), clients)
    return reporters, torch.arange(clients) if method.metadata.train_all_clients else reporters


@dataclass(frozen=True)
class Stragglers:
    """Settings of client failures, drawn independently in each round: dropout and partial work.

    Attributes:
        drop_rate: probability that a client drops out after training. It keeps its previous state;
            the server aggregates the messages of the others.
        min_work: smallest fraction of its epochs that a client does; each draws a fraction
            uniformly from it to 1, and does at least one epoch of every phase that has any.
    """

    drop_rate: Share = 0.0
    min_work: PositiveShare = 1.0

    def __post_init__(self) -> None:
        check_fields(self)

    def reported(self, ids: Tensor, names: Sequence[str], seed: Seed, number: int) -> Tensor:
        """Return the ids of the clients that do not drop out in a round."""
        return (
            ids[_uniform_draws(ids, names, seed, number)[:, 0] >= self.drop_rate]
            if self.drop_rate
            else ids
        )

    def working(self, method: Method, names: Sequence[str], seed: Seed, number: int) -> Method:
        """Return a copy of the method in which clients train a random fraction of their epochs."""
        if self.min_work == 1:
            return method

        def shortened(phase: Phase) -> Phase:
            whole = phase.epochs
            if not callable(whole) and whole <= 1:
                return phase

            def epochs(ids: Tensor) -> Tensor:
                share = _uniform_draws(ids.cpu(), names, seed, number)[:, 1]
                return torch.ceil(
                    (self.min_work + (1 - self.min_work) * share) * phase.count_epochs(ids)
                ).long()

            return replace(phase, epochs=epochs)

        return replace(method, phases=tuple(map(shortened, method.phases)))


def _uniform_draws(ids: Tensor, names: Sequence[str], seed: Seed, number: int) -> Tensor:
    """Draw two uniform random numbers for each client in a round: [C, 2]."""
    drawn = torch.zeros(len(ids), 2, dtype=torch.float64)
    for client_draws, i in zip(drawn, ids.tolist(), strict=True):
        client_draws.uniform_(generator=stream(seed, Stream.WORK, number, names[i]))
    return drawn
