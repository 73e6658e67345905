"""Slides of a lesson: its goals, definitions, formulas, lists and short code, as one HTML file.

A slide shows a section: sentences with bold words (definitions and results), displayed formulas
with the sentences that lead to them, lists, and cells of code of at most twelve lines with what
they print; a section without bold words begins with its first sentence, and one without formulas,
lists and code shows three sentences. Exercises are left out. Formulas are MathML: nothing is
fetched. Figures and printed text are shown if the cells have them as outputs, see
`pyrofl.cli.output.lesson_figures`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from importlib import import_module
from importlib.resources import files
from typing import Any

from pyrofl.cli.output.notebooks import tags

MAX_LINES = 12  # of code on a slide
MAX_BLOCKS = 6  # on a slide; a longer section is continued on the next one
MAX_SENTENCES = 3  # on a slide with nothing else
FIGURE_BLOCKS = 4  # that a figure takes the room of
REFERS_BACK = re.compile(r"\W*(?:This|That|These|Those|It|They|Both|Then|Here|So|Hence)\b")
LIST = r"(?:[-*]|\d+\.) "  # begin of an item
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


def check_installed() -> tuple[Any, Any]:
    """Return the modules of Markdown and of its formulas.

    Raises:
        ValueError: if markdown-it-py, its plugins or docutils are not installed.
    """
    try:
        import_module("docutils")
        return import_module("markdown_it"), import_module("mdit_py_plugins.dollarmath")
    except ImportError as error:
        raise ValueError(
            f"slides are written by {error.name}; expected pip install -e '.[course]' in the clone"
        ) from error


def deck(notebook: Any) -> str:
    """Return the slides of a lesson as an HTML page that needs no other file and no network.

    Raises:
        ValueError: if markdown-it-py or docutils is not installed.
    """
    markdown, plugin = check_installed()

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


def slides_of(notebook: Any) -> list[str]:
    """Return the Markdown of each slide; a section of one sentence is added to the slide before."""
    title, *rest = re.split(r"(?m)^(?=#{2,3} )", lesson_markdown(notebook).partition("\n## Ex")[0])
    shown = [title]
    for section in rest:
        heading, _, text = section.partition("\n")
        heading, blocks = heading.lstrip("# "), key_points(text)
        if is_sentence(blocks):
            shown[-1] += f"\n\n**{heading}.** {blocks[0]}"
        else:
            shown += pages(f"## {heading}", blocks)
    return shown


def lesson_markdown(notebook: Any) -> str:
    """Return the prose and the short code of a lesson as one text in Markdown."""
    parts = []
    for cell in notebook.cells:
        if cell["cell_type"] == "markdown":
            parts.append(cell["source"])
        elif not tags(cell) & {"solution", "test", "remove-cell", "parameters"}:
            if code := code_on_slide(cell["source"]):
                parts += [code, *map(printed_on_slide, cell.get("outputs", ()))]
            drawn = (one.get("data", {}).get("image/png") for one in cell.get("outputs", ()))
            parts += [f"![figure](data:image/png;base64,{data})" for data in filter(None, drawn)]
    return "\n\n".join(filter(None, parts))


def pages(heading: str, blocks: list[str]) -> Iterator[str]:
    """Yield a section's slides, each with its heading."""
    parts: list[list[str]] = [[]]
    room = MAX_BLOCKS
    for block in blocks:
        size = FIGURE_BLOCKS if block.startswith("![") else 1
        is_printed = block.startswith("```text")  # stays below its code
        if parts[-1] and size > room and not is_printed:
            is_led = block.startswith("$$") and is_sentence(parts[-1][-1:]) and len(parts[-1]) > 1
            parts.append([parts[-1].pop()] if is_led else [])
            room = MAX_BLOCKS - is_led
        parts[-1].append(block)
        room -= size
    if len(parts) > 1 and is_sentence(parts[-1]) and len(parts[-2]) > 1:
        parts[-1].insert(0, parts[-2].pop())
    for i, part in enumerate(filter(None, parts)):
        yield "\n\n".join([heading + " (continued)" * bool(i), *part])


def code_on_slide(source: str) -> str:
    """Return a cell of code as a block of Markdown if it is short and draws no figure."""
    lines = [line for line in source.splitlines() if line.strip()]
    drawn = re.search(r"plt\.|axes|%matplotlib|figures\.", source)
    short = len(lines) <= MAX_LINES and not drawn
    return f"```python\n{source.strip()}\n```" if short else ""


def printed_on_slide(output: Any) -> str:
    """Return printed text of a cell as a block of Markdown if it is short, else an empty text."""
    text = output.get("text", "").rstrip()
    return f"```text\n{text}\n```" if 0 < len(text.splitlines()) <= MAX_LINES else ""


def is_sentence(blocks: list[str]) -> bool:
    """Return whether the blocks are a single sentence, without list, formula, code and figure."""
    return len(blocks) == 1 and not re.match(rf"(?:{LIST})|!\[|\$\$|```", blocks[0])


def key_points(text: str) -> list[str]:
    r"""Return code, formulas, lists and sentences with bold words of a section, in their order.

    Without bold words, the first sentence is one of them; without other blocks, three are. The
    sentence before a formula is shown, and that before one that refers to it.

    >>> key_points("A **client** holds rows. It may be small.\n\n- one\n- two\n\n$$x = 1.$$")
    ['A **client** holds rows.', '- one\n- two', '$$x = 1.$$']
    >>> key_points("Insert this. Then that.\n\n$$x = 1.$$")
    ['Insert this.', 'Then that.', '$$x = 1.$$']
    >>> key_points("First. Second. A **third** one. Fourth.")
    ['First.', 'Second.', 'A **third** one.']
    """
    blocks = list(_blocks(text))
    sentences = [i for i, (_, is_prose) in enumerate(blocks) if is_prose]
    shown = {i for i, (block, is_prose) in enumerate(blocks) if not is_prose or "**" in block}
    if not any("**" in blocks[i][0] for i in shown if not blocks[i][0].startswith("```")):
        shown |= {*sentences[:1]}
    if shown <= {*sentences}:
        shown |= {*[i for i in sentences if i not in shown][: max(0, MAX_SENTENCES - len(shown))]}
    for i in sorted(shown, reverse=True):
        shown |= {*_leading_sentences(blocks, i)}
    # A colon whose list or formula is not shown announces nothing.
    announced = {i for i in shown if blocks[i][1] and blocks[i][0].endswith(":")}
    return [blocks[i][0] for i in sorted(shown - {i for i in announced if i + 1 not in shown})]


def _leading_sentences(blocks: list[tuple[str, bool]], i: int) -> Iterator[int]:
    """Yield the sentences before a block that it needs: one to a formula, and what "this" means."""
    block, is_prose = blocks[i]
    needs = block.startswith("$$") or (is_prose and bool(REFERS_BACK.match(block)))
    while needs and i > 0 and blocks[i - 1][1]:
        i -= 1
        yield i
        needs = bool(REFERS_BACK.match(blocks[i][0]))


def _blocks(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the blocks of a section, and whether each is a sentence of its prose."""
    for part in BLOCK.split(text):
        if part.startswith(("$$", "```")):
            yield part, False
            continue
        for paragraph in filter(None, map(str.strip, re.split(r"\n\s*\n", part))):
            if re.match(rf"(?:{LIST})|!\[", paragraph):
                yield paragraph, False
                continue
            for sentence in re.split(r"(?<=[.:?]) +(?=[A-Z$*`])", " ".join(paragraph.split())):
                yield sentence, True
