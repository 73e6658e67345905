"""Pages of figures, ordered by question: a picture, and the ten lines that draw it."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from making.cards import capital
from pyrofl import figures

QUESTIONS = {
    "How sure is each client?": "shrinkage pooling forest narrowing entropies",
    "Are the intervals and probabilities right?": "coverage coverage_by_client ranks "
    "reliability reliability_by_client confidence_histogram predictive_checks",
    "How does a response depend on a covariate?": "conditional lines courses",
    "Which method is best?": "comparison curves differences clients tuning after_epochs "
    "histograms simplex",
    "Has the fit converged, and to the right posterior?": "convergence distance cost watched",
    "How do the clients and the model look?": "partition plates data_flow confidence alphas",
}


def gallery_pages(folder: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the pictures, a page for each, and cards that link to the pages."""
    grids, toctree = [], ["```{toctree}", ":hidden:", ""]
    for question, names in QUESTIONS.items():
        cards = []
        for name in names.split():
            script = folder / f"{name}.py"
            file = BytesIO()
            runpy.run_path(str(script))["figure"].savefig(file, dpi=130, facecolor="white")
            yield f"gallery/{name}.png", file.getvalue()
            yield f"gallery/{name}.md", entry(name, script.read_text())
            toctree.append(f"made/gallery/{name}")
            cards.append(card(name, about(name), f"made/gallery/{name}", name))
        grids.append(f"## {question}\n\n{grid(cards)}")
    yield "gallery_cards.md", "\n\n".join([*grids, "\n".join([*toctree, "```"])]) + "\n"


def entry(name: str, code: str) -> str:
    """Write the page of a figure."""
    hint, _, lines = code.removeprefix('"""').partition('"""')
    return (
        f"# {name}\n\n{about(name)}. {' '.join(hint.split())}\n\n![{about(name)}]({name}.png)\n\n"
        f"```python\n{lines.strip()}\n```\n\nArguments: {{py:func}}`pyrofl.figures.{name}`.\n"
    )


def about(name: str) -> str:
    """Return what a figure shows, from the first line of its function."""
    first = (getattr(figures, name).__doc__ or "").split("\n")[0]
    return capital(re.sub(r"^(Plot|Draw) ", "", first).rstrip("."))


def card(title: str, text: str, page: str, picture: str) -> str:
    """Write a card that links to a page, with a picture of the gallery."""
    options = f":img-top: made/gallery/{picture}.png\n:link: {page}\n:link-type: doc"
    return f":::{{grid-item-card}} {title}\n{options}\n\n{text}\n:::"


def grid(cards: list[str]) -> str:
    """Write cards as a grid."""
    return "\n".join(["::::{grid} 1 2 3 3", ":gutter: 3", "", *cards, "::::"])
