"""Validation of a method and its data before the first round."""
