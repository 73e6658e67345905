"""Flower apps of a study: the ClientApp of the sites and the ServerApp of the server."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from pyrofl.choices import MIN_SCORED_ROWS
from pyrofl.experiments.console import FAILED, REFUSED, UNLEARNED, Stopped, what
from pyrofl.files.link_safe_files import append
from pyrofl.files.run_folder import write_json
from pyrofl.flower.coordinator import ServerSettings, coordinate
from pyrofl.flower.project import Project
from pyrofl.flower.registry import NODES_FILE
from pyrofl.flower.results import ResultStore
from pyrofl.flower.site import reply_or_refuse
from pyrofl.inference.transport.message_checks import one_line
from pyrofl.inference.transport.records import Records, deserialize, serialize
from pyrofl.nouns import use

REPLY_CHECK_INTERVAL = 0.25  # seconds between two looks for replies
MESSAGE_LIFETIME = 60.0  # seconds after which a message without a reply expires
LOG_FILE = "server.log"
ODD_MODS = {
    "LocalDpMod": "it clips and adds noise to replies as if they were weights of a network",
    "fixedclipping_mod": "it clips replies as if they were changes of weights",
    "adaptiveclipping_mod": "it clips replies as if they were changes of weights",
    "secagg_mod": "the server cannot add encrypted replies",
    "secaggplus_mod": "the server cannot add encrypted replies",
}


def flower() -> Any:
    """Import Flower's modules: name -> module; raise ValueError if Flower is not installed."""
    try:
        return {n: import_module(f"flwr.{n}") for n in ("app", "clientapp", "serverapp")}
    except ImportError as error:
        raise ValueError(
            f"Flower cannot be imported ({error}); expected pip install -e '.[flower]' in the clone"
        ) from error


def to_record(records: Mapping[str, Any]) -> Any:
    """Convert the records of a message to Flower's RecordDict."""
    app = flower()["app"]
    content, text = serialize(records)
    arrays = app.ArrayRecord({"tensors": app.Array(np.frombuffer(content, np.uint8))})
    return app.RecordDict({"arrays": arrays, "words": app.ConfigRecord({"json": text})})


def from_record(record: Any) -> Records:
    """Convert Flower's RecordDict to the records of a message."""
    try:
        content, text = record["arrays"]["tensors"].numpy().tobytes(), record["words"]["json"]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"a record cannot be read ({reason}); expected arrays and words") from None
    return deserialize(content, text)


def client_app(mods: Sequence[Any] = ()) -> Any:
    """Build the Flower ClientApp of a site, which reads the node's settings.

    Args:
        mods: Flower's, or your own, that look at messages.

    Raises:
        ValueError: if one would ruin the messages in silence, such as those for privacy.
    """
    for mod in mods:
        name = getattr(mod, "__name__", type(mod).__name__)
        if name in ODD_MODS:
            expected = f"none of {', '.join(ODD_MODS)}"
            raise ValueError(f"mod {name}: {ODD_MODS[name]}; expected {expected}")
    modules = flower()
    app = modules["clientapp"].ClientApp(mods=list(mods) or None)

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        node = {n: str(v) for n, v in context.node_config.items()}
        site = {n: node.get(n, "") for n in ("name", "project", "data", "state", "rules")}
        least = int(node.get("min-scored-rows", MIN_SCORED_ROWS))
        own = {**site, "rejoin": node.get("rejoin") == "yes", "min_scored_rows": least or None}
        answers = reply_or_refuse(own, from_record(message.content))
        return modules["app"].Message(to_record(answers), reply_to=message)

    return app


class GridTransport:
    """Transport of messages between server and nodes over Flower's grid."""

    def __init__(self, grid: Any) -> None:
        """Store the Flower grid over which a run exchanges messages."""
        self.grid, self.modules = grid, flower()

    def present(self) -> list[int]:
        """Return the ids of the connected Flower nodes."""
        return list(self.grid.get_node_ids())

    def exchange(self, messages: Mapping[int, Records], timeout: float) -> dict[int, Records]:
        """Send messages to Flower nodes; return the replies received before the timeout."""
        end, sent = time.monotonic() + timeout, self._sent(messages, timeout)
        waiting = {id_: node for id_, node in zip(sent, messages, strict=True) if id_}
        answers: dict[int, Records] = {}
        while waiting and time.monotonic() < end:
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None and not reply.has_error():
                    answers[node] = _read(reply.content)
            time.sleep(REPLY_CHECK_INTERVAL)
        return answers

    def tell(self, messages: Mapping[int, Records]) -> None:
        """Send messages to Flower nodes without waiting for replies."""
        self._sent(messages, MESSAGE_LIFETIME)

    def _sent(self, messages: Mapping[int, Records], timeout: float) -> list[str]:
        """Send messages to nodes that expire after the timeout; return the messages' ids."""
        app = self.modules["app"]
        kind = app.MessageType.TRAIN
        sent = [app.Message(to_record(s), node, kind, ttl=timeout) for node, s in messages.items()]
        return list(self.grid.push_messages(sent))


def _read(record: Any) -> Records:
    """Decode a node's reply; if it cannot be read, return a refusal with the reason."""
    try:
        return from_record(record)
    except Exception as error:  # whatever the bytes of others cause
        return {"refused": {"why": f"{type(error).__name__}: {one_line(str(error))}"}}


def server_app() -> Any:
    """Build the Flower ServerApp, which reads the run's settings."""
    app = flower()["serverapp"].ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        Thread(target=_end_as_orphan, args=(os.getppid(),), daemon=True).start()
        config = context.run_config
        project, sites = str(config["project"]), int(config["sites"])
        out = Path(str(config["out"]) or Path(project).with_name("run"))
        out.mkdir(parents=True, exist_ok=True)
        end = Path(str(config["end"]) or out / "end.json")
        how = sites, int(config["least"]) or sites, float(config["timeout"])
        whose = site_of_nodes(end.with_name(NODES_FILE))
        say = partial(_say, out / LOG_FILE)
        write_json(
            end, run_study(project, out, GridTransport(grid), ServerSettings(*how, whose), say)
        )

    return app


def site_of_nodes(file: Path) -> dict[int, str] | None:
    """Return node -> the site whose key it has; None if no node has a key."""
    names = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {int(node): name for node, name in names.items()} or None


def _end_as_orphan(parent: int) -> None:
    """End this process, which releases its folder lock, when its parent process has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(FAILED)


def _say(log: Path, text: str) -> None:
    append(log, f"{text}\n")


def run_study(
    folder: str, out: Path, transport: Any, settings: ServerSettings, say: Any
) -> dict[str, Any]:
    """Run all rounds of a study; return the exit code, error message and result tables."""
    try:
        project = Project.read(folder)
        with use(project.nouns):
            return _results_of(coordinate(project, out, transport, settings, say))
    except Stopped as stop:
        return {"code": stop.code, "error": str(stop), "tables": []}
    except Exception as error:
        code = REFUSED if isinstance(error, ValueError) else FAILED
        if code == FAILED:
            say(traceback.format_exc())
        return {"code": code, "error": what(error), "tables": []}


def _results_of(stores: Mapping[str, ResultStore]) -> dict[str, Any]:
    """Write the last results of all methods; return exit code, error message and tables."""
    lacking = [problem for store in stores.values() for problem in store.finish()]
    lost = [f"{name} {problem}" for name, store in stores.items() if (problem := store.problem)]
    code = UNLEARNED if lost else FAILED if lacking else 0
    tables = [store.table() for store in stores.values()]
    return {"code": code, "error": "; ".join([*lost, *lacking]), "tables": tables}
