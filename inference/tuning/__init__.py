"""Hyperparameter search for a method, scored on validation rows of the clients."""
