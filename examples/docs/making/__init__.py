"""Pages that are made of the code: cards, gallery, reference; tutorials turned into notebooks."""

from making.links import of_site
from making.pages import make, summaries
from making.signs import accessible, by_name, displayed, inline, plain_signs, plain_types

__all__ = [
    "accessible",
    "by_name",
    "displayed",
    "inline",
    "make",
    "of_site",
    "plain_signs",
    "plain_types",
    "summaries",
]
