"""Straight code of Python, which is compiled once for all shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

NUMBER = r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
NUMBERS = re.compile(  # also several, as sizes and strides are
    rf"(?<!\w)(?:\((?:{NUMBER}, ?)+(?:{NUMBER})?\)|\[(?:{NUMBER}, )*{NUMBER}\]|{NUMBER})(?![\w.])"
)


def executed(code: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Run code that names these values; return them with what it defines.

    Its numbers get names too, so that code of another shape is the same text.
    """
    known = dict(values)

    def named(numbers: re.Match[str]) -> str:
        name = f"number_{len(known)}"
        known[name] = _read(numbers[0])
        return name

    exec(compiled(NUMBERS.sub(named, code)), known)
    return known


@lru_cache(maxsize=256)
def compiled(code: str) -> CodeType:
    """Compile code, which takes longer than all else where it is not known from another shape."""
    return compile(code, "<recording>", "exec")


def _read(text: str) -> Any:
    """Read what `NUMBERS` found."""
    if text[0] not in "([":
        return float(text) if {".", "e"} & {*text} else int(text)
    found = [_read(part) for part in text[1:-1].replace(",", " ").split()]
    return tuple(found) if text[0] == "(" else found
