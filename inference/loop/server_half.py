"""The server's half of a round: who takes part, what goes down, what comes of the replies.

It needs no rows: of the data it asks who the clients are and how many rows each has.
"""

from __future__ import annotations

import pyro
import torch
from torch import Tensor

from pyrofl.data import Federation, Roster
from pyrofl.inference.description import constants_hash
from pyrofl.inference.loop.client_half import Reply
from pyrofl.inference.loop.messages import agreed, form_of, inbox, merged, unlike
from pyrofl.inference.loop.origin import rows_of
from pyrofl.inference.loop.participation import Draw, drawn
from pyrofl.inference.loop.state import Round, to_data
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Seed, Stream, stream
from pyrofl.inference.servers.averages import CannotMerge
from pyrofl.tensors import Tensors, as_tensors, cut, join_up, pick, role, unwritten
from pyrofl.turns import in_turn


@in_turn  # as layers draw by torch's own generator, which is the process's
def first(
    method: Method, data: Federation | Roster, seed: Seed, server: Tensors | None = None
) -> Round:
    """Return the state before round one; rows that `init` has of clients are dealt by name."""
    if server is None:
        server = as_tensors(
            "what init returns", method.init(stream(seed, Stream.START), data.clients)
        )
        place = torch.tensor(sorted(range(data.clients), key=data.names.__getitem__)).argsort()
        server = server | {n: v[place] for n, v in pick(server, method.per_client).items()}
    server = to_data(as_tensors("server", server), data)
    seen, names = torch.zeros(data.clients, dtype=torch.bool), data.names[: data.clients]
    rows = rows_of(data) if isinstance(data, Federation) else None
    constants = constants_hash(method)
    return Round(0, server, {}, seen, names=names, rows=rows, constants=constants)


def called(
    method: Method, clients: int, seed: Seed, number: int, participation: Draw, trains: Draw | None
) -> tuple[Tensor, Tensor]:
    """Return who is to report in a round, and who is to train, both sorted."""
    source = stream(seed, Stream.WHO, number)
    asked = drawn(participation(source, clients), clients)
    if trains is not None:
        return asked, drawn(trains(source, clients), clients)
    return asked, torch.arange(clients) if method.all_train else asked


class Gathering:
    """Takes the replies of a round as they come, and makes the next state of them."""

    def __init__(
        self,
        method: Method,
        data: Federation | Roster,
        state: Round,
        asked: Tensor,
        keep_messages: bool = True,
    ) -> None:
        """Begin; `asked` are sorted ids of those whose message may come."""
        self.method, self.data, self.state, self.asked = method, data, state, asked
        own = {n: v.clone() for n, v in state.server.items()}
        self.letters = inbox(method, own, asked, keep_messages)
        self.replies: list[Reply] = []

    def take(self, reply: Reply) -> None:
        """Take the reply of some clients, of which the message goes to the inbox."""
        self.letters.take(reply.form, reply.sender, reply.message)
        reply.message = {}
        self.replies.append(reply)

    def close(self, seed: Seed, silent: Tensor) -> tuple[Round, Tensor]:
        """Return the next state, but for what clients keep, and ids of those that may keep it.

        These are all that trained but those whose message was missed, was bad or not merged.
        """
        form = self._rejecting()
        reasons = [reason for reply in self.replies for reason in reply.reasons]
        told = join_up(reply.told for reply in self.replies)
        told |= {"good": torch.tensor([not reason for reason in reasons], dtype=torch.bool)}
        told = cut(told, told["ids"].argsort())
        heard = told["good"] & torch.isin(told["ids"], self.asked)
        who, server, bad = self.data.who(told["ids"][heard]), self.state.server, list[str]()
        message = self.letters.left(form, who)
        try:
            if len(who.ids):
                source = stream(seed, Stream.MERGE, self.state.number)
                with torch.no_grad(), pyro.validation_enabled(False), unwritten("merge", message):
                    new = self.letters.merged(form, message, who, source)
                new = to_data(as_tensors("what merge returns", new), self.data)
                server, bad = merged(server, new, len(who.ids))
        except CannotMerge as error:
            bad = [f"the server: {error}"]
        lost = torch.cat([silent, who.ids.cpu()[: len(who.ids) * bool(bad)]])
        kept = told["ids"][told["good"] & ~torch.isin(told["ids"], lost)]
        after = Round(
            number=self.state.number + 1,
            server=server,
            private={},
            seen=self.state.seen,
            who=who,
            message=message,
            trained=told["ids"],
            rejected=(*filter(None, reasons), *bad),
            loss=role("loss", told),
            begun=role("begun", told),
            steps=told["steps"],
            silent=silent,
            down=told["down"],
            up=told["up"][heard],
            names=self.state.names,
            rows=self.state.rows,
            constants=self.state.constants,
        )
        return after, kept

    def _rejecting(self) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
        """Return the form that messages must have, once clients with another one are rejected."""
        votes = [(reply.form, reply.reasons.count("")) for reply in self.replies]
        form = agreed(votes, form_of(self.state.message), self.state.server)
        for reply in self.replies:
            if odd := unlike(reply.form, form):
                reply.reasons = [
                    reason or f"{self.data.names[i]}: {odd}"
                    for reason, i in zip(reply.reasons, reply.told["ids"].tolist(), strict=True)
                ]
        return form
