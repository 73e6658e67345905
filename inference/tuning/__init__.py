"""Search for settings of a method on validation rows of the clients."""
