"""Loader of CSV and Parquet tables: a target, features, and a column that identifies the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyrofl.arguments import ShareBelowOne, check_name, checked, composed
from pyrofl.choices import LIKELIHOODS, Missing, Scaling
from pyrofl.data.federation import Dataset
from pyrofl.data.tables.column_summary import ColumnSummary, category_codes, summarize_values
from pyrofl.data.tables.columns import Column, Ints, Rows, complete, number
from pyrofl.data.tables.data_quality import (
    distinct_level_warning,
    number_warning,
    spelling_and_unit_warnings,
    total_row_warning,
    word_warning,
)
from pyrofl.data.tables.feature_selection import choose, far_apart, omitted_category_warning
from pyrofl.data.tables.holdout import draw_test_rows, last_rows, told_rows
from pyrofl.data.tables.preprocessor import ColumnPreprocessing, PreprocessingPlan, Preprocessor
from pyrofl.data.tables.row_checks import (
    cells_of,
    copied_test_warning,
    determined_target_warning,
    doubled_row_warning,
    is_determined,
    is_doubled,
    relation_of,
    shared_row_warning,
)
from pyrofl.data.tables.source import LEARNED, Source
from pyrofl.data.tables.table_files import SITE, Columns, Table, load_table
from pyrofl.user_warnings import warn_user

# Likelihoods that read the first feature in its own units.
OF_FIRST = "normal_known_sd", "binomial"


@checked
def load_csv(
    path: str,
    *,
    target: str | None = None,
    client_column: str | None = None,
    features: Sequence[str] | None = None,
    categories: Sequence[str] = (),
    likelihood: str | None = None,
    missing: Missing = "error",
    scaling: Scaling | None = None,
    test_fraction: ShareBelowOne = 0.2,
    test_column: str | None = None,
    test_last: str | None = None,
    row_weights: str | None = None,
    seed: int = 0,
) -> Dataset:
    """Read tables with a header row, CSV or Parquet, as a data set; see `load`.

    A cell that is empty, ".", NA, n/a, NaN or null has no value. A column holds numbers if at least
    half of its cells that have a value are numbers, and text otherwise; a column of numbers with
    other cells, such as 5% or 1e999, raises an error where it is used.
    """
    target, client_column, test_column, test_last, row_weights = (
        name and composed(name)
        for name in (target, client_column, test_column, test_last, row_weights)
    )
    features, categories = features and [*map(composed, features)], [*map(composed, categories)]
    names = (target, client_column, test_column, test_last, row_weights, *(features or ()))
    table = load_table(path, [name for name in names if name] if features else None)
    columns, client_column = _with_sites(path, table, client_column)
    if target is None:
        raise ValueError(f"{path}: target is missing; expected one of {', '.join(columns)}")
    roles = {"target": target, "client column": client_column, "test column": test_column}
    roles["row weights"] = row_weights
    owners = [name for name in roles.values() if name]
    time = [test_last] if test_last else []
    _refuse_names(path, columns, roles, features, (*categories, *time))
    if test_column and test_last:
        message = f"test_column is {test_column!r} and test_last {test_last!r}"
        raise ValueError(f"{message}; expected only one of them, as they are mutually exclusive")
    if likelihood is not None:
        check_name(likelihood.partition(":")[0], LIKELIHOODS, "likelihood")
        likelihood = LEARNED if likelihood == "normal" else likelihood
    chosen = choose(columns, owners, features, categories, scaling == "standardize")
    if likelihood in OF_FIRST:
        chosen = chosen.numbers_first(likelihood)
    columns[target].refuse_clash("take another target")
    if likelihood != "categorical" and columns[target].is_numeric:
        columns[target].refuse_odd("take all for classes (--likelihood categorical)")
    plain = chosen.names[:1] if likelihood in OF_FIRST else ()
    used = {name: columns[name] for name in (*chosen.names, *owners, *time)}
    whole, lacking = _whole(used, (*owners, *time, *plain), missing)
    columns_used = {name: column.at(whole) for name, column in used.items()}
    y, classes = _response(columns_used[target], likelihood)
    texts = (
        [word_warning(target, dict.fromkeys(columns_used[target].words), "classes")]
        if classes
        else []
    )
    of_cells = [*chosen.names] if classes else [*chosen.names, target]
    texts += [
        number_warning(columns_used[name]) for name in of_cells if name not in chosen.categories
    ]
    answer = cells_of(columns_used[target])
    pairs = {name: relation_of(cells_of(columns_used[name]), answer) for name in chosen.names}
    texts.append(
        determined_target_warning(
            target, [name for name, pair in pairs.items() if is_determined([pair])]
        )
    )
    if client_column:
        texts.append(
            word_warning(client_column, dict.fromkeys(columns_used[client_column].words), "groups")
        )
        texts.append(total_row_warning(columns_used[client_column]))
    if client_column and classes:
        texts.append(
            distinct_level_warning(
                target, _classes_of_groups(columns_used[target], columns_used[client_column])
            )
        )
    weights = _row_weights(columns_used[row_weights]) if row_weights else None
    codes, groups = (
        _groups(columns_used[client_column], table.sites)
        if client_column
        else (np.zeros(len(y), int), ())
    )
    lost = (
        set(columns[client_column].words[~columns[client_column].gaps]) - set(groups)
        if client_column
        else ()
    )
    if test_column:
        is_test = told_rows(columns_used[test_column])
    elif test_last:
        is_test = last_rows(codes, columns_used[test_last], test_fraction)
    else:
        is_test = draw_test_rows(codes, np.random.default_rng([seed, 3]), test_fraction)
    coded_columns = {n: columns_used[n] for n in chosen.names if n in chosen.categories}
    levels = {name: _codes(column.at(~column.gaps))[1] for name, column in coded_columns.items()}
    active = bool(levels) or scaling == "standardize" or missing == "impute"
    x = _values(columns_used, chosen.names, levels, active)
    same = np.concatenate([x.numpy(), y.numpy()[:, None], codes[:, None]], 1)
    copied = copied_test_warning([row.tobytes() for row in same], np.asarray(is_test))
    if client_column:
        rows = {name: codes == code for code, name in enumerate(groups)}
        numbers = [name for name in chosen.names if name not in chosen.categories]
        numbers += [] if classes else [target]
        texts += _between_clients(columns_used, rows, numbers, levels)
        copied = copied or doubled_row_warning(
            {n: is_doubled(same[row_index].T) for n, row_index in rows.items()}
        )
        others = [c.words[whole].astype(str) for n, c in columns.items() if n not in columns_used]
        cells = [*same[:, :-1].T, *others]  # of which one may identify rows
        texts.append(
            shared_row_warning({n: [c[row_index] for c in cells] for n, row_index in rows.items()})
        )
    texts.append(copied)
    if likelihood is not None and not classes:
        refuse_range(path, likelihood, y, x[:, 0])
    raw = [name for name in chosen.names if name not in levels and scaling != "standardize"]
    apart = far_apart(raw, x[~is_test][:, [chosen.names.index(name) for name in raw]])
    texts += [apart] if scaling is None else []
    texts += [omitted_category_warning(columns, chosen)] if features is None else []
    for text in filter(None, texts):
        warn_user(f"{path}: {text}")
    plan = PreprocessingPlan(chosen.names, levels, scaling or "none", missing == "impute", plain)
    return Dataset(
        name=Path(path).stem,
        x=x,
        y=y,
        is_test=is_test,
        classes=classes,
        groups={client_column: torch.from_numpy(codes)} if client_column else {},
        group_names={client_column: groups} if client_column else {},
        likelihood=likelihood or ("categorical" if classes else LEARNED),
        source=Source(
            target=target,
            features=chosen.names,
            left_out=chosen.left_out,
            dropped=len(whole) - len(y),
            lacking=lacking,
            lost=tuple(sorted(lost)),
            reordered=table.reordered,
            scales=apart,
            preparation=None
            if active
            else Preprocessor(tuple(map(ColumnPreprocessing, chosen.names))),
        ),
        recipe=plan if active else None,
        weights=weights,
    )


def _with_sites(path: str, table: Table, client_column: str | None) -> tuple[Columns, str | None]:
    """Add each row's file name as a column if there are several files and no client column."""
    if (
        table.site is None
        or client_column not in (None, SITE)
        or (client_column and SITE in table.columns)
    ):
        return table.columns, client_column
    if SITE in table.columns:
        raise ValueError(
            f"{path}: the files have a column {SITE}, the name reserved for the file of each row; "
            f"expected --client-column {SITE} to use that column, or another name"
        )
    return {**table.columns, SITE: table.site}, SITE


