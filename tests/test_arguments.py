from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, nan
from typing import Literal

import numpy as np
import pytest

from pyrofl.arguments import (
    Count,
    NotNegative,
    Positive,
    PositiveShare,
    Share,
    ShareBelowOne,
    Whole,
    check_fields,
    check_name,
    checked,
)


class Pretend:
    """A record of the library."""


Pretend.__module__ = "pyrofl.pretend"


@checked
def build(
    net: str,
    *,
    lr: Positive = 0.01,
    decay: NotNegative = 0.0,
    momentum: ShareBelowOne = 0.9,
    part: PositiveShare = 1.0,
    share: Share | None = None,
    epochs: Count | Callable[[int], int] = 5,
    spare: Whole = 0,
    order: Literal["exact", "first"] = "exact",
    prune: Share | Literal["snip"] | None = None,
    aggregation: str | Callable[[], None] = "mean",
) -> dict[str, object]:
    """Build a thing."""
    return {"lr": lr, "epochs": epochs}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", 0, "lr is 0; expected a number above 0"),
        ("lr", nan, "lr is nan; expected a number above 0"),
        ("lr", "0.1", "lr is '0.1'; expected a number above 0"),
        ("lr", True, "lr is True; expected a number above 0"),
        ("decay", -1e-9, "decay is -1e-09; expected a number of at least 0"),
        ("momentum", 1, "momentum is 1; expected a number from 0 to below 1"),
        ("part", 0.0, "part is 0.0; expected a number above 0 to 1"),
        ("share", 1.5, "share is 1.5; expected a number from 0 to 1"),
        ("epochs", 2.5, "epochs is 2.5; expected a whole number of at least 1"),
        ("epochs", 0, "epochs is 0; expected a whole number of at least 1"),
        ("spare", -1, "spare is -1; expected a whole number of at least 0"),
        ("order", "second", "order is 'second'; expected one of exact, first"),
        ("prune", "snap", "prune is 'snap'; expected a number from 0 to 1 or one of snip"),
        ("prune", 2, "prune is 2; expected a number from 0 to 1 or one of snip"),
    ],
)
def test_what_is_out_of_range_is_refused_in_one_line(name, value, expected):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        build("net", **{name: value})
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"lr": 1, "decay": inf, "momentum": 0, "part": 1, "share": None, "epochs": np.int64(3)},
        {"lr": np.float32(0.5), "epochs": lambda ids: ids, "prune": "snip", "aggregation": print},
        {"prune": None, "order": "first", "aggregation": "anything"},
    ],
)
def test_what_is_in_range_goes_through(given):
    assert build("net", **given)["lr"] == given.get("lr", 0.01)


def test_the_signature_stays_and_help_shows_the_words():
    assert "lr: 'Positive' = 0.01" in str(inspect.signature(build))
    assert build.__doc__ == "Build a thing."
    with pytest.raises(TypeError, match="unexpected keyword argument 'lrr'"):
        build("net", lrr=1)


def test_fields_of_records_are_checked():
    @dataclass
    class Step:
        repeat: Count = 1
        fail: Share = 0.0

        def __post_init__(self) -> None:
            check_fields(self)

    assert Step(3).repeat == 3
    with pytest.raises(ValueError, match=r"^fail is 2; expected a number from 0 to 1$"):
        Step(fail=2)


def test_a_misspelt_name_gets_the_nearest():
    with pytest.raises(ValueError, match=r"unknown method .fedavgg.; did you mean fedavg\?"):
        check_name("fedavgg", {"fedavg": 1}, "method")
    with pytest.raises(ValueError, match="unknown method 'x'; expected one of fedavg, local"):
        check_name("x", {"fedavg": 1, "local": 2}, "method")


class Thing:
    """A record."""


@checked
def handle(
    thing: Pretend, made: Pretend | Callable[[int], int] = len, by: Mapping[str, int] | None = None
) -> None:
    """Handle a thing."""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"thing": 3}, "thing is 3; expected a Pretend"),
        ({"thing": None}, "thing is None; expected a Pretend"),
        ({"thing": [1, 2]}, "thing is a list; expected a Pretend"),
        (
            {"thing": Pretend(), "made": "x"},
            "made is 'x'; expected a Pretend or a function of 1 argument (int)",
        ),
        (
            {"thing": Pretend(), "made": lambda a, b: a},
            "made is a function (a, b); expected a Pretend or a function of 1 argument (int)",
        ),
        ({"thing": Pretend(), "by": [1]}, "by is a list; expected a dict"),
    ],
)
def test_arguments_of_another_kind_are_refused(given, told):
    with pytest.raises(ValueError, match="is") as error:
        handle(**given)
    assert str(error.value) == told


def test_what_behaves_alike_is_let_through():
    handle(Pretend(), Pretend(), {})
    handle(Thing())
    with pytest.raises(TypeError, match=r"^handle\(\) missing a required argument: 'thing'"):
        handle()
