"""Client side of remote training: stores rows and states of clients, and runs local training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from pyrofl.arguments import Count, check_name, checked
from pyrofl.choices import MIN_SCORED_ROWS
from pyrofl.data import Cohort, Federation
from pyrofl.data.fingerprint import fingerprint
from pyrofl.data.shard import Shard
from pyrofl.files import checkpoint_file
from pyrofl.files.lock import lock_folder
from pyrofl.files.run_folder import compared_versions, prepare
from pyrofl.inference.definition.description import described
from pyrofl.inference.definition.method import Method, View
from pyrofl.inference.definition.seeds import Seed, separate
from pyrofl.inference.engine.requests import RoundRequest, join_replies
from pyrofl.inference.engine.round import LocalClients
from pyrofl.inference.engine.start import method_schedule
from pyrofl.inference.engine.state import RoundState, current_states
from pyrofl.inference.engine.surroundings import refuse_surroundings
from pyrofl.inference.evaluation.evaluate import Metric, evaluate
from pyrofl.inference.evaluation.predictions import PredictionOptions, Predictions, predictions
from pyrofl.inference.privacy.preparation import refuse_preparation
from pyrofl.inference.transport import weighing
from pyrofl.inference.transport.client_records import ClientRecord, as_sent, state_of
from pyrofl.inference.transport.message_checks import (
    EVALUATION_SETTINGS,
    Flat,
    InvalidRequestError,
    StateLostError,
    client_names,
    column,
    refuse_disagreement,
    to_own_storage,
    whole_number,
)
from pyrofl.inference.transport.requests import SENT_SEEDS, place, refuse_more_rounds
from pyrofl.tensors import Tensors, under
from pyrofl.turns import synchronized

CLIENT_FILE = "private.safetensors"
# Files of the folder, with the results that a site has after its study; others refuse it.
STATE_FILES = rf"{CLIENT_FILE}|{weighing.WEIGHING_FILE}|.*\.nc|plan\.json|report\.html"


def _losses(report: Tensors) -> Tensors:
    """Return the entries of a training report that are losses.

    Private methods send none, as losses depend on rows.
    """
    return {n: v for n, v in report.items() if n.startswith(("loss/", "begun/"))}


class Client:
    """Client side of federated rounds: trains and evaluates on the machine that has the rows.

    Args:
        method: a method, or round number (from 0) -> method, built as at the server.
        data: the rows of one or several clients, with the same names as at the server.
        seed: seed of the run, as at the server, except that of participation.
        state: folder for the client states, written before a reply is returned; None keeps them in
            memory, as long as this object exists.
        metrics: name -> custom metric, in addition to those of `pyrofl.metrics`.
        min_scored_rows: smallest number of rows for which a client's scores are sent, as the
            accuracy of one row reveals its label. None sends no scores.
        rounds: largest number of rounds in which these clients take part; requests of later rounds
            are refused. None sets no limit.

    Raises:
        ValueError: if the folder cannot be used, or its file is damaged or of another run.
    """

    @checked
    def __init__(
        self,
        method: Method | Callable[[int], Method],
        data: Federation,
        seed: Seed = 0,
        state: str | Path | None = None,
        metrics: Mapping[str, Metric] | None = None,
        min_scored_rows: Count | None = MIN_SCORED_ROWS,
        rounds: Count | None = None,
    ) -> None:
        if data.weights is not None:
            raise ValueError(
                "data have row weights, which a remote server does not support; remove them"
            )
        self.at, self.data, self.seed = method_schedule(method), data, separate(seed)
        refuse_preparation(self.at(0), data)
        self.metrics, self.min_scored_rows, self.rounds = metrics, min_scored_rows, rounds
        self.names = data.names[: data.clients]
        self.file = None if state is None else prepare(state, holding=STATE_FILES) / CLIENT_FILE
        self._records = {name: ClientRecord() for name in self.names}
        self._sent: dict[str, Flat] = {}  # by client: its last noisy reply
        self._weighed: dict[str, Any] = {}  # see `weighing.weigh`
        self._read()

    @synchronized
    @checked
    def train(self, order: Mapping[str, Any]) -> Flat:
        """Train as requested by `Server.configure_train`, and return the reply for the server.

        Raises:
            ValueError: if the request is not for these clients, or one of them has lost its state.
        """
        refuse_surroundings()
        cohort, shard, received = self._placed(order)
        rounds, names = whole_number(order, "round") - 1, client_names(order)
        reports = column(order, "reports", len(names), torch.bool)
        method = self.at(rounds)
        refuse_disagreement(order, method)
        with self._held():
            self._refuse_late(names, rounds + 1)
            noisy = (
                method.metadata.privacy is not None
                and method.metadata.privacy.privacy.where == "client"
            )
            if noisy and (before := self._replied(names, rounds + 1)) is not None:
                return before
            records = self._settled(order)
            state = state_of(shard, rounds, received, records)
            client_state = partial(
                current_states, method, shard, state, received, cohort, self.seed
            )
            records = self._belonging(order, records, client_state)
            reporters = cohort.ids.cpu()[reports]
            ids = cohort.ids.cpu()
            here = replace(method, download=as_sent(ids))
            local = LocalClients(shard, RoundRequest(here, state, ids, reporters, self.seed))
            reply = join_replies([*local.replies()], ids)
            for i, reason in zip(cohort.ids.tolist(), reply.reasons, strict=True):
                if reason:
                    continue
                name, row = shard.names[i], local.written.get(i)
                now = to_own_storage(row.tensors) if row else {}
                waits = bool((reporters == i).any())  # others commit, as they send no message
                change = {"round": rounds + 1, "pending": now} if waits else {"client_state": now}
                records[name] = replace(records[name], **change)
            self._records |= records
            answer = {
                "names": names,
                "round": rounds + 1,
                "sends": torch.isin(cohort.ids.cpu(), reply.sender.ids.cpu()),
                "odd": tuple(reply.reasons),
                "steps": reply.report["steps"],
                **({} if method.metadata.privacy else to_own_storage(_losses(reply.report))),
                **under("up", to_own_storage(reply.message)),
            }
            self._sent |= dict.fromkeys(names, answer) if noisy else {}
            self._write()
        return answer

    @synchronized
    @checked
    def evaluate(self, question: Mapping[str, Any]) -> Flat:
        """Evaluate as requested by `Server.configure_evaluate`; return scores and row counts.

        Clients with fewer than `min_scored_rows` rows are left out.

        Raises:
            ValueError: as `train` and `pyrofl.evaluate`.
        """
        here, shard, state = self._deployed(question)
        clients = len(client_names(question))
        rounds, place = state.number, column(question, "ids", clients, torch.long)
        settings = {n: question[n] for n in EVALUATION_SETTINGS if n in question}
        wanted = settings.pop("metrics", None)
        part = shard.test if settings.get("part", "test") == "test" else shard.train
        about = {"round": rounds, **{n: v for n, v in settings.items() if n != "metrics"}}
        least = self.min_scored_rows
        large = torch.tensor([least is not None and len(rows) >= least for rows in part])
        if not bool(large[place].any()):
            return {**about, "names": (), "rows": torch.zeros(0, dtype=torch.long)}
        scores = evaluate(here, shard, state, metrics=self.metrics, seed=self.seed, **settings)
        shared = large[scores.ids]
        wanted = scores.values if wanted is None else wanted
        sent_scores = {n: v[shared] for n, v in scores.values.items() if n in wanted}
        names = tuple(shard.names[i] for i in scores.ids[shared].tolist())
        rows = scores.rows[shared]
        sent_scores = to_own_storage(sent_scores)
        return {**about, "names": names, "rows": rows, **under("score", sent_scores)}

    @synchronized
    @checked
    def weigh(self, request: Mapping[str, Any]) -> Flat:
        """Report marginal likelihoods, for a correction of posterior draws; see `correction`.

        The reply has the log marginal likelihood of each client at each draw of the shared sites;
        draws of the clients' own sites stay here.

        Raises:
            ValueError: as `evaluate`, or if clients have not replied to the request before.
        """
        with self._held():
            here, shard, state = self._deployed(request)
            last_weights = self._last_weights()
            reply, self._weighed = weighing.weigh(
                here, shard, state, self.seed, request, last_weights
            )
            if self.file is not None:
                file = self.file.with_name(weighing.WEIGHING_FILE)
                checkpoint_file.write(file, self._about, self._weighed)
        return reply

    @synchronized
    @checked
    def posterior(self, request: Mapping[str, Any]) -> Any:
        """Return the clients' posterior draws for ArviZ, as requested by `configure_draws`.

        The draws are those of `to_arviz` in the process that has all rows, of these clients.
        Nothing is sent.

        Raises:
            ValueError: as `weigh`.
        """
        here, shard, state = self._deployed(request)
        last_weights = self._last_weights()
        return weighing.posterior(here, shard, state, self.seed, request, last_weights)

    def _last_weights(self) -> dict[str, Any]:
        """Return the records of the last exchange of `weigh`, if there are any."""
        file = self.file and self.file.with_name(weighing.WEIGHING_FILE)
        if file is None or not file.exists():
            return self._weighed
        return checkpoint_file.read(file, self._about)

    @synchronized
    @checked
    def predict(
        self, question: Mapping[str, Any], x: Any, client: str, **asked: Unpack[PredictionOptions]
    ) -> Predictions:
        """Predict responses of rows `x` of a client, by its own state and received tensors.

        The result equals that of `Run.predict` with all clients in one process. Nothing is sent.

        Args:
            question: the last request of `Server.configure_evaluate`; it determines the model.
            x: rows, [N, *x].
            client: name of the client.
            asked: as in `Run.predict`, except the model.

        Returns:
            The predictions of all rows.

        Raises:
            ValueError: as `evaluate` and `Run.predict`.
        """
        check_name(client, self.names, "client")
        here, shard, state = self._deployed(question)
        how: PredictionOptions = {"seed": self.seed, **asked, "model": question["model"]}
        return predictions(here, shard, state, x, client, **how)

    def _deployed(self, question: Mapping[str, Any]) -> tuple[Method, Shard, RoundState]:
        """Return the method, the clients' rows and the round state for an evaluation request."""
        cohort, shard, received = self._placed(question)
        rounds = whole_number(question, "round")
        self._read()
        records = self._settled(question)
        state = state_of(shard, rounds, received, records)
        method = self.at(max(rounds - 1, 0))
        refuse_disagreement(question, method)

        views = {n: View(getattr(view, "read", view)) for n, view in method.views.items()}
        here = replace(method, download=as_sent(cohort.ids.cpu()), views=views)
        client_state = partial(current_states, here, shard, state, received, cohort, self.seed)
        self._belonging(question, records, client_state)
        return here, shard, state

    @synchronized
    @checked
    def forget(self, names: Sequence[str]) -> None:
        """Delete the states of some clients; call `Server.reset_clients` before the next request.

        Raises:
            ValueError: if a name is not that of one of these clients.
        """
        with self._held():
            for name in names:
                check_name(name, self.names, "client")
                self._records[name] = ClientRecord()
            self._write()

    def _refuse_late(self, names: Sequence[str], rounds: int) -> None:
        """Raise InvalidRequestError if a request of a later round has already been answered."""
        for name in names:
            if (last := self._records[name].round) > rounds:
                raise InvalidRequestError(
                    f"{name}: a request of round {rounds} arrived after that of round {last}; "
                    "send requests in the order of rounds"
                )

    def _replied(self, names: Sequence[str], number: int) -> Flat | None:
        """Return the noisy reply already sent by these clients in this round, or None.

        The privacy accountant counts one noisy reply per round. With a second reply with new noise
        the server could average out the noise.
        """
        sent = {n: self._sent[n] for n in names if n in self._sent}
        again = [name for name, reply in sent.items() if reply["round"] >= number]
        if not again:
            return None
        first = sent[again[0]]
        if (first["round"], first["names"]) == (number, tuple(names)):
            return first
        raise InvalidRequestError(
            f"{', '.join(again)}: a noisy reply of round {first['round']} was sent already; "
            "send a request for a later round, as epsilon counts one reply per round"
        )

    def _placed(self, order: Mapping[str, Any]) -> tuple[Cohort, Shard, Tensors]:
        """Return a request's clients, their rows in the server's order, and received tensors."""
        refuse_more_rounds(order, self.rounds)
        return place(order, self.data, self.seed)

    def _settled(self, order: Mapping[str, Any]) -> dict[str, ClientRecord]:
        """Commit or drop clients' pending states, as the request states; return the records."""
        names = client_names(order)
        accepted = column(order, "accepted", len(names), torch.long).tolist()
        each = zip(names, accepted, strict=True)
        return {name: self._records[name].settled(last) for name, last in each}

    def _belonging(
        self,
        order: Mapping[str, Any],
        records: Mapping[str, ClientRecord],
        client_state: Callable[[], Tensors],
    ) -> dict[str, ClientRecord]:
        """Return a request's client records; raise StateLostError if one is of another round."""
        confirmed = {}
        odd = {}
        for name, last in zip(records, order["accepted"].tolist(), strict=True):
            if records[name].merged != last:
                odd[name] = (
                    f"{name}: the server has aggregated its message of round {last}, but its state "
                    f"here is of round {records[name].merged}"
                )
            confirmed[name] = replace(records[name], merged=last)
        if odd and client_state():  # without client states, nothing can be lost
            cure = "use the folder of that round, or reset these clients by forget"
            raise StateLostError(f"{'; '.join(odd.values())}; {cure}", list(odd))
        return confirmed

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Context manager that locks the state folder and reads the client states from it."""
        with lock_folder(self.file.parent) if self.file else nullcontext():
            self._read()
            yield

    @property
    def _about(self) -> dict[str, Any]:
        seeds = {f"seed of {n}": int(getattr(self.seed, n)) for n in SENT_SEEDS}
        return {"hash of the data": fingerprint(self.data), **compared_versions(), **seeds}

    def _read(self) -> None:
        """Read the client states from their file, if it exists."""
        if self.file is None or not self.file.exists():
            return
        content = checkpoint_file.read(self.file, self._about)
        checkpoint_file.refuse_differences(
            f"the client states in {self.file}", content["method"], described(self.at(0))
        )
        self._records = {name: ClientRecord(**fields) for name, fields in content["own"].items()}
        self._sent = content["sent"]

    def _write(self) -> None:
        if self.file is not None:
            records = {name: vars(records) for name, records in self._records.items()}
            content = {"own": records, "sent": self._sent, "method": described(self.at(0))}
            checkpoint_file.write(self.file, self._about, content)
