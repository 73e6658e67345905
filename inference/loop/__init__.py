"""The federated loop: rounds, local training side by side, participation, messages."""
