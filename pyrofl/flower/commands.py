"""Commands `pyrofl study new`, `up`, `serve` and `join`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.experiments import console
from pyrofl.experiments.console import FAILED, Stopped, ending, show, tell
from pyrofl.files import run_folder
from pyrofl.files.lock import lock_folder
from pyrofl.flower.certificates import refuse_certificate, wait_for_server
from pyrofl.flower.processes import (
    CONNECTION,
    ProcessGroup,
    connect,
    free_port,
    process_group,
    program,
    wait_for_port,
    words_of,
)
from pyrofl.flower.project import STUDY_FILE, Project, of_study
from pyrofl.flower.registry import NODES_FILE
from pyrofl.flower.rows import rows_of
from pyrofl.flower.rules import check_rules
from pyrofl.flower.site import LOG_FILE as LOG_OF_SITE
from pyrofl.flower.site import REFUSAL, STUDY_COMPLETE, site_log
from pyrofl.flower.site_state import refuse_other_state
from pyrofl.flower.table_check import check_tables, try_study
from pyrofl.flower.tables import read_site_tables, regression_arguments
from pyrofl.flower.template import new as write_study
from pyrofl.flower.template import write_app
from pyrofl.inference.transport.site_rules import SiteRules
from pyrofl.models.regression.remote import RegressionServer
from pyrofl.nouns import nouns

LOG_FILE, FLOWER_FOLDER, SITES_FOLDER = "server.log", "flower", "sites"
KEYS_FILE = "keys.json"  # public key -> node
LOOPBACK = "127.0.0.1"
PROGRESS_INTERVAL = 0.25  # seconds between two looks at how far the server is
NODE_LAPSE = 60.0  # seconds after which a node that ended had been accepted
# A node that was killed is known to the server for about a minute.
RECONNECT_PAUSE, MAX_RECONNECTS = 10.0, 8
LOCKED_OUT = "does not let in the node of"
LAST_REPLY_PAUSE = 10.0  # seconds in which a node sends its last reply, at the end of a study
RUN_CHECK_INTERVAL = 30.0  # seconds between two questions whether the run still goes on


def new(args: Namespace) -> None:
    """Create the folder of a study, with example settings and simulated data."""
    path = write_study(args.folder)
    show(f"{path} holds a study: {STUDY_FILE} has its settings, sites/ simulated rows")
    show(f"try it with: pyrofl study run {path}")


@of_study
def up(args: Namespace) -> None:
    """Run a study by Flower on this machine: a server, and a node for each file in sites/."""
    refuse_too_few(args)
    project: Project = args.project
    files = sorted((project.folder / "sites").glob("*.csv"))
    if len(files) < args.sites:
        message = f"{project.folder / 'sites'} holds {len(files)} CSV files"
        raise ValueError(f"{message}; expected one for each of --sites {args.sites}")
    check_tables(project, list(map(str, files[: args.sites])))
    check(project, args.sites)
    try_study(project, list(map(str, files[: args.sites])), SiteRules.read(args.rules))
    program("flower-superlink")
    out = Path(args.out or project.folder / "run").absolute()
    with process_group(out / FLOWER_FOLDER) as group, ending(partial(kept, out)):
        port = serve_on(group, LOOPBACK, free_port(), [])
        connect(group.home, f"{LOOPBACK}:{port}")
        for file in files[: args.sites]:
            data, state = str(file.absolute()), str(out / SITES_FOLDER / file.stem)
            node = {"name": file.stem, "project": str(project.file.absolute())}
            node |= {"data": data, "state": state} | rules_of(args.rules)
            start_node(group, file.stem, f"{LOOPBACK}:{port}", node, ["--insecure"])
        ended = submit(args, group, project, out)
    finish(args, out, ended)


@of_study
def serve(args: Namespace) -> None:
    """Run the server of a study by Flower, to which sites on other machines connect."""
    refuse_too_few(args)
    project: Project = args.project
    folder = args.nodes if args.nodes and os.path.isdir(args.nodes) else None
    keys = sorted(Path(folder).glob("*.pub")) if folder else []
    files = {"--cert": args.cert, "--cert-key": args.cert_key, "--ca": args.ca}
    safe = safe_server(args.host, files, keys)
    near = LOOPBACK if args.host == "0.0.0.0" else args.host
    if safe:
        refuse_certificate(near, args.cert, args.cert_key, args.ca)
    check(project, args.sites)
    program("flower-superlink")
    out = Path(args.out or project.folder / "run").absolute()
    with process_group(out / FLOWER_FOLDER) as group, ending(partial(kept, out)):
        serve_on(group, args.host, args.port, [*safe, *kept_by(group)])
        connect(group.home, f"{near}:{args.port}", str(Path(args.ca).absolute()) if safe else "")
        register(group, keys)
        tell(f"listening on {args.host}:{args.port} for {nouns().site.count(args.sites)}\n")
        ended = submit(args, group, project, out)
    finish(args, out, ended)


def check(project: Project, sites: int) -> None:
    """Build the methods of a study; raise ValueError if they cannot be built."""
    if project.formula:
        names = [f"{nouns().site} {number}" for number in range(sites)]
        RegressionServer(project.formula, names, **regression_arguments(project))
    else:
        project.build(sites, server=True)


def read(project: Project, path: str, name: str) -> Federation | Tables:
    """Read a site's rows, or for a regression its tables."""
    if project.formula:
        return read_site_tables(project, path, name)
    return rows_of(project, path, name)


