"""Effect handlers that fill latent sites: every client's own noise, or the guide's mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Generator, Tensor

Message = Any  # a Pyro message: a mutable mapping that Pyro types only in part


class ClientNoise(Messenger):
    """Draw the latent sites of every client from that client's own generator.

    What a client draws then depends on nothing but its generator, so it is the same alone, side by
    side with others and on a machine of its own.

    Args:
        generators: one per client, in the order of the batch.

    Raises:
        ValueError: at a site outside `batch.clients()`, or of a family that cannot be drawn one
            client at a time, while several clients are stacked; chunk=1 runs both.
    """

    def __init__(self, generators: Sequence[Generator]) -> None:
        """Keep one generator per client."""
        super().__init__()
        self.generators = generators

    def _pyro_sample(self, msg: Message) -> None:
        if open_latent(msg):
            axis = client_axis(msg)
            rows = any(frame.name == "rows" for frame in msg["cond_indep_stack"])
            if axis is None and len(self.generators) > 1:
                raise ValueError(
                    f"site {msg['name']!r} lies outside batch.clients(), so it couples "
                    f"{len(self.generators)} clients; move it inside, or run with chunk=1"
                )
            try:
                msg["value"] = draw(msg["fn"], axis, self.generators, rows)
            except TypeError as error:
                raise ValueError(
                    f"site {msg['name']!r}: {type(msg['fn']).__name__} cannot be drawn for "
                    f"{len(self.generators)} clients side by side; run with chunk=1"
                ) from error
            msg["done"] = True


class GuideMean(Messenger):
    """Put the mean of its distribution at every latent site: a point prediction.

    Raises:
        ValueError: at a site whose distribution has no mean.
    """

    def _pyro_sample(self, msg: Message) -> None:
        if open_latent(msg):
            try:
                mean = msg["fn"].mean
            except NotImplementedError:
                mean = torch.tensor(torch.nan)
            if bool(mean.isnan().all()) and not isinstance(msg["fn"], dist.Delta):
                raise ValueError(
                    f"site {msg['name']!r}: {type(msg['fn']).__name__} has no mean to predict "
                    "from; give a number of draws"
                )
            msg["value"] = mean
            msg["done"] = True


def open_latent(msg: Message) -> bool:
    """Say whether a message asks for the value of a latent site."""
    return not (
        msg["done"] or msg["is_observed"] or msg["value"] is not None or site_is_subsample(msg)
    )


def client_axis(site: Message) -> int | None:
    """Return the axis of a site's batch shape that belongs to the client plate."""
    for frame in site["cond_indep_stack"]:
        if frame.name == "clients":
            return len(site["fn"].batch_shape) + int(frame.dim)
    return None


def draw(fn: Any, axis: int | None, generators: Sequence[Generator], rows: bool = False) -> Tensor:
    """Draw once from a distribution of stacked clients; client c uses generators[c] alone.

    Args:
        fn: a distribution whose batch shape has the clients at `axis`.
        axis: position of the client axis; None if there is one client and no plate.
        generators: one per client.
        rows: whether the last batch axis are rows. They come first in the client's stream then, so
            that the noise of a row does not depend on how far the batch is padded.
    """
    if isinstance(fn, dist.Delta):
        return fn.v
    if isinstance(fn, (dist.Independent, dist.MaskedDistribution)):
        return draw(fn.base_dist, axis, generators, rows)
    if isinstance(fn, dist.TransformedDistribution):
        value = draw(fn.base_dist, axis, generators, rows)
        for transform in fn.transforms:
            value = transform(value)
        return value
    if isinstance(fn, dist.Normal) and axis is not None:
        noise = [_normal(fn, axis, g, rows) for g in generators]
        return fn.loc + fn.scale * torch.stack(noise, axis).to(fn.loc.device)
    parts = []
    for c, g in enumerate(generators):
        one = fn if len(generators) == 1 or axis is None else _narrow(fn, axis, c)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_integer(g))  # leaves accelerators alone
            parts.append(one.rsample() if one.has_rsample else one.sample())
    return parts[0] if axis is None else torch.cat(parts, axis)


def _normal(fn: dist.Normal, axis: int, generator: Generator, rows: bool) -> Tensor:
    """Draw standard normal noise for one client: the shape of fn without its client axis."""
    shape = list(fn.batch_shape)
    del shape[axis]
    if not rows:
        return torch.randn(shape, generator=generator, dtype=fn.loc.dtype)
    own = torch.Generator().manual_seed(_integer(generator))
    at = len(fn.batch_shape) - 2 if axis < len(fn.batch_shape) - 1 else -1
    shape.insert(0, shape.pop(at))
    return torch.randn(shape, generator=own, dtype=fn.loc.dtype).movedim(0, at)


def _integer(generator: Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator))


def _narrow(fn: Any, axis: int, client: int) -> Any:
    """Return the distribution of one of the stacked clients."""
    names = [n for n in fn.arg_constraints if n in vars(fn)] or list(fn.arg_constraints)
    if {"probs", "logits"} <= set(names):
        names.remove("logits")
    params = {n: getattr(fn, n).narrow(axis, client, 1) for n in names}
    return type(fn)(**params, validate_args=False)
