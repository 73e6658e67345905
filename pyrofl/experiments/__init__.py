"""Experiments: what is fitted to which data, and the folder that a run leaves."""
