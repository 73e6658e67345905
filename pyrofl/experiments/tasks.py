"""Build data, partition and network from command-line arguments, with validation."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from pyrofl import nets
from pyrofl.data import Dataset, Federation, weights
from pyrofl.data.loaders import datasets
from pyrofl.data.tables.source import LEARNED
from pyrofl.experiments.experiment import Experiment
from pyrofl.inference.definition.seeds import Seeds
from pyrofl.inference.engine.participation import Draw, bernoulli, everyone, fixed, fraction
from pyrofl.nets import Network
from pyrofl.partitions import federations
from pyrofl.tensors import generator

CLIENTS = 20
PARTITION = "slices:5"
DOMAINS = "domains:dirichlet:0.5"  # of data sets that are joined
NET = "mlp:50"
NETS = {"csv": "softmax", "eight_schools": "mean", "gaussian": "linear", "linear": "linear"}
OF_TABLES = (
    *("target", "client_column", "likelihood", "missing", "scaling"),
    *("test_fraction", "test_column", "test_last", "row_weights"),
)
SEEDED = ("csv", "gaussian", "linear")  # data that differ between seeds


@dataclass(frozen=True)
class Task:
    """Federation and network that methods are fitted to, with likelihood and seeds."""

    seed: int  # names the run; also the seed of all that has none of its own
    split: int  # seed of who holds what
    seeds: Seeds
    data: Federation
    net: Network
    likelihood: str


def resolve(experiment: Experiment) -> Experiment:
    """Fill in settings with defaults that depend on the data: partition, clients, network."""
    _load.cache_clear()  # within one command data are read once
    if experiment.data.startswith("csv:"):
        experiment = replace(experiment, scaling=experiment.scaling or "standardize")
    dataset = load(experiment, experiment.seed)
    natural = DOMAINS if "domain" in dataset.groups else "groups"
    drawn = PARTITION if dataset.classes else "iid"
    partition = experiment.partition or (natural if dataset.groups else drawn)
    grouped = partition.partition(":")[0] == "groups"
    return replace(
        experiment,
        partition=partition,
        clients=experiment.clients or (None if grouped else CLIENTS),
        net=experiment.net or NETS.get(experiment.data.partition(":")[0], NET),
    )


def load(experiment: Experiment, seed: int) -> Dataset:
    """Load the data set of an experiment, with at most the requested training rows per class."""
    options: dict[str, Any] = {name: getattr(experiment, name) for name in OF_TABLES}
    for name in ("features", "categories"):
        text = getattr(experiment, name)
        options[name] = tuple(text.split(",")) if text else None
    options["seed"] = seed if experiment.data.partition(":")[0] in SEEDED else 0
    dataset = _load(experiment.data, data_dir=experiment.data_dir, **options)
    count = experiment.per_class
    return dataset if count is None else datasets.per_class(dataset, count)


_load = lru_cache(maxsize=1)(datasets.load)


def split(experiment: Experiment, seed: int) -> tuple[Dataset, Federation]:
    """Load the data set of an experiment and partition it among clients."""
    seed = seed_or_default(experiment.split_seed, seed)
    dataset = load(experiment, seed)
    federation = federations.split(
        dataset,
        partition(str(experiment.partition)),
        experiment.clients,
        seed=seed,
        test=experiment.test,
        held_out=held_out(experiment),
        server_data=server_data(experiment, tuple(dataset.x.shape[1:])),
    )
    class_weights = experiment.class_weights
    try:
        return dataset, federation.with_class_weights(
            weights.read(class_weights)
        ) if class_weights else federation
    except ValueError as error:
        raise ValueError(f"--class-weights {class_weights!r}: {error}") from error


def held_out(experiment: Experiment) -> int | list[str]:
    """Parse the option --held-out: a number of clients, or names separated by commas."""
    if isinstance(experiment.held_out, int):
        return experiment.held_out
    if str(experiment.partition).partition(":")[0] != "groups":
        raise ValueError(
            f"--held-out is {experiment.held_out!r}, and partition {experiment.partition} has no "
            "names; expected a whole number, or --partition groups"
        )
    names: list[str] = experiment.held_out.removesuffix(",").split(",")
    return names


def seed_or_default(seed: int | None, default: int) -> int:
    """Return a seed, or the default seed if it is None."""
    return default if seed is None else seed


def server_data(experiment: Experiment, shape: tuple[int, ...]) -> int | float | Dataset | None:
    """Parse --server-data: a number, a fraction, or a data set, resized to the given shape."""
    text = experiment.server_data
    if text is None:
        return None
    for kind in (int, float):
        with suppress(ValueError):
            number: int | float = kind(text)
            return number
    other = datasets.load(text, data_dir=experiment.data_dir)
    return other if other.x.shape[1:] == shape else datasets.resized(other, shape)


def task(experiment: Experiment, seed: int) -> Task:
    """Partition the data among clients and build a network for them."""
    dataset, federation = split(experiment, seed)
    net = network_for(str(experiment.net), federation, dataset.likelihood)
    own = (experiment.init_seed, experiment.participation_seed, experiment.noise_seed)
    seeds = Seeds(*(seed_or_default(one, seed) for one in own))
    split_seed, data = (
        seed_or_default(experiment.split_seed, seed),
        federation.to(device(experiment.device)),
    )
    return Task(seed, split_seed, seeds, data, net, dataset.likelihood)


def network_for(spec: str, data: Federation, likelihood: str) -> Network:
    """Build a network with the number of outputs that the likelihood requires.

    Where noise is learned, a network with one output gets a second one; see `nets.with_noise`.
    """
    outputs = len(data.classes) if likelihood == "categorical" else 1
    net = network(spec, tuple(data.x.shape[1:]), outputs)
    if likelihood == LEARNED:
        with suppress(ValueError):  # a module of one's own may have both outputs
            net.check(data.x[:1][None], 2)
            return net
    net.check(data.x[:1][None], outputs)
    return nets.with_noise(net) if likelihood == LEARNED else net


def network(spec: str, shape: tuple[int, ...], outputs: int) -> Network:
    """Build a network from its name, or from a module or function in a file "FILE.py:NAME"."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        return nets.build(spec, shape, outputs)
    module = from_file(
        spec, "network", lambda it: it() if callable(it) and not isinstance(it, nn.Module) else it
    )
    if not isinstance(module, nn.Module):
        raise ValueError(f"{name} in {path} is {module!r}; expected a torch module")
    return Network(module)


