"""Loaders of data sets, by name or from files."""
