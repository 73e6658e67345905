"""Posteriors of clients: draws, log densities by row, and export to ArviZ."""
