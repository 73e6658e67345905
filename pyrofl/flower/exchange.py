"""The command `pyrofl study exchange`: the server of a study without network, by files."""

from __future__ import annotations

import os
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from pyrofl.arguments import check_name
from pyrofl.experiments.console import ending
from pyrofl.experiments.tasks import threads
from pyrofl.files.link_safe_files import append
from pyrofl.files.lock import lock_folder
from pyrofl.files.run_folder import prepare
from pyrofl.flower.apps import run_study
from pyrofl.flower.commands import LOG_FILE, check, finish, kept, print_progress
from pyrofl.flower.coordinator import ServerSettings
from pyrofl.flower.file_transport import MESSAGES_FOLDER, SERVER, TAKEN_FOLDER, FileTransport
from pyrofl.flower.project import Project, of_study
from pyrofl.inference.transport.correction import RepliesNeeded
from pyrofl.inference.transport.message_files import read_private_key, read_public_key
from pyrofl.nouns import nouns


@of_study
def exchange(args: Namespace) -> None:
    """Take the replies that have arrived, run as far as they permit, and write new requests."""
    project: Project = args.project
    keys = site_keys(args.nodes)
    without = (args.without or "").split(",") if args.without else []
    for name in [*without, *([args.ask_again] if args.ask_again else [])]:
        check_name(name, list(keys), str(nouns().site))
    if len(without) == len(keys):
        raise ValueError(
            f"--without has all {nouns().site.many}; expected that one of them replies"
        )
    key = read_private_key(args.key)
    check(project, len(keys))
    out = Path(args.out or project.folder / "run").absolute()
    folder = Path(args.messages or out / MESSAGES_FOLDER)
    if any(out.glob("*/run.json")) and not (out / TAKEN_FOLDER).exists():
        raise ValueError(f"{out} has the results of another command; expected another --out")
    prepare(folder, overwrite=True)
    out.mkdir(parents=True, exist_ok=True)

    def print_line(text: str) -> None:
        append(out / LOG_FILE, f"{text}\n")
        print_progress(args, text)

    name = project.folder.absolute().name
    transport = FileTransport(folder, out, name, project.agreed, key, keys, without, print_line)
    whose = dict(enumerate(transport.sites))
    settings = ServerSettings(len(keys), len(keys) - len(set(without)), 0.0, whose, by_files=True)
    if args.ask_again:
        with lock_folder(out):
            transport.forget(args.ask_again)
    with threads(1), ending(partial(kept, out), ValueError):
        try:
            ended = run_study(str(project.file), out, transport, settings, print_line)
        except RepliesNeeded:
            return
    finish(args, out, ended)


def site_keys(folder: str) -> dict[str, Any]:
    """Return the public keys of all sites, from the files NAME.pub in a folder."""
    files = sorted(Path(folder).glob("*.pub")) if os.path.isdir(folder) else []
    if not files:
        raise ValueError(
            f"{folder} has no NAME.pub; expected the public key of each {nouns().site}"
        )
    if odd := [file for file in files if file.stem == SERVER]:
        raise ValueError(
            f"{odd[0]}: no {nouns().site} may be called {SERVER}; expected another name"
        )
    return {file.stem: read_public_key(file) for file in files}
