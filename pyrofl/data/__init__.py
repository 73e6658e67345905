"""Data of clients: data sets by name or from files, minibatches, and federations."""

from typing import Any

from pyrofl.data.batch import Batch
from pyrofl.data.federation import Dataset, Federation, stack
from pyrofl.data.outlines import outline
from pyrofl.data.roster import Cohort, Roster
from pyrofl.data.rows import check_table
from pyrofl.data.tables.source import Source
from pyrofl.extensions import required

__all__ = [
    "Batch",
    "Cohort",
    "Dataset",
    "Federation",
    "Preprocessor",
    "Roster",
    "Source",
    "check_table",
    "outline",
    "stack",
    "summarize_columns",
]


def __getattr__(name: str) -> Any:
    """Return what prepares and describes tables."""
    points = {"Preprocessor": "preprocessor", "summarize_columns": "summary of columns"}
    if name not in points:
        raise AttributeError(f"module 'pyrofl.data' has no attribute {name!r}")
    return required(points[name], name)
