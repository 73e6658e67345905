"""A check of a method and its data before round one: what would give wrong numbers silently.

The method makes a round on a few rows of a few clients. Its programs are traced, and run again in
another order of the rows: the likelihood of a row may depend on nothing but that row and what is
known of the client. The same clients run together and alone, with other padding and with other
states of the global random generators: what comes of a client must stay the same. Where clients
have few rows, their programs run on all of these, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches

import pyro
import torch
from torch import Tensor

from pyrofl.arguments import Count, checked
from pyrofl.data.federation import Federation, a_row
from pyrofl.inference.aggregation.aggregator import Aggregator
from pyrofl.inference.aggregation.averages import AggregationError
from pyrofl.inference.engine.messages import merged
from pyrofl.inference.engine.state import RoundState, client_inputs, to_data
from pyrofl.inference.metadata import (
    INCOMPARABLE,
    Mark,
    Moments,
    Monitor,
    Optimal,
    Rule,
    WireCost,
    of_kind,
)
from pyrofl.inference.method import GradientStep, Method
from pyrofl.inference.seeds import Stream, stream
from pyrofl.inference.validation.gradients import ROWS, WatchedStep, refuse_still, watched
from pyrofl.inference.validation.independence import Drew, Made, Mixed, Trial, filled, undrawn
from pyrofl.inference.validation.program_checker import Look
from pyrofl.inference.validation.repeatability import Reruns
from pyrofl.returned import as_tensors, calling, explained, is_of_library
from pyrofl.tensors import Tensors, cut, default_type, matches, pick
from pyrofl.turns import synchronized

MANY = 200  # rows of a client up to which all of them may be looked at


@checked
@synchronized
def validate_method(
    method: Method,
    data: Federation,
    *,
    chunk_size: Count | None = None,
    server_state: Tensors | None = None,
) -> None:
    """Refuse a method that would give wrong numbers on these data, in one line with the remedy.

    `fit` and `federate` call it before round one, unless check=False. The two clients run together
    and alone, with the same noise, through programs, losses, closed forms, upload, view and
    statistics: what comes of a client must be equal but for rounding.

    Args:
        method: any.
        data: the federation; of the clients two that train and one that is held out are looked at.
        chunk_size: clients side by side; with 1 a single client is looked at.
        server_state: first state, instead of `method.init`.

    Raises:
        ValueError: if a latent site lies outside `batch.clients()`, or inside `batch.rows()` with a
            guide that is the same for every row; an observed one lies outside `batch.rows()`; there
            is none, or two observe the same; there is a `pyro.param`; a parameter of a
            distribution, or a response, is outside its constraint; what comes of a client depends
            on other clients or on padding; rows depend on each other, where clients train on
            minibatches; a function draws from a global random generator, or gives other numbers
            each time; a program writes into what it is given; no gradient reaches a tensor or a
            site on which the loss depends; a pattern of names matches nothing; the aggregation or
            a view makes a tensor of a new name; or the method fails on these rows.

    Warns:
        UserWarning: if the guide reads a tensor that nothing moves, or the loss reads one that is
            moved and does not depend on it.
    """
    if not method.phases:
        raise ValueError("phases are (), so no client would train; expected at least one Phase")
    for phase in (*method.phases, *method.adapt):
        phase.count_epochs(data.cohort(torch.arange(data.clients)).ids)
    minibatches = any(phase.batch for phase in (*method.phases, *method.adapt))
    few, ids = _few(method, data, alone=chunk_size == 1)
    with pyro.get_param_store().scope(), pyro.validation_enabled(False):
        try:
            _in_both_precisions(method, filled(few), ids, server_state)
        except ValueError as error:
            # Programs may be made for just as many rows as clients have.
            if minibatches or not _is_of_program(error) or int(data.sizes.max()) > MANY:
                raise
            whole = _whole(few, data, few.names)
            try:
                _in_both_precisions(method, filled(whole), ids, server_state)
            except ValueError:
                raise error from None
        if few.clients > 1 and int(data.sizes.max()) <= MANY:
            # With all their rows, and the smallest first: programs may read sizes or masks.
            names = (*few.names[few.clients - 1 :: -1], *few.names[few.clients :])
            whole = filled(_whole(few, data, names))
            with suppress(KeyError, RuntimeError, IndexError, TypeError, AttributeError):
                _in_both_precisions(method, whole, ids.flip(0), server_state, _look_at_clients)


def _whole(few: Federation, data: Federation, names: tuple[str, ...]) -> Federation:
    """Return few clients with all their rows, in the order of their names."""
    rows = tuple(data.train[data.names.index(n)] for n in names)
    return replace(few, train=rows, names=names)


def _is_of_program(error: BaseException) -> bool:
    """Say whether an error was raised inside a function of the method, by Pyro or torch."""
    error = error.__cause__ or error
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    return frame is None or not str(frame.tb_frame.f_globals["__name__"]).startswith("pyrofl.")


def _in_both_precisions(
    method: Method,
    few: Federation,
    ids: Tensor,
    server: Tensors | None,
    look: Callable[[Method, Federation, Tensor, Tensors | None], None] | None = None,
) -> None:
    """Look at a method; where rounding may be to blame, once more in double precision."""
    look = look or _look
    try:
        look(method, few, ids, server)
    except Mixed:
        if few.dtype == torch.float64 or few.device.type == "mps":
            raise
        with default_type(torch.float64), suppress(RuntimeError, IndexError, TypeError):
            return look(method, few.to(few.device, torch.float64), ids, server)
        raise


def _look(method: Method, few: Federation, ids: Tensor, server: Tensors | None) -> None:
    """Look at a method on a few rows; see `validate_method`."""
    first = _first(method, few, ids, server)
    state = RoundState(0, first, {}, torch.zeros(few.clients).bool())
    written, steps = set[str](), list[WatchedStep]()
    phases = (*method.phases, *method.adapt)
    short = tuple(watched(phase, written, steps) for phase in phases)
    trial = Trial(method, few, state, short)
    made = _made(trial)
    if not all(v.isfinite().all() for v in made.local.values()):
        return  # the round says so, and names the clients
    training = slice(few.clients)
    received, local = (cut(t, training) for t in (made.received, made.local))
    look = Look(method, few, received, local)
    look.refuse_wrong_sites()
    look.refuse_broken_constraints()
    again = Reruns(look, any(phase.batch for phase in phases))
    again.refuse_mixed_rows()
    again.refuse_mixed_clients()
    again.refuse_cut_sites()
    refuse_still(trial, steps)
    trial.refuse_mixed_clients(made, again.refuse_mixed_clients)
    message = trial.message(made)
    refuse_idle_pools(method, state.server, message)
    after = _aggregated(method, few, state.server, message)
    refuse_idle_patterns(method, local, state.server, after, message | received, look.sites)
    refuse_odd_views(method, look)
    trial.refuse_mixed_results(made)
    look.warn_of_still_tensors({n: v for n, v in made.known.items() if n not in written})


def _look_at_clients(method: Method, few: Federation, ids: Tensor, server: Tensors | None) -> None:
    """Look at the programs alone, for clients together and apart."""
    first = _first(method, few, ids, server)
    state = RoundState(0, first, {}, torch.zeros(few.clients).bool())
    received, private = client_inputs(method, few, state, few.cohort(torch.arange(few.clients)), 0)
    again = Reruns(Look(method, few, received, private | received), False)
    if not again.of_rows:
        again.refuse_mixed_clients()


def _first(method: Method, few: Federation, ids: Tensor, given: Tensors | None) -> Tensors:
    """Return the server's first state; refuse one that lacks what the method begins with."""
    with calling("init"), undrawn("init", few.device):
        made = method.init(stream(0, Stream.START), few.clients)
    server = as_tensors("what init returns", made)
    if given is not None:
        lacking = [n for n in server if n not in as_tensors("server", given)]
        if lacking:
            raise ValueError(
                f"server lacks {', '.join(lacking)}; expected a state of this method, with "
                f"{', '.join(server)}"
            )
        for name in (n for n in server if not matches(n, f"server/* {method.per_client}")):
            if given[name].shape != (shape := server[name].shape):
                raise ValueError(
                    f"server holds {name!r} of shape {list(given[name].shape)}; expected "
                    f"{list(shape)}, as init makes it"
                )
        server = given | {n: v[ids] for n, v in pick(given, method.per_client).items()}
    return to_data(server, few)


