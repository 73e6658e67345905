"""Warnings about columns of clients' arrays: units, codes for missing values, copies of rows."""

from __future__ import annotations

from typing import Any

from pyrofl.data.tables.column_summary import Numbers, summarize_values
from pyrofl.data.tables.data_quality import code_warning
from pyrofl.data.tables.row_checks import (
    determined_target_warning,
    doubled_row_warning,
    is_determined,
    is_doubled,
    relation_of,
    shared_row_warning,
)
from pyrofl.data.tables.units import unit_warning

MAX_COLUMNS = 100  # of x; more are hardly measurements of different kinds


def unit_warnings(data: Any) -> list[str]:
    """Return warnings about a federation's training clients that seem to use another unit."""
    texts = []
    for name, clients in _columns(data).items():
        summaries = {client: summarize_values(values) for client, values in clients.items()}
        texts.append(unit_warning(name, summaries))
    return [text for text in texts if text]


def array_warnings(data: Any) -> list[str]:
    """Return warnings about a federation's units, codes for missing values, answers and copies."""
    columns = _columns(data)
    texts = unit_warnings(data)
    texts += [code_warning(name, list(clients.values())) for name, clients in columns.items()]
    target = data.source.target if data.source else "y"
    features = {name: clients for name, clients in columns.items() if name != target}
    y = _rows(data, data.y.double().cpu().numpy()) if data.y.dim() == 1 and features else {}
    answers = [
        name
        for name, clients in features.items()
        if y and is_determined([relation_of(clients[c], y[c]) for c in y])
    ]
    texts.append(determined_target_warning(target, answers))
    rows = {client: [*(v[client] for v in features.values()), y[client]] for client in y}
    texts.append(
        doubled_row_warning({client: is_doubled(columns) for client, columns in rows.items()})
    )
    texts.append(shared_row_warning(rows))
    return [text for text in texts if text]


def _columns(data: Any) -> dict[str, dict[str, Numbers]]:
    """Return the columns of x, and y if it is a number: column -> training client -> numbers."""
    columns = {}
    if data.x.dim() == 2 and data.x.shape[1] <= MAX_COLUMNS:
        names = data.source.features if data.source else ()
        x = data.x.double().cpu().numpy()
        for place in range(x.shape[1]):
            name = names[place] if len(names) == x.shape[1] else f"{place} of x"
            columns[name] = _rows(data, x[:, place])
    if not data.classes and data.y.dim() == 1:
        target = data.source.target if data.source else "y"
        columns[target] = _rows(data, data.y.double().cpu().numpy())
    return columns


def _rows(data: Any, values: Numbers) -> dict[str, Numbers]:
    """Return the numbers [N] of each training client, without missing ones."""
    parts = list(zip(data.names, data.train, strict=True))[: len(data.train) - data.held_out]
    return {name: values[rows.cpu().numpy()] for name, rows in parts}
