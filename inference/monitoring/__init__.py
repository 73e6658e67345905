"""Convergence of a fit while it runs: parameter changes, status and progress."""
