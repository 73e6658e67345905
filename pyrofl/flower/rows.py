"""Load a site's CSV file as a federation of the site's clients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.data.loaders.csv_files import codes_of, refuse_range
from pyrofl.data.tables.columns import Column
from pyrofl.data.tables.data_quality import number_warning
from pyrofl.data.tables.holdout import draw_test_rows
from pyrofl.data.tables.row_checks import (
    cells_of,
    determined_target_warning,
    is_determined,
    relation_of,
)
from pyrofl.flower.project import Project
from pyrofl.user_warnings import warn_user


def rows_of(project: Project, path: str, name: str) -> Federation:
    """Read a site's rows as a federation; with groups, clients are named "SITE/GROUP"."""
    owners = [project.target, *([project.client_column] if project.client_column else [])]
    table = project.read_columns(path, owners)
    x, y = project.x(table), _response(project, table[project.target])
    if not project.classes:
        refuse_range(path, project.likelihood, y, x[:, 0])
    for text in _doubtful(project, table):
        warn_user(f"{path}: {text}")
    words = table[project.client_column].words.tolist() if project.client_column else [""] * len(y)
    codes, groups = codes_of(words)
    is_test = draw_test_rows(codes, np.random.default_rng([project.seed, 3]), project.test_fraction)
    own = [torch.from_numpy(codes) == code for code in range(len(groups))]
    train, test = (
        [(mine & part).nonzero().flatten() for mine in own] for part in (~is_test, is_test)
    )
    names = tuple(f"{name}/{group}" if group else name for group in groups)
    return Federation(x, y, tuple(train), tuple(test), names, project.classes)


def _doubtful(project: Project, table: Mapping[str, Column]) -> list[str]:
    """Return warnings about codes for missing values, and features that determine the target."""
    target = table[project.target]
    numbers = [table[name] for name in project.features]
    texts = [number_warning(c) for c in (*numbers, *([] if project.classes else [target]))]
    pairs = {c.name: relation_of(cells_of(c), cells_of(target)) for c in numbers}
    texts.append(
        determined_target_warning(
            target.name, [n for n, pair in pairs.items() if is_determined([pair])]
        )
    )
    return [text for text in texts if text]


def features_of(project: Project, path: str) -> tuple[Tensor, list[str]]:
    """Read the features of rows to predict, [N, columns], and each row's group, if any."""
    table = project.read_columns(path)
    groups = table[project.client_column].words.tolist() if project.client_column in table else []
    return project.x(table), groups


def _response(project: Project, column: Column) -> Tensor:
    """Return the target column as y: numbers, or indices of the study's classes."""
    if not project.classes:
        column.refuse_text("numbers as target")
        column.refuse_odd("write numbers")
        return project.numbers(column)
    codes = {word: code for code, word in enumerate(project.classes)}
    if (bad := np.array([word not in codes for word in column.words])).any():
        expected = f"one of the project's classes: {', '.join(project.classes)}"
        raise ValueError(f"{column.first(bad)}; expected {expected}")
    return torch.tensor([codes[word] for word in column.words])