def _whole(used: Columns, unfilled: Sequence[str], missing: Missing) -> tuple[Rows, dict[str, int]]:
    """Return a mask of the rows to keep [N], and the number of missing values in each column."""
    if missing != "impute":
        lacking = {name: int(c.gaps.sum()) for name, c in used.items() if c.gaps.any()}
        return complete(used.values(), missing), lacking
    return complete([used[name] for name in unfilled], "error"), {}


def _codes(column: Column) -> tuple[Ints, tuple[str, ...]]:
    """Return a column's values as integer codes [N], and the distinct values."""
    if not np.isnan(column.numbers).any():
        column.refuse_spellings()
    return codes_of(column.words.tolist())


def _values(
    columns: Columns, names: Sequence[str], levels: Mapping[str, Sequence[str]], active: bool
) -> Tensor:
    """Return the features x [N, C] of table columns.

    If preprocessing follows, they are float64 with category codes and NaN.
    """
    if not active:
        return torch.from_numpy(np.stack([columns[name].single() for name in names], 1))
    parts = [
        category_codes(columns[n], levels[n]) if n in levels else columns[n].numbers for n in names
    ]
    return torch.from_numpy(np.stack(parts, 1))


def _between_clients(
    columns: Columns,
    rows: Mapping[str, Rows],
    numbers: Sequence[str],
    levels: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return warnings about columns that clients seem to write in different ways."""
    clients = []
    for row_index in rows.values():
        sums = {name: summarize_values(columns[name].numbers[row_index]) for name in numbers}
        sums |= {
            n: summarize_values(category_codes(columns[n].at(row_index), words), words)
            for n, words in levels.items()
        }
        clients.append(sums)
    return spelling_and_unit_warnings(clients, [*rows])


def _classes_of_groups(target: Column, client_column: Column) -> dict[str, ColumnSummary]:
    """Summarize the target column for each client group: number of rows and class names."""
    classes_by_client = {}
    for name in dict.fromkeys(client_column.words):
        words = target.words[client_column.words == name].tolist()
        classes_by_client[name] = ColumnSummary(len(words), levels=tuple(dict.fromkeys(words)))
    return classes_by_client


def _row_weights(column: Column) -> Tensor:
    """Return a table's column of row weights as a float64 tensor [N]."""
    column.refuse_text("weights of rows, numbers of at least 0")
    column.refuse_odd("fill in a number of at least 0")
    if (column.numbers < 0).any():
        raise ValueError(f"{column.first(column.numbers < 0)}; expected weights of at least 0")
    return torch.from_numpy(column.numbers.astype(np.float64))


def _groups(column: Column, sites: Sequence[str] = ()) -> tuple[Ints, tuple[str, ...]]:
    """Return each row's client group as an integer code [N], and the group names.

    Groups that are files follow the order of the files.
    """
    if sites and column.name == SITE and set(column.words) <= set(sites):
        words = tuple(site for site in sites if site in set(column.words))
        return category_codes(column, words).astype(np.int64), words
    return _codes(column)


def codes_of(words: Sequence[str]) -> tuple[Ints, tuple[str, ...]]:
    """Return integer codes [N] of strings, and the distinct strings in sorted order.

    >>> codes_of(["10", "9", "10"])
    (array([1, 0, 1]), ('9', '10'))
    """
    value = {word: number(word) for word in words}
    numeric = not np.isnan(list(value.values())).any()
    names = tuple(sorted(value, key=value.__getitem__ if numeric else None))
    place = {word: code for code, word in enumerate(names)}
    return np.array([place[word] for word in words], dtype=np.int64), names


def _refuse_names(
    path: str,
    table: Mapping[str, Column],
    roles: Mapping[str, str | None],
    wanted: Sequence[str] | None,
    others: Sequence[str],
) -> None:
    """Raise ValueError if a column is unknown or has two roles, such as target and feature."""
    owners = [name for name in roles.values() if name]
    for column in [*owners, *(wanted or ()), *others]:
        check_name(column, list(table), f"column in {path}:")
    if len(set(owners)) < len(owners):
        twice = next(name for name in owners if owners.count(name) > 1)
        roles_text = " and ".join(role for role, name in roles.items() if name == twice)
        raise ValueError(f"{path}: {roles_text} are both {twice}; expected two different columns")
    if wanted is not None and (set(owners) & set(wanted) or not wanted):
        roles_text = f"{path}: features are {', '.join(wanted)}"
        raise ValueError(
            f"{roles_text}; expected at least one column, without the target and the group"
        )
    if wanted is not None and len(set(wanted)) < len(wanted):
        raise ValueError(f"{path}: features are {', '.join(wanted)}; expected distinct columns")


def _response(column: Column, likelihood: str | None) -> tuple[Tensor, tuple[str, ...]]:
    """Return the target column as y, and its class names, which are empty for a numeric target."""
    different = len(set(column.words))
    message = f"{column.label} holds"
    if different < 2 and likelihood in (None, "categorical"):
        raise ValueError(
            f"{message} only {column.words[0]!r}; expected at least two different values"
        )
    is_class = likelihood == "categorical" or (likelihood is None and column.is_boolean)
    if not is_class and column.is_numeric:
        return torch.from_numpy(column.single()), ()
    if likelihood not in (None, "categorical"):
        column.refuse_unreadable()
        column.refuse_text(f"numbers for {likelihood}")
    if likelihood is None and 2 * different > len(column.words):
        column.refuse_unreadable()
        raise ValueError(
            f"{message} {different} different texts, such as {column.words[0]!r}, in "
            f"{len(column.words)} rows, and no likelihood is given; expected numbers such as 1.5, "
            "or classes with several rows each (--likelihood categorical accepts any)"
        )
    codes, classes = _codes(column)
    if not np.isnan(column.numbers).any() and (column.numbers % 1).any():
        raise ValueError(f"{message} numbers with decimals; expected class labels")
    return torch.from_numpy(codes), classes


def refuse_range(path: str, likelihood: str, y: Tensor, first: Tensor) -> None:
    """Raise ValueError if the target or the first feature is invalid for the likelihood."""
    name, colon, count = likelihood.partition(":")
    if name == "binomial" and colon and not count.isdecimal():
        raise ValueError(f"likelihood is {likelihood!r}; expected binomial:N, N a whole number")
    whole = (y == y.round()) & (y >= 0)
    trials = float(count) if name == "binomial" and count else first
    fits, expected = {
        "bernoulli": ((y == 0) | (y == 1), "0 and 1"),
        "poisson": (whole, "whole numbers of at least 0"),
        "binomial": (
            whole & (y <= trials),
            "whole numbers from 0 to the trials, the first feature or N of binomial:N",
        ),
        "normal_known_sd": (first > 0, "positive standard errors as first feature"),
    }.get(name, (torch.ones(1), ""))
    if not bool(fits.all()):
        raise ValueError(
            f"{path}: the target runs from {float(y.min()):g} to {float(y.max()):g} and the first "
            f"feature from {float(first.min()):g}; expected {expected} for {likelihood}"
        )
