"""Evaluation of fitted methods and predictions of new rows."""
