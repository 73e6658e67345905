"""Where the clients' half of a round is done: in this process, or in several by Ray.

    pyrofl.fit(method, data, 100, engine="ray", workers=4)

Every worker has the rows of some clients, and what these keep stays with it. What comes of it is
the same up to rounding. Workers trust each other and the caller: they share programs, orders and
replies by pickle, so that this is for the machines of one owner; sites that keep their rows from
others use `pyrofl.inference.halves`.
"""
