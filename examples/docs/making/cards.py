"""A page for every method, from its docstring, its signature and a round that is measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO

import matplotlib
import pyro
import pyro.distributions as dist
from matplotlib.figure import Figure

import pyrofl
from making import formulas
from making.which import which
from pyrofl import (
    Batch,
    Federation,
    Method,
    Tensors,
    datasets,
    docstrings,
    federations,
    figures,
    nets,
)
from pyrofl.cli.output import cards
from pyrofl.experiments.methods import builds
from pyrofl.files.text_tables import markdown
from pyrofl.models import likelihood_factors, pvi, two_stage
from pyrofl.reports import calibration

LETTER = rf"(?:[A-Za-z]|sum|{formulas.GREEK.replace(' ', '|')})"
POWER = r"\^(?:-?\d(?:/\d)?|[a-z](?!\w))"
SYMBOL = rf"(?<![\w.]){LETTER}(?:_[a-z]{{1,3}}(?![\w=])(?:{POWER})?|{POWER}(?!\w))"

SHARED = "mu tau"
PROGRAMS = {
    "likelihood_factors": likelihood_factors.hierarchical,
    "pvi": pvi.hierarchical,
    "two_stage": two_stage.hierarchical,
}
FLOW = (
    "Arrows are messages of one client; their width grows with their bytes. Names are those of the "
    "method's tensors. All messages are computed from the training data: see [what leaves a "
    "client](../../what_leaves_a_client.md)."
)


def card_pages() -> Iterator[tuple[str, str | bytes]]:
    """Yield a card and a diagram for each method, and a table of them all."""
    found = [cards.card(name) for name in builds()]
    for one in found:
        yield f"methods/{one.key}.svg", diagram(one.key)
        method = cards.made(one.key, cards.network())
        yield f"methods/{one.key}_flow.svg", flow(method, cards.rows())
        yield f"methods/{one.key}.md", page(one)
    schools = federations.split(datasets.load("eight_schools"), "groups")
    for name in cards.OF_PROGRAMS:
        yield f"methods/{name}.md", program_page(cards.paper(name))
    for name, build in PROGRAMS.items():
        yield (
            f"methods/{name}_program_flow.svg",
            flow(build(effects, schools, shared=SHARED), schools),
        )
    yield "methods_table.md", table(found)
    yield "which.svg", which()


def page(card: cards.Card) -> str:
    """Write a card."""
    paper, wire = card.paper, card.wire
    parts = head(paper)
    if intervals := calibration.sentence(card.key):
        parts += [f"{text(intervals)} See [calibration](../../calibration.md)."]
    parts += [
        f"![{paper.name}: the dependencies of its model]({card.key}.svg)\n\n"
        "Boxes are tensors of the server (blue) or client states (orange); circles are random "
        "variables, and gray ones are observed. Names are those of a small network."
    ]
    parts += equations(paper)
    parts += ["## Messages", text(card.bytes)]
    kept = f"Sent to the server: {names(wire.sent)}. Client state: {names(wire.kept)}."
    parts += [f"{kept} Models for predictions: {', '.join(card.views)}."]
    parts += [f"![{paper.name}: what is stored, and what is sent]({card.key}_flow.svg)\n\n{FLOW}"]
    # On a phone the last column would be a word wide.
    parts += ["## Settings", f":::{{container}} settings\n{settings(card)}\n:::"]
    parts += [
        f"```python\nfrom pyrofl.models import {card.key}\n\nmethod = {card.key}.build(net)\n```"
    ]
    return "\n\n".join([*parts, *departures(paper)]) + "\n"


def program_page(paper: docstrings.Paper) -> str:
    """Write the page of a method for a user's program, which has no network and no command."""
    code = f"```python\n{cards.SCRIPT}\n```"
    parts = [*head(paper), *equations(paper), "## In a script", code]
    parts += ["[Hierarchical models](../../hierarchical.md) describes programs and options."]
    parts += ["## Messages", f"The program of eight schools, by each method for programs. {FLOW}"]
    parts += [f"![what {name} stores and sends]({name}_program_flow.svg)" for name in PROGRAMS]
    return "\n\n".join([*parts, *departures(paper)]) + "\n"


