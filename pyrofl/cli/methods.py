"""Methods by name: found in `pyrofl.models`, built for a task with the settings of the user."""

from __future__ import annotations

import pkgutil
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

import pyrofl.models
from pyrofl.arguments import known
from pyrofl.cli.settings import DONE, Build, accepted, arguments, read_settings
from pyrofl.cli.setup import Task
from pyrofl.inference.loop.messages import inbox
from pyrofl.inference.loop.rounds import first
from pyrofl.inference.method import Method
from pyrofl.models.likelihoods import named

Scheduled = Method | Callable[[int], Method]


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
    """Build methods by name for the network, likelihood and rounds of a task.

    A `build` with an argument `done`, the share of the rounds that are over, is called every round.

    Raises:
        ValueError: if a name is unknown or occurs twice, a setting is refused, or a method needs
            rows at the server and there are none.
    """
    found = builds()
    for name in names:
        known(name, found, "method")
    if len(set(names)) < len(names):
        raise ValueError(f"methods are {', '.join(names)}; expected no two alike")
    chosen = read_settings(settings, {name: found[name] for name in names})
    likelihood = named(task.likelihood)
    return {
        name: _built(name, found[name], task, rounds, {"likelihood": likelihood, **chosen[name]})
        for name in names
    }


def _built(
    name: str, build: Build, task: Task, rounds: int, arguments: dict[str, Any]
) -> Scheduled:
    wanted = accepted(build)
    if "unlabelled" in wanted:
        arguments["unlabelled"] = task.data.unlabelled
    try:
        method: Method = build(task.net, **arguments)
        first(method, task.data, task.seeds)  # so that it is refused before a run
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if DONE not in wanted or ("decay" in wanted and not arguments.get("decay")):
        return method  # nothing in it depends on the round
    return lambda number: build(task.net, **arguments, done=number / rounds)


def reaching(words: Sequence[str], method: str) -> list[str]:
    """Return the settings that reach one method, without its name, of equal ones the last.

    Args:
        words: as `methods` takes them.
        method: its name.
    """
    own, told = arguments(builds()[method]), dict[str, str]()
    for word in words:
        name, _, text = word.partition("=")
        to, _, argument = name.rpartition(".")
        if to in ("", method) and argument in own:
            told[argument] = text
    return [f"{name}={text}" for name, text in sorted(told.items())]


def foldable(args: Namespace, built: Mapping[str, Scheduled]) -> None:
    """Refuse a method that needs all messages at once, if they are to be folded.

    Raises:
        ValueError: if there is one.
    """
    for name, method in built.items() if args.fold_messages else ():
        now = method if isinstance(method, Method) else method(0)
        try:
            inbox(now, {}, torch.zeros(0), keep_messages=False)
        except ValueError as error:
            raise ValueError(f"--fold-messages with {name}: {error}") from error
