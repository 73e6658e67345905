"""Conformal prediction: sets and intervals with guaranteed coverage."""
