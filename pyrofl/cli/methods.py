"""Methods by name, built for a task with settings that the signatures of their `build` read."""

from __future__ import annotations

import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

import pyrofl.models
from pyrofl.arguments import known
from pyrofl.cli.experiment import Experiment
from pyrofl.cli.setup import Task, participation, task
from pyrofl.data.source import LEARNED
from pyrofl.inference.budget import Privacy
from pyrofl.inference.engine.messages import inbox
from pyrofl.inference.engine.participation import Draw
from pyrofl.inference.engine.server_round import by_round, first
from pyrofl.inference.method import Method
from pyrofl.inference.privacy.noising import with_privacy
from pyrofl.inference.transport.start import create_engine
from pyrofl.models.likelihoods import learned_normal, named
from pyrofl.models.shared.schedules import uneven

Build = Callable[..., Any]
Scheduled = Method | Callable[[int], Method]
Epochs = Callable[[Tensor], Tensor]
N = TypeVar("N", int, float)
Value = int | float | bool | str | Epochs | None

DONE = "done"  # the share of the rounds that are over
KNOWN = (DONE, "unlabelled")  # no settings: the command line knows them


@dataclass(frozen=True)
class Job:
    """One method that a command fits to one task."""

    experiment: Experiment
    name: str
    method: Scheduled
    task: Task
    reporting: Draw
    path: Path  # the folder of what comes out
    groups: str | Sequence[str] = "all"  # of posterior.nc
    coords: Mapping[str, Sequence[str]] = field(default_factory=dict)  # labels of its axes
    tuned: str = ""  # what --tune has chosen, in words


def builds() -> dict[str, Build]:
    """Find the methods: every module of `pyrofl.models` that has a `build`."""
    names = [found.name for found in pkgutil.iter_modules(pyrofl.models.__path__)]
    modules = {name: import_module(f"pyrofl.models.{name}") for name in sorted(names)}
    return {name: module.build for name, module in modules.items() if hasattr(module, "build")}


def about(method: str) -> str:
    """Return the first line of a method's description, without its name."""
    first = (import_module(f"pyrofl.models.{method}").__doc__ or "").splitlines()[0]
    return first.partition(": ")[2].rstrip(".")


def methods(
    names: Sequence[str], settings: Sequence[str], task: Task, rounds: int
) -> Mapping[str, Scheduled]:
    """Build methods by name; one whose `build` has an argument `done` is built every round."""
    found = builds()
    for name in names:
        known(name, found, "method")
    if len(set(names)) < len(names):
        raise ValueError(f"methods are {', '.join(names)}; expected no two alike")
    chosen = read_settings(settings, {name: found[name] for name in names})
    return {name: _built(name, found[name], task, rounds, chosen[name]) for name in names}


def _built(
    name: str, build: Build, task: Task, rounds: int, settings: Mapping[str, Value]
) -> Scheduled:
    wanted = accepted(build)
    arguments: dict[str, Any] = {"likelihood": named(task.likelihood), **settings}
    if "unlabelled" in wanted:
        arguments["unlabelled"] = task.data.unlabelled
    source = task.data.source
    try:
        if task.likelihood == LEARNED and source:
            moments = (source.centre, source.scale)
            arguments["likelihood"] = learned_normal(*moments)
            if not getattr(build(task.net, **arguments).guide, "random", True):
                arguments["likelihood"] = learned_normal(*moments, least_squares=True)
        method: Method = build(task.net, **arguments)
        first(method, task.data, task.seeds)  # so that it is refused before a run
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if DONE not in wanted or ("decay" in wanted and not arguments.get("decay")):
        return method  # nothing in it depends on the round
    return lambda number: build(task.net, **arguments, done=number / rounds)


def jobs(experiment: Experiment, seeds: Sequence[int], folder: Path | None = None) -> list[Job]:
    """Return a job for each method and seed, with folders of their own in `folder`, if given.

    Raises:
        ValueError: for what can be refused before any work.
    """
    names = experiment.methods
    tasks = [task(experiment, seed) for seed in seeds]
    if len({(found.split, found.seeds) for found in tasks}) < len(tasks):
        raise ValueError(
            f"--seeds is {experiment.seeds}, and the seeds of split, init, participation and noise "
            "are all given, so runs would be equal; expected --seeds 1, or one of them left out"
        )
    create_engine(experiment.engine, experiment.workers, tasks[0].data)
    built = [methods(names, experiment.settings, found, experiment.rounds) for found in tasks]
    who = [participation(experiment.participation, found.data.clients) for found in tasks]
    asked = privacy(experiment.privacy)
    of = [
        ({n: with_privacy(m, asked, at.data.clients, draw) for n, m in made.items()}, at, draw)
        for made, at, draw in zip(built, tasks, who, strict=True)
    ]
    for name in names if experiment.fold_messages else ():
        foldable(name, of[0][0][name])
    return [
        Job(experiment, name, made[name], at, draw, _path(experiment, f"{name}-{at.seed}", folder))
        for name in names
        for made, at, draw in of
    ]


def _path(experiment: Experiment, own: str, folder: Path | None) -> Path:
    return folder / own if folder else Path(experiment.out or f"runs/{own}")


