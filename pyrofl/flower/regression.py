"""Agreement of the sites of a Flower study on the columns of a regression, by messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyrofl.experiments.console import FAILED, Stopped
from pyrofl.files import checkpoint_file
from pyrofl.flower.project import REGRESSION_METHOD, Project
from pyrofl.flower.site import SUMMARY_REPLY, SUMMARY_REQUEST, label
from pyrofl.flower.tables import regression_arguments
from pyrofl.inference.transport.message_checks import Flat
from pyrofl.inference.transport.records import Records
from pyrofl.models.regression.remote import RegressionServer
from pyrofl.nouns import nouns

AGREEMENT_FILE = "agreement.safetensors"
MAX_EXCHANGE_REPEATS = 3  # of an exchange with sites that have not replied

Sites = Mapping[str, tuple[Sequence[str], Sequence[int]]]
"""Name of a site -> names of its clients, and how many rows each has."""

Send = Callable[[Mapping[str, Records]], tuple[dict[str, Records], dict[str, str]]]
"""Messages by site -> replies, and reasons of refusals, by site."""


def agree_on(
    project: Project, out: Path, sites: Sites, send: Send, say: Callable[[str], None]
) -> RegressionServer:
    """Return the server side of a study's regression after all exchanges with the sites.

    Results are stored, so that a study that is resumed continues with the next exchange.

    Args:
        project: the study.
        out: folder of the study's results.
        sites: all sites.
        send: sends messages to sites, once all of them are connected.
        say: prints a line.

    Raises:
        ValueError: if a report is invalid or refused, with the name of its site, or columns do not
            fit together.
        Stopped: if a site does not reply.
    """
    path = out / AGREEMENT_FILE
    about: dict[str, Any] = {"sites": {n: list(own) for n, (own, _) in sites.items()}}
    about |= {n: json.dumps(v) for n, v in project.agreed.items()}
    stored = checkpoint_file.read(path, about)["results"] if path.exists() else "{}"
    holders = {name: tuple(own) for name, (own, _) in sites.items()}
    server = RegressionServer(
        project.formula, holders, results=json.loads(stored), **regression_arguments(project)
    )
    what, number = label(SUMMARY_REQUEST, REGRESSION_METHOD), 0
    while not server.is_agreed:
        requests = server.configure_describe()
        replies = _replies(what, requests, send, say)
        server.aggregate_describe(replies)
        checkpoint_file.write(path, about, {"results": json.dumps(server.results)})
        number += 1
    if number:
        columns = ", ".join(server.design.places)
        say(
            f"{REGRESSION_METHOD}: the {nouns().site.many} agreed on {columns} in {number} "
            "exchanges"
        )
        for text in server.warnings:
            say(f"warning: {text}")
    return server


def _replies(
    what: str, requests: Mapping[str, Flat], send: Send, say: Callable[[str], None]
) -> dict[str, Flat]:
    """Return the replies of all sites to one exchange, which is repeated for sites without one."""
    replies: dict[str, Flat] = {}
    for _ in range(MAX_EXCHANGE_REPEATS):
        left = {n: {what: flat} for n, flat in requests.items() if n not in replies}
        answers, refused = send(left)
        described = what.replace(SUMMARY_REQUEST, SUMMARY_REPLY, 1)
        replies |= {n: answer[described] for n, answer in answers.items() if described in answer}
        replies |= {name: {"why": why} for name, why in refused.items()}
        if replies.keys() == requests.keys() or refused:
            return replies
    silent = ", ".join(requests.keys() - replies.keys())
    raise Stopped(
        f"{silent} did not reply to {MAX_EXCHANGE_REPEATS} requests on the columns", FAILED
    )
