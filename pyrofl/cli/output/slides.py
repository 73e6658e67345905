"""Slides of a lesson: its goals, definitions, formulas, lists and short code, as one HTML file.

A slide shows a section: sentences with bold words (definitions and results), displayed formulas,
lists, and cells of code of at most twelve lines. Formulas are MathML: nothing is fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from importlib import import_module
from importlib.resources import files
from typing import Any

from pyrofl.cli.output.notebooks import tags

MOST_LINES = 12  # of code on a slide
MOST_BLOCKS = 6  # on a slide; a longer section is continued on the next one
BLOCK = re.compile(r"\$\$.*?\$\$", re.DOTALL)

# LaTeX that docutils does not read, and what it reads.
SIMPLER = {
    r"\operatorname": r"\mathrm",
    r"\lVert": r"\|",
    r"\rVert": r"\|",
    r"\dots": r"\ldots",
    r"\tfrac": r"\frac",
    r"\dfrac": r"\frac",
    r"\lt": "<",
    r"\gt": ">",
}
SIMPLER |= {
    rf"\{size}{side}": "" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r")
}


def mathml(text: str, as_block: bool) -> str:
    """Return a formula in LaTeX as MathML.

    Raises:
        docutils.utils.math.MathError: if docutils cannot read it.
    """
    tex2mathml = import_module("docutils.utils.math.latex2mathml").tex2mathml
    for sign, other in SIMPLER.items():
        text = re.sub(re.escape(sign) + r"(?![A-Za-z])", lambda _, other=other: other, text)
    return str(tex2mathml(text, as_block=as_block))


def deck(notebook: Any) -> str:
    """Return the slides of a lesson as an HTML page that needs no other file and no network.

    Raises:
        ValueError: if markdown-it-py or docutils is not installed.
    """
    try:
        markdown, plugin = map(import_module, ("markdown_it", "mdit_py_plugins.dollarmath"))
        import_module("docutils")
    except ImportError as error:
        raise ValueError(
            f"slides are written by {error.name}; expected pip install 'pyrofl[course]'"
        ) from error

    def formula(text: str, options: dict[str, Any]) -> str:
        return mathml(text, options["display_mode"])

    writer = markdown.MarkdownIt("commonmark").use(plugin.dollarmath_plugin, renderer=formula)
    slides = [f"<section>{writer.render(text)}</section>" for text in slides_of(notebook)]
    title = slides_title(notebook)
    page = files("pyrofl.cli.output").joinpath("slides.html").read_text("utf-8")
    return page.replace("{{ title }}", escape(title)).replace("{{ slides }}", "\n".join(slides))


def slides_title(notebook: Any) -> str:
    """Return the title of a lesson, such as "1. Federated learning"."""
    return str(notebook.cells[0]["source"]).splitlines()[0].removeprefix("# ")


def slides_of(notebook: Any) -> Iterator[str]:
    """Yield the Markdown of each slide of a lesson."""
    heading, blocks = "", list[str]()
    for cell in notebook.cells:
        if tags(cell) & {"solution", "test", "remove-cell", "parameters"}:
            continue
        if cell["cell_type"] == "code":
            blocks += code_on_slide(cell["source"])
            continue
        for part in re.split(r"(?m)^(?=#{1,3} )", cell["source"]):
            if title := re.match(r"(#{1,3}) (.*)\n?", part):
                yield from pages(heading, blocks)
                first = title[1] == "#"
                heading, blocks = f"{title[1][:2]} {title[2]}", []
                part = part[title.end() :]
                if first:  # all of it: what the lesson is about, and its goals
                    blocks = [b for b in part.split("\n\n") if b.strip()]
                    continue
            blocks += key_points(part)
    yield from pages(heading, blocks)


def pages(heading: str, blocks: list[str]) -> Iterator[str]:
    """Yield a section's slides, each with its heading."""
    for i in range(0, len(blocks), MOST_BLOCKS):
        more = " (continued)" if i else ""
        yield "\n\n".join([f"{heading}{more}", *blocks[i : i + MOST_BLOCKS]])


def code_on_slide(source: str) -> list[str]:
    """Return a cell of code as a block of Markdown if it is short and draws no figure."""
    lines = [line for line in source.splitlines() if line.strip()]
    drawn = re.search(r"plt\.|axes|%matplotlib", source)
    return [f"```python\n{source.strip()}\n```"] if len(lines) <= MOST_LINES and not drawn else []


def key_points(text: str) -> list[str]:
    r"""Return formulas, lists and sentences with bold words of a text, in their order.

    >>> key_points("A **client** holds rows. It may be small.\n\n- one\n- two\n\n$$x = 1.$$")
    ['A **client** holds rows.', '- one\n- two', '$$x = 1.$$']
    """
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        at = 0
        for formula in [*BLOCK.finditer(paragraph), None]:
            prose = paragraph[at : formula.start() if formula else None].strip()
            if re.match(r"(?:[-*]|\d+\.) ", prose):
                found.append(prose)
            else:
                sentences = re.split(r"(?<=[.:?]) +(?=[A-Z$*`])", " ".join(prose.split()))
                found += [s for s in sentences if "**" in s]
            if formula:
                found.append(formula[0])
                at = formula.end()
    return found
