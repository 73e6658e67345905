"""Clients and their rows: data sets by name or file, batches, and federations."""

from pyrofl.data.federation import Batch, Dataset, Federation, Who, check_table, stack

__all__ = ["Batch", "Dataset", "Federation", "Who", "check_table", "stack"]
