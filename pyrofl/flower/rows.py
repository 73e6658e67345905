"""The rows of a site: a CSV file as a federation of the site's clients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from pyrofl.arguments import known
from pyrofl.data import Federation
from pyrofl.data.loaders.csv_files import codes_of, refuse_range
from pyrofl.data.tables.columns import Column, complete, read
from pyrofl.data.tables.holdout import draw_test_rows
from pyrofl.flower.project import Project


def rows_of(project: Project, path: str, name: str) -> Federation:
    """Return the rows of the site `name`; with groups its clients are "NAME/group"."""
    table = read(path)
    owners = [project.target, *([project.group] if project.group else [])]
    for column in (*project.features, *owners):
        known(column, list(table), f"column in {path}:")
    used = {column: table[column] for column in (*project.features, *owners)}
    whole = complete(used.values(), "refuse")
    kept = {column: one.at(whole) for column, one in used.items()}
    x = _features(project, kept)
    y = _response(project, kept[project.target])
    if not project.classes:
        refuse_range(path, project.likelihood, y, x[:, 0])
    words = kept[project.group].words.tolist() if project.group else [""] * len(y)
    codes, groups = codes_of(words)
    is_test = draw_test_rows(codes, np.random.default_rng([project.seed, 3]), project.test_share)
    own = [torch.from_numpy(codes) == code for code in range(len(groups))]
    train, test = (
        [(mine & part).nonzero().flatten() for mine in own] for part in (~is_test, is_test)
    )
    names = tuple(f"{name}/{group}" if group else name for group in groups)
    data = Federation(x, y, tuple(train), tuple(test), names, project.classes)
    return data.to("cpu", project.type)


def features_of(project: Project, path: str) -> tuple[Tensor, list[str]]:
    """Return the features of rows to predict, [N, columns], and the group of each row, if any."""
    table = read(path)
    for column in project.features:
        known(column, list(table), f"column in {path}:")
    used = {name: table[name] for name in project.features}
    whole = complete(used.values(), "refuse")
    groups = table[project.group].words.tolist() if project.group in table else []
    return _features(project, {n: one.at(whole) for n, one in used.items()}), groups


def _features(project: Project, columns: Mapping[str, Column]) -> Tensor:
    """Return the features in the project's order, [N, columns]."""
    x = np.stack([_numbers(columns[name]) for name in project.features], axis=1)
    return torch.from_numpy(x)


def _numbers(column: Column) -> np.ndarray:
    """Return a feature as single numbers."""
    if not column.is_numeric:
        told = f"{column.file}: column {column.name} holds {column.nature}"
        raise ValueError(f"{told}; expected numbers as features")
    column.refuse_odd("write numbers")
    return column.single()


def _response(project: Project, column: Column) -> Tensor:
    """Return y: a number, or the place of its word among the project's classes."""
    if not project.classes:
        return torch.from_numpy(_numbers(column))
    codes = {word: code for code, word in enumerate(project.classes)}
    for word, place in zip(column.words, column.places, strict=True):
        if word not in codes:
            raise ValueError(
                f"{column.file}: column {column.name} holds {word!r} in {place}; expected one "
                f"of the project's classes: {', '.join(project.classes)}"
            )
    return torch.tensor([codes[word] for word in column.words])
