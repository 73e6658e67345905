"""Warnings about columns whose clients differ in spelling or in units, found from sums alone."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from math import log, sqrt

from pyrofl.data.telling import Told
from pyrofl.data.wording import listed

FEWEST = 20  # values of a client from which its mean and standard deviation are compared
LARGER = 1.8  # times that numbers in another unit are larger, at least
APART = 4.0  # standard deviations of the smaller numbers between two means
ALIKE = 0.1  # difference of the logs of the two ratios, besides one standard error
FAHRENHEIT = (1.8, 32.0)  # of degrees Celsius


def key_of(word: str) -> str:
    """Return what spellings of one word have in common: no case, width or repeated blanks.

    >>> key_of("New  York") == key_of("new york")
    True
    """
    return " ".join(unicodedata.normalize("NFKC", word).casefold().split())


def spellings(words: Iterable[str]) -> list[list[str]]:
    """Return the groups of different words that are spellings of one."""
    found: dict[str, list[str]] = {}
    for word in dict.fromkeys(words):
        found.setdefault(key_of(word), []).append(word)
    return [group for group in found.values() if len(group) > 1]


def of_words(column: str, words: Iterable[str], kind: str) -> str:
    """Return a warning about words of a column that differ in case or blanks alone, or ""."""
    groups = [" and ".join(map(repr, group)) for group in spellings(words)]
    if not groups:
        return ""
    return (
        f"column {column} holds {listed(groups, 3)}, which differ only in case or blanks and count "
        f"as different {kind}; expected one spelling: correct the column"
    )


def of_levels(column: str, told: Mapping[str, Told]) -> str:
    """Return a warning about categories of clients that differ in case or blanks alone, or "".

    Args:
        column: its name.
        told: client -> sums over its rows.
    """
    owners: dict[str, list[str]] = {}
    for client, sums in told.items():
        for word in sums.levels or ():
            owners.setdefault(word, []).append(client)
    groups = [
        " and ".join(f"{word!r} (in {listed(owners[word], 3)})" for word in group)
        for group in spellings(owners)
    ]
    if not groups:
        return ""
    return (
        f"column {column} holds {listed(groups, 3)}, which differ only in case or blanks and count "
        "as different categories; expected one spelling in all clients: correct the column"
    )


def of_units(column: str, told: Mapping[str, Told]) -> str:
    """Return a warning about clients of which the numbers seem to be in another unit, or "".

    Such numbers have a mean and a standard deviation that are both larger by about one factor, and
    hardly overlap with the others; or both are as degrees Fahrenheit are to degrees Celsius. The
    client with the median mean is what the others are compared with.

    Args:
        column: its name.
        told: client -> sums over its rows, of numbers.
    """
    known = {client: sums for client, sums in told.items() if _is_known(sums)}
    if len(known) < 2:
        return ""
    order = sorted(known, key=lambda client: abs(known[client].mean))
    middle = order[(len(order) - 1) // 2]
    factors = {client: _factor(known[client], known[middle]) for client in order}
    odd = {client: factor for client, factor in factors.items() if factor}
    if not odd:
        return ""
    first = next(iter(odd))
    same = [client for client, factor in odd.items() if abs(log(factor / odd[first])) < 0.5]
    others = [client for client in order if client not in odd]
    how, factor = ("larger", odd[first]) if odd[first] > 1 else ("smaller", 1 / odd[first])
    return (
        f"column {column}: the numbers in {listed(same, 3)} are about {factor:.3g} times {how} "
        f"than those in {listed(others, 3)} (means {known[first].mean:.4g} and "
        f"{known[middle].mean:.4g}), as if they had another unit; expected one unit in all "
        "clients: convert the column"
    )


def _is_known(sums: Told) -> bool:
    return sums.levels is None and sums.count >= FEWEST and sums.mean != 0 and sums.squares > 0


def _factor(one: Told, other: Told) -> float:
    """Return the factor between numbers in different units; 0 if nothing speaks for units."""
    if abs(one.mean) < abs(other.mean):
        factor = _factor(other, one)
        return factor and 1 / factor
    (mean, spread), (low, low_spread) = one.moments, other.moments
    times, wider = mean / low, spread / low_spread
    slack = ALIKE + sqrt(0.5 / one.count + 0.5 / other.count)
    apart = abs(mean - low) > APART * low_spread
    if times >= LARGER and apart and abs(log(times / wider)) <= slack:
        return times
    slope, offset = FAHRENHEIT
    warmer = abs(mean - (slope * low + offset)) < spread and abs(log(wider / slope)) <= slack
    return times if times > 1 and apart and warmer else 0.0


def in_spelling_and_units(
    columns: Sequence[str], clients: Sequence[Mapping[str, Told]], names: Sequence[str]
) -> list[str]:
    """Return the warnings about columns, given the sums and the names of all clients."""
    found = []
    for column in columns:
        told = {name: sums[column] for name, sums in zip(names, clients, strict=True)}
        found += [of_levels(column, told), of_units(column, told)]
    return [text for text in found if text]
