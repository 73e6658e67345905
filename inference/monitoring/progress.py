"""Progress display of a fit: a bar in a terminal or notebook, otherwise about ten lines."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from torch import Tensor

from pyrofl.inference.definition.elbo import Elbo
from pyrofl.inference.definition.method import GradientStep, Method
from pyrofl.inference.definition.programs import Guide
from pyrofl.inference.engine.state import RoundState

NUM_LINES = 10  # lines of a run without a bar
ALWAYS_PRINTED_ROUNDS = 5  # rounds that are all printed in a run that may stop early


class Progress:
    """Progress display on stderr: completed rounds, losses and messages."""

    def __init__(
        self, rounds: int, begun: int, sizes: Tensor, shown: bool, early: bool = False
    ) -> None:
        """Create the display of a fit with `rounds` rounds, of which `begun` are complete.

        `early` states whether it may stop before.
        """
        self.rounds, self.sizes, self.shown = rounds, sizes, shown
        self.first = begun + ALWAYS_PRINTED_ROUNDS if early else 0
        self.bar: Any = None
        if shown and (sys.stderr.isatty() or in_notebook()):
            from tqdm.auto import tqdm

            self.bar = tqdm(total=rounds, initial=begun, unit="round")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def tell(self, text: str) -> None:
        """Print a line of text to stderr, above the progress bar if there is one."""
        if self.bar is not None:
            self.bar.write(text, sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def add(self, method: Method, state: RoundState) -> None:
        """Display the completion of a round and its mean loss."""
        loss = loss_text(method, state, self.sizes) if self.shown else ""
        if self.bar is not None:
            self.bar.set_postfix_str(loss)
            self.bar.update()
        elif self.shown and (state.number <= self.first or _is_printed(state.number, self.rounds)):
            self.tell(f"round {state.number}/{self.rounds}{loss and f'  {loss}'}")


def in_notebook() -> bool:
    """Return whether the process is a notebook kernel that can display a progress bar."""
    ipython = sys.modules.get("IPython")
    # A kernel has an attribute of this name; an imported ipykernel is not sufficient.
    kernel = ipython and getattr(ipython.get_ipython(), "kernel", None)
    return kernel is not None and find_spec("ipywidgets") is not None


def _is_printed(number: int, rounds: int) -> bool:
    """Return whether a progress line is printed after a round, about ten times per run.

    >>> [r for r in range(1, 26) if _is_printed(r, 25)]
    [3, 6, 9, 12, 15, 18, 21, 24, 25]
    """
    return number == rounds or number % -(-rounds // NUM_LINES) == 0


def loss_text(method: Method, state: RoundState, sizes: Tensor) -> str:
    """Return the mean loss of each gradient step in a round, as text for display.

    Losses that are sums over rows are divided by the number of rows.

    Args:
        method: method with these steps.
        state: state after a round.
        sizes: [J], training rows of every client.
    """
    rows, per_row, others = sizes[state.trained.cpu()], list[str](), list[str]()
    steps = [s for phase in method.phases for s in phase.updates if isinstance(s, GradientStep)]
    # An ELBO is a sum over rows or, with mean=True, a mean; other losses have their own units.
    is_mean = {s.names: s.loss.mean for s in steps if isinstance(s.loss, Elbo)}
    for names, value in state.loss.items():
        each = value.cpu() / rows if is_mean.get(names) is False else value
        text = f"{step_label(method, names)} {float(each[each.isfinite()].mean()):.3g}"
        (per_row if names in is_mean else others).append(text)
    groups = {"loss per row: ": per_row, "loss: ": others}
    return "; ".join(unit + ", ".join(texts) for unit, texts in groups.items() if texts)


def step_label(method: Method, names: str) -> str:
    """Return a short label for the tensors that a gradient step trains, such as "posterior".

    >>> from pyrofl import nets
    >>> from pyrofl.models import pfedvem
    >>> method = pfedvem.build(nets.build("mlp:2", input_shape=(3,), outputs=2))
    >>> step_label(method, "mu/* pi/*"), step_label(method, "base/*")
    ('posterior', 'base')
    """
    if method.metadata.sites:  # of a user's program, whose sites are not the tensors of the guide
        return "posterior"
    guide: Any = method.guide
    if isinstance(guide, Guide) and names == guide.names:
        return "posterior" if guide.random else "weights"
    return ", ".join(dict.fromkeys(name.partition("/")[0] for name in names.split()))
