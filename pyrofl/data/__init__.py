"""Clients and their rows: data sets by name or file, batches, and federations."""

from pyrofl.data.federation import Batch, Dataset, Federation, Who, check_table, stack
from pyrofl.data.source import Source

__all__ = ["Batch", "Dataset", "Federation", "Source", "Who", "check_table", "stack"]
