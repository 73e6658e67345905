"""The command line `pyrofl`."""

from pyrofl.cli.parser import main

__all__ = ["main"]
