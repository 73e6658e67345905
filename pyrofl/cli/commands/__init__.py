"""Commands of `pyrofl`, one module for each or for a few related ones."""