def checked_rules(
    path: str | None, project: Project, name: str, rows: Federation | Tables
) -> SiteRules:
    """Return a site's rules; raise BrokenRuleError if they forbid the study before its reports."""
    rules = SiteRules.read(path)
    check_rules(rules, project, name, rows if isinstance(rows, Federation) else None)
    return rules


def rules_of(path: str | None) -> dict[str, str]:
    """Return the setting of a node for a file of rules."""
    return {"rules": str(Path(path).absolute())} if path else {}


def refuse_too_few(args: Namespace) -> None:
    """Raise ValueError if --min-sites exceeds the number of sites."""
    if (args.min_sites or 0) > args.sites:
        most = f"no more than --sites, {args.sites}"
        raise ValueError(f"--min-sites is {args.min_sites}; expected {most}")


def kept_by(group: ProcessGroup) -> list[str]:
    """Return options with which Flower's server stores known nodes and recognizes them later."""
    return ["--database", str(group.home / "superlink.db")]


def safe_server(host: str, files: dict[str, str | None], keys: list[Path]) -> list[str]:
    """Return Flower's server options for TLS and node keys; none for a loopback server."""
    files_given = [name for name, file in files.items() if file]
    if not files_given and not keys and host == LOOPBACK:
        return []
    for name, file in files.items():
        if not file or not os.path.isfile(file):
            raise ValueError(
                f"{name} is {file!r}; expected a file, as others reach {host} (a server without "
                f"certificate listens on {LOOPBACK} alone)"
            )
    if not keys:
        raise ValueError(
            f"--nodes has no NAME.pub; expected the public key of each {nouns().site}'s node"
        )
    words = ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile")
    pairs = zip(words, map(str, files.values()), strict=True)
    return [*(word for pair in pairs for word in pair), "--enable-supernode-auth"]


def register(group: ProcessGroup, keys: list[Path]) -> None:
    """Register nodes' public keys with Flower's server, and record the site of each node.

    `flwr supernode list` shows neither names nor keys, so both are recorded here.
    """
    file = group.home / KEYS_FILE
    node_numbers = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    )  # key -> node
    for key in keys:
        if (own := key.read_text(encoding="utf-8")) not in node_numbers:
            words = ("flwr", "supernode", "register", str(key), CONNECTION)
            response = json.loads(group.ask(*words, "--name", key.stem, "--format", "json"))
            node_numbers[own] = response["node-id"]
            run_folder.write_json(file, node_numbers)
    whose = {node_numbers[key.read_text(encoding="utf-8")]: key.stem for key in keys}
    run_folder.write_json(group.home / NODES_FILE, whose)