def partition(spec: str) -> str | federations.Own:
    """Return the name of a built-in partition, or load a user's function from "FILE.py:NAME"."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        return spec
    own_partition = from_file(spec, "partition")
    if not callable(own_partition):
        raise ValueError(f"{name} in {path} is {own_partition!r}; expected a function: a partition")
    partition_function: federations.Own = own_partition
    return partition_function


def from_file(
    spec: str, what: str, then: Callable[[Any], Any] = lambda partition_function: partition_function
) -> Any:
    """Load the object NAME from a user's file "FILE.py:NAME", and pass it to `then`."""
    path, _, name = spec.rpartition(":")
    try:
        return then(runpy.run_path(path).get(name))
    except (Exception, SystemExit) as error:  # whatever the user's file does wrong
        raise ValueError(f"{what} {spec} cannot be made: {error}") from error


def device(name: str) -> torch.device:
    """Return a torch device by name; raise ValueError if it cannot be used."""
    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        expected = "cpu, or one that this machine has, as cuda:0"
        raise ValueError(
            f"device {name!r} cannot be used: {reason}; expected {expected}"
        ) from error
    return torch.device(name)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's number of threads within the context; results may depend on it slightly."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def participation(text: str, clients: int) -> Draw:
    """Parse --participation: "everyone", a count, a fraction or "bernoulli:0.1"."""
    if text == "everyone":
        return everyone
    kind, number = text.split(":", 1) if ":" in text else (text, text)
    alone = fixed if number.isdecimal() else fraction
    makers: dict[str, Callable[[Any], Draw]] = {text: alone, "bernoulli": bernoulli}
    try:
        make, value = makers[kind], float(number)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"participation is {text!r}; expected everyone, a count such as 10, a share such as "
            "0.1, or bernoulli:0.1"
        ) from error
    draw = make(int(value) if make is fixed else value)
    draw(generator(0), clients)  # refuses what does not suit the number of clients
    return draw
