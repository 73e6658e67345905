"""Pyro messengers that set latent sites to draws from clients' generators, or to means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, cast

import numpy as np
import pyro.distributions as dist
import torch
import torch.distributions as torchdist
from numpy.typing import NDArray
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Generator, Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pyrofl.tensors import generator as keyed
from pyrofl.tensors import lent

ROWS_PER_BLOCK = 64  # rows drawn at once
NUMBERS_AHEAD = 2048  # normal numbers that a client draws at once for the steps to come

NoiseRequest = tuple[Any, ...]
"""The method of `ClientNoise` that draws some noise, and its arguments."""

Message = Any  # a Pyro message: a mutable mapping that Pyro types only in part


class ClientNoise(Messenger):
    """Pyro messenger that draws each client's latent values from the client's own generator.

    A client's draws then only depend on its generator: they are the same alone, in a vectorized
    batch, and on another machine.
    """

    def __init__(self, generators: Sequence[Generator], ahead: int = 0) -> None:
        """Store one random generator per client; up to `ahead` numbers are drawn in advance."""
        super().__init__()
        self.generators, self.ahead = generators, ahead
        self.waiting: dict[tuple[str, torch.Size], list[Tensor]] = {}
        self.mask: Tensor | None = None  # [C, B] of a batch, whose padding then gets no noise
        self.rows: tuple[Tensor, list[int]] | None = None  # a mask, and its numbers of rows
        # Noise that was drawn, while a step is recorded.
        self.noted: list[tuple[NoiseRequest, Tensor]] | None = None

    def narrow(self, clients: int) -> None:
        """Keep only the first `clients` random generators and their unused noise."""
        self.generators = self.generators[:clients]
        self.waiting = {
            (name, torch.Size([clients, *shape[1:]])): [v[:clients] for v in noise]
            for (name, shape), noise in self.waiting.items()
        }

    def normal(
        self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return standard normal noise [C, *p] for a sample site, drawn in advance if possible."""
        waiting = self.waiting.setdefault((name, shape), [])
        if not waiting:
            count = max(1, self.ahead // max(shape[1:].numel(), 1))
            with self._unrecorded():
                block = _normals(self.generators, (count, *shape[1:]), dtype)
                waiting += copy_to_device(block, device).unbind(1)[::-1]
        return self._note(("normal", name, shape, dtype, device), waiting.pop())

    def of_rows(
        self, shape: torch.Size, axis: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return standard normal noise [C, *p] whose value per row does not depend on padding."""
        with self._unrecorded():
            # By NumPy, as torch takes longer to slice and copy so few numbers.
            each = np.empty(shape, np.float32 if dtype == torch.float32 else np.float64)
            by_row = np.moveaxis(each, axis + 1, 1)  # [C, B, *p]
            counts, seeds = self._row_counts(by_row.shape[1]), _random_seeds(self.generators)
            drawn = np.empty(by_row.shape[1:])  # reused, so that it stays in the cache
            for client_noise, count, seed in zip(by_row, counts, seeds, strict=True):
                _draw_normals(drawn[:count], seed)
                client_noise[:count] = drawn[:count]
                client_noise[count:] = 0  # padding
            noise = copy_to_device(torch.from_numpy(each).to(dtype), device)
        return self._note(("of_rows", shape, axis, dtype, device), noise)

    def _row_counts(self, width: int) -> list[int]:
        """Return the numbers of rows of each client that need noise, of `width` with padding."""
        mask = self.mask
        if mask is None or mask.device.type != "cpu" or mask.shape != (len(self.generators), width):
            return [width] * len(self.generators)  # reading a mask would wait for another device
        if self.rows is None or self.rows[0] is not mask:
            last = (mask * torch.arange(1, width + 1)).amax(1)
            self.rows = mask, last.tolist()
        return self.rows[1]

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Context manager in which tensor operations are not recorded."""
        if self.noted is None:
            yield
        else:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                yield

    def _note(self, requested: NoiseRequest, noise: Tensor) -> Tensor:
        if self.noted is not None:
            self.noted.append((requested, noise))
        return noise

    def _pyro_sample(self, msg: Message) -> None:
        if is_unset_latent(msg):
            fn, name, clients, axis = msg["fn"], msg["name"], len(self.generators), client_axis(msg)
            rows = any(frame.name == "rows" for frame in msg["cond_indep_stack"])
            if axis is None and clients > 1:
                raise ValueError(
                    f"site {name!r} is outside batch.clients(), so it couples {clients} clients; "
                    "move it inside, or run with chunk_size=1"
                )
            try:
                normals = partial(self.normal, name)
                msg["value"] = draw(fn, axis, self.generators, rows, normals, self.of_rows)
            except NotImplementedError as error:  # as of an improper prior
                raise NotImplementedError(
                    f"site {name!r} has an improper prior; expected a proper one, or a guide "
                    "that samples it"
                ) from error
            except TypeError as error:
                raise ValueError(
                    f"site {name!r}: {type(fn).__name__} cannot be drawn for {clients} clients "
                    "in one batch; use another distribution, or run a method with chunk_size=1"
                ) from error
            msg["done"] = True


class LatentMeans(Messenger):
    """Pyro messenger that sets every latent site to the mean of its distribution."""

    def _pyro_sample(self, msg: Message) -> None:
        if is_unset_latent(msg):
            try:
                mean = msg["fn"].mean
            except NotImplementedError:
                mean = torch.tensor(torch.nan)
            if bool(mean.isnan().all()) and not isinstance(msg["fn"], dist.Delta):
                loc = getattr(getattr(msg["fn"], "base_dist", msg["fn"]), "loc", mean.new_zeros(1))
                if bool(loc.isnan().all()):
                    raise ValueError(
                        f"site {msg['name']!r}: its mean is not a number, as training has "
                        "diverged; lower the learning rate (lr), or standardize the response"
                    )
                raise ValueError(
                    f"site {msg['name']!r}: {type(msg['fn']).__name__} has no mean to predict "
                    "from; pass a number of draws"
                )
            msg["value"], msg["done"] = mean, True


def is_unset_latent(msg: Message) -> bool:
    """Return whether a Pyro message belongs to a latent site that has no value yet."""
    return not (
        msg["done"] or msg["is_observed"] or msg["value"] is not None or site_is_subsample(msg)
    )


def client_axis(site: Message) -> int | None:
    """Return the axis of a site's batch shape that indexes clients; None without client plate."""
    dims = [int(frame.dim) for frame in site["cond_indep_stack"] if frame.name == "clients"]
    return len(site["fn"].batch_shape) + dims[0] if dims else None


def draw(
    fn: Any,
    axis: int | None,
    generators: Sequence[Generator],
    rows: bool = False,
    normals: Callable[[torch.Size, torch.dtype, torch.device], Tensor] | None = None,
    of_rows: Callable[[torch.Size, int, torch.dtype, torch.device], Tensor] | None = None,
) -> Tensor:
    """Draw a value for all clients from their stacked distribution; client c uses generators[c].

    The clients are at `axis` of its batch shape; None is one client without a plate. `normals`
    returns standard normal noise [C, *p] unless the next axis is that of the rows; then `of_rows`
    does, independently of padding. Raises TypeError if the distribution has no client axis.
    """
    if isinstance(fn, dist.Delta):
        return cast("Tensor", fn.v)
    if isinstance(fn, (torchdist.Independent, dist.MaskedDistribution)):
        return draw(fn.base_dist, axis, generators, rows, normals, of_rows)
    if isinstance(fn, torchdist.TransformedDistribution):
        value = draw(fn.base_dist, axis, generators, rows, normals, of_rows)
        for transform in fn.transforms:
            value = transform(value)
        return value
    if isinstance(fn, torchdist.Normal) and axis is not None:
        shape = list(fn.batch_shape)
        client_shape = torch.Size([shape.pop(axis), *shape])
        dtype, device = fn.loc.dtype, fn.loc.device
        if rows:
            drawn = of_rows or ClientNoise(generators).of_rows
            noise = drawn(client_shape, axis, dtype, device)
        elif normals is None:
            noise = copy_to_device(_normals(generators, client_shape[1:], dtype), device)
        else:
            noise = normals(client_shape, dtype, device)
        return torch.addcmul(fn.loc, fn.scale, noise.movedim(0, axis))
    if (home := _device(fn)).type != "cpu":  # the generators of the clients are on the CPU
        return draw(_map_parameters(fn, torch.Tensor.cpu), axis, generators, rows).to(home)
    if axis is None or (len(generators) == 1 and not rows):
        return _sample(fn, generators[0])
    singles = [
        _map_parameters(fn, partial(torch.narrow, dim=axis, start=c, length=1))
        for c in range(len(generators))
    ]
    parts = [
        _draw_rows(one, axis, g) if rows else _sample(one, g)
        for one, g in zip(singles, generators, strict=True)
    ]
    value = torch.cat(parts, axis)
    if value.shape != fn.batch_shape + fn.event_shape:
        raise TypeError(f"{type(fn).__name__} is not made from tensors with an axis for clients")
    return value


def _normals(generators: Sequence[Generator], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw standard normal noise [C, *shape], each client from its own generator."""
    noise = torch.empty(len(generators), *shape, dtype=dtype)
    for client_noise, generator in zip(noise.unbind(), generators, strict=True):
        client_noise.normal_(generator=generator)
    return noise


def _draw_normals(values: NDArray[np.float64], seed: int) -> None:
    """Fill an array with standard normal noise; its first rows do not depend on their number."""
    # NumPy's stream does not depend on its length, unlike torch.randn's.
    np.random.default_rng(seed).standard_normal(out=values)


def copy_to_device(noise: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device, without waiting for the transfer to finish."""
    if device.type == "cuda":
        return noise.pin_memory().to(device, non_blocking=True)
    return noise.to(device)


def _sample(fn: Any, generator: Generator) -> Tensor:
    with lent(generator):
        return cast("Tensor", fn.rsample() if fn.has_rsample else fn.sample())


def _device(fn: Any) -> torch.device:
    values = (getattr(fn, n) for n in fn.arg_constraints)
    return next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))


def _random_seeds(generators: Sequence[Generator]) -> list[int]:
    """Draw a seed from each generator, without a read from a device."""
    seeds = torch.empty(len(generators), dtype=torch.long)
    for seed, generator in zip(seeds.unbind(), generators, strict=True):
        seed.random_(0, 2**62, generator=generator)
    return cast("list[int]", seeds.numpy().tolist())


def _draw_rows(fn: Any, axis: int, generator: Generator) -> Tensor:
    """Draw values for one client's rows in blocks of fixed size, so that padding has no effect."""
    row_generator = keyed(*_random_seeds([generator]))
    count = fn.batch_shape[axis + 1]
    filled = (
        torch.arange(-(-count // ROWS_PER_BLOCK) * ROWS_PER_BLOCK)
        .clamp(max=count - 1)
        .view(-1, ROWS_PER_BLOCK)
    )
    first = _map_parameters(fn, lambda value: value.movedim(axis + 1, 0))
    blocks = [
        _sample(_map_parameters(first, partial(torch.index_select, dim=0, index=at)), row_generator)
        for at in filled
    ]
    return torch.cat(blocks)[:count].movedim(0, axis + 1)


def _map_parameters(fn: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a distribution with `change` applied to each of its parameter tensors."""
    names = [n for n in fn.arg_constraints if n in vars(fn)] or list(fn.arg_constraints)
    if {"probs", "logits"} <= set(names):
        names.remove("logits")
    params = {n: change(getattr(fn, n)) for n in names}
    # Such as the number of trials of a multinomial, which has no axis for clients.
    others = set(signature(type(fn)).parameters) - {*fn.arg_constraints, "validate_args"}
    params |= {n: getattr(fn, n) for n in others if hasattr(fn, n)}
    try:
        return type(fn)(**params, validate_args=False)
    except ValueError as error:  # it has alternative parameters and accepts only one set
        raise TypeError(f"{type(fn).__name__} is not made from {sorted(params)}") from error
