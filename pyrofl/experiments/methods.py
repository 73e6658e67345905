"""Construction of methods by name, with the settings given on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from pyrofl.arguments import check_name
from pyrofl.data.tables.source import LEARNED
from pyrofl.experiments.method_names import method_summaries
from pyrofl.experiments.settings import (
    ELAPSED,
    Build,
    Value,
    argument_types,
    arguments,
    read_settings,
)
from pyrofl.experiments.tasks import Task
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.start import first
from pyrofl.models.likelihoods import learned_normal, named

Scheduled = Method | Callable[[int], Method]


def builds() -> dict[str, Build]:
    """Return the `build` function of every method: name -> function."""
    return {name: import_module(f"pyrofl.models.{name}").build for name in method_summaries()}


def methods(
    names: Sequence[str], settings: Sequence[str], task: Task, rounds: int
) -> Mapping[str, Scheduled]:
    """Build methods by name for a task; methods with a schedule become functions of the round."""
    builders = builds()
    for name in names:
        check_name(name, builders, "method")
    if len(set(names)) < len(names):
        raise ValueError(f"methods are {', '.join(names)}; expected no two alike")
    chosen = read_settings(settings, {name: builders[name] for name in names})
    return {name: _built(name, builders[name], task, rounds, chosen[name]) for name in names}


def _built(
    name: str, build: Build, task: Task, rounds: int, settings: Mapping[str, Value]
) -> Scheduled:
    wanted = argument_types(build)
    arguments: dict[str, Any] = {"likelihood": named(task.likelihood), **settings}
    if "server_data" in wanted:
        arguments["server_data"] = task.data.server_data
    source = task.data.source
    try:
        if task.likelihood == LEARNED and source:
            moments = (source.center, source.scale)
            arguments["likelihood"] = learned_normal(*moments)
            if not getattr(build(task.net, **arguments).guide, "random", True):
                arguments["likelihood"] = learned_normal(*moments, least_squares=True)
        method: Method = build(task.net, **arguments)
        first(method, task.data, task.seeds)  # so that it is refused before a run
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if ELAPSED not in wanted or ("decay" in wanted and not arguments.get("decay")):
        return method  # nothing in it depends on the round
    return lambda number: build(task.net, **arguments, elapsed=number / rounds)


def settings_of_method(words: Sequence[str], method: str) -> list[str]:
    """Return the settings that apply to a method, as "name=value" without the method's name.

    A later setting replaces an earlier one of the same name.
    """
    own, reached = arguments(builds()[method]), dict[str, str]()
    for word in words:
        name, _, text = word.partition("=")
        to, _, argument = name.rpartition(".")
        if to in ("", method) and argument in own:
            reached[argument] = text
    return [f"{name}={text}" for name, text in sorted(reached.items())]
