"""What a site does with a letter: says who it is, tests and trains, and what it tells of errors."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pyrofl.experiments.methods import Scheduled
from pyrofl.flower.letters import Sheets
from pyrofl.flower.project import Project
from pyrofl.flower.rows import rows_of
from pyrofl.inference.transport import Client
from pyrofl.inference.transport.client import MIN_SCORED_ROWS
from pyrofl.inference.transport.wire import (
    Flat,
    InvalidRequestError,
    StateLostError,
    number,
    release,
)

HELLO, ORDER, ASK, REPLY, TOLD = "hello", "order", "ask", "reply", "told"
REFUSED, LOST = "refused", "lost"  # what else a site may answer
OVER = "over"  # tells a site that all rounds are made
LOG = "site.log"


def label(kind: str, method: str, which: int = 0) -> str:
    """Name a sheet of a method.

    >>> label("ask", "fedavg", 1)
    'ask/fedavg/1'
    """
    return f"{kind}/{method}/{which}"


def greeting(project: Project) -> Sheets:
    """Return what the server tells a site of the project, and what the site compares."""
    about = {n: json.dumps(v) for n, v in project.agreed.items()}
    return {HELLO: about | {f"version of {n}": v for n, v in release().items()}}


class Site:
    """The rows of a site, and what its clients keep.

    Args:
        name: which no other site has.
        project: the site's own copy of the project; its method is run, and no other.
        data: CSV file.
        state: folder for what clients keep and for the log.
        rejoin: clients that have lost what they keep come back as newcomers.
        min_scored_rows: as of `pyrofl.Client`.
    """

    def __init__(
        self,
        name: str,
        project: Project,
        data: str,
        state: str | Path,
        rejoin: bool = False,
        min_scored_rows: int | None = MIN_SCORED_ROWS,
    ) -> None:
        """Read the rows."""
        self.name, self.project, self.rejoin = name, project, rejoin
        self.min_scored_rows = min_scored_rows
        self.data = rows_of(project, data, name)
        self.state = Path(state)
        self.state.mkdir(parents=True, exist_ok=True)
        self._built: dict[int, dict[str, Scheduled]] = {}

    def answer(self, sheets: Mapping[str, Flat]) -> Sheets:
        """Do what a letter asks: questions first, as they are about the state before the orders."""
        if HELLO in sheets:
            return {HELLO: self.hello(sheets[HELLO])}
        found: Sheets = {}
        for what in sorted(sheets):  # "ask/..." before "order/..."
            kind, *of = what.split("/")
            if kind in (ASK, ORDER) and len(of) == 2:
                found |= self._done(kind, of[0], int(of[1]), sheets[what])
        return found

    def hello(self, told: Flat) -> Flat:
        """Say who is here, how many rows each has; refuse a server with another project."""
        mine = greeting(self.project)[HELLO]
        if odd := sorted(n for n in told.keys() | mine.keys() if told.get(n) != mine.get(n)):
            each = "; ".join(f"{n} is {mine.get(n)}, and {told.get(n)} at the server" for n in odd)
            raise InvalidRequestError(f"{each}; expected the same project and versions at both")
        names = self.data.names
        return {"site": self.name, "names": names, "sizes": self.data.sizes.clone()}

    def _done(self, kind: str, method: str, which: int, flat: Flat) -> Sheets:
        """Follow one order or answer one question."""
        client = self.client(method, flat)
        try:
            if kind == ASK:
                return {label(TOLD, method, which): client.evaluate(flat)}
            return {label(REPLY, method): client.train(flat)}
        except StateLostError as lost:
            if not self.rejoin:
                told = "; --rejoin makes newcomers of them"
                raise StateLostError(f"{method}: {lost}{told}", lost.names) from lost
            client.forget(lost.names)
            return {label(LOST, method): {"names": lost.names}}
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{method}: {error}") from error

    def client(self, method: str, flat: Flat) -> Client:
        """Return the clients of this site, under a method."""
        if method not in self.project.labels:
            known = ", ".join(self.project.labels)
            raise InvalidRequestError(f"an order is of method {method!r}; expected one of {known}")
        clients = number(flat, "clients")
        if clients not in self._built:
            self._built[clients] = self.project.build(clients)
        built = self._built[clients][method]
        least = self.min_scored_rows
        how: dict[str, Any] = {"state": self.state / method, "min_scored_rows": least}
        return Client(built, self.data, self.project.seed, **how)


def answered(site: Mapping[str, Any], sheets: Mapping[str, Flat]) -> Sheets:
    """Answer a letter whatever happens; site: arguments of `Site`, with the project's folder.

    Of an error the server is told no more than its kind, as its words may hold a value of a row;
    the log at the site has all. What does not fit, by name, number or version, is told in full.
    """
    state = Path(site["state"])
    state.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger("pyrofl.flower.site")
    handler = logging.FileHandler(state / LOG, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    torch.set_num_threads(1)
    try:
        log.info("came: %s", ", ".join(sorted(sheets)))
        if REFUSED in sheets:
            log.info("refused: by the server: %s", sheets[REFUSED].get("why"))
            return {}
        if OVER in sheets:
            log.info("%s: all rounds are made", OVER)
            return {}
        here = Site(**(dict(site) | {"project": Project.read(site["project"])}))
        found = here.answer(sheets)
        for what, flat in found.items():
            log.info("leaves: %s: %s", what, ", ".join(map(str, shapes(flat))) or "no tensor")
        return found
    except InvalidRequestError as error:
        log.info("refused: %s", error)
        return {REFUSED: {"site": str(site["name"]), "why": str(error)}}
    except Exception as error:
        log.error("%s", traceback.format_exc())
        why = f"{type(error).__name__}; its own log, {LOG}, tells more"
        return {REFUSED: {"site": str(site["name"]), "why": why}}
    finally:
        log.removeHandler(handler)
        handler.close()


def shapes(flat: Flat) -> list[str]:
    """Tell the tensors of a sheet: name, shape and bytes.

    >>> shapes({"round": 1, "up/w": torch.zeros(1, 3)})
    ['up/w [1, 3] 12 bytes']
    """
    found = {n: v for n, v in flat.items() if torch.is_tensor(v)}
    return [f"{n} {list(v.shape)} {v.numel() * v.element_size()} bytes" for n, v in found.items()]
