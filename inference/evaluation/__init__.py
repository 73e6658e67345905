"""Evaluation of fitted methods on clients' rows, and predictions of new rows."""