@of_study
def join(args: Namespace) -> None:
    """Print which data will leave the site; then participate in the study until it has ended."""
    from pyrofl.flower.disclosure import leaving

    safe = safe_node(args.server, args.key, args.ca)
    site, project, rows, rules = site_settings(args, may_be_new=True)
    state, least = Path(site["state"]), site["min_scored_rows"]
    node = {n: str(site[n]) for n in ("name", "project", "data", "state")}
    node |= ({"rejoin": "yes"} if args.rejoin else {}) | rules_of(args.rules)
    node |= {"min-scored-rows": str(least or 0)}  # 0: no scores
    words_of(node)  # refuses what Flower could not read
    show(leaving(project, rows, least, rules))
    if args.show:
        return
    program("flower-supernode")
    run_folder.prepare(state, overwrite=True)
    with lock_folder(state), process_group(state / FLOWER_FOLDER) as group:
        log, tries, before = state / LOG_OF_SITE, MAX_RECONNECTS, ""
        tell(f"{args.name} joins {args.server}; its log is {log}\n")
        while True:
            wait_for_server(args.server, args.ca)
            begun, at = time.monotonic(), log.stat().st_size if log.exists() else 0
            process = start_node(group, args.name, args.server, node, safe)
            for what, text in followed_site(process, log, at):
                tell(f"{text}\n")
                if what == STUDY_COMPLETE:
                    with suppress(subprocess.TimeoutExpired):  # for the node to send its reply
                        process.wait(LAST_REPLY_PAUSE)
                    return
            if time.monotonic() - begun > NODE_LAPSE:  # it was in, so that it is worth another try
                tries = MAX_RECONNECTS
            why, tries = not_in(group, args, process.returncode), tries - 1
            if not tries:
                raise Stopped(why, console.REFUSED if LOCKED_OUT in why else FAILED)
            if why != before:
                text = f"{why}; trying again for {tries * RECONNECT_PAUSE:g} s"
                tell(f"{text}\n")
                with site_log(state) as site_file:
                    site_file.info("not in: %s", text)
            before = why
            time.sleep(RECONNECT_PAUSE)


def site_settings(
    args: Namespace, *, may_be_new: bool
) -> tuple[dict[str, Any], Project, Federation | Tables, SiteRules]:
    """Return the arguments of `Site`, the project, the rows, and the rules, which permit these.

    Without `may_be_new`, the site needs the state of its earlier replies, unless it rejoins.
    """
    project: Project = args.project
    check_tables(project, [args.data])
    refuse_other_state(args.state, args.data, may_be_new=may_be_new or args.rejoin)
    rows = read(project, args.data, args.name)
    rules = checked_rules(args.rules, project, args.name, rows)
    site: dict[str, Any] = {"name": args.name, "project": str(project.file.absolute())}
    site |= {"data": str(Path(args.data).absolute()), "state": str(Path(args.state).absolute())}
    site |= {"rejoin": args.rejoin} | rules_of(args.rules)
    site |= {"min_scored_rows": None if args.no_scores else args.min_scored_rows}
    return site, project, rows, rules


def followed_site(
    process: subprocess.Popen[bytes], log: Path, at: int
) -> Iterator[tuple[str, str]]:
    """Follow a site's log: yield (kind, text) for each refusal and for the end of the run."""
    while process.poll() is None:
        with suppress(OSError), open(log, encoding="utf-8") as file:
            file.seek(at)
            for line in file:
                if match := re.search(rf" ({REFUSAL}|{STUDY_COMPLETE}): (.+)", line):
                    yield match[1], match[2]
            at = file.tell()
        time.sleep(PROGRESS_INTERVAL)


def not_in(group: ProcessGroup, args: Namespace, code: int) -> str:
    """Return the reason why a site's node process has ended."""
    reason = group.last_words(f"node-{args.name}").rpartition("Exit Code:")[2].strip()
    if "[code: 2004]" not in reason:
        return f"the node ended with {code}: {reason}"
    return (
        f"{args.server} {LOCKED_OUT} {args.key}: it does not know the key, or a node with it is "
        f"there (for a minute after one is killed); expected the public key in --nodes of "
        "`pyrofl study serve`, and one node with it"
    )


def safe_node(server: str, key: str | None, ca: str | None) -> list[str]:
    """Return a Flower node's options for TLS and its key, or --insecure for a loopback server."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"server is {server!r}; expected HOST:PORT, such as 10.0.0.1:8443")
    if not key and not ca and host == LOOPBACK:
        return ["--insecure"]
    for name, file in (("--key", key), ("--ca", ca)):
        if not file or not os.path.isfile(file):
            raise ValueError(f"{name} is {file!r}; expected a file, as {host} is another machine")
    return ["--root-certificates", str(ca), "--auth-supernode-private-key", str(key)]


def serve_on(group: ProcessGroup, host: str, port: int, more: list[str]) -> int:
    """Start Flower's server, wait until it accepts connections, and return its port."""
    words = ["flower-superlink", "--host", host, "--port", str(port)]
    words += ["--disable-runtime-dependency-installation"]
    words += more if "--ssl-certfile" in more else ["--insecure", *more]
    group.start("superlink", words)
    wait_for_port(group, "superlink", LOOPBACK if host == "0.0.0.0" else host, port)
    return port