def _made(trial: Trial) -> Made:
    """Return what comes of the method's phases, or say that they fail."""
    few = trial.data

    def look() -> Look:
        """Run the programs before the phases."""
        cohort = few.cohort(torch.arange(few.clients))
        received, private = client_inputs(trial.method, few, trial.state, cohort, 0)
        return Look(trial.method, few, received, private | received)

    try:
        with undrawn("a loss", few.device):
            return trial.made(trial.ids)
    except Drew:
        look().refuse_wrong_sites()  # which names the program, if it is one
        raise
    except Exception as error:
        if isinstance(error, ValueError) and not is_of_library(error):
            raise
        with suppress(KeyError, RuntimeError, IndexError, TypeError, AttributeError):
            look().refuse_odd_responses()
        raise ValueError(
            f"the method fails on the first rows of {few.names[0]!r}, x {a_row(few.x)} and "
            f"y {a_row(few.y)}: {explained(error)}"
        ) from error


def _few(method: Method, data: Federation, alone: bool) -> tuple[Federation, Tensor]:
    """Return the largest client and the smallest, and one that is held out, with few rows each.

    With them come the ids of those that train. The smallest has fewer rows than a minibatch, so
    that there is padding.
    """
    batches = [phase.batch for phase in (*method.phases, *method.adapt) if phase.batch]
    rows = (ROWS, 1 if 2 in batches else 2, 1)
    order = data.sizes[: data.clients].argsort(descending=True, stable=True).tolist()
    good = [i for i in order if _finite(data, i)]
    order = good or order  # a bad client is left out and named in every round
    train = order[:1] if alone or len(order) == 1 else [order[0], order[-1]]
    ids = [*train, *([] if alone else range(data.clients, len(data.train)))[:1]]
    few = replace(
        data,
        train=tuple(_beginning(data, i)[:n] for i, n in zip(ids, rows, strict=False)),
        test=tuple(data.test[i][:0] for i in ids),
        names=tuple(data.names[i] for i in ids),
        held_out=len(ids) - len(train),
        pooled_test=None,
    )
    return few, torch.tensor(train)


