"""Checks of models and posteriors."""
