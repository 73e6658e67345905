"""Warnings about inconsistent spellings or units, and suspicious cells, in tables.

Differences between clients are found from their column summaries.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log, sqrt

import numpy as np

from pyrofl.data.tables.column_summary import ColumnSummary
from pyrofl.data.tables.columns import Column, Rows
from pyrofl.data.tables.wording import listed

CODES = (-9999, -999, -99, -9, 99, 999, 9999, 99999)  # often used for missing values
ROW_NUMBER = re.compile(r"(?i)(^|[_ ])(id|index|idx|row|nr|unnamed: \d+)$")
TOTALS = frozenset(("total", "totals", "sum", "all", "mean", "average", "gesamt", "summe"))
FEW = 10  # largest number of different values that may be meaningful codes
MOST_OF = 0.9  # fraction of a column's variance that a single cell explains
CLEAR = 5.0  # ratio of numbers in two units from which few values suffice
FEWEST = 10  # values of a client for a comparison of mean and standard deviation
ENOUGH = 20  # values for ratios below CLEAR
LARGER = 1.8  # smallest ratio of numbers in two units
APART = 4.0  # standard deviations of the smaller numbers between two means
ALIKE = 0.1  # difference of the logs of the two ratios, besides one standard error
FEW_ROWS = 20  # rows from which repeated values may show a rule
ENOUGH_IN_ORDER = 50  # numbers for a monotone relation of two columns
LEAST_ONCE = 5.0  # number of unique rows expected if equal rows were due to chance
MOST_COPIES = 0.2  # fraction of the test rows
FAHRENHEIT = (1.8, 32.0)  # of degrees Celsius


def key_of(word: str) -> str:
    """Return a normalized key, equal for words that differ only in case, width, dashes or blanks.

    >>> key_of("New  York") == key_of("new york"), key_of("St-L\u00f4") == key_of("ST\u2013L\u00d4")
    (True, True)
    """
    letters = unicodedata.normalize("NFKC", word)
    kinds = ((unicodedata.category(letter), letter) for letter in letters)
    plain = ("-" if kind == "Pd" else letter for kind, letter in kinds if kind != "Cf")
    return " ".join("".join(plain).casefold().replace("\u2019", "'").split())


def spellings(words: Iterable[str]) -> list[list[str]]:
    """Group words with the same meaning: spelling variants, or initials such as "Y" for "yes"."""
    found: dict[str, list[str]] = {}
    for word in dict.fromkeys(words):
        found.setdefault(key_of(word), []).append(word)
    short = {key for key in found if len(key) == 1}
    long = {key[0]: key for key in found if len(key) > 1}
    if len(short) > 1 and short == set(long) and len(found) == 2 * len(short):
        return [found[key] + found[long[key]] for key in sorted(short)]  # as of Y, N, yes and no
    return [group for group in found.values() if len(group) > 1]


def of_words(column: str, words: Iterable[str], kind: str) -> str:
    """Return a warning about words in a column that differ only in case or blanks, or ""."""
    groups = [" and ".join(map(repr, group)) for group in spellings(words)]
    if not groups:
        return ""
    return (
        f"column {column} holds {listed(groups, 3)}, which look like spellings of one word and "
        f"count as different {kind}; expected one spelling: correct the column"
    )


def of_levels(column: str, told: Mapping[str, ColumnSummary]) -> str:
    """Return a warning about inconsistent spellings of categories between clients, or "".

    It covers spellings of one word, and clients without a common category.
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
        return without_common_levels(column, told)
    return (
        f"column {column} holds {listed(groups, 3)}, which look like spellings of one word and "
        "count as different categories; expected one spelling in all clients: correct the column"
    )


def without_common_levels(column: str, told: Mapping[str, ColumnSummary]) -> str:
    """Return a warning about a client that shares no category with the other clients, or ""."""
    for client, sums in told.items():
        others = {w for name, one in told.items() if name != client for w in one.levels or ()}
        own = set(sums.levels or ())
        if len(own) > 1 and others and sums.count >= FEWEST and not own & others:
            return (
                f"column {column} holds {listed(sorted(own), 3)} in {client} and "
                f"{listed(sorted(others), 3)} elsewhere, without a common word, as if {client} had "
                "a code of its own; expected one code in all clients"
            )
    return ""


def of_numbers(column: Column) -> str:
    """Return a warning about suspicious numbers, such as codes for missing values, or "".

    They are codes for missing values, such as -999; row numbers and dates written as numbers; and
    a single number that explains nearly all the variance of the column.
    """
    values = column.numbers[~np.isnan(column.numbers)]
    distinct = np.unique(values)
    if len(distinct) <= FEW:
        return ""
    told = f"column {column.name} holds"
    for code in CODES:
        count, rest = np.count_nonzero(values == code), distinct[distinct != code]
        low, high = rest.min(), rest.max()
        outside = max(low - code, code - high)
        if count > 1 and outside > (high - low) / 2:
            return (
                f"{told} {code} in {count} rows, and otherwise {low:g} to {high:g}; if it stands "
                "for a missing value, expected an empty cell (--missing drop or impute)"
            )
    if ROW_NUMBER.search(column.name) and len(distinct) == len(values):
        return (
            f"{told} a different number in every row, as row numbers do, and is used as one; "
            "expected measurements: leave it out (--features)"
        )
    if all(18000101 <= value <= 21001231 and _is_date(value) for value in distinct[:100]):
        return (
            f"{told} numbers such as {distinct[0]:.0f}, which look like dates and count as plain "
            "numbers; expected days since a date"
        )
    squares = (values - values.mean()) ** 2
    if len(values) >= FEWEST and squares.max() > MOST_OF * squares.sum():
        at = int(np.nanargmax(np.abs(column.numbers - values.mean())))
        return (
            f"{told} {column.words[at]} in {column.places[at]}, from which nearly all its variance "
            f"comes (the median is {np.median(values):g}); correct the cell if it is an error"
        )
    return ""


