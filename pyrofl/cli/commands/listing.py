"""Commands `pyrofl list` and `pyrofl explain`, which describe methods, data sets and networks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from textwrap import TextWrapper
from typing import Any, get_args

from pyrofl.cli.output import cards
from pyrofl.data.loaders.csv_files import LIKELIHOODS
from pyrofl.data.loaders.datasets import DATASETS
from pyrofl.experiments.console import show
from pyrofl.experiments.methods import about, builds
from pyrofl.experiments.settings import Epochs, arguments, readable
from pyrofl.nets import NETWORKS
from pyrofl.partitions.federations import PARTITIONS, TEST_POLICIES
from pyrofl.reports.calibration import summary

SECTIONS = ("methods", "data", "partitions", "tests", "networks", "likelihoods")  # of `list`


def list_all(args: Namespace) -> None:
    """Print all names of methods, data sets, networks etc., or one section with descriptions."""
    if args.section:
        show(entries(sections()[args.section]) if args.section != "settings" else variants())
        return
    width = max(map(len, (*SECTIONS, "settings")))
    wrapped = TextWrapper(100, subsequent_indent=" " * (width + 4))
    wrapped.break_long_words = wrapped.break_on_hyphens = False
    lines = [f"  {name:<{width}}  {', '.join(found)}" for name, found in sections().items()]
    lines.append(f"  {'settings':<{width}}  of methods, for --set NAME=VALUE")
    end = "pyrofl list SECTION describes them, pyrofl explain METHOD describes one method."
    show("\n".join([*map(wrapped.fill, lines), "", end]))


def sections() -> dict[str, Mapping[str, str]]:
    """Return all methods, data sets, networks etc. with descriptions: section -> name -> text."""
    partitions = dict(text.split(": ", 1) for text in PARTITIONS.values())
    methods = {n: "\n".join(filter(None, (about(n), summary(n)))) for n in builds()}
    found = (methods, DATASETS, partitions, TEST_POLICIES, NETWORKS)
    return dict(zip(SECTIONS, (*found, LIKELIHOODS), strict=True))


def entries(lines: Mapping[str, str]) -> str:
    """Format names and their descriptions as text, one per line."""
    width = max(map(len, lines))
    below = "\n" + " " * (width + 4)
    return "\n".join(f"  {n:<{width}}  {text.replace(chr(10), below)}" for n, text in lines.items())


def explain(args: Namespace) -> None:
    """Print the documentation card of a method: equations, settings and message sizes."""
    show(cards.text(args.method))


def variants() -> str:
    """Format the settings of every method that --set accepts, with their valid words, as text."""
    under = TextWrapper(100, initial_indent="  ", subsequent_indent=" " * 12)
    under.break_long_words = under.break_on_hyphens = False
    return "\n".join(
        under.fill(f"{name:<9} {'  '.join(told(n, kind) for n, kind in arguments(build).items())}")
        for name, build in builds().items()
    )


def told(name: str, kind: Any) -> str:
    """Format the name of a method's setting, with its valid values if they are words."""
    words = [str(word) for one in readable(kind) for word in get_args(one) if one != Epochs]
    return f"{name}={'|'.join(words)}" if words else name
