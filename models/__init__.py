"""One file, one paper; priors, guides and likelihoods beside them.

A module here with a function `build` is a method; its name is the method's name everywhere.
"""
