"""Local training of several clients in one vectorized batch: phases, minibatches and noise."""
