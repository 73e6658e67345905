"""Validation of the scores that remote clients send, and their combination."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from pyrofl.data import Roster
from pyrofl.inference.definition.seeds import Seed
from pyrofl.inference.evaluation.evaluate import Scores
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.transport.message_checks import (
    EVALUATION_SETTINGS,
    MAX_QUOTED_CHARACTERS,
    MAX_SHOWN_CHARACTERS,
    Flat,
    column,
    one_line,
    own_client_names,
    whole_number,
)
from pyrofl.inference.transport.message_checks import tensors as tensors_of
from pyrofl.metrics import RANGES

MAX_TEST_ROWS = 1_000_000  # of a client with few training rows; of others 1,000 times these


@dataclass(frozen=True)
class ScoreReply:
    """Valid scores of the clients of one machine, and the evaluation that they belong to."""

    holder: str
    about: Flat
    names: tuple[str, ...]
    rows: list[int]
    values: dict[str, list[float]]  # metric -> number of each client


@dataclass(frozen=True)
class ScoreParser:
    """Parser and validator of the replies to one evaluation request.

    Attributes:
        roster: names and sizes of all clients.
        holders: sender -> names of the clients that it answers for.
        questions: evaluations that were requested, if that is known.
        seed: seed of the run.
    """

    roster: Roster
    holders: Mapping[str, Sequence[str]]
    questions: Sequence[Flat]
    seed: Seed

    def read(self, answers: Mapping[str, Mapping[str, Any]]) -> Scores:
        """Return the scores of all valid replies, and a reason for each one that is left out.

        Raises:
            ValueError: if no reply has valid scores; the message has the reasons.
        """
        valid, refused = list[ScoreReply](), list[str]()
        for holder in sorted(answers):
            try:
                valid.append(self._reply(holder, answers[holder]))
            except Exception as error:  # whatever a reply of others causes
                refused.append(
                    f"{one_line(holder, MAX_QUOTED_CHARACTERS)}: "
                    f"{one_line(str(error), 2 * MAX_SHOWN_CHARACTERS)}"
                )
        valid, about = self._of_one_evaluation(valid, refused)
        valid, metrics = _with_metrics(valid, refused)
        if not valid:
            why = f": {'; '.join(refused)}" if refused else ""
            raise ValueError(
                f"no client has replied with valid scores{why}; expected at least one reply with "
                "scores"
            )
        return self._scores(valid, about, metrics, refused)

    def _reply(self, holder: str, flat: Mapping[str, Any]) -> ScoreReply:
        """Parse the reply of one machine; raise ValueError if it is invalid."""
        names = own_client_names(holder, flat, self.holders)
        about: Flat = {"round": whole_number(flat, "round")}
        for n in EVALUATION_SETTINGS:
            if n in flat and n != "metrics":
                about[n] = whole_number(flat, n) if n == "draws" else _text(flat, n)
        EvaluationSpec.of({n: v for n, v in about.items() if n != "round"})
        rows = column(flat, "rows", len(names), torch.long).tolist()
        part, sizes = about.get("part", "test"), self.roster.sizes
        for name, count in zip(names, rows, strict=True):
            size = int(sizes[self.roster.names.index(name)])
            least, most = (size, size) if part == "train" else (1, _most_rows(size))
            if not least <= count <= most:
                valid = f"{least:,}" if least == most else f"{least:,} to {most:,}"
                raise ValueError(f"{name} has {count:,} {part} rows; expected {valid}")
        largest = 1e100 if self.roster.dtype == torch.float64 else 1e31  # so that means are finite
        values = {n: _numbers(flat, n, len(names)) for n in tensors_of("score", flat)}
        for n, client_values in values.items():
            low, high = RANGES.get(n, (-torch.inf, torch.inf))
            if n == "nll" and "accuracy" in values:
                low = 0.0
            for name, value in zip(names, client_values, strict=True):
                if not (
                    isfinite(value)
                    and low - ROUNDING_TOLERANCE <= value <= high + ROUNDING_TOLERANCE
                ):
                    raise ValueError(f"{n} of {name} is {value:g}; expected {_range(low, high)}")
                if abs(value) > largest:
                    raise ValueError(f"{n} of {name} is {value:g}; expected at most {largest:g}")
        return ScoreReply(holder, about, names, rows, values)

    def _of_one_evaluation(
        self, replies: list[ScoreReply], refused: list[str]
    ) -> tuple[list[ScoreReply], Flat]:
        """Return the replies to the requested evaluation, or if none is known to that of most."""
        requested = [
            one.about for one in replies if one.about in self.questions or not self.questions
        ]
        usual = self.questions[-1] if self.questions else {}
        about = max(
            requested, key=lambda it: _clients(replies, lambda one: one.about == it), default=usual
        )
        for one in replies:
            if one.about != about:
                refused.append(f"{one.holder}: replies to {one.about}; expected replies to {about}")
        return [one for one in replies if one.about == about], about

    def _scores(
        self,
        replies: Sequence[ScoreReply],
        about: Flat,
        metrics: Sequence[str],
        refused: Sequence[str],
    ) -> Scores:
        """Combine valid replies, ordered by client."""
        places = [
            (self.roster.names.index(n), r, c) for r in replies for c, n in enumerate(r.names)
        ]
        places.sort(key=lambda place: place[0])
        dtype = self.roster.dtype
        return Scores(
            **{n: v for n, v in about.items() if n != "round"},
            seed=self.seed,
            ids=torch.tensor([i for i, *_ in places]),
            rows=torch.tensor([one.rows[c] for _, one, c in places]),
            values={
                n: torch.tensor([one.values[n][c] for _, one, c in places], dtype=dtype)
                for n in metrics
            },
            rejected=tuple(refused),
            names=tuple(self.roster.names[i] for i, *_ in places),
        )


ROUNDING_TOLERANCE = 1e-3  # of a score that is at the end of its range


def _with_metrics(
    replies: list[ScoreReply], refused: list[str]
) -> tuple[list[ScoreReply], list[str]]:
    """Return the replies with all metrics that more than half of the clients sent, and these."""
    replies = [one for one in replies if one.names]
    every = list(dict.fromkeys(n for one in replies for n in one.values))
    clients = _clients(replies, lambda one: True)
    senders = {n: [one for one in replies if n in one.values] for n in every}
    common = [n for n in every if 2 * _clients(senders[n], lambda one: True) > clients]
    for one in replies:
        if not one.values:
            refused.append(f"{one.holder}: it sends rows without scores; expected both")
        elif lacking := [n for n in common if n not in one.values]:
            reason = f"{one.holder}: it sends no {lacking[0]}; expected all metrics of most clients"
            refused.append(reason)
    return [one for one in replies if one.values and not {*common} - {*one.values}], common


def _clients(replies: Sequence[ScoreReply], which: Callable[[ScoreReply], bool]) -> int:
    """Return the number of clients in those replies that satisfy a condition."""
    return sum(len(one.names) for one in replies if which(one))


def _numbers(flat: Mapping[str, Any], metric: str, count: int) -> list[float]:
    """Return a metric of the clients in a reply; raise ValueError unless it is a number of each."""
    value = flat[f"score/{metric}"]
    if not value.is_floating_point():
        raise ValueError(f"score/{metric} is {value.dtype}; expected torch.float64")
    numbers: list[float] = column(flat, f"score/{metric}", count, value.dtype).tolist()
    return numbers


def _text(flat: Mapping[str, Any], name: str) -> str:
    """Return a text of a reply; raise ValueError for other values."""
    value = flat[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is a {type(value).__name__}; expected a string")
    return one_line(value, MAX_QUOTED_CHARACTERS)


def _most_rows(size: int) -> int:
    """Return the largest plausible number of test rows of a client."""
    return max(MAX_TEST_ROWS, 1000 * size)


def _range(low: float, high: float) -> str:
    if not isfinite(low) and not isfinite(high):
        return "a finite number"
    return f"{low:g} to {high:g}" if isfinite(high) else f"at least {low:g}"