def start_node(
    group: ProcessGroup, name: str, address: str, node: dict[str, Any], more: list[str]
) -> subprocess.Popen[bytes]:
    """Start a Flower node for a site, with the site's settings."""
    words = ["flower-supernode", "--superlink", address, "--host", LOOPBACK]
    words += ["--port", str(free_port()), "--node-config", words_of(node), *more]
    return group.start(f"node-{name}", words)


def submit(args: Namespace, group: ProcessGroup, project: Project, out: Path) -> dict[str, Any]:
    """Submit a run to Flower and print the server's log; return exit code, error and tables."""
    end = group.home / f"{group.mark}.json"  # another run of Flower's may still be there, and end
    begin = (out / LOG_FILE).stat().st_size if (out / LOG_FILE).exists() else 0
    settings = {"project": str(project.file.absolute()), "out": str(out), "sites": args.sites}
    settings |= {"least": args.min_sites or args.sites, "timeout": float(args.timeout)}
    settings |= {"end": str(end)}
    command = ["flwr", "run", str(write_app(group.home / "app")), CONNECTION, "--format", "json"]
    response = json.loads(group.ask(*command, "--run-config", words_of(settings)))
    if "run-id" not in response:
        raise Stopped(f"the run was not taken: {response}", FAILED)
    number = str(response["run-id"])
    for line in followed(group, out, end, begin, number):
        print_progress(args, line)
    ended: dict[str, Any] = json.loads(end.read_text(encoding="utf-8"))
    return ended


def print_progress(args: Namespace, line: str) -> None:
    """Print a line on the progress of a study; with --quiet, only warnings."""
    if not args.quiet or line.startswith("warning: "):
        tell(f"{line}\n")


def followed(group: ProcessGroup, out: Path, end: Path, at: int, number: str) -> Iterator[str]:
    """Yield new lines of the server's log until the run has ended."""
    last_request = time.monotonic()
    while True:
        over = end.exists()
        if (out / LOG_FILE).exists():
            with open(out / LOG_FILE, encoding="utf-8") as file:
                file.seek(at)
                yield from file.read().splitlines()
                at = file.tell()
        if over:
            return
        if (code := group.running["superlink"].poll()) is not None:
            raise Stopped(f"Flower's server ended with {code}: {gone(group, out)}", FAILED)
        if time.monotonic() - last_request > RUN_CHECK_INTERVAL:
            last_request = time.monotonic()
            status = state(group, number)
            if status.startswith("finished") and not end.exists():
                raise Stopped(f"the run ended ({status}): {gone(group, out)}", FAILED)
        time.sleep(PROGRESS_INTERVAL)


def state(group: ProcessGroup, number: str) -> str:
    """Return Flower's status of a run, such as "running"."""
    words = ("flwr", "list", CONNECTION, "--run-id", number, "--format", "json")
    runs = json.loads(group.ask(*words))
    return str(runs["runs"][0]["status"]) if runs.get("runs") else "unknown"


def kept(out: Path, ended_by: str) -> str:
    """Return the error message of an interrupted command, which explains how to resume it."""
    return (
        f"{ended_by}; {out} holds the rounds that are made, the same command continues from there"
    )


def gone(group: ProcessGroup, out: Path) -> str:
    """Describe why a run failed: the end of the server's log, and where logs and results are."""
    return f"{group.last_words('superlink')[-200:]}; {group.home} holds logs, {out} what is done"


def finish(args: Namespace, out: Path, ended: dict[str, Any]) -> None:
    """Print the result tables of a study, and end the command with the server's exit code."""
    show("\n\n".join(ended["tables"]), f"{out} holds all results")
    if ended["code"]:
        raise Stopped(str(ended["error"]), int(ended["code"]))
    shutil.rmtree(out / FLOWER_FOLDER, ignore_errors=True)
    if not args.quiet:
        tell(f"{out} holds a folder with tables and figures for each method\n")
