"""The command `pyrofl study run`: server and sites of a study in this process, without Flower."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pyrofl.data.tables.table_files import files_of
from pyrofl.experiments.console import ending
from pyrofl.experiments.tasks import threads
from pyrofl.files.link_safe_files import append
from pyrofl.flower.apps import run_study
from pyrofl.flower.commands import (
    LOG_FILE,
    SITES_FOLDER,
    check,
    finish,
    kept,
    print_progress,
    rules_of,
)
from pyrofl.flower.coordinator import ServerSettings
from pyrofl.flower.project import Project, of_study
from pyrofl.flower.site import LOG_FILE as LOG_OF_SITE
from pyrofl.flower.site import reply_or_refuse
from pyrofl.flower.table_check import check_tables, try_study
from pyrofl.inference.transport.records import Records, deserialize, serialize
from pyrofl.inference.transport.site_rules import SiteRules


class LocalTransport:
    """Transport of messages to sites in this process, which reply at once.

    Args:
        sites: the arguments of each `Site`, with the path of the study file.
    """

    def __init__(self, sites: Sequence[Mapping[str, Any]]) -> None:
        self.sites = list(sites)

    def present(self) -> Sequence[int]:
        """Return the numbers of all sites."""
        return range(len(self.sites))

    def exchange(self, messages: Mapping[int, Records], timeout: float) -> dict[int, Records]:
        """Return the replies, as they would arrive over a network."""
        return {
            node: _as_sent(reply_or_refuse(self.sites[node], _as_sent(records)))
            for node, records in messages.items()
        }

    def tell(self, messages: Mapping[int, Records]) -> None:
        """Send messages without waiting for replies."""
        self.exchange(messages, 0.0)


def _as_sent(records: Records) -> Records:
    return deserialize(*serialize(records))


@of_study
def run(args: Namespace) -> None:
    """Run a study in this process; each file of a folder has the rows of one site."""
    project: Project = args.project
    files = files_of(args.data or str(project.folder / "sites"))
    check_tables(project, files)
    check(project, len(files))
    try_study(project, files, SiteRules.read(args.rules))
    out = Path(args.out or project.folder / "run").absolute()
    sites = [_site(args, project, file, out) for file in files]
    out.mkdir(parents=True, exist_ok=True)

    def print_line(text: str) -> None:
        append(out / LOG_FILE, f"{text}\n")
        print_progress(args, text)

    settings = ServerSettings(len(files), len(files), 0.0)
    with threads(1), ending(partial(kept, out), ValueError):
        transport = LocalTransport(sites)
        ended = run_study(str(project.file), out, transport, settings, print_line)
    if ended["code"]:
        ended["error"] = f"{ended['error']}; see {out / SITES_FOLDER}/NAME/{LOG_OF_SITE}"
    finish(args, out, ended)


def _site(args: Namespace, project: Project, file: str, out: Path) -> dict[str, Any]:
    """Return the arguments of a `Site`."""
    name = Path(file).stem
    site = {"name": name, "project": str(project.file), "data": file} | rules_of(args.rules)
    return site | {"state": str(out / SITES_FOLDER / name)}
