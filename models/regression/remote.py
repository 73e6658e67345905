"""Agreement on a regression between a server without rows and remote clients.

    server = RegressionServer(formula, names, family="bernoulli")    at the server
    client = RegressionClient(formula, tables, family="bernoulli")   at every client

    while not server.is_agreed:
        requests = server.configure_describe()
        server.aggregate_describe({name: describe(name, one) for name, one in requests.items()})
    plans = server.configure_describe()
    method, data = client.build(plans[name])                         at every client

where `describe` calls client.describe(request) at the client `name`. Then `pyrofl.Server` with
server.method, server.names and server.sizes, and `pyrofl.Client` with method and data, run rounds.

Both sides run the code of `pyrofl.regression`; what it needs of all rows are the clients' reports,
which the server combines. Columns, priors and program equal those of `pyrofl.regression` with all
rows in one process. The settings are those of each side's own arguments: a request has them only to
be compared.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pyrofl.arguments import checked
from pyrofl.choices import HierarchicalMethod
from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.data.tables.wording import listed
from pyrofl.inference.transport.message_checks import (
    MAX_SHOWN_CHARACTERS,
    Flat,
    InvalidRequestError,
    client_names,
    one_line,
    own_client_names,
    versions_and_hash,
)
from pyrofl.inference.transport.site_rules import SiteRules
from pyrofl.models.regression.agreement import Agreement, Report, ReportNeeded
from pyrofl.models.regression.building import Settings, agree, make_method
from pyrofl.models.regression.design import Design
from pyrofl.models.regression.families import family_of
from pyrofl.models.regression.formula import read_all
from pyrofl.models.regression.method import Regression
from pyrofl.models.regression.priors import Priors, code_of
from pyrofl.models.regression.rows import ROSTER, MissingColumn
from pyrofl.models.regression.rule_checks import check_design, checked_reports
from pyrofl.nouns import nouns

MAX_REPLY_CHARACTERS = 20_000_000  # characters of a reply
DEFAULT_RULES = SiteRules()


class RegressionServer:
    """Server side of the agreement on a regression, without rows.

    Args:
        formula: as in `pyrofl.regression`, with all further arguments but weights.
        clients: names of the clients, or name of a machine -> names of its clients.
        family: name of the family.
        link: name of the link; None is the usual one.
        priors: parameter -> distribution that replaces the default.
        center: whether the prior of the intercept is that at the mean of all columns.
        client: name of the column that identifies the client; tables need not have it.
        namespace: name -> number, or list of numbers, that the formula may use.
        method: as in `pyrofl.regression`.
        results: `results` of a server with the same arguments, to continue from there.

    Attributes:
        is_agreed: whether no report is lacking.
        method: the agreed regression, for `pyrofl.Server`.
        names: names of the clients with complete rows.
        sizes: their numbers of complete rows.
        warnings: as of `pyrofl.regression`, those that need cells of tables excepted, and of
            clients with few rows.

    Raises:
        ValueError: if an argument is invalid.

    Examples:
        >>> import pandas as pd
        >>> import torch
        >>> import pyrofl
        >>> from pyrofl import federations
        >>> ages = [30.0, 40.0, 55.0, 62.0, 71.0, 48.0]
        >>> bern, chur = [50.0, 52.0, 47.0, 45.0, 44.0, 49.0], [41.0, 44.0, 43.0, 38.0, 37.0, 43.0]
        >>> scores = {"bern": bern, "chur": chur}
        >>> frames = {n: pd.DataFrame({"score": s, "age": ages}) for n, s in scores.items()}
        >>> formula = "score ~ age + (1 | client)"
        >>> server = pyrofl.RegressionServer(formula, [*frames])
        >>> sites = {
        ...     n: pyrofl.RegressionClient(formula, federations.from_frames({n: frame}))
        ...     for n, frame in frames.items()
        ... }
        >>> while not server.is_agreed:
        ...     requests = server.configure_describe()
        ...     server.aggregate_describe({n: sites[n].describe(r) for n, r in requests.items()})
        >>> plans = server.configure_describe()
        >>> clients = {n: pyrofl.Client(*sites[n].build(plan)) for n, plan in plans.items()}
        >>> rounds = pyrofl.Server(server.method, server.names, server.sizes, torch.float64)
        >>> orders = rounds.configure_train()
        >>> state = rounds.aggregate_train({n: clients[n].train(o) for n, o in orders.items()})
        >>> state.number
        1
    """

    @checked
    def __init__(
        self,
        formula: str | Mapping[str, str | float],
        clients: Mapping[str, Sequence[str]] | Sequence[str],
        *,
        family: str = "gaussian",
        link: str | None = None,
        priors: Mapping[str, Any] | None = None,
        center: bool = True,
        client: str = "client",
        namespace: Mapping[str, Any] | None = None,
        method: HierarchicalMethod = "auto",
        results: Mapping[str, Any] | None = None,
    ) -> None:
        more: Any = {"center": center, "client": client, "namespace": dict(namespace or {})}
        more["method"] = method
        self._settings = Settings(formula, family, link, dict(priors or {}), **more)
        self._texts = texts_of(self._settings)
        holders = clients if isinstance(clients, Mapping) else {name: (name,) for name in clients}
        self._clients = {name: tuple(own) for name, own in holders.items()}
        self._agreement = Agreement(dict(results or {}), is_remote=True)
        self._lacking: ReportNeeded | None = None
        self._parts: tuple[Design, Priors] | None = None
        self.warnings: list[str] = []
        self._proceed()

    def _proceed(self) -> None:
        """Run the regression's code up to the next report that is lacking, or to its end."""
        self._lacking = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._parts = agree(self._settings, None, self._agreement)
            except ReportNeeded as needed:
                self._lacking = needed
                return
        self.warnings = [str(one.message) for one in caught]
        self.warnings += small_clients(self.design, dict(zip(self.names, self.sizes, strict=True)))

    @property
    def is_agreed(self) -> bool:
        """Whether no report is lacking."""
        return self._lacking is None

    @property
    def design(self) -> Design:
        """The agreed design; raises ValueError before."""
        return self._agreed[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the clients with complete rows."""
        return tuple(self.design.clients.roster["sizes"])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of complete rows of the clients."""
        return tuple(self.design.clients.roster["sizes"].values())

    @property
    def method(self) -> Regression:
        """The agreed regression."""
        design, chosen = self._agreed
        return make_method(self._settings, design, chosen, design.outline())

    @property
    def results(self) -> dict[str, Any]:
        """What the clients agreed on so far, by label; "server: ..." is not sent to clients."""
        return dict(self._agreement.results)

    @property
    def _agreed(self) -> tuple[Design, Priors]:
        if self._parts is None:
            assert self._lacking is not None
            raise ValueError(
                f"the clients have not agreed on {self._lacking.label}; call configure_describe "
                "and aggregate_describe until is_agreed"
            )
        return self._parts

    @property
    def holders(self) -> dict[str, tuple[str, ...]]:
        """Name of a machine -> its clients, without those that have no complete row."""
        if ROSTER not in self._agreement.results:
            return dict(self._clients)
        sizes = self._agreement.results[ROSTER]["sizes"]
        left = {n: tuple(c for c in own if c in sizes) for n, own in self._clients.items()}
        return {name: own for name, own in left.items() if own}

    @property
    def plan(self) -> Flat:
        """What a client needs to build columns and method, without names of clients."""
        return {**self._about, "names": ()}

    @property
    def _about(self) -> Flat:
        """Settings, versions and results, and what is lacking."""
        about = {f"setting/{n}": text for n, text in self._texts.items()}
        about |= {f"version/{n}": text for n, text in versions_and_hash().items()}
        about["lacking"] = "" if self._lacking is None else self._lacking.label
        return {**about, "results": json.dumps(self._agreement.public)}

    def configure_describe(self) -> dict[str, Flat]:
        """Return requests by machine, for `RegressionClient.describe`; if agreed, for `build`."""
        about = self._about
        return {name: {**about, "names": own} for name, own in self.holders.items()}

    def aggregate_describe(self, replies: Mapping[str, Mapping[str, Any]]) -> None:
        """Combine the clients' reports; nothing changes if one of them is invalid.

        Args:
            replies: machine -> reply of `RegressionClient.describe`; {"why": TEXT} is a refusal.

        Raises:
            ValueError: if a reply is missing or invalid, with the name of its sender, or the
                clients' columns do not fit together.
        """
        needed = self._lacking
        if needed is None:
            raise ValueError("the clients have agreed; expected no further replies")
        reports, reasons = dict[str, Report](), list[str]()
        for holder, own in self.holders.items():
            try:
                reports |= self._read(needed, holder, own, replies.get(holder))
            except Exception as error:  # whatever a reply of others causes
                reasons.append(f"{holder}: {one_line(str(error), MAX_SHOWN_CHARACTERS)}")
        if reasons:
            raise ValueError("; ".join(reasons))
        order = [name for own in self._clients.values() for name in own if name in reports]
        self._agreement.results.update(_combined(needed, {name: reports[name] for name in order}))
        self._proceed()

    def _read(
        self, needed: ReportNeeded, holder: str, own: Sequence[str], reply: Any
    ) -> dict[str, Report]:
        """Return the reports of a machine's reply; raise an error if it is invalid."""
        if reply is None:
            raise ValueError("no reply")
        if isinstance(why := reply.get("why"), str):
            raise ValueError(why)
        if own_client_names(holder, reply, self.holders) != tuple(own):
            raise ValueError(
                f"its reply is of {listed(client_names(reply))}; expected {listed(own)}"
            )
        if reply.get("label") != needed.label:
            shown = one_line(reply.get("label"), 100)
            raise ValueError(f"its reply is on {shown!r}; expected {needed.label!r}")
        reports = read_json(reply.get("reports"))
        if not isinstance(reports, dict) or set(reports) != set(own):
            raise ValueError(f"its reply has not one report for each of {listed(own)}")
        for name in own:
            try:
                needed.check(reports[name])
            except ValueError as error:
                raise ValueError(f"{needed.label}: {error}") from error
        return {name: reports[name] for name in own}


class RegressionClient:
    """Client side of the agreement on a regression: reports on tables that stay here.

    Args:
        formula: as at the server, and so are all further arguments.
        tables: tables of the clients that are here.
        family: name of the family.
        link: name of the link.
        priors: parameter -> distribution.
        center: whether the prior of the intercept is that at the mean of all columns.
        client: name of the column that identifies the client.
        namespace: name -> number, or list of numbers, that the formula may use.
        rules: what messages about the rows may contain; None checks nothing.
    """

    @checked
    def __init__(
        self,
        formula: str | Mapping[str, str | float],
        tables: Tables,
        *,
        family: str = "gaussian",
        link: str | None = None,
        priors: Mapping[str, Any] | None = None,
        center: bool = True,
        client: str = "client",
        namespace: Mapping[str, Any] | None = None,
        method: HierarchicalMethod = "auto",
        rules: SiteRules | None = DEFAULT_RULES,
    ) -> None:
        more: Any = {"center": center, "client": client, "namespace": dict(namespace or {})}
        more["method"] = method
        self._rules = rules
        self._settings = Settings(formula, family, link, dict(priors or {}), **more)
        self._tables = tables
        self._texts = texts_of(self._settings)
        columns = {str(n) for frame in tables.frames.values() for n in frame.columns}
        if both := sorted(columns & {*self._settings.namespace}):
            raise ValueError(f"{both[0]} is a column and in namespace; expected one of them")

    def describe(self, request: Mapping[str, Any]) -> Flat:
        """Return the reports that a request of the server needs: sums, counts and levels.

        Raises:
            InvalidRequestError: if the request is not for these clients or of other settings, or
                the tables lack a column.
            BrokenRuleError: if a rule of the site forbids the study.
            ValueError: if cells are not valid for the regression, as in `pyrofl.regression`.
        """
        names = self._accepted(request)
        with _here():
            try:
                self._agree(request, with_checks=True)
            except ReportNeeded as needed:
                if needed.label != request.get("lacking"):
                    raise InvalidRequestError(
                        f"a request is on {one_line(request.get('lacking'), 100)!r}, but "
                        f"{needed.label!r} is lacking"
                    ) from None
                reports = {name: needed.reports.get(name) for name in names}
                if self._rules is not None:
                    about = (self._settings, self._tables, read_json(request.get("results")))
                    reports = checked_reports(self._rules, *about, needed.label, reports)
                return {"names": names, "label": needed.label, "reports": _json(needed, reports)}
        raise InvalidRequestError("a request asks for nothing that is lacking")

    def build(self, request: Mapping[str, Any]) -> tuple[Regression, Federation]:
        """Return method and rows for `pyrofl.Client`, given the last request of the server.

        Raises:
            InvalidRequestError: as `describe`, or if something is lacking.
            BrokenRuleError: as `describe`.
        """
        self._accepted(request)
        with _here():
            try:
                design, chosen = self._agree(request, with_checks=False)
            except ReportNeeded as needed:
                raise InvalidRequestError(f"{needed.label!r} is lacking in the request") from None
            if not design.clients.frames:
                raise InvalidRequestError("no row without missing values is left here")
            if self._rules is not None:
                check_design(self._rules, design, self._settings.link_name)
            method = make_method(self._settings, design, chosen, design.outline())
        return method, design.federation()

    def _accepted(self, request: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names in a request; raise InvalidRequestError if it does not fit."""
        here = {f"setting/{n}": v for n, v in self._texts.items()}
        here |= {f"version/{n}": v for n, v in versions_and_hash().items()}
        there = {n: v for n, v in request.items() if n.startswith(("setting/", "version/"))}
        for name in sorted(here | there):
            if here.get(name) != there.get(name):
                raise InvalidRequestError(
                    f"{name.partition('/')[2]} is {here.get(name)!r}, but {there.get(name)!r} at "
                    "the server; use the same at both"
                )
        names = client_names(request)
        if others := [name for name in names if name not in self._tables.frames]:
            raise InvalidRequestError(
                f"a request is for {others[0]!r}, but the clients here are "
                f"{listed([*self._tables.frames])}"
            )
        return names

    def _agree(self, request: Mapping[str, Any], *, with_checks: bool) -> tuple[Design, Priors]:
        results = read_json(request.get("results"))
        agreement = Agreement(results, is_remote=True)
        return agree(self._settings, self._tables, agreement, with_checks=with_checks)


def texts_of(settings: Settings) -> dict[str, str]:
    """Return the settings as texts, which must be equal at server and clients.

    Raises:
        ValueError: if namespace has other values than numbers, or there are row weights.
    """
    family = family_of(settings.family)
    if "weights" in read_all(settings.formula, family.auxiliary).columns:
        raise ValueError(
            "the formula has weights; a regression of remote clients has no row weights"
        )
    for name, value in settings.namespace.items():
        values = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(one, int | float) for one in values):
            raise ValueError(
                f"{name} of namespace is a {type(value).__name__}; expected a number or a list of "
                "numbers, which server and clients can compare"
            )
    priors = {
        n: v if isinstance(v, int | float) else code_of(v, n)
        for n, v in (settings.priors or {}).items()
    }
    return {
        "formula": json.dumps(settings.formula),
        "family": settings.family,
        "link": settings.link_name,
        "priors": json.dumps(priors, sort_keys=True),
        "center": str(settings.center),
        "client": settings.client,
        "namespace": json.dumps(settings.namespace, sort_keys=True),
        "method": settings.method,
    }


def read_json(text: Any) -> Any:
    """Return the content of a received JSON text; raise ValueError if it is invalid or too long."""
    if not isinstance(text, str) or len(text) > MAX_REPLY_CHARACTERS:
        got = f"{len(text):,} characters" if isinstance(text, str) else f"a {type(text).__name__}"
        raise ValueError(f"got {got}; expected JSON of at most {MAX_REPLY_CHARACTERS:,} characters")

    def refuse(constant: str) -> None:
        raise ValueError(f"got the number {constant}; expected finite numbers")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("got nested lists; expected JSON of reports") from error


def small_clients(design: Design, sizes: Mapping[str, int]) -> list[str]:
    """Return a text on clients whose messages have at least as many numbers as their rows.

    A likelihood factor of d coefficients has d + d (d + 1) / 2 numbers, and a row d, of which one
    is the response and another may be the intercept.
    """
    labels = {label for one in design.groups for label in one.labels}
    d = len({*design.terms, *["Intercept"] * design.population.has_intercept} | labels)
    small = [name for name, rows in sizes.items() if rows < (d + 3) / 2]
    if not small:
        return []
    return [
        f"{listed(small, 3)} has fewer than {math.ceil((d + 3) / 2)} rows: its messages may "
        f"determine its rows; leave it out, or join it with another {nouns().client}"
    ]


def _combined(needed: ReportNeeded, reports: Mapping[str, Report]) -> dict[str, Any]:
    """Return the results of all reports; raise ValueError if they are not finite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflows
        try:
            results = needed.combine(reports)
            json.dumps(results, allow_nan=False)
        except OverflowError as error:
            raise _overflow(needed, reports) from error
        except ValueError as error:
            if "JSON" not in str(error):
                raise
            raise _overflow(needed, reports) from error
    return results


def _overflow(needed: ReportNeeded, reports: Mapping[str, Report]) -> ValueError:
    """Return the error for sums that are not finite, with the client of the largest number."""
    sizes = {name: max(_numbers(report), default=0.0) for name, report in reports.items()}
    largest = max(sizes, key=lambda name: sizes[name])
    return ValueError(
        f"{largest}: {needed.label}: got the number {sizes[largest]:g}, whose sums are not finite"
    )


def _numbers(report: Report) -> Iterator[float]:
    """Yield the absolute values of all numbers of a report."""
    if isinstance(report, dict | list):
        for part in report.values() if isinstance(report, dict) else report:
            yield from _numbers(part)
    elif isinstance(report, int | float):
        yield abs(float(report))


def _json(needed: ReportNeeded, reports: Mapping[str, Report]) -> str:
    """Return reports as JSON; raise InvalidRequestError if they have other values."""
    try:
        return json.dumps(reports, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"{needed.label}: a report has levels that are neither texts nor numbers, or numbers "
            "that are not finite; correct the tables"
        ) from error


@contextmanager
def _here() -> Iterator[None]:
    """Context manager that ignores warnings and converts errors of lacking columns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except MissingColumn as error:
            raise InvalidRequestError(
                f"{error.client}: column {error.column} is missing; expected the columns of the "
                "formula"
            ) from error
