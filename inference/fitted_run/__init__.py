"""Fitted runs: results of `fit`, with saving, resuming and combination over seeds."""
