"""Every setting of every method refuses what lies outside of its range, by its name."""

from __future__ import annotations

from math import nan

import promises
import pytest
import test_contract as contract
import toys
from hostile.settings import kind_of, known

# By the kinds that tests/hostile/settings.py gives to settings by hand.
OUTSIDE: dict[str, tuple[object, ...]] = {
    "count": (0, -1, 2.5),
    "whole": (-1, 2.5),
    "positive": (0.0, nan),
    "not negative": (-1.0, nan),
    "share": (-0.1, 1.5, nan),
    "below one": (-0.1, 1.0, nan),
    "both": (-0.1, nan),
    "word": ("no-such-word",),
    "pattern": ("no-such-layer.*",),
}


@contract.everywhere
def test_values_out_of_range_are_refused_by_name(name):
    build = contract.MODULES[name].build
    for setting in [setting for method, setting in known() if method == name]:
        for value in OUTSIDE.get(kind_of(name, setting), ()):
            given = {**promises.of(name).settings, setting: value}
            with pytest.raises(ValueError, match=rf"^({setting} is |no parameter matches)"):
                build(toys.net(), **given)
