"""Training of first layers in the space of a client's rows, faster for clients with few rows."""
