"""Clients and their rows: data sets by name or file, batches, and federations."""

from pyrofl.data.batch import Batch
from pyrofl.data.blank import outline
from pyrofl.data.federation import Dataset, Federation, stack
from pyrofl.data.preparation import Preparation
from pyrofl.data.roster import Roster, Who
from pyrofl.data.rows import check_table
from pyrofl.data.source import Source
from pyrofl.data.telling import tell

__all__ = [
    "Batch",
    "Dataset",
    "Federation",
    "Preparation",
    "Roster",
    "Source",
    "Who",
    "check_table",
    "outline",
    "stack",
    "tell",
]
