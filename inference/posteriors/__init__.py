"""Clients' posteriors: draws, log densities of each row, and export to ArviZ."""
