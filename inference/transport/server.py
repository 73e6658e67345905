"""Server side of federated rounds with remote clients, without access to their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from pyrofl.arguments import check_name, checked
from pyrofl.data import Roster
from pyrofl.data.roster import names_of
from pyrofl.files import checkpoint_file
from pyrofl.files.lock import lock_folder
from pyrofl.files.run_folder import compared_versions, prepare
from pyrofl.inference.definition.description import described
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, separate
from pyrofl.inference.engine.participation import Draw, everyone, sample_clients
from pyrofl.inference.engine.requests import Reply
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first, method_schedule
from pyrofl.inference.engine.state import RoundState, downloaded, to_data
from pyrofl.inference.evaluation.evaluate import Scores
from pyrofl.inference.evaluation.specification import EvaluationFields, EvaluationSpec
from pyrofl.inference.fitted_run.records import RoundRecord
from pyrofl.inference.monitoring.status import (
    ConvergenceMonitor,
    ConvergenceStatus,
    trained_by,
)
from pyrofl.inference.privacy.sampling import refuse_other_sampling
from pyrofl.inference.transport.message_checks import (
    MAX_SHOWN_CHARACTERS,
    Flat,
    one_line,
    required_agreement,
    to_own_storage,
)
from pyrofl.inference.transport.replies import (
    Received,
    ReplyParser,
    agree_on_form,
    empty_reply,
    is_confirmed,
)
from pyrofl.inference.transport.requests import SENT_SEEDS
from pyrofl.inference.transport.score_replies import ScoreParser
from pyrofl.returned import as_tensors, calling
from pyrofl.tensors import Tensors, cut, role, under
from pyrofl.turns import synchronized

SERVER_FILE = "server.safetensors"


class Server:
    """Server side of federated rounds: creates requests for remote clients, aggregates replies.

    Attributes:
        state: the last `RoundState`, without client states.
        accepted: [J] int64, last round of every client with an aggregated message; 0 is none.
        records: record of each round.

    Args:
        method: a method, or round number (from 0) -> method, built as at the clients.
        names: names of the training clients.
        sizes: their numbers of training rows.
        dtype: floating-point type of the clients' data.
        seed: with the round and the client's name, fixes all random numbers.
        participation: function that samples the reporting clients, as in `federate`.
        training_clients: function that samples the training clients, as in `federate`.
        state: folder for the server's state, written after every round and resumed if it exists;
            None keeps the state in memory.

    Raises:
        ValueError: if names, sizes or type are invalid, or the folder's file is damaged or of
            another run.
    """

    @checked
    def __init__(
        self,
        method: Method | Callable[[int], Method],
        names: Sequence[str],
        sizes: Sequence[int] | Tensor,
        dtype: torch.dtype,
        seed: Seed = 0,
        *,
        participation: Draw = everyone,
        training_clients: Draw | None = None,
        state: str | Path | None = None,
    ) -> None:
        self.at, self.seed = method_schedule(method), separate(seed)
        self.roster = Roster(names, sizes, dtype)
        refuse_other_sampling(self.at(0), self.roster.clients, participation, self.seed)
        self.participation, self.trains = participation, training_clients
        self.file = None if state is None else prepare(state, holding=SERVER_FILE) / SERVER_FILE
        self.accepted = torch.zeros(self.roster.clients, dtype=torch.long)
        # Who answers for whom, and the evaluations that were requested.
        self._holders = dict.fromkeys(("train", "evaluate"), self._clients_by_machine(None))
        self._evaluation_requests: list[Flat] = []
        self.state = first(self.at(0), self.roster, self.seed)
        self.records: list[RoundRecord] = []
        if self.file is not None and self.file.exists():
            self._restore_checkpoint(checkpoint_file.read(self.file, self._checkpoint_identity))

    @synchronized
    @checked
    def configure_train(
        self, holders: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, Flat]:
        """Return the training requests of the next round by client, for `Client.train`.

        A second call before `aggregate_train` returns the same.

        Args:
            holders: name of a machine -> names of the clients with rows there, for one request per
                machine; default: one request per client.
        """
        method, number = self.at(self.state.number), self.state.number
        reporters, ids = self._sample_clients(method)
        about = {"round": number + 1}
        self._holders["train"] = self._clients_by_machine(holders)
        return self._requests_by_machine(
            method, ids, holders, about, {"reports": torch.isin(ids, reporters)}
        )

    @synchronized
    @checked
    def aggregate_train(self, replies: Mapping[str, Mapping[str, Any]]) -> RoundState:
        """Aggregate the clients' replies to the training requests, and return the new round state.

        A reporter without a readable reply is `silent`; a client with an invalid, late or foreign
        reply is `rejected` by name. They return to their previous state with the next request. So
        do clients whose messages cannot be aggregated, if neither the last round nor most of
        several clients confirm their tensors' names, shapes and types.

        Raises:
            ValueError: as `federate`, if aggregate returns an invalid state; or another server
                uses the folder.
        """
        with self._locked_and_saved_state():
            old = self.state
            self._aggregate_replies(replies)
            method = self.at(old.number)
            self.records.append(RoundRecord.of(self.state, old, method, seconds=0.0))
        return self.state

    @property
    def status(self) -> ConvergenceStatus:
        """Convergence status after the last round, as `Run.status` without corrected draws."""
        method = self.at(max(self.state.number - 1, 0))
        return ConvergenceMonitor(self.records, trained_by(method), set[str]).status()

    def _aggregate_replies(self, replies: Mapping[str, Mapping[str, Any]]) -> None:
        """Validate and aggregate the replies, and store the new round state."""
        method, state = self.at(self.state.number), self.state
        reporters, ids = self._sample_clients(method)
        down = self._bytes_down(method, ids)
        parser = ReplyParser(
            method,
            self.roster,
            state.number + 1,
            ids,
            reporters,
            down,
            self._holders["train"],
            state.server,
        )
        read, refused = parser.read(replies)
        while True:
            form, same_form = agree_on_form(read or [empty_reply(state)], state)
            try:
                after, rejected = self._aggregate_round(method, ids, reporters, same_form)
                break
            except ValueError as error:
                if is_confirmed(form, same_form, state):
                    raise
                senders = [i for one in same_form for i in one.sender.ids.tolist()]
                why = one_line(str(error), 2 * MAX_SHOWN_CHARACTERS)
                refused += [f"{self.roster.names[i]}: {why}" for i in senders]
                read = [reply for reply in read if reply.form != form]
        merged = after.reporters.ids[~torch.isin(after.reporters.ids, rejected)]
        self.accepted = self.accepted.index_fill(0, merged, after.number)
        none = {n: v[:0] for n, v in state.message.items()}
        self.state = replace(
            after,
            message=after.message or none,
            rejected=(*refused, *after.rejected),
            seen=self.accepted > 0,
        )

    def _aggregate_round(
        self, method: Method, ids: Tensor, reporters: Tensor, replies: list[Reply]
    ) -> tuple[RoundState, Tensor]:
        """Aggregate replies to a round state; also return the ids of clients that must revert."""
        senders = torch.cat([reply.sender.ids for reply in replies]).sort().values
        came = torch.cat([reply.report["ids"] for reply in replies])
        received, silent = Received(replies), reporters[~torch.isin(reporters, came)]
        after = run_round(
            method,
            self.roster,
            self.state,
            ids,
            senders,
            silent,
            seed=self.seed,
            backend=lambda request: received,
        )
        return after, received.rejected

    @checked
    def has_accepted(self, name: str) -> bool:
        """Return whether the server has aggregated a message of a client.

        Raises:
            ValueError: if the name is unknown.
        """
        check_name(name, self.roster.names, "client")
        return bool(self.accepted[self.roster.names.index(name)] > 0)

    @synchronized
    @checked
    def reset_clients(self, names: Sequence[str]) -> None:
        """Reset clients that have lost their state to new clients; see `Metadata.reset_clients`.

        Send the next requests afterwards; replies to earlier ones must not be aggregated.

        Raises:
            ValueError: if a name is unknown, or the method cannot reset clients.
        """
        for name in names:
            check_name(name, self.roster.names, "client")
        ids = torch.tensor([self.roster.names.index(name) for name in names], dtype=torch.long)
        ids = ids[self.accepted[ids] > 0].sort().values
        method = self.at(max(self.state.number - 1, 0))
        with self._locked_and_saved_state():
            with calling("reset_clients"):
                server_state = method.metadata.reset_clients(
                    dict(self.state.server), self.roster.cohort(ids)
                )
            server = to_data(as_tensors("what reset_clients returns", server_state), self.roster)
            self.accepted = self.accepted.index_fill(0, ids, 0)
            self.state = replace(self.state, server=server, seen=self.accepted > 0)

    @synchronized
    @checked
    def configure_evaluate(
        self,
        holders: Mapping[str, Sequence[str]] | None = None,
        metrics: Sequence[str] | None = None,
        **asked: Unpack[EvaluationFields],
    ) -> dict[str, Flat]:
        """Return evaluation requests for all clients, by client, for `Client.evaluate`.

        Args:
            holders: as in `configure_train`.
            metrics: names of the metrics to send; default: all.
            asked: fields of `EvaluationSpec`: model, adaptation, part, draws.

        Raises:
            ValueError: as `pyrofl.evaluate`, or if the population is not "training".
        """
        if (others := asked.pop("population", "training")) != "training":
            raise ValueError(
                f"population is {others!r}, but a remote server only evaluates 'training'; where "
                "the other rows are, use pyrofl.evaluate(method, data, server.state, "
                f"population={others!r})"
            )
        method = self.at(max(self.state.number - 1, 0))
        how = EvaluationSpec.of(asked, excluded=("population", "seed", "chunk_size"))
        view = how.view_name(method)
        how.phases(method)  # raises an error if this method does not have them
        about: Flat = {"round": self.state.number, "model": view}
        about |= {"adaptation": how.adaptation, "part": how.part}
        about |= {} if how.draws is None else {"draws": how.draws}
        self._evaluation_requests = [
            q for q in self._evaluation_requests if q["round"] == about["round"]
        ]
        self._evaluation_requests.append({**about})
        about |= {} if metrics is None else {"metrics": tuple(metrics)}
        ids = torch.arange(self.roster.clients)
        self._holders["evaluate"] = self._clients_by_machine(holders)
        return self._requests_by_machine(method.deployed(view), ids, holders, about, {})

    @checked
    def aggregate_evaluate(self, answers: Mapping[str, Mapping[str, Any]]) -> Scores:
        """Combine the clients' replies to one evaluation request into their scores.

        Invalid replies, and those to another request, are left out; `Scores.rejected` has the
        reasons, with the names of their senders.

        Raises:
            ValueError: if no reply has valid scores.
        """
        parser = ScoreParser(
            self.roster, self._holders["evaluate"], [*self._evaluation_requests], self.seed
        )
        return parser.read(answers)

    @synchronized
    @checked
    def configure_posterior(
        self,
        holders: Mapping[str, Sequence[str]] | None,
        about: Flat,
        columns: Tensors,
        state: Tensors | None = None,
    ) -> dict[str, Flat]:
        """Return requests on posterior draws to all clients, with what these draws need.

        See `correction`, which sends them.

        Args:
            holders: as in `configure_train`.
            about: further numbers and texts of the requests.
            columns: further tensors, with one entry for each client, [J, ...].
            state: server state with other draws; None is that of the last round.
        """
        method, ids = self.at(max(self.state.number - 1, 0)), torch.arange(self.roster.clients)
        view = method.posterior_view
        about = {"round": self.state.number, "model": view, **about}
        return self._requests_by_machine(method.deployed(view), ids, holders, about, columns, state)

    @property
    def checkpoint(self) -> Flat:
        """Server state as a flat dict, from which a server with the same settings can resume."""
        return {
            "round": self.state.number,
            "accepted": self.accepted,
            "records": [vars(record) for record in self.records],
            **under("state", self.state.server),
            **under("form", {n: v[:0] for n, v in self.state.message.items()}),
        }

    @contextmanager
    def _locked_and_saved_state(self) -> Iterator[None]:
        """Context manager that locks the state folder and writes the new state to it."""
        if self.file is None:
            yield
            return
        with lock_folder(self.file.parent):
            if self.file.exists():
                saved = checkpoint_file.read(self.file, self._checkpoint_identity)
                if saved["round"] != (current_round := self.state.number) or not torch.equal(
                    saved["accepted"], self.accepted
                ):
                    raise ValueError(
                        f"{self.file} has round {saved['round']} of another server, but this one "
                        f"is at round {current_round}; use one folder per server"
                    )
            yield
            content = self.checkpoint | {"method": described(self.at(0))}
            checkpoint_file.write(self.file, self._checkpoint_identity, content)

    def _restore_checkpoint(self, content: Mapping[str, Any]) -> None:
        """Restore the server's state from a checkpoint."""
        checkpoint_file.refuse_differences(
            f"checkpoint {self.file}", content["method"], described(self.at(0))
        )
        self.accepted = content["accepted"].clone()
        self.records = [RoundRecord(**fields) for fields in content["records"]]
        self.state = replace(
            self.state,
            number=content["round"],
            server={n: v.clone() for n, v in role("state", content).items()},
            message={n: v.clone() for n, v in role("form", content).items()},
            seen=self.accepted > 0,
        )

    @property
    def _checkpoint_identity(self) -> dict[str, Any]:
        seeds = {f"seed of {n}": int(v) for n, v in vars(self.seed).items()}
        clients = dict(zip(self.roster.names, self.roster.sizes.tolist(), strict=True))
        order = list(clients)  # of the clients' tables: equal dicts may have another
        about = {"clients": clients, "order of the clients": order}
        return {**about, "dtype": str(self.roster.dtype), **compared_versions(), **seeds}

    def _sample_clients(self, method: Method) -> tuple[Tensor, Tensor]:
        """Return the ids of the reporting clients and of the training clients of the next round."""
        draws = self.participation, self.trains
        return sample_clients(method, self.roster.clients, self.seed, self.state.number, *draws)

    def _requests_by_machine(
        self,
        method: Method,
        ids: Tensor,
        holders: Mapping[str, Sequence[str]] | None,
        about: Flat,
        columns: Tensors,
        state: Tensors | None = None,
    ) -> dict[str, Flat]:
        """Create one request per machine, for the selected clients on that machine."""
        names = self.roster.names
        state = self.state.server if state is None else state
        received = downloaded(method, state, self.roster.cohort(ids))
        table = columns | {"ids": ids, "sizes": self.roster.sizes[ids]}
        table |= {"accepted": self.accepted[ids]} | under("down", received)
        about = about | {"clients": len(names)}
        about |= {f"seed/{n}": getattr(self.seed, n) for n in SENT_SEEDS}
        about |= required_agreement(self.at(max(int(about["round"]) - 1, 0)))
        place = {names[i]: at for at, i in enumerate(ids.tolist())}
        sheets: dict[str, Flat] = {}
        for holder, client_names in self._clients_by_machine(holders).items():
            if some := [name for name in client_names if name in place]:
                at = torch.tensor([place[name] for name in some])
                sheets[holder] = about | {"names": tuple(some)} | to_own_storage(cut(table, at))
        return sheets

    def _clients_by_machine(
        self, holders: Mapping[str, Sequence[str]] | None
    ) -> dict[str, tuple[str, ...]]:
        """Return each machine's clients, by default one client each; raise ValueError if unknown.

        A reply is only read if it is of clients of its sender.
        """
        names = self.roster.names
        clients_by_holder = {name: (name,) for name in names} if holders is None else holders
        for name in names_of(
            "clients of holders",
            [n for client_names in clients_by_holder.values() for n in client_names],
        ):
            check_name(name, names, "client")
        return {holder: tuple(client_names) for holder, client_names in clients_by_holder.items()}

    def _bytes_down(self, method: Method, ids: Tensor) -> Tensor:
        """Return the bytes sent to each client, [J], with 0 for clients that do not train."""
        received = downloaded(method, self.state.server, self.roster.cohort(ids))
        total = torch.zeros(self.roster.clients, dtype=torch.long)
        total[ids] = method.message_bytes(received) if received else 0
        return total
