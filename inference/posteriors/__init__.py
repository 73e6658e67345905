"""Posteriors of clients: draws, log densities by row, groups for ArviZ."""
