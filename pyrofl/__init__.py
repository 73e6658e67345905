"""Bayesian and personalised federated learning on Pyro."""
