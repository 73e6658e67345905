"""The command `pyrofl list`, which describes methods, data sets, networks etc."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from textwrap import TextWrapper

from pyrofl.choices import DATASETS, LIKELIHOODS, NETWORKS, PARTITIONS, TEST_POLICIES
from pyrofl.cli.rows import LIST_SECTIONS
from pyrofl.experiments.console import show
from pyrofl.experiments.method_names import method_summaries
from pyrofl.reports.calibration import summary


def list_choices(args: Namespace) -> None:
    """Print all names of methods, data sets, networks etc., or one section with descriptions."""
    if args.section == "settings":
        from pyrofl.cli.output.cards import variants  # which imports all methods

        show(variants())
        return
    if args.section:
        show(format_entries(sections()[args.section]))
        return
    width = max(map(len, (*LIST_SECTIONS, "settings")))
    wrapped = TextWrapper(100, subsequent_indent=" " * (width + 4))
    wrapped.break_long_words = wrapped.break_on_hyphens = False
    lines = [f"  {name:<{width}}  {', '.join(names)}" for name, names in sections().items()]
    lines.append(f"  {'settings':<{width}}  of methods, for --set NAME=VALUE")
    end = "pyrofl list SECTION describes them, pyrofl explain METHOD describes one method."
    show("\n".join([*map(wrapped.fill, lines), "", end]))


def sections() -> dict[str, Mapping[str, str]]:
    """Return all methods, data sets, networks etc. with descriptions: section -> name -> text."""
    partitions = dict(text.split(": ", 1) for text in PARTITIONS.values())
    methods = {
        name: "\n".join(filter(None, (about, summary(name))))
        for name, about in method_summaries().items()
    }
    choices = (methods, DATASETS, partitions, TEST_POLICIES, NETWORKS)
    return dict(zip(LIST_SECTIONS, (*choices, LIKELIHOODS), strict=True))


def format_entries(lines: Mapping[str, str]) -> str:
    """Format names and their descriptions as text, one per line."""
    width = max(map(len, lines))
    below = "\n" + " " * (width + 4)
    return "\n".join(f"  {n:<{width}}  {text.replace(chr(10), below)}" for n, text in lines.items())
