"""Site of a Flower study: replies to server messages, and predicts from saved client states."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyrofl.arguments import check_name
from pyrofl.choices import MIN_SCORED_ROWS
from pyrofl.experiments.methods import Scheduled
from pyrofl.files import checkpoint_file
from pyrofl.files.link_safe_files import PRIVATE, open_without_links, subfolder
from pyrofl.flower.project import Project
from pyrofl.flower.rows import rows_of
from pyrofl.flower.rules import check_rules
from pyrofl.flower.site_results import POSTERIOR_FILE, write_results
from pyrofl.flower.site_state import SITE_FILE, record_site, refuse_other_state
from pyrofl.flower.table_check import table_problems
from pyrofl.flower.tables import read_site_tables, regression_client
from pyrofl.inference.engine.start import method_schedule
from pyrofl.inference.evaluation.predictions import Predictions
from pyrofl.inference.evaluation.specification import default_evaluation
from pyrofl.inference.posteriors import export
from pyrofl.inference.transport import Client
from pyrofl.inference.transport.message_checks import (
    Flat,
    InvalidRequestError,
    StateLostError,
    one_line,
    versions_and_hash,
    whole_number,
)
from pyrofl.inference.transport.records import Records
from pyrofl.inference.transport.site_rules import BrokenRuleError, SiteRules
from pyrofl.models.regression.remote import read_json
from pyrofl.nouns import use
from pyrofl.returned import ClientError

GREETING, TRAINING_REQUEST, EVALUATION_REQUEST, TRAINING_REPLY, EVALUATION_REPLY = (
    "hello",
    "order",
    "ask",
    "reply",
    "told",
)
# The last exchange, and its result.
LIKELIHOOD_REQUEST, LIKELIHOOD_REPLY, DRAWS_REQUEST = "weigh", "weights", "draws"
SUMMARY_REQUEST, SUMMARY_REPLY = "describe", "described"  # the first exchanges, of a regression
REGRESSION_PLAN = "plan"  # in a request: what the sites agreed on in these
REFUSAL, LOST_STATE = "refused", "lost"  # what else a site may answer
NOTICE = "notice"  # informs a site why it was not in the last round
STUDY_COMPLETE = "over"  # informs a site that all rounds are made
# In a request: largest number of rows of a client, if the method depends on it.
LARGEST_CLIENT_ROWS = "rows"
LOG_FILE = "site.log"
MAX_ERROR_CHARACTERS = 100_000  # characters of an error in the log
REQUESTS_FOLDER = "received"  # folder of the server's last questions, which bring its models
HAS_BEGUN = "begun"  # in a greeting: whether the study has begun
WARNED = "warned"  # in its reply: columns that the check warns of; "" is the file
LOG = logging.getLogger("pyrofl.flower.site")


def label(kind: str, method: str, which: int = 0) -> str:
    """Return the label of a message record, such as "ask/fedavg/1".

    >>> label("ask", "fedavg", 1)
    'ask/fedavg/1'
    """
    return f"{kind}/{method}/{which}"


def greeting(project: Project) -> Records:
    """Return the server's greeting: project settings and versions, for a site to compare."""
    about = {n: json.dumps(v) for n, v in project.agreed.items()}
    return {GREETING: about | {f"version of {n}": v for n, v in versions_and_hash().items()}}


