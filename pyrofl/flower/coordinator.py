"""Server of a Flower study: it waits for sites, runs all rounds and stores the results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pyrofl.experiments.console import FAILED, Stopped
from pyrofl.experiments.methods import Scheduled
from pyrofl.files.link_safe_files import subfolder
from pyrofl.files.lock import lock_folder
from pyrofl.files.run_folder import write_json
from pyrofl.flower.project import REGRESSION_METHOD, Project
from pyrofl.flower.registry import Registry, Transport
from pyrofl.flower.regression import agree_on
from pyrofl.flower.regression_store import RegressionStore
from pyrofl.flower.results import ResultStore
from pyrofl.flower.site import (
    DRAWS_REQUEST,
    EVALUATION_REPLY,
    EVALUATION_REQUEST,
    LARGEST_CLIENT_ROWS,
    LIKELIHOOD_REPLY,
    LIKELIHOOD_REQUEST,
    LOST_STATE,
    NOTICE,
    REFUSAL,
    REGRESSION_PLAN,
    STUDY_COMPLETE,
    TRAINING_REPLY,
    TRAINING_REQUEST,
    label,
)
from pyrofl.inference.definition.description import clients_part
from pyrofl.inference.engine.start import method_schedule
from pyrofl.inference.transport import Server
from pyrofl.inference.transport.correction import configure_draws, reporter
from pyrofl.inference.transport.message_checks import Flat, one_line, own_client_names
from pyrofl.inference.transport.records import Records
from pyrofl.models.regression.remote import RegressionServer
from pyrofl.nouns import nouns

Sites = Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]
"""Name of a site -> names of its clients, and how many training rows each has."""

ROSTER_FILE = "sites.json"
FAREWELL_TIMEOUT = 20.0  # seconds to inform sites of the end
MAX_ROUND_REPEATS = 3  # of a round with too few replies
SITE_CHECK_INTERVAL = 0.5  # seconds between two checks for sites


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server of a Flower study: timeout and required numbers of sites."""

    sites: int  # it begins when so many are there
    least: int  # smallest number of sites of a round; one with fewer replies is repeated
    timeout: float  # seconds that a round waits for replies, and the server for sites
    whose: Mapping[int, str] | None = None  # as of `Registry`
    by_files: bool = False  # replies come at any time, and the command is repeated for them


def coordinate(
    project: Project,
    out: Path,
    transport: Transport,
    settings: ServerSettings,
    print_line: Callable[[str], None],
) -> dict[str, ResultStore]:
    """Run and evaluate the remaining rounds of a Flower study, and write tables and figures.

    The folder `out` holds the server's states and the results; a run in it is resumed.
    """
    with ExitStack() as held:
        out.mkdir(parents=True, exist_ok=True)
        if dead := held.enter_context(lock_folder(out)):
            print_line(f"{dead}; taking it over")
        register = Registry(
            project, transport, print_line, whose=settings.whose, by_files=settings.by_files
        )
        sites = _roster(out / ROSTER_FILE, register, settings)
        regression = None
        if project.formula:

            def send(messages: Mapping[str, Records]) -> tuple[dict[str, Records], dict[str, str]]:
                """Send messages to sites once all of them are connected."""
                wait(register, len(sites), settings.timeout)
                return exchange(register, messages, settings.timeout)

            regression = agree_on(project, out, sites, send, print_line)
        run = Rounds(project, out, register, settings, print_line, sites, regression)
        while not run.over:
            run.step()
        run.correct_draws()
        run.finish()
        return run.stores


def _roster(path: Path, register: Registry, settings: ServerSettings) -> Sites:
    """Return the sites of a study: those recorded at its start, or those now connected."""
    is_resumed = path.exists()
    if is_resumed:
        roster = json.loads(path.read_text(encoding="utf-8"))
        if len(roster) != settings.sites:
            raise ValueError(
                f"{path.parent} holds a run of {nouns().site.count(len(roster))} "
                f"({', '.join(roster)}); expected these, or another --out"
            )
    else:
        wait(register, settings.sites, settings.timeout)
        there = sorted(register.sites.items())
        roster = {name: [list(site.names), list(site.sizes)] for name, site in there}
        write_json(path, roster)
    expected = {name: (tuple(names), tuple(sizes)) for name, (names, sizes) in roster.items()}
    register.expected = expected
    if is_resumed:
        with suppress(Stopped):  # a late site only misses rounds
            wait(register, settings.sites, settings.timeout)
    return expected


