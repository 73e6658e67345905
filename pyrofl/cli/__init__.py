"""Command-line interface: the command `pyrofl`."""

from pyrofl.cli.parser import main

__all__ = ["main"]
