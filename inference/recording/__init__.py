"""Recorded updates: Python code of torch operations instead of Pyro programs and autograd."""