class Site:
    """Site of a Flower study: its rows and the saved states of its clients.

    Its own copy of the project is run, and no other. Clients that have lost their state return as
    new ones if they may `rejoin`. The folder `state` has the clients' states and the log.
    """

    def __init__(
        self,
        name: str,
        project: Project,
        data: str,
        state: str | Path,
        rejoin: bool = False,
        min_scored_rows: int | None = MIN_SCORED_ROWS,
        rules: str = "",
    ) -> None:
        """Read the site's rows and its rules, and build the methods of the study.

        `rules` is the file of the site's rules; "" is the default rules.
        """
        self.name, self.project, self.rejoin = name, project, rejoin
        self.rules = SiteRules.read(rules)
        self.min_scored_rows = min_scored_rows
        if project.formula:
            frames = read_site_tables(project, data, name)
            self.regression = regression_client(project, frames, self.rules)
            sizes = {name: len(frame) for name, frame in frames.frames.items()}
        else:
            self.data = rows_of(project, data, name)
            sizes = dict(zip(self.data.names, self.data.sizes.tolist(), strict=True))
        self.sizes = sizes
        self.state, self.table = Path(state), data
        self.state.mkdir(parents=True, exist_ok=True)
        self._built: dict[tuple[int, int], dict[str, Scheduled]] = {}

    @classmethod
    def read(cls, state: str | Path) -> Site:
        """Restore the site of a Flower study from its state folder."""
        path = Path(state, SITE_FILE)
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            name, folder, data = (str(about[n]) for n in ("name", "project", "data"))
            rules = str(about.get("rules", ""))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}); expected the folder that was --state of "
                "`pyrofl study join`, or sites/NAME in the results of `pyrofl study run`"
            ) from error
        return cls(name, Project.read(folder), data, state, rules=rules)

    def answer(self, records: Mapping[str, Flat]) -> Records:
        """Reply to a server message: run the requested evaluations, then the training."""
        has_begun = records[GREETING].get(HAS_BEGUN) if GREETING in records else True
        refuse_other_state(self.state, self.table, may_be_new=self.rejoin or not has_begun)
        if GREETING in records:
            return {GREETING: self.reply_to_greeting(records[GREETING])}
        data = None if self.project.formula else self.data
        check_rules(self.rules, self.project, self.name, data)
        answers: Records = {}
        for what in sorted(records):  # "ask/..." before "order/..."
            kind, *of = what.split("/")
            if (
                kind
                in (
                    SUMMARY_REQUEST,
                    EVALUATION_REQUEST,
                    TRAINING_REQUEST,
                    LIKELIHOOD_REQUEST,
                    DRAWS_REQUEST,
                )
                and len(of) == 2
            ):
                answers |= self._execute_request(kind, of[0], int(of[1]), records[what])
        return answers

    def reply_to_greeting(self, told: Flat) -> Flat:
        """Reply to the server's greeting with client names and sizes; reject another project."""
        mine = greeting(self.project)[GREETING]
        told = {n: v for n, v in told.items() if n != HAS_BEGUN}
        if odd := sorted(n for n in told.keys() | mine.keys() if told.get(n) != mine.get(n)):
            each = "; ".join(f"{n} is {mine.get(n)}, and {told.get(n)} at the server" for n in odd)
            raise InvalidRequestError(f"{each}; expected the same project and versions at both")
        warnings = [one for one in table_problems(self.project, [self.table]) if one.is_warning]
        for one in warnings:
            LOG.info("warning: %s", one_line(f"{one.column} {one.text}: {one.cure}".strip()))
        sizes, warned = (
            torch.tensor([*self.sizes.values()]),
            tuple({one.column for one in warnings}),
        )
        names = {"site": self.name, "names": tuple(self.sizes), "sizes": sizes}
        return names | {WARNED: tuple(sorted(warned))}

    def _execute_request(self, kind: str, method: str, which: int, flat: Flat) -> Records:
        """Execute one training or evaluation request of the server; return the labeled reply."""
        if kind == SUMMARY_REQUEST and self.project.formula:
            return {label(SUMMARY_REPLY, method): self.regression.describe(flat)}
        client = self.client(method, flat)
        try:
            if kind == EVALUATION_REQUEST:
                checkpoint_file.write(self._request_path(method, str(flat.get("model"))), {}, flat)
                return {label(EVALUATION_REPLY, method, which): client.evaluate(flat)}
            if kind == LIKELIHOOD_REQUEST:
                if not self.project.corrected:
                    raise InvalidRequestError("corrected is false in this project")
                return {label(LIKELIHOOD_REPLY, method): client.weigh(flat)}
            if kind == DRAWS_REQUEST:
                self._write_results(method, client.posterior(flat), flat)
                return {}
            return {label(TRAINING_REPLY, method): client.train(flat)}
        except StateLostError as lost:
            if not self.rejoin:
                remedy = "; --rejoin makes them new clients"
                raise StateLostError(f"{method}: {lost}{remedy}", lost.names) from lost
            client.forget(lost.names)
            return {label(LOST_STATE, method): {"names": lost.names}}
        except (InvalidRequestError, ClientError) as error:
            raise InvalidRequestError(f"{method}: {error}") from error

    def predict(
        self, method: str, x: Tensor, client: str, model: str | None = None, **asked: Any
    ) -> Predictions:
        """Predict rows of a client of the site from its saved state and the server's last message.

        Rows are [N, columns]; other arguments are those of `Run.predict`.
        """
        check_name(method, self.project.labels, "method")
        view = (
            model
            or default_evaluation(
                method_schedule(self.project.build(self.data.clients)[method])(0)
            )[0]
        )
        path = self._request_path(method, view)
        if not path.exists():
            there = path.parent.glob(f"{method} *.safetensors")
            methods = sorted(one.stem.partition(" ")[2] for one in there)
            have = f"one of {', '.join(methods)}" if methods else "a study after an evaluation"
            message = f"the server has sent no {view} model of {method} to {self.name}"
            raise ValueError(f"{message}; expected {have}")
        question = checkpoint_file.read(path, {})
        return self.client(method, question).predict(question, x, client, **asked)

    def _write_results(self, method: str, posterior: Any, flat: Flat) -> None:
        """Write the posterior draws of the site's clients; of a regression, a page too."""
        folder = self.state / method
        if not self.project.formula:
            export.save(posterior, folder / POSTERIOR_FILE)
            return
        plan = read_json(flat.get(REGRESSION_PLAN))
        write_results(folder, self.project, self.regression, plan, posterior)

    def _request_path(self, method: str, model: str) -> Path:
        """Return the path of the file with the server's last evaluation request for a model."""
        folder = self.state / REQUESTS_FOLDER
        subfolder(folder)
        return folder / f"{method} {Path(model).name}.safetensors"

    def client(self, method: str, flat: Flat) -> Client:
        """Return the `Client` that runs a method for all clients of this site."""
        if method not in self.project.labels:
            labels = ", ".join(self.project.labels)
            raise InvalidRequestError(f"an order is of method {method!r}; expected one of {labels}")
        how: dict[str, Any] = {"min_scored_rows": self.min_scored_rows}
        how |= {"state": subfolder(self.state / method), "rounds": self.project.rounds}
        if self.project.formula:
            plan = read_json(flat.get(REGRESSION_PLAN))
            return Client(*self.regression.build(plan), self.project.seed, **how)
        key = clients, rows = (
            whole_number(flat, "clients"),
            whole_number({LARGEST_CLIENT_ROWS: 1} | flat, LARGEST_CLIENT_ROWS),
        )
        if key not in self._built:
            self._built[key] = self.project.build(clients, rows)
        return Client(self._built[key][method], self.data, self.project.seed, **how)


