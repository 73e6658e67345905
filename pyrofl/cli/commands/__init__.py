"""Subcommands of the command line `pyrofl`, each in its own module or with related subcommands."""
