"""Flat dicts of tensors (states) with names "role/parameter", such as "loc/fc1.weight"."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import shake_128
from operator import index
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

Tensors = dict[str, Tensor]

# A state of torch's Mersenne Twister on the CPU: where it stands, 624 words in 64 bits each, ...
SEEDED, HEAD, WORDS = torch.Generator().get_state().numpy(), 24, 624


def is_measured(value: Tensor) -> bool:
    """Return whether a tensor has a floating-point or complex type, not integers."""
    return value.is_floating_point() or value.is_complex()


@contextmanager
def refuse_inplace_writes(function: str, *states: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise ValueError if the `with` block modifies the given tensors in place."""
    before = [(n, v, v._version) for state in states for n, v in state.items()]
    yield
    for name, value, version in before:
        if value._version != version:
            raise ValueError(
                f"{function} writes into {name!r} in place; expected it to return new tensors, "
                "such as those of value + change or value.clone()"
            )


@lru_cache(maxsize=4096)  # as every round asks for the same
def matches(name: str, patterns: str) -> bool:
    """Return whether a name matches any of several shell patterns separated by spaces.

    A pattern also matches the name that is spelled as it, such as "b[0]".

    >>> matches("loc/fc1.weight", "scale/* loc/*")
    True
    """
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns.split())


def unmatched_patterns(patterns: str, names: Iterable[str]) -> list[str]:
    """Return the name patterns that match none of the given names."""
    return [p for p in patterns.split() or [""] if not any(matches(n, p) for n in names)]


def suggest_name(pattern: str, names: Iterable[str]) -> str:
    """Suggest a similar name for a name pattern without a match, or list all names."""
    near = get_close_matches(pattern, list(names), 1)
    return f"did you mean {near[0]}?" if near else f"the names are {', '.join(names)}"


