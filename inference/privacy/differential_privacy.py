"""Differentially private methods: clipped contributions of clients, and noise added to sums.

where="server"   clients send contributions to sums, see `sums`; the server clips each, sums them
                 and adds noise once: McMahan, Ramage, Talwar and Zhang, "Learning Differentially
                 Private Recurrent Language Models", ICLR 2018, with their fixed denominator
where="client"   each client clips its contribution and adds noise to it

A server that is not an `Aggregator` may interpret messages as changes of its own tensors, as PVI
does with factors (Heikkilä, Ashman, Swaroop, Turner and Honkela, "Differentially private
partitioned variational inference", 2022): its method declares them by the metadata `CHANGES`, and
clients add noise to the change.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Generator, Tensor

from pyrofl.arguments import Count, checked
from pyrofl.data import Cohort
from pyrofl.inference.definition.budget import Privacy, PrivacyAccountant, too_large
from pyrofl.inference.definition.metadata import (
    CHANGES,
    EXACT,
    Factors,
    marked_names,
    metadata_of_class,
)
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.participation import Draw, everyone, sampling_of
from pyrofl.inference.privacy.sums import (
    AT,
    SUM,
    WEIGHT,
    Sums,
    repeat_for_clients,
    summed,
    weighted_mean_aggregator,
    without_message_rules,
)
from pyrofl.tensors import (
    Tensors,
    add_trailing_axes,
    generator,
    matches,
    pick,
    role,
    sum_per_client,
)
from pyrofl.user_warnings import warn_user


@checked
def with_privacy(
    method: Method | Callable[[int], Method],
    privacy: Privacy | None,
    clients: int,
    participation: Draw,
) -> Method | Callable[[int], Method]:
    """Make a method, or the method of each round, differentially private if `privacy` is given."""
    if privacy is None:
        return method
    if large := too_large(privacy.delta, clients):
        warn_user(large)
    if isinstance(method, Method):
        return private(method, privacy, clients, participation)
    return lambda number: private(method(number), privacy, clients, participation)


@checked
def private(
    method: Method, privacy: Privacy, clients: Count, participation: Draw = everyone
) -> Method:
    """Return a method in which every new server state is differentially private.

    Args:
        method: a method that aggregates by an `Aggregator` of weighted means; with where="client"
            also one with messages that are `CHANGES`.
        privacy: bounds and noise.
        clients: number of training clients.
        participation: function that samples the reporting clients, as in `fit`.

    Returns:
        The private method.

    Raises:
        ValueError: if the method needs single or exact messages, or is private already; if
            participation is a custom function, or the accountant is not installed.
    """
    if method.metadata.privacy is not None:
        raise ValueError(
            f"{method.name}: the method is private already; pass the original method, or no privacy"
        )
    if exact := marked_names(method.metadata.tensors, EXACT):
        raise ValueError(
            f"{method.name}: {exact} is a sum of exact statistics, which clipping and noise would "
            "break; use pvi.hierarchical with Privacy(..., where='client')"
        )
    mechanism, at_client = ClipAndNoise(privacy), privacy.where == "client"
    sampling = sampling_of(participation, clients)
    promise = PrivacyAccountant(
        privacy, clients, sampling, mechanism.privatize_messages if at_client else None
    )
    changes = marked_names(method.metadata.tensors, CHANGES)
    if changes and not at_client:
        raise ValueError(
            f"{method.name}: its server stores a tensor of each client, which noise on a sum would "
            "not protect; use Privacy(..., where='client')"
        )
    if changes:

        def download(server: Tensors, cohort: Cohort) -> Tensors:
            """Return the tensors that clients download, with those to subtract from messages."""
            return method.download(server, cohort) | repeat_for_clients(server, cohort, changes)

        return replace(
            method,
            download=download,
            metadata=replace(without_message_rules(method.metadata), privacy=promise),
        )
    if metadata_of_class(method.metadata.tensors, Factors):
        raise ValueError(
            f"{method.name}: its server needs the factor of every client, which noise on a sum "
            "would not protect; use pvi.hierarchical with Privacy(..., where='client')"
        )
    sums = Sums(
        weighted_mean_aggregator(method), promise.sampling.expected, privacy.max_weight, least=1.0
    )
    summing = summed(method, sums)
    if at_client:
        return replace(summing, metadata=replace(summing.metadata, privacy=promise))
    aggregate = replace(
        weighted_mean_aggregator(summing),
        transform=mechanism.clip_messages,
        add_noise=mechanism.add_noise,
    )
    metadata = replace(summing.metadata, privacy=promise)
    return replace(summing, aggregate=aggregate, metadata=metadata)


@dataclass(frozen=True)
class ClipAndNoise:
    """Clipping and Gaussian noise for clients' contributions to sums, from privacy settings.

    The weights have a total norm of at most 1, the other tensors of at most `clip`. If there are
    weights, both groups get 2^1/2 times the noise, which gives the same privacy.
    """

    privacy: Privacy

    def clip_messages(self, server: Tensors, message: Tensors) -> Tensors:
        """Clip the contributions in clients' messages, as the `transform` of an `Aggregator`."""
        return self.clip_contributions(pick(message, f"{SUM}/* {WEIGHT}/*"))

    def clip_contributions(self, added: Tensors) -> Tensors:
        """Clip clients' contributions [C, ...] to the norm bounds; set non-finite ones to zero."""
        light = _scaled(added, pick(added, f"{WEIGHT}/*"), 1.0)
        weights = pick(light, f"{WEIGHT}/*")
        rest = {n: v for n, v in light.items() if n not in weights}
        return weights | _scaled(rest, rest, self.privacy.clip)

    def add_noise(self, added: Tensors, source: Generator) -> Tensors:
        """Add Gaussian noise to sums over clients, [*p] each.

        The noise comes from the operating system's entropy or, if the privacy has a seed, from
        that seed and the next number of `source`.
        """
        seed = self.privacy.seed
        seeded = None if seed is None else generator("noise of privacy", seed, _number(source))
        more = 2**0.5 if pick(added, f"{WEIGHT}/*") else 1.0
        noisy_sums = Tensors()
        for n in sorted(added):
            value, unit = added[n], 1.0 if matches(n, f"{WEIGHT}/*") else self.privacy.clip
            if seeded is None:
                drawn = secret_normals(value.shape)
            else:
                drawn = torch.randn(value.shape, generator=seeded, dtype=torch.float64)
            noisy_sums[n] = value + (more * self.privacy.noise_multiplier * unit * drawn).to(value)
        return noisy_sums

    def privatize_messages(
        self, received: Tensors, message: Tensors, sources: Sequence[Generator]
    ) -> Tensors:
        """Clip clients' messages [C, ...] and add Gaussian noise from each client's generator."""
        base = {n: v for n, v in role(AT, received).items() if n in message}
        near = self.clip_contributions(
            {n: v - base[n] if n in base else v for n, v in message.items()}
        )
        each = [
            self.add_noise({n: v[c] for n, v in near.items()}, g) for c, g in enumerate(sources)
        ]
        noisy = {n: torch.stack([one[n] for one in each]) for n in near} if each else near
        return {n: base[n] + v if n in base else v for n, v in noisy.items()}


