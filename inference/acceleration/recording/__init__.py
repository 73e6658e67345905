"""Recording of training updates as torch operations, replayed without Pyro and autograd."""
