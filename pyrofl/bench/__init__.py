"""Measure the speed of the federated loop beside loops that people write by hand."""
