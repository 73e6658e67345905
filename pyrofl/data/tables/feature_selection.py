"""Selection of the feature columns of a table, with the reasons for omitting the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from pyrofl.data.tables.columns import UNNAMED, Column

MAX_LEVELS = 20  # of a column of text used as categories by default
MAX_SD_RATIO = 100.0  # ratio of the standard deviations of two features


class Chosen(NamedTuple):
    """Selected feature columns, which of them are categorical, and reasons for omitted columns."""

    names: tuple[str, ...]
    categories: frozenset[str]
    left_out: dict[str, str]  # column -> why

    def numbers_first(self, likelihood: str) -> Chosen:
        """Reorder features, numeric ones first, for likelihoods with a numeric first feature."""
        names = sorted(self.names, key=self.categories.__contains__)
        if names[0] in self.categories:
            message = f"features are categories only: {', '.join(names)}"
            raise ValueError(f"{message}; expected a numeric first feature for {likelihood}")
        return self._replace(names=tuple(names))


def choose(
    table: Mapping[str, Column],
    owners: Sequence[str],
    wanted: Sequence[str] | None,
    categories: Sequence[str],
    take_text: bool,
) -> Chosen:
    """Select feature columns: those in `wanted`, or all suitable ones except target and groups.

    Owners are the target and the columns of groups and of test rows. By default all columns of
    numbers and the `categories` are used, and text with few words if `take_text`.
    """
    file, left_out = table[owners[0]].file, dict[str, str]()
    coded = {n for n, c in table.items() if n in categories or (take_text and _few_words(c))}
    for place, (name, column) in enumerate(table.items(), 1):
        if name in owners:
            continue
        if wanted is not None:
            why = "" if name in wanted else "not requested"
        elif name == UNNAMED.format(place):
            why = "it has no name"
        else:
            why = "" if column.is_numeric or name in coded else column.nature
        if not why:
            column.refuse_clash("name the features that are wanted, without it (--features)")
        if wanted is None:
            column.refuse_unreadable()
        if why:
            left_out[name] = why
    names = tuple(wanted or (name for name in table if name not in (*owners, *left_out)))
    if not names:
        raise ValueError(f"{file}: no numeric column besides {owners[0]}; expected features")
    if odd := [name for name in categories if name not in names]:
        raise ValueError(f"{file}: categories are {', '.join(odd)}; expected names of features")
    for name in names:
        if name not in coded:
            _refuse_no_numbers(table[name], take_text)
    return Chosen(names, frozenset(coded), left_out)


def far_apart(names: Sequence[str], x: Tensor) -> str:
    """Return a warning if the features' standard deviations differ widely, or ""."""
    observed_values = [column[~column.isnan()].double() for column in x.T]
    spread = [float(column.std()) if len(column) > 1 else 0.0 for column in observed_values]
    varying = {name: sd for name, sd in zip(names, spread, strict=True) if sd > 0}
    if not varying:
        return ""
    low, high = (pick(varying, key=varying.__getitem__) for pick in (min, max))
    if varying[high] <= MAX_SD_RATIO * varying[low]:
        return ""
    return (
        f"the standard deviation of {high} is {varying[high]:.3g} and that of {low} "
        f"{varying[low]:.3g}, so that steps of one size do not suit both; expected similar ones, "
        "as by scaling='standardize' (--scaling standardize)"
    )


def omitted_category_warning(table: Mapping[str, Column], chosen: Chosen) -> str:
    """Return a warning if columns of text that may be categories are omitted, or ""."""
    omitted = [name for name in chosen.left_out if _few_words(table[name])]
    if not omitted:
        return ""
    levels = [len(set(table[name].words[~table[name].gaps])) for name in omitted]
    each = ", ".join(f"{name} ({n} levels)" for name, n in zip(omitted, levels, strict=True))
    return (
        f"text is left out: {each}; name such columns as categories (--categories), or name all "
        "features (--features)"
    )


def _few_words(column: Column) -> bool:
    """Return whether a text column has few distinct values, at most half its number of rows."""
    words = column.words[~column.gaps]
    return not column.is_numeric and 0 < len(set(words)) <= min(MAX_LEVELS, len(words) // 2)


def _refuse_no_numbers(column: Column, take_text: bool) -> None:
    column.refuse_unreadable()
    cure = " (or categories: --categories)" if take_text else ""
    column.refuse_text(f"numbers as features{cure}")
    column.refuse_odd("name the features that are wanted, without it (--features)")
