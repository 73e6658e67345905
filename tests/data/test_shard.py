"""Shards, which Ray's workers receive as pickles."""

from __future__ import annotations

import pickle

import torch

from pyrofl.data import Federation
from pyrofl.data.shard import shard

CLIENTS, ROWS = 400, 4
BYTES_OF_OBJECTS = 600  # of the objects of a client


def test_a_pickle_has_each_row_once():
    x = torch.zeros(CLIENTS * ROWS, 2)
    rows, none = torch.arange(len(x)).split(ROWS), (torch.arange(0),) * CLIENTS
    part = shard(Federation(x, x[:, 0], rows, none), torch.arange(CLIENTS))
    bytes_of_rows = 2 * 4 + 4 + 8  # x, y and the index
    assert len(pickle.dumps(part)) < CLIENTS * (ROWS * bytes_of_rows + BYTES_OF_OBJECTS)
    assert torch.equal(torch.cat(pickle.loads(pickle.dumps(part)).train), torch.arange(len(x)))
