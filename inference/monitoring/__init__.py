"""Monitoring of a fit: parameter changes, convergence status and progress display."""