def head(paper: docstrings.Paper) -> list[str]:
    """Write the title of a card, its source, and when to use the method."""
    parts = [f"# {paper.name}", f"**{capital(paper.headline)}.**"]
    parts += [text(re.sub(":$", ".", paper.source))] if paper.source else []
    return [*parts, f":::{{admonition}} When to use it\n{text(paper.use)}\n:::"]


def equations(paper: docstrings.Paper) -> list[str]:
    """Write the equations of a card, and the text around them."""
    parts = ["## Equations"]
    for part in paper.parts:
        parts.append(
            text(part) if isinstance(part, str) else f"```{{raw}} html\n{formulas.block(part)}\n```"
        )
    return parts


def departures(paper: docstrings.Paper) -> list[str]:
    """Write what is not as in the paper."""
    whole, _, listed = paper.departures.partition(": ")
    found = text(capital(listed) if listed else whole)
    return ["## Departures from the paper", found] if paper.departures else []


def settings(card: cards.Card) -> str:
    """Write the table of settings."""
    rows = []
    for s in card.settings:
        about = text(capital(s.about)).replace("|", "\\|")
        rows.append((f"`{s.name}`", f"`{s.default}`", s.kind.replace("|", ", "), about))
    return markdown(("setting", "default", "valid values", "description"), rows)


def table(found: list[cards.Card]) -> str:
    """Write the table of all methods: when to use each, its messages, its models."""
    rows = []
    for one in found:
        down, up = one.wire.down / one.plain.down, one.wire.up / one.plain.up
        use = one.paper.use.removeprefix("Use it ").partition(". It assumes")[0]
        link = f"[{one.paper.name}](made/methods/{one.key}.md)"
        rows.append((link, text(use), f"{down:.2f}", f"{up:.2f}", ", ".join(one.views)))
    return markdown(("method", "when to use it", "download", "upload", "models"), rows) + "\n"


def diagram(name: str) -> bytes:
    """Draw what depends on what in a method's model, with a network of two layers."""
    net = nets.build("mlp:3", (cards.INPUTS,), cards.OUTPUTS)
    return svg(figures.plates(pyrofl.get_dependencies(cards.made(name, net), cards.rows())), name)


def svg(figure: Figure, name: str) -> bytes:
    """Return a figure as SVG, the same each time."""
    file = BytesIO()
    # Shapes have names that are hashes, salted with random bytes unless there is a salt.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def flow(method: Method, data: Federation) -> bytes:
    """Draw what a method stores and sends, from rounds of training."""
    return svg(figures.data_flow(pyrofl.get_data_flow(method, data)), method.name)


def effects(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Model effects of schools as normal around mu; x is the standard error."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


def names(roles: tuple[str, ...]) -> str:
    """List names of tensors."""
    return ", ".join(f"`{role}`" for role in roles) or "nothing"


def capital(words: str) -> str:
    """Begin a sentence, unless it begins with a name such as pFedVEM."""
    return words[:1].upper() + words[1:] if words.partition(" ")[0].islower() else words


def text(words: str) -> str:
    """Write prose in Markdown: tau_j is a formula, and signs outside of code are themselves."""
    parts = re.split(r"(`[^`]*`)", words)
    return "".join(p if p.startswith("`") else _prose(p) for p in parts)


def _prose(words: str) -> str:
    pieces = re.split(f"({SYMBOL})", words)
    signs = (
        f"${formulas.tex(p)}$" if i % 2 else re.sub(r"([*_$<>\[\]{}^~])", r"\\\1", p)
        for i, p in enumerate(pieces)
    )
    return "".join(signs)