def _beginning(data: Federation, client: int) -> Tensor:
    """Return a client's first training rows, at most ROWS, of those that do not weigh 0."""
    rows = data.train[client]
    return (rows if data.weights is None else rows[data.weights[rows] > 0])[:ROWS]


def _finite(data: Federation, client: int) -> bool:
    """Say whether the rows of a client that are looked at are finite."""
    rows = _beginning(data, client)
    return bool(data.x[rows].isfinite().all() and data.y[rows].isfinite().all())


def refuse_idle_patterns(
    method: Method,
    local: Tensors,
    server: Tensors,
    after: Tensors | None,
    travels: Tensors,
    sites: list[str],
) -> None:
    """Refuse a pattern of names that matches nothing, naming the nearest."""
    asked: list[tuple[str, str, Iterable[str]]] = [
        (f"step {move.names!r} of {kind}", move.names, local)
        for kind in ("phases", "adapt")
        for phase in getattr(method, kind)
        for move in phase.updates
        if isinstance(move, GradientStep)
    ]
    for names, mark in of_kind(method.metadata.tensors, Mark).items():
        of_sites = names in method.shared
        held = local if mark is INCOMPARABLE else server
        asked.append((f"fact {mark.text!r}", names, sites if of_sites else held))
    for names in {
        **of_kind(method.metadata.tensors, Rule),
        **of_kind(method.metadata.tensors, WireCost),
    }:
        asked.append(("fact about messages", names, travels))
    for names in of_kind(method.metadata.tensors, Moments):
        asked.append(("fact about movement", names, {**server, **local}))
    if after is not None:
        asked += [("Monitor", names, after) for names in of_kind(method.metadata.tensors, Monitor)]
    for names, best in of_kind(method.metadata.tensors, Optimal).items():
        asked.append(("fact about the optimum", f"{names} {best.mean} {best.root}", local))
        asked.append(("fact about the optimum", " ".join(best.sites), sites))
    for what, patterns, known in asked:
        for pattern in idle(patterns, known):
            raise ValueError(
                f"{pattern!r} in the {what} matches no name; {nearest(pattern, known)}"
            )


