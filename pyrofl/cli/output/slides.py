"""Slides of a lesson: its goals, definitions, formulas, lists and short code, as one HTML file.

A slide shows a section: sentences with bold words (definitions and results), displayed formulas,
lists, and cells of code of at most twelve lines; a section without bold words begins with its first
sentence. Exercises are left out. Formulas are MathML: nothing is fetched. Figures are shown if the
cells have them as outputs, see `pyrofl.cli.output.lesson_figures`.
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
FIGURE_BLOCKS = 4  # that a figure takes the room of
BLOCK = re.compile(r"(\$\$.*?\$\$|```.*?```)", re.DOTALL)

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
        text = re.sub(re.escape(sign) + r"(?![A-Za-z])", other.replace("\\", r"\\"), text)
    # \frac12 and \frac1{2}, which docutils reads as one number and what follows it.
    text = re.sub(r"\\frac\s*([0-9a-z])\s*([0-9a-z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([0-9a-z])\s*\{", r"\\frac{\1}{", text)
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
            f"slides are written by {error.name}; expected pip install -e '.[course]' in the clone"
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
    title, *rest = re.split(r"(?m)^(?=#{2,3} )", marked(notebook).partition("\n## Ex")[0])
    yield title
    for section in rest:
        heading, _, text = section.partition("\n")
        yield from pages(f"## {heading.lstrip('# ')}", key_points(text))


def marked(notebook: Any) -> str:
    """Return the prose and the short code of a lesson as one text in Markdown."""
    parts = []
    for cell in notebook.cells:
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
        elif not tags(cell) & {"solution", "test", "remove-cell", "parameters"}:
            parts.append(code_on_slide(cell["source"]))
            drawn = (one.get("data", {}).get("image/png") for one in cell.get("outputs", ()))
            parts += [f"![figure](data:image/png;base64,{data})" for data in filter(None, drawn)]
    return "\n\n".join(filter(None, parts))


def pages(heading: str, blocks: list[str]) -> Iterator[str]:
    """Yield a section's slides, each with its heading."""
    parts: list[list[str]] = [[]]
    room = MOST_BLOCKS
    for block in blocks:
        size = FIGURE_BLOCKS if block.startswith("![") else 1
        if parts[-1] and size > room:
            parts.append([])
            room = MOST_BLOCKS
        parts[-1].append(block)
        room -= size
    for i, part in enumerate(filter(None, parts)):
        yield "\n\n".join([heading + " (continued)" * bool(i), *part])


def code_on_slide(source: str) -> str:
    """Return a cell of code as a block of Markdown if it is short and draws no figure."""
    lines = [line for line in source.splitlines() if line.strip()]
    drawn = re.search(r"plt\.|axes|%matplotlib|figures\.", source)
    short = len(lines) <= MOST_LINES and not drawn
    return f"```python\n{source.strip()}\n```" if short else ""


def key_points(text: str) -> list[str]:
    r"""Return code, formulas, lists and sentences with bold words of a section, in their order.

    Without bold words, the first sentence is one of them.

    >>> key_points("A **client** holds rows. It may be small.\n\n- one\n- two\n\n$$x = 1.$$")
    ['A **client** holds rows.', '- one\n- two', '$$x = 1.$$']
    >>> key_points("Insert this. Then that.\n\n$$x = 1.$$")
    ['Insert this.', '$$x = 1.$$']
    """
    points, first = list[str](), ""
    for part in BLOCK.split(text):
        if part.startswith(("$$", "```")):
            points.append(part)
            continue
        for paragraph in filter(None, map(str.strip, re.split(r"\n\s*\n", part))):
            if re.match(r"(?:[-*]|\d+\.) |!\[", paragraph):
                points.append(paragraph)
                continue
            sentences = re.split(r"(?<=[.:?]) +(?=[A-Z$*`])", " ".join(paragraph.split()))
            points += [sentence for sentence in sentences if "**" in sentence]
            first = first or sentences[0]
    bold = any("**" in block for block in points if not block.startswith("```"))
    return points if bold or not first else [first, *points]
