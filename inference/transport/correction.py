"""Exchanges with remote clients that correct posterior draws of the shared sites.

    found = corrected_shared(run, reporter(server, send))
    requests = configure_draws(server, found)          then Client.posterior(request) at each client

The server draws the shared sites, each client replies with its log marginal likelihoods there, and
the sum of these over all clients weighs the draws; see `pyrofl.inference.posteriors.corrected`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.data.outlines import facts, outline_federation
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors.guided_sites import CannotCorrect
from pyrofl.inference.posteriors.importance_sampling import Request
from pyrofl.inference.posteriors.shared import AskClients, SharedDraws, corrected_shared
from pyrofl.inference.transport.message_checks import (
    MAX_SHOWN_CHARACTERS,
    Flat,
    one_line,
    own_client_names,
    tensors,
    whole_number,
)
from pyrofl.inference.transport.server import Server
from pyrofl.tensors import Tensors


class RepliesNeeded(BaseException):
    """Signal that replies to an exchange are lacking; it is not an error, see `Correction`."""

    def __init__(self, requests: dict[str, Flat]) -> None:
        super().__init__("replies are needed")
        self.requests = requests


class Correction:
    """Correction of posterior draws that can be interrupted between two exchanges.

        correction = Correction(server, outline)
        while requests := correction.configure_weigh():
            correction.aggregate_weigh({n: weigh(n, one) for n, one in requests.items()})
        correction.draws

    where `weigh` calls `Client.weigh` at a client. Everything follows from the server's state and
    the replies so far, so that `Correction(server, outline, replies=correction.replies)` continues
    in another process.

    Args:
        server: the server after the last round.
        outline: the clients without rows, see `pyrofl.data.outlines.outline`.
        draws: number of draws.
        holders: as in `Server.configure_train`.
        replies: `replies` of an earlier correction of the same round.

    Attributes:
        replies: replies to each exchange so far, by machine.
        draws: the corrected draws; None before the last exchange.
    """

    def __init__(
        self,
        server: Server,
        outline: Federation,
        draws: int = 1000,
        holders: Mapping[str, Sequence[str]] | None = None,
        replies: Sequence[Mapping[str, Mapping[str, Any]]] = (),
    ) -> None:
        method = server.at(max(server.state.number - 1, 0))
        self.server, self.holders, self.count = server, holders, draws
        self._run = Run(method, outline_federation(facts(outline)), server.state, server.seed)
        self.replies = [dict(one) for one in replies]
        self.draws: SharedDraws | None = None
        self._requests: dict[str, Flat] = {}
        self._proceed()

    def configure_weigh(self) -> dict[str, Flat]:
        """Return the requests of the next exchange, for `Client.weigh`; none after the last."""
        return dict(self._requests)

    def aggregate_weigh(self, replies: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the replies to the last requests; nothing changes if one of them is invalid.

        Raises:
            ValueError: if a reply is missing or invalid, with the name of its sender.
        """
        if not self._requests:
            raise ValueError("the correction is complete; expected no further replies")
        reasons = invalid_weights(self.server, replies, self._requests, self.holders)
        if reasons:
            raise ValueError("; ".join(f"{name}: {why}" for name, why in reasons.items()))
        self.replies.append({name: replies[name] for name in self._requests})
        self._proceed()

    def _proceed(self) -> None:
        """Run the correction up to the exchange whose replies are lacking, or to its end."""
        self._requests = {}
        try:
            self.draws = corrected_shared(self._run, self._report(), self.count)
        except RepliesNeeded as needed:
            self._requests = needed.requests

    def _report(self) -> AskClients:
        def send(requests: dict[str, Flat]) -> Mapping[str, Mapping[str, Any]]:
            number = next(iter(requests.values()))["exchange"]
            if number >= len(self.replies):
                raise RepliesNeeded(requests)
            return self.replies[number]

        return reporter(self.server, send, self.holders)


Send = Callable[[dict[str, Flat]], Mapping[str, Mapping[str, Any]]]
"""Requests -> replies of `Client.weigh`, by machine."""

MAX_LOG_LIKELIHOOD = 1e100  # log marginal likelihood, so that sums over clients are finite
# Of an exchange with machines that have not replied, or with an invalid reply.
MAX_EXCHANGE_ATTEMPTS = 3