def foldable(name: str, method: Scheduled) -> None:
    """Refuse a method that needs all messages at once."""
    now = by_round(method)(0)
    try:
        inbox(now, {}, torch.zeros(0), keep_messages=False)
    except ValueError as error:
        raise ValueError(f"--fold-messages with {name}: {error}") from error


def read_settings(words: Sequence[str], builds: Mapping[str, Build]) -> dict[str, dict[str, Value]]:
    """Hand "name=value" to all methods that have it, "method.name=value" to one: method -> own."""
    chosen: dict[str, dict[str, Value]] = {method: {} for method in builds}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise ValueError(f"setting {word!r} has no value; expected name=value")
        method, dot, argument = name.rpartition(".")
        if dot:
            known(method, builds, f"method in setting {word!r}:")
        asked = {m: arguments(builds[m]) for m in ([method] if dot else builds)}
        names = sorted({argument for own in asked.values() for argument in own})
        known(argument, names, f"setting of {', '.join(asked)}:")
        for m, own in asked.items():
            if argument in own:
                chosen[m][argument] = parse(text, own[argument], f"setting {argument} of {m}")
    return chosen


def privacy(text: str | None) -> Privacy | None:
    """Return the privacy of "clip=1.0,noise=1.1" and further fields of `Privacy`."""
    if text is None:
        return None
    kinds = get_type_hints(Privacy)
    words = [word.partition("=") for word in text.split(",")]
    names = [name for name, *_ in words]
    if not {"clip", "noise"} <= set(names) <= kinds.keys() or len(set(names)) < len(names):
        raise ValueError(
            f"privacy is {text!r}; expected clip=NORM,noise=TIMES, optionally followed by "
            "delta=, where=, most= or seed="
        )
    try:
        found: dict[str, Any] = {name: parse(value, kinds[name], name) for name, _, value in words}
        return Privacy(**found)
    except ValueError as error:
        raise ValueError(f"privacy {text!r}: {error}") from error


def reaching(words: Sequence[str], method: str) -> list[str]:
    """Return the settings that reach one method, without its name, of equal ones the last."""
    own, told = arguments(builds()[method]), dict[str, str]()
    for word in words:
        name, _, text = word.partition("=")
        to, _, argument = name.rpartition(".")
        if to in ("", method) and argument in own:
            told[argument] = text
    return [f"{name}={text}" for name, text in sorted(told.items())]


def arguments(build: Build) -> dict[str, Any]:
    """Return the types of what a method can be told in words; most functions cannot."""
    return {n: kind for n, kind in accepted(build).items() if n not in KNOWN and readable(kind)}


def accepted(build: Build) -> dict[str, Any]:
    """Return the types of a method's arguments, also of those that it hands on."""
    hints = get_type_hints(build)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(build).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            found[name] = hints[name]
        elif parameter.kind is parameter.VAR_KEYWORD:  # **name: Unpack[a TypedDict]
            found |= get_type_hints(get_args(hints[name])[0])
    return found


def _number(text: str) -> float:
    if not math.isfinite(found := float(text)):
        raise ValueError(text)
    return within(found, 2.0**63)  # whose square single precision still has


def _whole(text: str) -> int:
    return within(int(text), 2**31 - 1)


def within(value: N, most: N) -> N:
    """Refuse a number that tensors do not have room for."""
    if abs(value) > most:
        raise OverflowError(f"{most:.10g}")
    return value


def _epochs(text: str) -> Epochs:
    name, _, most = text.partition(":")
    if name != "uneven":
        raise ValueError(text)
    return uneven(_whole(most))


# Types that words can stand for: what is expected, and who reads it.
READERS: dict[Any, tuple[str, Callable[[str], Value]]] = {
    NoneType: ("none", {"none": None}.__getitem__),
    bool: ("true or false", {"true": True, "false": False}.__getitem__),
    int: ("a whole number", _whole),
    float: ("a number", _number),
    str: ("a word", str),
    Epochs: ("uneven:MOST", _epochs),
}


def readable(kind: Any) -> list[Any]:
    """Return the types, of the one or the union that is given, that words can stand for."""
    union = get_origin(kind) in (Union, UnionType)
    kinds = get_args(kind) if union else (kind,)
    return [k for k in kinds if k in READERS or get_origin(k) is Literal]


def parse(text: str, kind: Any, what: str) -> Value:
    """Read a value of a type: int, float, bool, str, None, Literal, or a union of these.

    >>> parse("none", int | None, "setting batch"), parse("1e-3", float, "setting lr")
    (None, 0.001)
    """
    readers = {k: READERS.get(k) or _choice(k) for k in readable(kind)}
    for one in sorted(readers, key=lambda k: (k is not NoneType, k is str)):
        try:
            with suppress(ValueError, KeyError):
                return readers[one][1](text)
        except OverflowError as most:
            raise ValueError(f"{what} is {text!r}; expected at most {most}") from most
    expected = " or ".join(words for words, _ in readers.values())
    raise ValueError(f"{what} is {text!r}; expected {expected}")


def _choice(kind: Any) -> tuple[str, Callable[[str], Value]]:
    """Read one of the words of a Literal."""
    words = {str(choice): choice for choice in get_args(kind)}
    return f"one of {', '.join(words)}", words.__getitem__
