"""Pages of figures, ordered by question: a picture, and the ten lines that draw it."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from papers import plots

from making.cards import capital
from pyrofl import figures

QUESTIONS = {
    "How sure is each client?": "shrinkage pooling forest narrowing entropies",
    "Are the intervals and probabilities right?": "coverage coverage_by_client ranks "
    "reliability reliability_by_client predictive_checks",
    "How does a response depend on a covariate?": "conditional survival lines "
    "parameters_by_covariate",
    "Which method is best?": "comparison curves differences clients tuning",
    "Has the fit converged, and to the right posterior?": "convergence "
    "posterior_differences watched",
    "How do the clients and the model look?": "partition plates data_flow confidence",
    "Figures of single papers (in examples/papers)": " ".join(plots.__all__),
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
        f"```python\n{lines.strip()}\n```\n\n{arguments(name)}\n"
    )


def arguments(name: str) -> str:
    """Return where the arguments of a figure are described."""
    if name in plots.__all__:
        return (
            "Run it in a clone with `PYTHONPATH=examples`. Arguments: `examples/papers/plots.py`."
        )
    return f"Arguments: {{py:func}}`pyrofl.figures.{name}`."


def about(name: str) -> str:
    """Return what a figure shows, from the first line of its function."""
    module = plots if name in plots.__all__ else figures
    first = (getattr(module, name).__doc__ or "").split("\n")[0]
    return capital(re.sub(r"^(Plot|Draw) ", "", first).rstrip("."))


def card(title: str, text: str, page: str, picture: str) -> str:
    """Write a card that links to a page, with a picture of the gallery."""
    options = f":img-top: made/gallery/{picture}.png\n:link: {page}\n:link-type: doc"
    return f":::{{grid-item-card}} {title}\n{options}\n\n{text}\n:::"


def grid(cards: list[str]) -> str:
    """Write cards as a grid."""
    return "\n".join(["::::{grid} 1 2 3 3", ":gutter: 3", "", *cards, "::::"])
