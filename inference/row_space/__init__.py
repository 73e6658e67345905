"""The space of a client's rows, in which first layers of clients with few rows train faster."""
