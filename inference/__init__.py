"""Federated inference: rounds, training, posteriors, evaluation and checks of any method."""
