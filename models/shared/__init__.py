"""Building blocks that several federated methods share."""