def refuse_idle_pools(method: Method, server: Tensors, message: Tensors) -> None:
    """Refuse a pattern of the aggregation that matches nothing while a name is pooled by none."""
    if isinstance(aggregate := method.aggregate, Aggregator):
        sent = {n: v for n, v in aggregate.transformed(server, message).items() if n in server}
        used = [patterns for _, patterns in aggregate.groups(sent)]
        for hidden in (p for p in aggregate.weights if p not in used):
            if known := [n for n in sent if matches(n, hidden)]:
                raise ValueError(
                    f"{hidden!r} in the aggregation has no effect, as an earlier pattern matches "
                    f"{known[0]!r}; expected it before that pattern"
                )
        left = [n for n in sent if not any(matches(n, p) for p in aggregate.weights)]
        for pattern in idle(" ".join(aggregate.weights), sent) if left else ():
            raise ValueError(
                f"{pattern!r} in the aggregation matches no name, so {left[0]!r} would stay as "
                f"it is; {nearest(pattern, left)}"
            )


def _aggregated(
    method: Method, few: Federation, server: Tensors, message: Tensors
) -> Tensors | None:
    """Return the server's next state by an `Aggregator`; refuse messages that add to it."""
    if not isinstance(method.aggregate, Aggregator):
        return None
    cohort = few.cohort(torch.arange(few.clients))
    try:
        with calling(f"the aggregation of messages of {', '.join(message) or 'nothing'}"):
            made = method.aggregate(server, message, cohort, stream(0, Stream.MERGE))
    except AggregationError:
        return None  # three clients may be too few for it
    after = to_data(as_tensors("what aggregate returns", made), few)
    merged(server, after, few.clients)
    # What begins with server/ is the memory of the server's own optimiser or sampler.
    for name in (n for n in after if n not in server and not n.startswith("server/")):
        raise ValueError(
            f"the aggregation puts {name!r} into the server's state, which has "
            f"{', '.join(server) or 'nothing'}; expected messages with the names of that state, or "
            f"an aggregation that leaves {name!r} out"
        )
    return after


def refuse_odd_views(method: Method, look: Look) -> None:
    """Refuse a view that sets what no program has ever seen, or lacks what the programs read."""
    received, local = look.received, look.local
    known = received | local
    for view in method.views:
        found = method.read_view(view, received, local)
        for model in found if isinstance(found, list) else [found]:
            for name in (n for n in model if n not in known):
                raise ValueError(
                    f"view {view!r} sets {name!r}, which neither arrives nor is the client's own; "
                    f"expected one of {', '.join(known)}"
                )
            try:
                look.run(look.batch, received, model)
            except KeyError as error:
                raise ValueError(
                    f"view {view!r} lacks {error}, which the programs read; expected a dict with it"
                ) from error


def idle(patterns: str, names: Iterable[str]) -> list[str]:
    """Return those patterns that match none of the names."""
    return [p for p in patterns.split() or [""] if not any(matches(n, p) for n in names)]


def nearest(pattern: str, names: Iterable[str]) -> str:
    """Name what a pattern may have been meant to match."""
    near = get_close_matches(pattern, list(names), 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
