"""Records of the rounds of a run: losses, bytes sent, reporting and rejected clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyrofl.inference.definition.metadata import (
    Moments,
    metadata_of_class,
    monitored_numbers,
    unfinished_reason,
)
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.messages import SERVER_FAILED_PREFIX
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.monitoring.losses import comparable
from pyrofl.inference.monitoring.parameter_changes import Moved, movement
from pyrofl.tensors import Tensors

FAILURE_FACTOR = 2.0  # times its limit, a monitored number above which one round shows a failure


@dataclass(frozen=True)
class RoundRecord:
    """Record of one round: losses, bytes sent, reporting and rejected clients."""

    number: int
    seconds: float  # wall-clock time, without evaluation
    bytes_down: int  # bytes sent to all clients
    bytes_up: int  # bytes sent by them
    rejected: tuple[str, ...]  # clients with an invalid message or state, and the reason
    trained: list[int]  # ids
    steps: list[int]  # gradient steps that each of these made
    reported: list[int]  # ids of clients with an aggregated message
    silent: list[int]  # ids of selected clients that did not report
    loss: Tensors  # mean of every step by its names, [J]; NaN where a client did not train
    first_loss: Tensors  # loss of the first of these steps, as `loss`, where rounds are comparable
    moved: Moved | None  # changes of sites, see `movement`; None: nothing was aggregated
    watched: dict[str, float]  # monitored numbers of the server, see `Monitor`
    undamped: bool = False  # all clients reported, and their updates were applied in full
    exact: bool = False  # the server's draws are of the exact posterior
    unfinished: str = ""  # why the run cannot have converged
    unreliable: str = ""  # the same, if further rounds may not help
    failed: str = ""  # why another method of the model should continue
    noise: float = 0.0  # change of moments, in sds, that their Monte Carlo error explains

    @classmethod
    def of(cls, state: RoundState, old: RoundState, method: Method, seconds: float) -> RoundRecord:
        """Create the record of a round from the states after and before the round."""
        tensors = method.metadata.tensors
        seen, every = (
            monitored_numbers(tensors, state.server),
            list(metadata_of_class(tensors, Moments)),
        )
        is_exact = getattr(method.views[method.posterior_view], "exact", None)
        everyone = len(state.reporters.ids) == len(state.seen) and not state.rejected
        return cls(
            number=state.number,
            seconds=seconds,
            bytes_down=int(state.bytes_down.sum()),
            bytes_up=int(state.bytes_up.sum()),
            rejected=state.rejected,
            trained=state.trained.tolist(),
            steps=state.steps.tolist(),
            reported=state.reporters.ids.tolist(),
            silent=state.silent.tolist(),
            loss=state.of_all(state.loss),
            first_loss=state.of_all(comparable(tensors, state.first_loss)),
            moved=movement(tensors, old, state),
            watched=seen,
            undamped=everyone and any(m.undamped for _, m in every),
            exact=is_exact is not None and is_exact(state.server),
            unfinished=unfinished_reason(tensors, seen),
            unreliable=unfinished_reason(tensors, seen, lasting=True),
            failed=unfinished_reason(tensors, seen, lasting=True, times=FAILURE_FACTOR)
            or next((text for text in state.rejected if text.startswith(SERVER_FAILED_PREFIX)), ""),
            noise=max((m.noise(state.server) for _, m in every if m.noise), default=0.0),
        )

    def told(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the record as a row of the table `Run.rounds`: column -> value."""
        return {
            "round": self.number,
            "seconds": self.seconds,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "trained": len(self.trained),
            "steps": sum(self.steps),
            "reported": len(self.reported),
            "silent": len(self.silent),
            "silent_clients": [names[i] for i in self.silent],
            "rejected": len(self.rejected),
            "rejected_reasons": list(self.rejected),
            **{f"loss {name}": float(value.nanmean()) for name, value in self.loss.items()},
            **self.watched,
        }


def taken_part(records: Sequence[RoundRecord], rounds: int, clients: int) -> list[int]:
    """Return an upper bound on the number of rounds in which each client reported."""
    heard = Counter(i for record in records for i in (*record.reported, *record.silent))
    return [heard[i] + rounds - len(records) for i in range(clients)]
