"""Settings that tuning tries: those given by --over, or the method's default grid SEARCH_GRID."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice, product
from random import Random
from typing import Any

from pyrofl.arguments import check_name
from pyrofl.experiments.experiment import NUM_TRIALS, as_text
from pyrofl.experiments.methods import Scheduled, builds, settings_of_method
from pyrofl.experiments.settings import arguments, parse
from pyrofl.inference.definition.description import described
from pyrofl.inference.engine.start import method_schedule

SettingTexts = dict[str, str]
"""A setting as it is written behind --set: name -> value."""


def grid_from_over(
    method: str, over_words: Sequence[str], set_words: Sequence[str]
) -> list[SettingTexts]:
    """Return all combinations of the method settings given as texts "name=value,value,...".

    >>> grid_from_over("fedavg", ["lr=0.1,0.3", "fine_tune=0,5"], [])[1]
    {'lr': '0.1', 'fine_tune': '5'}
    """
    method_arguments, values_by_name = arguments(builds()[method]), dict[str, list[str]]()
    for word in over_words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"--over {word!r} has no values; expected name=value,value,...")
        check_name(name, method_arguments, f"setting of {method}:")
        values = text.split(",")
        for value in values:
            parse(value, method_arguments[name], f"--over {name}")
        if name in values_by_name or len(set(values)) < len(values):
            raise ValueError(f"--over {word!r}: expected every name once, and no two values alike")
        values_by_name[name] = values
    if twice := sorted(
        values_by_name.keys()
        & {word.partition("=")[0] for word in settings_of_method(set_words, method)}
    ):
        raise ValueError(f"{twice[0]} is given by --set and by --over; expected one of them")
    return _product(values_by_name)


def default_grid(
    method: str, build: Callable[..., Scheduled], set_words: Sequence[str], seed: int
) -> list[SettingTexts]:
    """Return the method's default tuning grid in random order, with the default settings first."""
    module = import_module(f"pyrofl.models.{method}")
    values: Mapping[str, Sequence[Any]] = getattr(module, "SEARCH_GRID", {})
    given_names = {word.partition("=")[0] for word in settings_of_method(set_words, method)}
    every = _product({n: [*map(as_text, v)] for n, v in values.items() if n not in given_names})
    usual = _description(build())
    first = next((one for one in every if _description(build(**one)) == usual), {})
    return [first, *Random(seed).sample(every, len(every))]


def settings_to_try(
    method: str,
    over_words: Sequence[str],
    trials: int | None,
    build: Callable[..., Scheduled],
    set_words: Sequence[str],
    seed: int,
) -> list[SettingTexts]:
    """Return at most `trials` method settings for tuning, each of which builds a different method.

    They are of --over, by default all; without it `NUM_TRIALS` of the method's own values.
    What is drawn goes by the seed. `build` makes the method of a setting, and refuses a bad one.
    """
    if over_words:
        every = grid_from_over(method, over_words, set_words)
        count = len(every) if trials is None else trials
        some = every if count == len(every) else Random(seed).sample(every, len(every))
    else:
        count = NUM_TRIALS if trials is None else trials
        some = default_grid(method, build, set_words, seed)
    settings = list(islice(_without_duplicates(some, build), count))
    if len(settings) < count:
        cure = "" if over_words else ", or more of them by pyrofl tune --over NAME=VALUE,VALUE"
        message = f"--trials is {count}, and of {method} there are {len(settings)} to try"
        raise ValueError(f"{message}; expected at most so many{cure}")
    return settings


def _without_duplicates(
    some: Sequence[SettingTexts], build: Callable[..., Scheduled]
) -> Iterator[SettingTexts]:
    seen: list[dict[str, str]] = []
    for setting in some:
        if (parts := _description(build(**setting))) not in seen:
            seen.append(parts)
            yield setting


def _description(method: Scheduled) -> dict[str, str]:
    return described(method_schedule(method)(0))


def _product(values: Mapping[str, Sequence[str]]) -> list[SettingTexts]:
    return [dict(zip(values, some, strict=True)) for some in product(*values.values())]
