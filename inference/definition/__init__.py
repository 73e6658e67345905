"""What a method is made of: programs, losses, optimizers, aggregation, metadata and seeds."""
