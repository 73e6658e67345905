"""Recorded updates: Python code of torch operations in place of Pyro programs and autograd."""
