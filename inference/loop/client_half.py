"""The clients' half of a round: they train, write their messages and keep what is theirs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pyrofl.data import Federation, Who
from pyrofl.inference.loop.local import Streams, train
from pyrofl.inference.loop.messages import Form, form_of, inspect
from pyrofl.inference.loop.state import sent_up
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Seed, Stream, stream
from pyrofl.tensors import Tensors, as_tensors, cut, under


@dataclass
class Reply:
    """What clients that trained side by side tell the server."""

    sender: Who  # of the messages: those that are to report and have nothing to complain of
    message: Tensors  # [M, ...] of these
    form: Form
    reasons: list[str]  # what is wrong with each that trained, or ""
    told: Tensors  # ids, steps, bytes down and up, losses: [C]


def work(
    method: Method,
    data: Federation,
    who: Who,
    received: Tensors,
    private: Tensors,
    asked: Tensor,
    *,
    seed: Seed,
    number: int,
) -> tuple[Reply, Tensor, Tensors]:
    """Train clients side by side; those of them that are `asked` report.

    Args:
        method: of the round.
        data: with the rows of these clients.
        who: the clients.
        received: what came down, [C, ...].
        private: what they keep, see `at_hand`, [C, ...].
        asked: ids of clients whose message may go up.
        seed: of the run.
        number: rounds done before.

    Returns:
        The reply, the ids of those whose numbers are good, [G], and what these keep now, [G, ...].
    """
    local, loss, steps, begun = train(
        method, received, private | received, data, who, seed=seed, number=number
    )
    mine = {n: local[n] for n in private}
    with torch.no_grad():
        message = sent_up(method, received, local)
    watched = mine | {f"its loss of {n}": v for n, v in loss.items()}
    reasons = inspect(message, watched, who, data.names, method.rules)
    ids, good = who.ids.cpu(), torch.tensor([not r for r in reasons])
    heard = good & torch.isin(ids, asked)
    letter: Tensors = {}
    if bool(good.any()):
        at = heard.nonzero().flatten()
        own = partial(stream, seed, Stream.PRIVACY, number)
        sources = Streams(own, [data.names[i] for i in ids[at].tolist()])
        at = at.to(data.device)
        protected = method.protect(cut(received, at), cut(message, at), sources)
        letter = as_tensors("what protect returns", protected)
    up = torch.zeros(len(ids), dtype=torch.long)
    up[heard] = method.weigh(letter) if letter else 0
    down = method.weigh(received) if received else torch.zeros_like(up)
    told = {"ids": ids, "steps": steps, "down": down, "up": up}
    told |= under("loss", loss) | under("begun", begun)
    reply = Reply(data.who(ids[heard]), letter, form_of(message), reasons, told)
    return reply, ids[good], cut(mine, good.nonzero().flatten().to(data.device))
