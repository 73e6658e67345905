"""A small transformer, and a federation of sequences of words that it classifies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyrofl.data import Federation
from pyrofl.tensors import generator

WORDS, LENGTH = 11, 6


class Transformer(nn.Module):
    """Classifier of sequences, with an embedding, attention, layer norms and inactive dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.0), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.words(x)).mean(1))


def transformer() -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Transformer().double()


def sentences(clients: int = 4) -> Federation:
    x = torch.randint(0, WORDS, (20 * clients, LENGTH), generator=generator(1))
    y = (x < 4).sum(1).clamp(max=2)
    parts = torch.arange(len(x)).split([*[12] * clients, *[8] * clients])
    return Federation(x, y, parts[:clients], parts[clients:], classes=tuple("abc"))
