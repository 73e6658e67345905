"""Hyperparameter search on validation rows of the clients."""
