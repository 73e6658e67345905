"""Data sets by name or from files."""