def wait(register: Registry, count: int, timeout: float) -> None:
    """Wait until the required number of sites is connected; raise an error after the timeout."""
    register.look(timeout if len(register.sites) < count else 0.0)
    end = time.monotonic() + timeout
    while len(register.sites) < count:
        if time.monotonic() > end:
            there = ", ".join(sorted(register.sites)) or "none"
            message = f"{len(register.sites)} of {nouns().site.count(count)} are there after "
            message += f"{timeout:g} s ({there})"
            raise Stopped(f"{message}; expected all of them (--min-sites, --timeout)", FAILED)
        time.sleep(SITE_CHECK_INTERVAL)
        register.look(timeout)


class Rounds:
    """Server side of a Flower study, which runs the rounds of all methods and stores results."""

    def __init__(
        self,
        project: Project,
        out: Path,
        register: Registry,
        settings: ServerSettings,
        print_line: Callable[[str], None],
        sites: Sites,
        regression: RegressionServer | None = None,
    ) -> None:
        """Start a new study in the folder `out`, or resume the study saved there."""
        self.project, self.registry, self.settings, self.print_line = (
            project,
            register,
            settings,
            print_line,
        )
        if regression is not None:
            sites = _complete_sites(regression)
        self.sites, self._repeated, self._refused = sites, 0, dict[str, str]()
        self._notices = dict[str, str]()  # site -> why it was not in the last round
        sizes = {
            n: size for names, each in sites.values() for n, size in zip(names, each, strict=True)
        }
        self.plan = "" if regression is None else json.dumps(regression.plan)
        if regression is None:
            self.methods, self.rows = _build_methods(project, tuple(sizes.values()))
        else:
            self.methods, self.rows = {REGRESSION_METHOD: regression.method}, {}
        roster = list(sizes), list(sizes.values()), project.type, project.seed
        self.servers = {
            name: Server(method, *roster, state=subfolder(subfolder(out / name) / "server"))
            for name, method in self.methods.items()
        }
        parts = {
            n: (out / n, project, n, method_schedule(self.methods[n])(0)) for n in self.servers
        }
        if regression is None:
            self.stores = {n: ResultStore(*parts[n], server) for n, server in self.servers.items()}
        else:
            stores = {n: RegressionStore(*parts[n], server) for n, server in self.servers.items()}
            stores[REGRESSION_METHOD].column_warnings = list(regression.warnings)
            self.stores = {**stores}

    @property
    def over(self) -> bool:
        """Whether all methods have stopped, and their last rounds are evaluated."""
        return all(store.over for store in self.stores.values())

    def step(self) -> None:
        """Evaluate the last round and run the next one, for all methods with rounds left."""
        wait(self.registry, self.settings.least, self.settings.timeout)
        holders = self._clients_by_site
        begun = time.monotonic()
        messages: dict[str, Records] = {
            name: {NOTICE: {"why": self._notices[name]}} if name in self._notices else {}
            for name in holders
        }
        training = [n for n, store in self.stores.items() if not store.stopped]
        asking = [n for n, store in self.stores.items() if store.needs_evaluation]
        for method, server in self.servers.items():
            records = {}
            if method in training:
                records[label(TRAINING_REQUEST, method)] = server.configure_train(holders)
            for i, views in enumerate(
                self.stores[method].evaluation_requests if method in asking else ()
            ):
                records[label(EVALUATION_REQUEST, method, i)] = server.configure_evaluate(
                    holders, **views
                )
            for what, each in records.items():
                for site, flat in each.items():
                    messages[site][what] = self._with_build_facts(method, flat)
        answers = self._exchange(messages)
        self._note_absent(answers)
        if training and self._too_few(training, answers):
            return
        for method in asking:
            count = range(len(self.stores[method].evaluation_requests))
            scores = [_records_labeled(answers, label(EVALUATION_REPLY, method, i)) for i in count]
            for reason in self.stores[method].scored(scores):
                self.print_line(f"{method}: scores of {reason}")
        for method in training:
            self._aggregate_replies(method, answers, time.monotonic() - begun)
        if training:
            number = max(self.servers[n].state.number for n in training)
            self.print_line(
                f"round {number} of at most {self.project.rounds}: {len(answers)} of "
                f"{nouns().site.count(len(self.sites))} replied, {time.monotonic() - begun:.1f} s"
            )
        for method in training:
            if self.stores[method].stopped:
                self.print_line(f"{method}: {self.stores[method].stop_reason}")

    def correct_draws(self) -> None:
        """Correct the posterior draws of all methods, by exchanges with all sites."""
        stores = [store for store in self.stores.values() if store.needs_correction]
        self.registry.look()
        needs_reports = any(store.needs_reports for store in stores)
        if needs_reports and (away := ", ".join(self.sites.keys() - self.registry.sites.keys())):
            self.print_line(
                f"waiting for {away}: the correction of posterior draws needs all "
                f"{nouns().site.many}"
            )
            with suppress(Stopped):
                wait(self.registry, len(self.sites), self.settings.timeout)
        for store in stores:
            send = partial(self._request_marginal_likelihoods, store.name)
            for line in store.correct_draws(reporter(store.server, send, self._clients_by_site)):
                self.print_line(f"{store.name}: {line}")

    def finish(self) -> None:
        """Inform the sites of the end, and of the draws that belong to those of the server."""
        self.registry.look()
        names = self.registry.sites  # also those without a complete row
        warned = [f"{n}: {text}" for n, site in sorted(names.items()) for text in site.warnings]
        for store in self.stores.values():
            store.site_warnings = warned
        messages: dict[str, Records] = {name: {STUDY_COMPLETE: dict[str, Any]()} for name in names}
        for name, store in self.stores.items():
            if (client_draws := store.shared_draws_for_clients) is not None:
                sheets = configure_draws(store.server, client_draws, self._clients_by_site)
                for site, flat in sheets.items():
                    messages[site][label(DRAWS_REQUEST, name)] = self._with_build_facts(name, flat)
        is_short = all(len(records) == 1 for records in messages.values())
        self._exchange(messages, FAREWELL_TIMEOUT if is_short else self.settings.timeout)

    def _request_marginal_likelihoods(self, method: str, requests: Mapping[str, Flat]) -> Records:
        """Send requests of marginal likelihoods to connected sites; return their replies."""
        self.registry.look()
        there = {name: flat for name, flat in requests.items() if name in self.registry.sites}
        what = label(LIKELIHOOD_REQUEST, method)
        answers = self._exchange(
            {name: {what: self._with_build_facts(method, flat)} for name, flat in there.items()}
        )
        refused = {name: {"why": why} for name, why in self._refused.items()}
        return refused | _records_labeled(answers, label(LIKELIHOOD_REPLY, method))

    @property
    def _clients_by_site(self) -> dict[str, tuple[str, ...]]:
        """Names of the clients of each connected site."""
        there = self.registry.sites
        return {name: clients for name, (clients, _) in self.sites.items() if name in there}

    def _with_build_facts(self, method: str, flat: Flat) -> Flat:
        """Add to a request what sites need to build its method.

        It is the largest number of rows of a client, if the method depends on it, or the columns
        of a regression.
        """
        if self.plan:
            return flat | {REGRESSION_PLAN: self.plan}
        return flat | ({LARGEST_CLIENT_ROWS: self.rows[method]} if method in self.rows else {})

    def _too_few(self, training: Sequence[str], answers: Mapping[str, Records]) -> bool:
        """Return whether a round must be repeated because too few sites replied."""
        trained = [_records_labeled(answers, label(TRAINING_REPLY, n)).keys() for n in training]
        replied = min(map(len, trained))
        if replied >= self.settings.least:
            self._repeated = 0
            return False
        self._repeated += 1
        number = self.servers[training[0]].state.number + 1
        flags = "--min-sites"
        if self.settings.by_files:
            away = ", ".join(sorted(self.sites.keys() - set.intersection(*map(set, trained))))
            flags = f"--ask-again NAME after a mistake there, or --without NAME, of {away}"
        least = f"at least {self.settings.least} ({flags})"
        message = f"round {number}: {nouns().site.count(replied)} replied; expected {least}"
        if self._repeated > MAX_ROUND_REPEATS:
            why = "".join(f"; {site}: {why}" for site, why in self._refused.items())
            raise Stopped(f"{message}{why}; it was repeated {MAX_ROUND_REPEATS} times", FAILED)
        self.print_line(f"{message}; the round is repeated")
        for method in training:
            self._restart_lost_clients(method, answers)
        return True

    def _exchange(
        self, messages: Mapping[str, Records], timeout: float | None = None
    ) -> dict[str, Records]:
        """Send messages to sites and return their replies; print refusals and missing replies."""
        within = self.settings.timeout if timeout is None else timeout
        answers, self._refused = exchange(self.registry, messages, within)
        return answers

    def _aggregate_replies(
        self, method: str, answers: Mapping[str, Records], seconds: float
    ) -> None:
        """Aggregate a method's replies; clients that lost their state restart as new clients."""
        state = self.servers[method].aggregate_train(
            _records_labeled(answers, label(TRAINING_REPLY, method))
        )
        for reason in state.rejected:
            self.print_line(f"{method}: {reason}")
            for site, (clients, _) in self.sites.items():
                if not self.settings.by_files and reason.startswith(tuple(clients)):
                    self._notices[site] = f"{method}: {reason}"
        self.stores[method].made(state, seconds)
        self._restart_lost_clients(method, answers)

    def _note_absent(self, answers: Mapping[str, Records]) -> None:
        """Store why sites are not in a round; their logs have it after the next message.

        A request in a file must be equal when it is written again, and so has no notice.
        """
        if self.settings.by_files:
            return
        late = f"no reply arrived within {self.settings.timeout:g} s"
        self._notices = {
            site: self._refused.get(site, late) for site in self.sites if site not in answers
        }

    def _restart_lost_clients(self, method: str, answers: Mapping[str, Records]) -> None:
        """Restart the clients that reported the loss of their state as new clients of a method."""
        for site, lost in _records_labeled(answers, label(LOST_STATE, method)).items():
            try:
                owners = {n: own for n, (own, _) in self.sites.items()}
                every = own_client_names(site, lost, owners)
                names = [name for name in every if self.servers[method].has_accepted(name)]
                self.servers[method].reset_clients(names)
            except ValueError as error:
                self.print_line(f"{site} cannot rejoin {method}: {one_line(str(error))}")
                continue
            if names:
                names_text = one_line(", ".join(names))
                self.print_line(f"{site} has lost its state of {method}: {names_text} restart")