def role(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors with a given role, such as "loc", without the role in their names.

    >>> role("loc", {"loc/w": torch.zeros(1), "tau": torch.ones(1)})
    {'w': tensor([0.])}
    """
    start = f"{prefix}/"
    return {n.removeprefix(start): v for n, v in tensors.items() if n.startswith(start)}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Add a role to the names of tensors, "w" -> "loc/w"; the inverse of `role`."""
    return {f"{prefix}/{n}": v for n, v in tensors.items()}


def renamed(tensors: Mapping[str, Tensor], roles: Mapping[str, str]) -> Tensors:
    """Rename the roles of tensors: {"mean": "loc"} renames "mean/w" to "loc/w".

    >>> renamed({"mean/w": torch.zeros(1), "tau": torch.ones(1)}, {"mean": "loc"})
    {'loc/w': tensor([0.])}
    """
    pairs = (under(new, role(old, tensors)) for old, new in roles.items())
    return {name: value for pair in pairs for name, value in pair.items()}


def pick(tensors: Mapping[str, Tensor], patterns: str) -> Tensors:
    """Return the tensors with names that match any of the shell patterns."""
    return {n: v for n, v in tensors.items() if matches(n, patterns)}


def spread_out(tensors: Mapping[str, Tensor], clients: int) -> Tensors:
    """Expand tensors [*p] by a leading client axis to [C, *p], as views."""
    return {n: v.expand(clients, *v.shape) for n, v in tensors.items()}


def cut(tensors: Mapping[str, Tensor], index: Tensor | slice) -> Tensors:
    """Index every tensor of a dict along its leading axis; expanded tensors stay views."""
    if not isinstance(index, slice):
        index = as_run(index)
    if isinstance(index, slice):
        begin, end, step = index.start or 0, index.stop, index.step
        all_of = None if begin or step else end  # so many clients are all: nothing is cut
        return {n: v if v.shape[0] == all_of else v[index] for n, v in tensors.items()}
    return {
        n: v[index] if v.stride(0) else v[:1].expand(len(index), *v.shape[1:])
        for n, v in tensors.items()
    }


def as_run(index: Tensor) -> Tensor | slice:
    """Convert consecutive indices [C] to a slice, since indexing by a slice copies nothing."""
    indices = index.tolist() if index.dtype == torch.long else [-1]
    first = indices[0] if indices else 0
    is_run = first >= 0 and indices == [*range(first, first + len(indices))]
    return slice(first, first + len(indices)) if is_run else index


def add_trailing_axes(value: Tensor, other: Tensor) -> Tensor:
    """Add trailing axes to values [C], so that they broadcast with a tensor [C, *p]."""
    return value.reshape(-1, *(1 for _ in other.shape[1:]))


def sum_per_client(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the sum over all entries of all tensors for every client: [C, *p] -> [C]."""
    return torch.stack([v.reshape(len(v), -1).sum(1) for v in tensors.values()]).sum(0)


def squared_distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    """Return the squared distance ||one - other||^2 of two states per client: [C, *p] -> [C]."""
    return sum_per_client({n: (v - other[n]).square() for n, v in one.items()})


def join_up(parts: Iterable[Mapping[str, Tensor]]) -> Tensors:
    """Concatenate dicts of tensors along the leading axis, preserving expanded tensors."""
    parts = list(parts)
    return {n: _joined([part[n] for part in parts]) for n in parts[0]} if parts else {}


def _joined(values: list[Tensor]) -> Tensor:
    if _expanded(values):
        return values[0][:1].expand(sum(map(len, values)), *values[0].shape[1:])
    return torch.cat(values)


def _expanded(values: Sequence[Tensor]) -> bool:
    """Return whether all given tensors are expanded views of the same tensor."""
    views = {(v.data_ptr(), v.shape[1:], v.stride(), v.dtype) for v in values}
    return len(views) == 1 and all(len(v) > 1 and not v.stride(0) for v in values)


def placed(values: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """Combine tensors along the leading axis into one, with each row at its given index."""
    first, count = values[0], sum(map(len, values))
    if _expanded(values):
        return first[:1].expand(count, *first.shape[1:])
    whole = first.new_empty(count, *first.shape[1:])
    for value, at in zip(values, places, strict=True):
        begin = int(at[0])
        run = torch.equal(at, torch.arange(begin, begin + len(at)))
        whole[slice(begin, begin + len(at)) if run else at.to(whole.device)] = value
    return whole


def client_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size in bytes of one client's message, for stacked tensors [C, ...]."""
    return sum(v[0].numel() * v.element_size() for v in tensors.values() if len(v))


def dense_bytes(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return each client's message size in bytes [C], for dense tensors [C, ...]."""
    return torch.full((len(next(iter(tensors.values()))),), client_bytes(tensors))


def sparse_bytes(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return each client's message size in bytes [C], with zeros omitted where that is smaller.

    A bit mask of the non-zero entries is counted too.
    """
    total = torch.zeros_like(dense_bytes(tensors))
    for value in tensors.values():
        size = value.shape[1:].numel()
        num_nonzero = value.reshape(len(value), size).count_nonzero(1).cpu()
        packed = num_nonzero * value.element_size() + -(-size // 8)
        total += packed.clamp(max=size * value.element_size())
    return total


def generator(*key: int | str) -> Generator:
    """Return a random generator seeded by the key; different keys give independent streams."""
    parts = [str(part) if isinstance(part, str) else index(part) for part in key]
    if any(isinstance(part, int) and part < 0 for part in parts):
        raise ValueError(f"key of a random generator is {parts}; expected no negative number")
    return torch.Generator().set_state(_state(repr(parts)))


@lru_cache(maxsize=64)  # as every round asks for the common start of clients
def _state(key: str) -> Tensor:
    # The whole state, as `manual_seed` takes 32 bits: among 100,000 streams two would be equal.
    words = np.frombuffer(shake_128(key.encode()).digest(4 * WORDS), np.uint32)
    state = SEEDED.copy()
    state[HEAD : HEAD + 8 * WORDS].view(np.uint64)[:] = words
    return torch.from_numpy(state)


@contextmanager
def lent(generator: torch.Generator) -> Iterator[None]:
    """Use a generator as torch's global CPU generator in the context, and advance its state."""
    global_generator = torch.default_generator
    before = global_generator.get_state()
    global_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(global_generator.get_state())
        global_generator.set_state(before)


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default floating-point type within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator within the context, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed the caller's accelerators too.
        torch.default_generator.manual_seed(seed)
        yield


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Multiply matrices [*p, a, b] by vectors [*s, *p, b]: [*s, *p, a].

    Vectors with further axes in front are the columns of one product, as `matmul` would copy every
    matrix for each of them.
    """
    front = vector.shape[: max(0, vector.dim() - matrix.dim() + 1)]
    product: Tensor
    if front:
        columns = vector.flatten(0, len(front) - 1).movedim(0, -1)
        product = (matrix @ columns).movedim(-1, 0).unflatten(0, front)
    else:
        product = (matrix @ vector[..., None])[..., 0]
    return product


def machine_memory() -> int:
    """Return the memory of this machine or container in bytes; 64 GiB if it is unknown."""
    limits = [2**36]
    with suppress(AttributeError, ValueError, OSError):
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(ValueError, OSError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)
