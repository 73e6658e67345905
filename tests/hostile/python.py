"""Hostile calls from Python: expressions, in which the names are those of `names` below."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any
from zlib import crc32

from hostile.calls import GAP, GAPS, WORKS
from hostile.case import BEGIN, CALL, DONE, REFUSED, Case
from hostile.settings import kind_of, known

# Values of another kind, for every number that a method can be told.
ODD = ("'ten'", "[1]", "1j", "object()", "{}", "nan", "-1", "b'1'", "tensor([1.,2.])", "None", "()")
NUMBERS = ("count", "whole", "positive", "not negative", "share", "below one")
MAYBE_NONE = "batch own_epochs lr_prior embedding damping prune scale downloads "
MAYBE_NONE += "warm_start"
DEEP = ("fedper", "fedrep", "fedbabu", "fedpop", "lgfedavg", "pfedvem")


def settings() -> Iterator[tuple[str, str]]:
    """Yield a call of every method with something odd for every number, and the number's name."""
    for method, name in known():
        kind = kind_of(method, name)
        at = crc32(f"{method}.{name}".encode()) % len(ODD)
        value = ODD[at] if name not in MAYBE_NONE.split() or ODD[at] != "None" else "'ten'"
        if kind in NUMBERS:
            more = ",server_data=x" if method in ("fedbe", "predbayes") else ""
            net = "deep" if method in DEEP else "net"
            yield f"{method}.build({net},{name}={value}{more})", name


def cases() -> Iterator[Case]:
    """Yield all that is called from Python."""
    met = set()
    for call, told, values in GAPS:
        for value in values.split():
            code = GAP.sub(lambda _, value=value: value.replace("~", " "), call)
            if code not in met:
                met.add(code)
                yield _case(code, (REFUSED,), (told,) if told else ())
    for code, name in settings():
        yield _case(code, (REFUSED,), (name,))
    for code in WORKS:
        # With rows of zeros no weight moves, which is warned of.
        warned = "unchanged in every round" if "x*0" in code else ""
        yield replace(_case(code.replace("~", " "), (DONE,), ()), warned=warned)


def _case(code: str, wanted: tuple[str, ...], told: tuple[str, ...]) -> Case:
    return Case((CALL, code), wanted, told, writes=False)


@cache
def names() -> dict[str, Any]:
    """Return what the calls speak of."""
    import numpy as np
    import torch
    from torch import nn

    import pyrofl
    from pyrofl import models, nets
    from pyrofl.inference import aggregation
    from pyrofl.inference.engine import participation

    grid = torch.arange(48, dtype=torch.float64).reshape(12, 4)
    ids = torch.arange(3)
    y = torch.tensor([0, 1, 2, 2, 1, 0, 0, 0, 1, 2, 2, 1])
    table = {
        "x": torch.sin(grid**1.5),
        "y": y,
        "train": torch.arange(12).split([3, 5, 4]),
        "test": torch.arange(12).split([3, 5, 4]),
        "classes": ("a", "b", "c"),
    }

    def federation(**changes: Any) -> Any:
        return pyrofl.Federation(**{**table, **changes})

    def each(change: Any) -> list[Any]:
        return [change(rows) for rows in table["train"]]

    def bad(values: Any, value: float) -> Any:
        made = values.clone()
        made[1] = value
        return made

    def finite(tensors: Any) -> bool:
        return all(bool(v.isfinite().all()) for v in tensors.values())

    def same(one: Any, other: Any) -> bool:
        return all(torch.allclose(v, other.state.server[n]) for n, v in one.state.server.items())

    net, deep = nets.build("softmax", (4,), 3), nets.build("mlp:2", (4,), 3)
    for name, _ in known():
        __import__(f"pyrofl.models.{name}")
    every = {name: getattr(models, name) for name, _ in known()}
    method = models.fedavg.build(net, epochs=1)
    bayes = models.pvi.build(net, epochs=1)
    data = federation()
    found = {**locals()}
    found |= {name: getattr(pyrofl, name) for name in pyrofl.__all__ if name != "posterior"}
    for name in ("checks", "datasets", "federations", "guides", "likelihoods", "participation"):
        found[name] = getattr(pyrofl, name)
    found |= {"priors": pyrofl.priors, "reference": pyrofl.reference, "parts": table["train"]}
    found |= {"Stragglers": participation.Stragglers, "by_size": aggregation.by_size, "inf": np.inf}
    found |= {"x": table["x"], "module": nn.Linear(4, 3), "tensor": torch.tensor, "nan": np.nan}
    return every | found | {"replace": replace, "step": method.phases[0].updates[0]}


@cache
def fitted() -> Any:
    """Return the run that calls ask about."""
    known_names = names()
    return known_names["fit"](known_names["method"], known_names["data"], 1, progress=False)


def call(code: str) -> int:
    """Evaluate a call; return the exit code that a command would have."""
    known_names = dict(names())
    if "run" in code or "state" in code:
        known_names |= {"run": fitted(), "state": fitted().state}
    for name in ("dataset", "schools"):
        if name in code:
            data = {"dataset": "digits", "schools": "eight_schools"}[name]
            known_names[name] = known_names["datasets"].load(data)
    try:
        found = eval(code, known_names)
    except (ValueError, TypeError) as error:
        sys.stderr.write(f"{BEGIN}{error}\n")
        return 2
    return int(found is False)