def reporter(
    server: Server, send: Send, holders: Mapping[str, Sequence[str]] | None = None
) -> AskClients:
    """Return a function that asks all clients for their marginal likelihoods.

    Args:
        server: the server after the last round.
        send: sends requests to machines, and returns the replies that have arrived; {"why": TEXT}
            is a refusal.
        holders: as in `Server.configure_train`; clients that no machine holds are missing.

    Returns:
        The function. It raises CannotCorrect with the names of missing clients or machines.
    """
    names = server.roster.names
    clients_by_holder = {name: (name,) for name in names} if holders is None else holders
    absent = sorted(set(names) - {name for own in clients_by_holder.values() for name in own})

    def report(wanted: Request, exchange: int) -> tuple[Tensor, Tensor]:
        """Return log marginal likelihoods and their relative variances, [S, J] each."""
        reasons, noise, sets = dict.fromkeys(absent, "not connected"), wanted.noise, wanted.sets
        log_likelihoods = torch.zeros(2, len(noise), len(names), dtype=torch.float64)
        about = {"exchange": exchange, "sets": sets, "more": int(wanted.more)}
        columns = {"draws": torch.tensor(wanted.draws)}
        columns |= {"shared/noise": noise.expand(len(names), *noise.shape)}
        requests = server.configure_posterior(clients_by_holder, about, columns, wanted.server)
        for _ in range(MAX_EXCHANGE_ATTEMPTS if not absent else 0):
            answers = send(requests)
            reasons = {}
            for holder in requests:
                try:
                    ids = [names.index(name) for name in clients_by_holder[holder]]
                    log_likelihoods[:sets, :, ids] = _read(
                        answers, holder, requests[holder], clients_by_holder
                    )
                except Exception as error:  # whatever a reply of others causes
                    reasons[holder] = one_line(str(error), 2 * MAX_SHOWN_CHARACTERS)
            if not reasons:
                return log_likelihoods[0], log_likelihoods[1]
            requests = {holder: requests[holder] for holder in reasons}
            if any(_refusal(answers.get(holder)) for holder in requests):
                break  # a refusal stays one
        reason_text = "; ".join(f"{holder}: {why}" for holder, why in reasons.items())
        raise CannotCorrect(
            f"not all clients have sent their marginal likelihoods ({reason_text})",
            "connect all clients",
            advice="run the last exchange again with all clients",
        )

    return report


def invalid_weights(
    server: Server,
    replies: Mapping[str, Mapping[str, Any]],
    requests: Mapping[str, Flat],
    holders: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, str]:
    """Return why replies to requests of an exchange are invalid, by machine."""
    names = server.roster.names
    clients_by_holder = {name: (name,) for name in names} if holders is None else holders
    reasons = {}
    for holder, request in requests.items():
        try:
            _read(replies, holder, request, clients_by_holder)
        except Exception as error:  # whatever a reply of others causes
            reasons[holder] = one_line(str(error), 2 * MAX_SHOWN_CHARACTERS)
    return reasons


def _read(
    answers: Mapping[str, Mapping[str, Any]],
    holder: str,
    request: Flat,
    clients_by_holder: Mapping[str, Sequence[str]],
) -> Tensor:
    """Return the tensors of a reply, [sets, S, C]; raise ValueError if it is invalid."""
    names, draws = clients_by_holder[holder], request["shared/noise"].shape[1]
    if holder not in answers:
        raise ValueError("no reply")
    answer = answers[holder]
    if why := _refusal(answer):
        raise ValueError(why)
    got = (
        own_client_names(holder, answer, clients_by_holder),
        whole_number(answer, "round"),
        whole_number(answer, "exchange"),
    )
    if got != (expected := (tuple(names), request["round"], request["exchange"])):
        raise ValueError(f"its reply is of {got}; expected {expected}")
    return _parts(tensors("up", answer), len(names), draws, request["sets"])


def _refusal(answer: Any) -> str:
    """Return the reason of a refusal, or "" for other replies."""
    why = answer.get("why") if isinstance(answer, Mapping) else None
    if why is None or isinstance(why, str):
        return one_line(why or "")
    return f"why is a {type(why).__name__}; expected a string"


def _parts(up: Tensors, clients: int, draws: int, sets: int) -> Tensor:
    """Return log marginal likelihoods and their variances, [sets, S, C]; ValueError if invalid."""
    parts = []
    for n in ("log_l", "noise")[:sets]:
        if (value := up.get(n)) is None:
            raise ValueError(f"up/{n} is missing; expected torch.float64 {[clients, draws]}")
        if value.shape != (clients, draws) or not value.is_floating_point():
            shown = f"{value.dtype} {list(value.shape)}"
            raise ValueError(f"{n} is {shown}; expected torch.float64 {[clients, draws]}")
        parts.append(value.double().mT)
    stacked = torch.stack(parts)
    if bool((stacked.isnan() | (stacked == torch.inf)).any()):
        raise ValueError("its reply has NaN or infinite numbers")
    if bool((stacked[0] > MAX_LOG_LIKELIHOOD).any()):
        raise ValueError(
            f"log_l is {float(stacked[0].max()):g}; expected at most {MAX_LOG_LIKELIHOOD:g}"
        )
    if not bool(stacked[0].isfinite().any(0).all()):
        raise ValueError("its log likelihood is not finite at any draw; expected finite numbers")
    if bool((stacked[1:] < 0).any()):
        raise ValueError(f"a variance is {float(stacked[1:].min()):g}; expected at least 0")
    return stacked


def configure_draws(
    server: Server, shared_draws: SharedDraws, holders: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Flat]:
    """Return requests, for `Client.posterior`, of draws that belong to those of the shared sites.

    Args:
        server: the server after the last round.
        shared_draws: draws of the shared sites.
        holders: as in `Server.configure_train`.
    """
    count = len(next(iter(shared_draws.values.values())))
    about: Flat = {"draws": count, "corrected": shared_draws.outcome}
    columns: Tensors = {}
    if (weights := shared_draws.diagnostics) is not None:
        about |= {"pareto_k": float(weights.k), "importance_ess": float(weights.ess)}
    if (chosen := shared_draws.resampled_index) is not None:
        columns["shared/chosen"] = chosen.expand(server.roster.clients, -1)  # [C, S]
    return server.configure_posterior(holders, about, columns)