def exchange(
    registry: Registry, messages: Mapping[str, Records], timeout: float
) -> tuple[dict[str, Records], dict[str, str]]:
    """Send messages to sites; return their replies, and the reasons of those that refused.

    Refusals and missing replies are printed.
    """
    at = {registry.sites[name].node: name for name, records in messages.items() if records}
    sent = {node: messages[name] for node, name in at.items()}
    answers, refused = dict[str, Records](), dict[str, str]()
    for node, answer in registry.transport.exchange(sent, timeout).items():
        if odd := answer.get(REFUSAL):
            refused[at[node]] = why = one_line(odd.get("why"))
            registry.say(f"{at[node]}: {why}")
        else:
            answers[at[node]] = answer
    if missing := sorted(set(at.values()) - answers.keys() - refused.keys()):
        registry.say(f"no reply of {', '.join(missing)}")
    return answers, refused


def _complete_sites(regression: RegressionServer) -> Sites:
    """Return the sites of a regression whose clients have complete rows, with these clients."""
    sizes = dict(zip(regression.names, regression.sizes, strict=True))
    return {n: (own, tuple(sizes[c] for c in own)) for n, own in regression.holders.items()}


def _build_methods(
    project: Project, sizes: Sequence[int]
) -> tuple[dict[str, Scheduled], dict[str, int]]:
    """Build the methods of a study for clients with these numbers of training rows.

    Also return the largest number of rows for the methods that depend on it, as programs with
    effects of rows do: sites then receive it, to build the same method.
    """
    largest, count = max(sizes), len(sizes)
    methods = project.build(count, largest, server=True)
    bare = project.build(count, server=True) if largest > 1 else methods
    parts = {n: [clients_part(method_schedule(m[n])(0)) for m in (methods, bare)] for n in methods}
    rows = {n: largest for n, (own, other) in parts.items() if own != other}
    return {n: (methods if n in rows else bare)[n] for n in methods}, rows


def _records_labeled(answers: Mapping[str, Records], what: str) -> Records:
    """Return the record with a given label from each site's reply that has it: site -> record."""
    return {site: answer[what] for site, answer in answers.items() if what in answer}