@contextmanager
def site_log(state: str | Path) -> Iterator[logging.Logger]:
    """Yield the log of a site, whose file is in the folder of its state."""
    Path(state).mkdir(parents=True, exist_ok=True)
    opened = open_without_links(
        Path(state) / LOG_FILE, os.O_WRONLY | os.O_APPEND, PRIVATE
    )  # errors show values of rows
    file = os.fdopen(opened, "a", encoding="utf-8", errors="backslashreplace")
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    try:
        yield LOG
    finally:
        LOG.removeHandler(handler)
        file.close()


def reply(site: Mapping[str, Any], records: Mapping[str, Flat], log: logging.Logger) -> Records:
    """Return a site's reply to a server message, with lines in its log.

    Args:
        site: the arguments of `Site`, with the project's folder.
        records: the message.
        log: see `site_log`.
    """
    torch.set_num_threads(1)
    log.info("came: %s", one_line(", ".join(sorted(records))))
    if REFUSAL in records:
        log.info("refused: by the server: %s", one_line(records[REFUSAL].get("why")))
        return {}
    if NOTICE in records:
        log.info("not in the last round: %s", one_line(records[NOTICE].get("why")))
    answers: Records = {}
    if records.keys() != {STUDY_COMPLETE}:
        project = Project.read(site["project"])
        with use(project.nouns):
            answers = Site(**(dict(site) | {"project": project})).answer(records)
    if STUDY_COMPLETE in records:
        log.info("%s: the study is complete", STUDY_COMPLETE)
    return answers


def record_leaving(site: Mapping[str, Any], answers: Records, log: logging.Logger) -> None:
    """Log which tensors leave the site with a reply, and record the rows that they are of."""
    record_site(site, rows=bool(answers.keys() - {GREETING}))
    for what, flat in answers.items():
        log.info("leaves: %s: %s", what, ", ".join(describe_tensors(flat)) or "no tensor")


def reply_or_refuse(site: Mapping[str, Any], records: Mapping[str, Flat]) -> Records:
    """Return a site's reply to a server message: its results, or a refusal after an error.

    `site` holds the arguments of `Site`, with the project's folder.

    The server receives only the kind of an error, as its text may hold a value of a row, and the
    name of a broken rule; the log at the site has the text. Names, numbers or versions that do not
    fit are sent in full, as is a program that does not suit the rows of a client.
    """
    with site_log(site["state"]) as log:
        try:
            answers = reply(site, records, log)
            record_leaving(site, answers, log)
            return answers
        except (InvalidRequestError, ClientError) as error:
            log.info("refused: %s", one_line(str(error), MAX_ERROR_CHARACTERS))
            return {REFUSAL: {"site": str(site["name"]), "why": str(error)}}
        except BrokenRuleError as error:
            log.info("refused: %s", error)
            return {REFUSAL: {"site": str(site["name"]), "why": error.for_server}}
        except Exception as error:
            log.error("%s", traceback.format_exc())
            why = f"{type(error).__name__}; see its log, {LOG_FILE}"
            return {REFUSAL: {"site": str(site["name"]), "why": why}}


def describe_tensors(flat: Flat) -> list[str]:
    """Describe each tensor of a message record: its name, shape and bytes.

    >>> describe_tensors({"round": 1, "up/w": torch.zeros(1, 3)})
    ['up/w [1, 3] 12 bytes']
    """
    tensors = {n: v for n, v in flat.items() if torch.is_tensor(v)}
    return [f"{n} {list(v.shape)} {v.numel() * v.element_size()} bytes" for n, v in tensors.items()]
