"""Links of pages: to files in a checkout, and to generated pages on the site."""

from __future__ import annotations

import re

TARGETS = (
    (r"\.\./\.\./models/(\w+)(?:/__init__)?\.py", r"made/methods/\1.md"),
    (r"\.\./tutorials/(\d+_\w+)\.py", r"made/tutorials/\1.ipynb"),
    (r"\.\./(NUMBERS|POSTERIORS|CALIBRATION|FAULTS)\.md", lambda m: f"{m[1].lower()}.md"),
    (r"\.\./papers/README\.md", "made/papers/index.md"),
    (r"\.\./papers/(\w+)/README\.md", r"made/papers/\1.md"),
)
ONLY_ON_SITE = re.compile(r"<!-- site: (.*?) -->", re.DOTALL)


def of_site(source: list[str]) -> None:
    """Replace links to files by links to the pages generated from them, in place.

    A comment `<!-- site: TEXT -->` becomes TEXT: generated pictures and cards are on the site only.
    They replace what is between `<!-- checkout -->` and the comment.
    """
    source[0] = re.sub(r"(?s)<!-- checkout -->.*?(?=<!-- site: )", "", source[0])
    source[0] = ONLY_ON_SITE.sub(r"\1", source[0])
    for file, page in TARGETS:
        source[0] = re.sub(rf"(?<=\]\(){file}(?=\))", page, source[0])
