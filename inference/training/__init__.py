"""Local training of several clients side by side: phases, minibatches and noise."""
