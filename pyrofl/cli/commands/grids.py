"""Settings that tuning tries: those given by --over, or the method's default grid TUNE_OVER."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice, product
from random import Random
from typing import Any

from pyrofl.arguments import check_name
from pyrofl.experiments.experiment import TRIALS, as_text
from pyrofl.experiments.methods import Scheduled, builds, reaching
from pyrofl.experiments.settings import arguments, parse
from pyrofl.inference.definition.description import described
from pyrofl.inference.engine.start import by_round

Words = dict[str, str]
"""A setting as it is written behind --set: name -> value."""


def asked(method: str, over: Sequence[str], fixed: Sequence[str]) -> list[Words]:
    """Return all combinations of the method settings given as texts "name=value,value,...".

    >>> asked("fedavg", ["lr=0.1,0.3", "fine_tune=0,5"], [])[1]
    {'lr': '0.1', 'fine_tune': '5'}
    """
    own, values_by_name = arguments(builds()[method]), dict[str, list[str]]()
    for word in over:
        name, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"--over {word!r} has no values; expected name=value,value,...")
        check_name(name, own, f"setting of {method}:")
        values = text.split(",")
        for value in values:
            parse(value, own[name], f"--over {name}")
        if name in values_by_name or len(set(values)) < len(values):
            raise ValueError(f"--over {word!r}: expected every name once, and no two values alike")
        values_by_name[name] = values
    if twice := sorted(
        values_by_name.keys() & {word.partition("=")[0] for word in reaching(fixed, method)}
    ):
        raise ValueError(f"{twice[0]} is given by --set and by --over; expected one of them")
    return _product(values_by_name)


def own(
    method: str, build: Callable[..., Scheduled], fixed: Sequence[str], seed: int
) -> list[Words]:
    """Return the method's default tuning grid in random order, with the default settings first."""
    module = import_module(f"pyrofl.models.{method}")
    values: Mapping[str, Sequence[Any]] = getattr(module, "TUNE_OVER", {})
    given_names = {word.partition("=")[0] for word in reaching(fixed, method)}
    every = _product({n: [*map(as_text, v)] for n, v in values.items() if n not in given_names})
    usual = _parts(build())
    first = next((one for one in every if _parts(build(**one)) == usual), {})
    return [first, *Random(seed).sample(every, len(every))]


def chosen(
    method: str,
    over: Sequence[str],
    trials: int | None,
    build: Callable[..., Scheduled],
    fixed: Sequence[str],
    seed: int,
) -> list[Words]:
    """Return at most `trials` method settings for tuning, each of which builds a different method.

    They are of --over, by default all; without it of the method's own values, by default `TRIALS`.
    What is drawn goes by the seed. `build` makes the method of a setting, and refuses a bad one.
    """
    if over:
        every = asked(method, over, fixed)
        count = len(every) if trials is None else trials
        some = every if count == len(every) else Random(seed).sample(every, len(every))
    else:
        count, some = TRIALS if trials is None else trials, own(method, build, fixed, seed)
    settings = list(islice(_different(some, build), count))
    if len(settings) < count:
        cure = "" if over else ", or more of them by pyrofl tune --over NAME=VALUE,VALUE"
        message = f"--trials is {count}, and of {method} there are {len(settings)} to try"
        raise ValueError(f"{message}; expected at most so many{cure}")
    return settings


def _different(some: Sequence[Words], build: Callable[..., Scheduled]) -> Iterator[Words]:
    seen: list[dict[str, str]] = []
    for setting in some:
        if (parts := _parts(build(**setting))) not in seen:
            seen.append(parts)
            yield setting


def _parts(method: Scheduled) -> dict[str, str]:
    return described(by_round(method)(0))


def _product(values: Mapping[str, Sequence[str]]) -> list[Words]:
    return [dict(zip(values, some, strict=True)) for some in product(*values.values())]
