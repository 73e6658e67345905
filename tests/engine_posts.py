"""Workers in this process, called as if they were elsewhere."""

from __future__ import annotations

from typing import Any

import cloudpickle

from pyrofl.inference.transport.worker import Worker


class Fake:
    """Calls workers at once; what they are given and return goes through bytes."""

    def __init__(self, workers: int = 2) -> None:
        self.workers, self.calls, self.open = workers, [], True

    def hire(self, each: Any) -> None:
        self.hands = [Worker(*through(given), "cpu") for given in each]

    def share(self, value: Any) -> Any:
        return value

    def send(self, worker: int, what: str, *given: Any) -> Any:
        self.calls.append((worker, what))
        if not self.open:
            raise ChildProcessError("workers have ended")
        try:
            return worker, through(getattr(self.hands[worker], what)(*through(given))), None
        except Exception as error:
            return worker, None, error

    def result(self, ticket: Any) -> Any:
        worker, found, error = ticket
        if not self.hands[worker]:
            raise ChildProcessError(f"worker {worker} has died")
        if error:
            raise error
        return found

    def forget(self, tickets: Any) -> None:
        pass

    def close(self) -> None:
        self.open = False


def through(value: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(value))