def _is_date(value: float) -> bool:
    return value == round(value) and 1 <= value // 100 % 100 <= 12 and 1 <= value % 100 <= 31


def of_totals(column: Column) -> str:
    """Return a warning about a single row labeled as a total, such as "all", or ""."""
    words = column.words.tolist()
    odd = [w for w in dict.fromkeys(words) if key_of(w) in TOTALS and words.count(w) == 1]
    if not odd:
        return ""
    return (
        f"column {column.name} holds {odd[0]!r} in a single row, which counts as a group of its "
        "own; if the row sums up others, leave it out"
    )


def of_units(column: str, told: Mapping[str, ColumnSummary]) -> str:
    """Return a warning about clients whose numbers seem to be in another unit, or "".

    Such numbers have a mean and a standard deviation that are both larger by about one factor, and
    hardly overlap with the others, which are similar to each other; or both are related as degrees
    Fahrenheit and Celsius. Clients are compared with the client of the median mean.
    """
    known = {
        client: sums
        for client, sums in told.items()
        if sums.levels is None and sums.count >= FEWEST and sums.mean != 0 and sums.squares > 0
    }
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
    low, *_, high = sorted(abs(known[client].mean) for client in (*others, *others))
    if high > sqrt(factor) * low:
        return ""  # the others differ as much among themselves
    return (
        f"column {column}: the numbers in {listed(same, 3)} are about {factor:.3g} times {how} "
        f"than those in {listed(others, 3)} (means {known[first].mean:.4g} and "
        f"{known[middle].mean:.4g}), as if they had another unit; expected one unit in all "
        "clients: convert the column"
    )


def _factor(one: ColumnSummary, other: ColumnSummary) -> float:
    """Return the factor between the units of two clients' numbers; 0 if units seem equal."""
    if abs(one.mean) < abs(other.mean):
        factor = _factor(other, one)
        return factor and 1 / factor
    (mean, spread), (low, low_spread) = one.moments, other.moments
    times, wider = mean / low, spread / low_spread
    slack = ALIKE + sqrt(0.5 / one.count + 0.5 / other.count)
    apart = abs(mean - low) > APART * low_spread
    if times < CLEAR and min(one.count, other.count) < ENOUGH:
        return 0.0
    if times >= LARGER and apart and abs(log(times / wider)) <= slack:
        return times
    slope, offset = FAHRENHEIT
    warmer = abs(mean - (slope * low + offset)) < spread and abs(log(wider / slope)) <= slack
    return times if times > 1 and apart and warmer else 0.0


def in_spelling_and_units(
    clients: Sequence[Mapping[str, ColumnSummary]], names: Sequence[str]
) -> list[str]:
    """Return warnings about inconsistent spellings and units between clients' columns."""
    found = []
    for column in clients[0]:
        told = {name: sums[column] for name, sums in zip(names, clients, strict=True)}
        found += [of_levels(column, told), of_units(column, told)]
    return [text for text in found if text]


def of_answers(target: Column, features: Sequence[Column]) -> str:
    """Return a warning about features that determine the target one to one, or "".

    Equal columns do, and columns with a rule without exception: a one-to-one mapping of repeated
    values, or a monotone one.
    """
    found = [column.name for column in features if _is_answer(column, target)]
    if not found:
        return ""
    return (
        f"column {listed(found, 3)} determines the target {target.name}: each value of it goes "
        "with one value of the target, and the reverse; expected features that are known before "
        "the target is: leave it out (--features)"
    )


def _is_answer(feature: Column, target: Column) -> bool:
    """Return whether feature and target have a one-to-one relation unlikely to be chance."""
    one, other = (c.words if np.isnan(c.numbers).any() else c.numbers for c in (feature, target))
    count = len(one)
    for some in (min(count, FEW_ROWS), count):  # few rows rule out most columns
        pairs = set(zip(one[:some].tolist(), other[:some].tolist(), strict=True))
        distinct = len(pairs)
        if not len(set(one[:some])) == distinct == len(set(other[:some])):
            return False
    if distinct < 2 or count < FEWEST:
        return False
    if 2 * distinct <= count and count >= FEW_ROWS:
        return True
    if one.dtype == object or other.dtype == object:
        return bool((feature.words == target.words).all())
    steps = np.diff(np.stack([one, other])[:, one.argsort()])
    up, higher = steps[:, steps[0] > 0] > 0
    monotone = bool((up == higher).all() or (up != higher).all())
    return bool((one == other).all()) or (monotone and count >= ENOUGH_IN_ORDER)


def of_copies(rows: Sequence[bytes], is_test: Rows) -> str:
    """Return a warning about a table in which nearly all rows are duplicated, or "".

    If N rows with D distinct values were equal by chance, about N exp(-N / D) would occur once;
    copies of all rows leave none. Rows [N] include features, target and client.
    """
    counts = Counter(rows)
    once = sum(count == 1 for count in counts.values())
    expected = len(rows) * exp(-len(rows) / max(1, len(counts)))
    if expected < LEAST_ONCE or once > expected / LEAST_ONCE**2:
        return ""
    trained = {row for row, test in zip(rows, is_test, strict=True) if not test}
    same = sum(row in trained for row, test in zip(rows, is_test, strict=True) if test)
    total = int(is_test.sum())
    if same <= MOST_COPIES * total:
        return ""
    return (
        f"{same} of {total} test rows equal a training row in all columns, the target included, as "
        "nearly all rows occur twice or more, so that test scores are too good; expected each row "
        "once: remove the copies"
    )
