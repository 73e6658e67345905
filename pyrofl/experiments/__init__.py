"""Experiments: methods, data, settings and output folders of fits."""
