"""Testing and predicting."""