def _scaled(values: Tensors, measured: Tensors, most: float) -> Tensors:
    """Scale down each client's values [C, ...] so that the norm of `measured` is at most `most`."""
    if not measured:
        return values
    norm = sum_per_client({n: v.double().square() for n, v in measured.items()}).sqrt()
    eps = max(torch.finfo(v.dtype).eps for v in measured.values())
    # Slightly smaller, as rounding might exceed the bound.
    factor = torch.where(norm > most, most / norm * (1 - 2 * eps), 1.0)
    return {n: _multiplied(v, factor, norm.isfinite()) for n, v in values.items()}


def _multiplied(value: Tensor, factor: Tensor, good: Tensor) -> Tensor:
    moved = (value.double() * add_trailing_axes(factor, value)).to(value.dtype)
    return torch.where(add_trailing_axes(good, value), moved, torch.zeros_like(value))


def secret_normals(shape: Sequence[int]) -> Tensor:
    """Draw standard normal numbers using the operating system's cryptographic random generator.

    Each is the normal quantile of a uniform number of 53 random bits, so that no generator state
    can reproduce the noise.

    Args:
        shape: shape of the result.

    Returns:
        Tensor of the shape, float64, on the CPU; its values are within 8.3 standard deviations.
    """
    bits = np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1), neither end included
    return cast("Tensor", torch.special.ndtri(torch.from_numpy(uniform))).reshape(tuple(shape))


def _number(source: Generator) -> int:
    return int(torch.randint(2**62, (), generator=source))
