"""Preview of the data that leave a site, from a trial round without a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from pyrofl.choices import MIN_SCORED_ROWS
from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.data.outlines import facts, outline_federation
from pyrofl.experiments.methods import Scheduled
from pyrofl.files import text_tables
from pyrofl.flower.project import REGRESSION_METHOD, Project
from pyrofl.flower.rules import checked_without_formula
from pyrofl.flower.site import describe_tensors
from pyrofl.flower.tables import regression_arguments, regression_client
from pyrofl.inference.engine.start import method_schedule
from pyrofl.inference.evaluation.specification import Part
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors.guided_sites import CannotCorrect
from pyrofl.inference.posteriors.importance_sampling import MAX_TRIED
from pyrofl.inference.posteriors.shared import corrected_shared
from pyrofl.inference.transport import Client, Server
from pyrofl.inference.transport.correction import reporter
from pyrofl.inference.transport.message_checks import Flat
from pyrofl.inference.transport.site_rules import SiteRules
from pyrofl.inference.transport.weighing import reason_against
from pyrofl.inference.validation.validate import validate_method
from pyrofl.models.regression.agreement import PRIVATE
from pyrofl.models.regression.remote import RegressionServer
from pyrofl.nouns import nouns

CLIENT_ROWS = (2, 3)  # rows of each client; what leaves must not depend on how many there are


def leaving(
    project: Project,
    rows: Federation | Tables,
    min_scored_rows: int | None = MIN_SCORED_ROWS,
    rules: SiteRules | None = None,
) -> str:
    """Return a table of all data that a site sends to the server, at joining and per round.

    Args:
        project: the study.
        rows: of the site's clients; tables, if the study has a formula.
        min_scored_rows: smallest number of rows of a client whose scores are sent; None sends none.
        rules: rules of the site; None checks nothing.

    Raises:
        BrokenRuleError: if a rule of the site forbids the study.
    """
    first = ""
    if isinstance(rows, Tables):
        first, built, data = _described(project, rows, rules)
        min_scored_rows = None
    else:
        data, built = rows, project.build(rows.clients, max(CLIENT_ROWS))
    alike: dict[tuple[str, ...], list[str]] = {}
    for method in project.labels:
        scored = min_scored_rows is not None
        try:
            few, more = (
                dict(_tried(project, _cut(data, count), built[method], scored))
                for count in CLIENT_ROWS
            )
        except RuntimeError:  # of torch or Pyro, which do not name the cause
            validate_method(method_schedule(built[method])(0), data)
            raise
        for record, flat in few.items():
            for described, other in zip(
                describe_tensors(flat), describe_tensors(more[record]), strict=True
            ):
                if described != other:
                    raise ValueError(
                        f"{method}: of {CLIENT_ROWS[0]} rows leaves {described}, and of "
                        f"{CLIENT_ROWS[1]} rows {other}; expected what does not grow with the rows"
                    )
                name, shape, size = described.replace("] ", " [").split(" [")
                role, _, own = name.rpartition("/") if name.count("/") == 1 else ("", "", name)
                alike.setdefault((method, record, role, f"[{shape}]", size), []).append(own)
    names = ", ".join(data.names[:8]) + (", ..." if len(data.names) > 8 else "")
    site, clients = nouns().site, nouns().client.many
    holders = f"the names of the {site} and of its {clients} ({names}), how many training rows each"
    if nouns().client == site:
        holders = f"the name of the {site} ({names}), how many training rows it"
    once = f"once: {holders} has, whether they suit the study and its versions, and columns of "
    once += "which the check warns"
    lines = [
        (method, record, f"{role}/{', '.join(owns)}" if role else ", ".join(owns), *form)
        for (method, record, role, *form), owns in alike.items()
    ]
    last = (
        "weights, after the last round: in 2 to 8 messages, the log marginal likelihood of each "
        f"{nouns().client} at up to {MAX_TRIED:,} draws of the shared parameters, to correct "
        "posterior draws"
    )
    weights = f"{last}\n" if any(line[1] == "weights" for line in lines) else ""
    table = text_tables.table(("method", "record", "tensors", "shape", "size of each"), lines)
    scores = "scores: none"
    if min_scored_rows is not None:
        part = "test" if _tested(data) == "test" else "training"
        left_out = sum(len(rows) < min_scored_rows for rows in getattr(data, _tested(data)))
        scores = f"scores: of {nouns().client.many} with at least {min_scored_rows} {part} rows"
        scores += f"; {left_out} of {data.clients} here have fewer" if left_out else ""
    checked = "" if project.formula else checked_without_formula(rules or SiteRules())
    head = f"What leaves this {nouns().site}, and no row of it:\n{once}\n"
    head += f"{first}{scores}\n{checked}{weights}"
    return f"{head}in every round:\n{table}"


def _described(
    project: Project, tables: Tables, rules: SiteRules | None
) -> tuple[str, dict[str, Scheduled], Federation]:
    """Return a list of what leaves before the rounds of a regression, its method and rows.

    The site's clients agree among themselves, on a trial; with others, there may be further levels.
    """
    client, names = regression_client(project, tables, rules), list(tables.frames)
    server = RegressionServer(project.formula, {"site": names}, **regression_arguments(project))
    lines = []
    while not server.is_agreed:
        reply = client.describe(server.configure_describe()["site"])
        lines.append((reply["label"].removeprefix(PRIVATE), f"{len(reply['reports']):,}"))
        server.aggregate_describe({"site": reply})
    about = f"Before round one, of each {nouns().client}, and for columns of the formula alone:\n"
    about += "columns: numbers of rows and of missing values; levels of categories; mean, sum of\n"
    about += "squares, smallest and largest number. Then sums, extremes and counts of:\n"
    table = text_tables.table(("exchange", "characters"), lines)
    return f"{about}{table}\n", {REGRESSION_METHOD: server.method}, client.build(server.plan)[1]


def _cut(data: Federation, count: int) -> Federation:
    """Return the federation with only the first few rows of each client."""
    train, test = (tuple(rows[:count] for rows in part) for part in (data.train, data.test))
    return replace(data, train=train, test=test)


def _tested(data: Federation) -> Part:
    """Return which rows a site evaluates: "test", or "train" if it has no test rows."""
    return "test" if any(map(len, data.test)) else "train"


def _tried(
    project: Project, data: Federation, method: Scheduled, scored: bool
) -> Iterator[tuple[str, Flat]]:
    """Run one trial round of a method, and yield the name and content of each client message."""
    server = Server(method, data.names, data.sizes, project.type, project.seed)
    client = Client(method, data, project.seed, min_scored_rows=1 if scored else None)
    here = {"site": list(data.names)}
    reply = client.train(server.configure_train(here)["site"])
    yield "reply", reply
    server.aggregate_train({"site": reply})
    for view in method_schedule(method)(0).views if scored else ():
        request = server.configure_evaluate(here, model=view, part=_tested(data))["site"]
        yield f"scores, {view}", client.evaluate(request)
    one = method_schedule(method)(0)
    if not project.corrected or reason_against(one):
        return
    records: list[Flat] = []

    def send(requests: dict[str, Flat]) -> NoReturn:
        """Keep the reply to the first exchange of a correction, and end it."""
        records.append(client.weigh(requests["site"]))
        raise CannotCorrect("this is a trial", "", quiet=True)

    run = Run(one, outline_federation(facts(data)), server.state, server.seed)
    corrected_shared(run, reporter(server, send, here), 1)
    for flat in records:
        yield "weights", flat
