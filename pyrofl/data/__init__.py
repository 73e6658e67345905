"""Data of clients: data sets by name or from files, minibatches, and federations."""

from pyrofl.data.batch import Batch
from pyrofl.data.federation import Dataset, Federation, stack
from pyrofl.data.outlines import outline
from pyrofl.data.roster import Cohort, Roster
from pyrofl.data.rows import check_table
from pyrofl.data.tables.column_summary import summarize_columns
from pyrofl.data.tables.preprocessor import Preprocessor
from pyrofl.data.tables.source import Source

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
