"""From arguments of the command line to clients, a network and methods; bad ones are refused."""

from __future__ import annotations

import math
import runpy
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from pyrofl import nets
from pyrofl.data import Dataset, Federation, datasets
from pyrofl.inference.loop.participation import (
    Draw,
    Stragglers,
    bernoulli,
    everyone,
    fixed,
    fraction,
)
from pyrofl.inference.seeds import Seeds
from pyrofl.nets import Network
from pyrofl.partitions import federations
from pyrofl.tensors import generator

CLIENTS = 20
PARTITION = "slices:5"
DOMAINS = "domains:dirichlet:0.5"  # of data sets that are joined
NET = "mlp:50"
NETS = {"csv": "softmax", "eight_schools": "mean", "gaussian": "linear", "linear": "linear"}
SEEDED = ("csv", "gaussian", "linear")  # data that differ between seeds


@dataclass(frozen=True)
class Task:
    """Everything but the methods: who has which rows, and what network is to learn from them.

    Attributes:
        seed: names the run; also the seed of all that has none of its own.
        split: seed of who holds what.
        seeds: of the run.
        data: the federation.
        net: the network.
        likelihood: by its name.
    """

    seed: int
    split: int
    seeds: Seeds
    data: Federation
    net: Network
    likelihood: str


def resolve(args: Namespace) -> Namespace:
    """Fill in what was left open: partition, clients and network, as suits the data.

    Raises:
        ValueError: if the data cannot be loaded.
    """
    _load.cache_clear()  # within one command data are read once
    dataset = load(args, args.seed)
    partition = args.partition or ("groups" if dataset.groups else PARTITION)
    if not args.partition and "domain" in dataset.groups:
        partition = DOMAINS
    elif not args.partition and not dataset.groups and not dataset.classes:
        partition = "iid"
    natural = partition.partition(":")[0] == "groups"
    clients = args.clients or (None if natural else CLIENTS)
    chosen = {"partition": partition, "clients": clients}
    if "net" in args:
        chosen["net"] = args.net or NETS.get(args.data.partition(":")[0], NET)
    return Namespace(**vars(args) | chosen)


def load(args: Namespace, seed: int) -> Dataset:
    """Load the data set, less rows if so many per class were asked for.

    Raises:
        ValueError: as `pyrofl.data.datasets.load` and `per_class`.
    """
    features = tuple(args.features.split(",")) if args.features else None
    dataset = _load(
        args.data,
        data_dir=args.data_dir,
        target=args.target,
        group=args.group,
        features=features,
        likelihood=args.likelihood,
        seed=seed if args.data.partition(":")[0] in SEEDED else 0,
    )
    return dataset if args.per_class is None else datasets.per_class(dataset, args.per_class)


_load = lru_cache(maxsize=1)(datasets.load)


def split(args: Namespace, seed: int) -> tuple[Dataset, Federation]:
    """Load the data and split them over clients.

    Raises:
        ValueError: as `load`, and `pyrofl.partitions.federations.split`.
    """
    seed = given(args.split_seed, seed)
    dataset = load(args, seed)
    federation = federations.split(
        dataset,
        args.partition,
        args.clients,
        seed=seed,
        test=args.test,
        held_out=args.held_out,
        server=server_data(args, tuple(dataset.x.shape[1:])),
    )
    return dataset, federation


def given(seed: int | None, default: int) -> int:
    """Return a seed, or another one if there is none."""
    return default if seed is None else seed


def server_data(args: Namespace, shape: tuple[int, ...]) -> int | float | Dataset | None:
    """Read what the server holds: a count "1000", a share "0.1", or a data set by name.

    Images of another data set are brought to the shape of the clients' rows.

    Raises:
        ValueError: if it is no number and no data set.
    """
    text = args.server_data
    if text is None:
        return None
    for kind in (int, float):
        with suppress(ValueError):
            number: int | float = kind(text)
            return number
    other = datasets.load(text, data_dir=args.data_dir)
    return other if other.x.shape[1:] == shape else datasets.resized(other, shape)


def task(args: Namespace, seed: int) -> Task:
    """Split the data over clients and build a network for it.

    Raises:
        ValueError: as `split`, or if the network does not fit the data or the device is not there.
    """
    dataset, federation = split(args, seed)
    outputs = len(dataset.classes) if dataset.likelihood == "categorical" else 1
    net = network(args.net, tuple(dataset.x.shape[1:]), outputs)
    net.check(dataset.x[:1][None], outputs)
    own = (args.init_seed, args.participation_seed, args.noise_seed)
    seeds = Seeds(*(given(one, seed) for one in own))
    split_seed, data = given(args.split_seed, seed), federation.to(device(args.device))
    return Task(seed, split_seed, seeds, data, net, dataset.likelihood)


def network(spec: str, shape: tuple[int, ...], outputs: int) -> Network:
    """Build a network by name, or take one from a file.

    Args:
        spec: one of `pyrofl.nets.NETWORKS`, or "FILE.py:NAME" with the name of a torch module, or
            of a class or function without arguments that makes one.
        shape: of one row.
        outputs: that the likelihood needs.

    Raises:
        ValueError: if there is no such network, the file fails, or a layer cannot be used.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        return nets.build(spec, shape, outputs)
    try:
        made = runpy.run_path(path).get(name)
        if callable(made) and not isinstance(made, nn.Module):
            made = made()
    except (Exception, SystemExit) as error:  # whatever the user's file does wrong
        raise ValueError(f"network {spec} cannot be made: {error}") from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"{name} in {path} is {made!r}; expected a torch module")
    return Network(made)


def device(name: str) -> torch.device:
    """Return a device that works.

    Raises:
        ValueError: if it does not.
    """
    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used: {reason}") from error
    return torch.device(name)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads: results to the last bit depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def stragglers(args: Namespace) -> Stragglers | None:
    """Read what goes wrong at clients.

    Raises:
        ValueError: if a number is out of its range.
    """
    if not 0 <= args.fail <= 1 or not 0 < args.partial <= 1:
        raise ValueError(
            f"--fail is {args.fail}, --partial {args.partial}; expected a probability, and a share "
            "above 0"
        )
    chosen = Stragglers(args.fail, args.partial)
    return None if chosen == Stragglers() else chosen


def participation(text: str, clients: int) -> Draw:
    """Read who reports: "everyone", a count "10", a share "0.1" or "bernoulli:0.1".

    Raises:
        ValueError: if it is none of these, or does not suit the number of clients.
    """
    kind, _, number = text.rpartition(":")
    try:
        value = 1.0 if text == "everyone" else float(number)
    except ValueError:
        value = math.nan
    if math.isnan(value) or kind not in ("", "bernoulli"):
        raise ValueError(
            f"participation is {text!r}; expected everyone, a count such as 10, a share such as "
            "0.1, or bernoulli:0.1"
        )
    if text == "everyone":
        return everyone
    if kind:
        draw = bernoulli(value)
    else:
        draw = fixed(int(number)) if number.isdecimal() else fraction(value)
    draw(generator(0), clients)
    return draw
