"""Signs that mean something to Sphinx: formulas as MathML, and stars of docstrings."""

from __future__ import annotations

import re
from contextlib import suppress
from html import escape
from inspect import signature, unwrap
from typing import Any

from docutils.nodes import SkipNode, Text
from docutils.utils.math import MathError
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.logging import getLogger

from pyrofl.arguments import Range
from pyrofl.cli.output.slides import mathml

RANGE = re.compile(
    r"(?:~typing\.)?Annotated\[(\w+), [~\w.]*Range\(low=(.*?), high=(.*?), open_low=(\w+), "
    r"open_high=(\w+)\)\]"
)
STOP = 'tabindex="0"'  # reached by the keyboard, as wide ones are moved sideways
NAMED = {  # what other libraries write, and with a name for screen readers
    ' aria-label="Toggle hidden content"': "",
    '<img id="_anim_img': '<img alt="Frame of an animated figure" id="_anim_img',
    'class="anim-slider"': 'class="anim-slider" aria-label="Frame"',
}
LOGGER = getLogger(__name__)


def _written(node: Any, as_block: bool) -> str:
    """Return a formula as MathML; one that cannot be read is a warning, and stays as it is."""
    text = node.astext()
    try:
        return mathml(text, as_block)
    except MathError as error:
        LOGGER.warning("formula %s: %s", text, error, location=node)
        return f"<code>{escape(text)}</code>"


def inline(writer: Any, node: Any) -> None:
    """Write a formula in a line."""
    writer.body.append(_written(node, as_block=False))
    raise SkipNode


def displayed(writer: Any, node: Any) -> None:
    """Write a formula in a line of its own."""
    writer.body.append(f'<div class="formula" {STOP}>{_written(node, as_block=True)}</div>')
    raise SkipNode


def accessible(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Make wide diagrams focusable by keyboard, and label controls that open and close."""
    body = re.sub(r'<p>(?=<img [^>]*\.svg")', f"<p {STOP}>", context.get("body", ""))
    for written, better in NAMED.items():
        body = body.replace(written, better)
    context["body"] = body
    draw = context["generate_toctree_html"]
    context["generate_toctree_html"] = lambda *how, **options: str(draw(*how, **options)).replace(
        "<summary>", '<summary aria-label="Pages of this section">'
    )


def plain_types(app: Any, domain: str, kind: str, content: Any) -> None:
    """Write ranges of numbers in types as error messages do, such as "int of at least 1"."""
    for text in list(content.findall(Text)):
        if "Annotated[" in text:
            text.parent.replace(text, Text(RANGE.sub(_range, text)))


def _range(found: re.Match[str]) -> str:
    kind, low, high, *is_open = found.groups()
    return f"{kind} {Range(float(low), float(high), *(one == 'True' for one in is_open))}".rstrip()


def plain_signs(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Let stars, bars and names that end in _ stand for themselves, but in code."""
    if what == "property" and lines:  # what stands before a colon is no type
        lines[0] = lines[0].replace(": ", "; ")
    code = False
    for i, line in enumerate(lines):
        code = line.lstrip().startswith(">>>") or (code and bool(line.strip()))
        if not code:
            parts = re.split(r"(`[^`]*`)", line)
            lines[i] = "".join(p if p.startswith("`") else _escaped(p) for p in parts)


def by_name(
    app: Any, what: str, name: str, thing: Any, options: Any, args: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """Show arguments by name, where a signature has `**options` of a TypedDict, or overloads."""
    if what not in ("function", "method") or args is None:
        return None
    function = unwrap(thing)
    with suppress(PycodeError):  # of built-in functions
        analyzer = ModuleAnalyzer.for_module(function.__module__)
        analyzer.analyze()
        analyzer.overloads.pop(function.__qualname__, None)
    own = signature(function).parameters
    for one in own.values():
        found = re.search(r"Unpack\[(\w+)\]", str(one.annotation))
        if one.kind is one.VAR_KEYWORD and found and found[1] in function.__globals__:
            names = function.__globals__[found[1]].__annotations__
            listed = ", ".join(f"{key}=..." for key in names if key not in own)
            args = re.sub(rf"\*\*{one.name}(: [^,)]+)?", listed, args)
    return args, returns


def _escaped(text: str) -> str:
    text = re.sub(r"(?<!\\)([*|])", r"\\\1", text)
    return re.sub(r"(\w)_(?=\W|$)", r"\1\\_", text)
