"""Pages that are made of the code: cards, gallery, reference; tutorials turned into notebooks."""

from making.pages import make
from making.signs import displayed, inline, plain_signs

__all__ = ["displayed", "inline", "make", "plain_signs"]
