"""Validation of a method and its data before training, to detect silent errors.

The method runs a round on a few rows of a few clients. Its programs are traced, and run again with
another order of the rows: the likelihood of a row may only depend on that row and on the client's
tensors. The same clients run together and alone, with other padding and with other states of the
global random generators: the results of a client must stay the same.

A method with functions of the user is validated further. Where clients have few rows, its programs
also run on all of them. Up to four clients with their own ids, of up to 64 rows each, then train
together and alone, also with more padding and with far values in the others' rows; the server
aggregates their messages twice. See `client_trials`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace

import pyro
import torch
from torch import Tensor

from pyrofl.arguments import Count, checked
from pyrofl.data.federation import Federation, a_row
from pyrofl.inference.definition.aggregator import Aggregator
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.definition.description import describe
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.definition.user_code import users_code
from pyrofl.inference.engine.messages import validated_state
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState, client_inputs, to_data
from pyrofl.inference.validation.client_trials import refuse_dependent_clients, trial_federation
from pyrofl.inference.validation.gradients import (
    VALIDATION_ROWS,
    WatchedStep,
    refuse_still,
    watched_phase,
)
from pyrofl.inference.validation.independence import (
    Drew,
    Mixed,
    TestRound,
    TrialRound,
    refuse_global_draws,
    with_steady_adam,
)
from pyrofl.inference.validation.patterns import (
    refuse_ineffective_aggregation_patterns,
    refuse_unmatched_patterns,
)
from pyrofl.inference.validation.program_checker import ProgramChecker
from pyrofl.inference.validation.repeatability import Reruns
from pyrofl.inference.validation.variants import with_other_padding
from pyrofl.returned import as_tensors, calling, explained, is_of_library
from pyrofl.tensors import Tensors, cut, default_type, matches, pick
from pyrofl.turns import synchronized
from pyrofl.user_warnings import warn_user

MAX_FULL_ROWS = 200  # largest number of rows of a client for a validation on all rows


@checked
@synchronized
def validate_method(
    method: Method,
    data: Federation,
    *,
    chunk_size: Count | None = None,
    server_state: Tensors | None = None,
) -> None:
    """Validate a method on a few rows of its data before training; raise ValueError if it fails.

    `fit` and `federate` call it before round one, unless check=False. Two clients run together and
    alone, with the same noise, through programs, losses, closed forms, upload, view and
    statistics: the results of a client must be equal up to rounding.

    Args:
        method: the method.
        data: the federation; two training clients and one held-out client are used, or, if the
            method has functions of the user, up to four.
        chunk_size: clients per vectorized batch; with 1 a single client is used.
        server_state: initial server state, instead of `method.init`.

    Raises:
        ValueError: if a latent site is outside `batch.clients()`, or inside `batch.rows()` with a
            guide that is the same for every row; an observed site is outside `batch.rows()`; there
            is none, or two observe the same; there is a `pyro.param`; a parameter of a
            distribution, or a response, is outside its constraint; results of a client depend on
            other clients or on padding; rows depend on each other, where clients train on
            minibatches; a function draws from a global random generator, or gives other numbers
            each time; a program modifies its arguments; no gradient reaches a tensor or a site on
            which the loss depends; a pattern of names matches nothing; the aggregation or a view
            returns an unknown name; the numbers of epochs depend on the other clients; the server
            keeps memory outside of its state; or the method fails on these rows.

    Warns:
        UserWarning: if the guide reads a tensor that no update changes, the gradient of your loss
            is not its derivative, your loss depends on the clients' ids, or two clients hold the
            same training row.
    """
    if not method.phases:
        raise ValueError("phases are (), so no client would train; expected at least one Phase")
    for phase in (*method.phases, *method.adapt):
        phase.count_epochs(data.cohort(torch.arange(data.clients)).ids)
    if text := _repeated_rows(data):
        warn_user(text)
    minibatches = any(phase.batch for phase in (*method.phases, *method.adapt))
    few, ids = _few(method, data, alone=chunk_size == 1)
    without = pyro.get_param_store().scope(), pyro.validation_enabled(False)
    with without[0], without[1]:
        try:
            _in_both_precisions(method, with_other_padding(few), ids, server_state)
        except ValueError as error:
            # Programs may only support the clients' actual numbers of rows, and the likelihood of
            # fewer rows than parameters may have no maximum, near which rounding errors grow.
            few_rows = int(data.sizes.max()) <= MAX_FULL_ROWS and _is_of_program(error)
            if minibatches or not (few_rows or isinstance(error, Mixed)):
                raise
            whole = _whole(few, data, few.names)
            try:
                _in_both_precisions(method, with_other_padding(whole), ids, server_state)
            except ValueError:
                raise error from None
        if not users_code(_trained_parts(method))[0]:
            return  # the library's own methods are tested for every release
        describe(method, has_text=False)  # which refuses tensors that a hook has stored
        if few.clients == 1:
            return
        if int(data.sizes.max()) <= MAX_FULL_ROWS:
            # With all their rows, and the smallest first: programs may read sizes or masks.
            names = (*few.names[few.clients - 1 :: -1], *few.names[few.clients :])
            whole = with_other_padding(_whole(few, data, names))
            with suppress(KeyError, RuntimeError, IndexError, TypeError, AttributeError):
                _in_both_precisions(method, whole, ids.flip(0), server_state, _look_at_clients)
        some = _several(data)
        real = with_other_padding(trial_federation(data, some))
        start = first(method, data, 0, server_state).server
        _in_both_precisions(method, real, some, start, refuse_dependent_clients)


def _trained_parts(method: Method) -> list[object]:
    """Return what training runs: without the tables of a regression and its alternative."""
    names = [field.name for field in fields(Method) if field.name != "metadata"]
    metadata = replace(method.metadata, alternative=None)
    return [metadata, *(getattr(method, name) for name in names)]


def _repeated_rows(data: Federation) -> str:
    """Return a warning about training rows that two clients hold, or ""."""
    row, holders = torch.cat(data.train[: data.clients]).unique(return_counts=True)
    if data.is_outline or int(holders.max()) == 1:
        return ""
    first = row[holders > 1][0]
    names = [n for n, rows in zip(data.names, data.train, strict=True) if first in rows]
    count = int((holders > 1).sum())
    return (
        f"{count} training row{'s belong' if count > 1 else ' belongs'} to more than one client, "
        f"such as row {int(first)} to {' and '.join(names[:2])}; each client counts it, as if it "
        "had been observed again"
    )


def _whole(few: Federation, data: Federation, names: tuple[str, ...]) -> Federation:
    """Return the selected clients with their first 200 training rows, in the order of `names`."""
    rows = tuple(data.train[data.names.index(n)][:MAX_FULL_ROWS] for n in names)
    return replace(few, train=rows, names=names)


def _is_of_program(error: BaseException) -> bool:
    """Return whether an error was raised outside pyrofl, as by the method's Pyro programs."""
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
    """Validate a method; if clients or rows seem to affect each other, repeat it in float64.

    The repetition uses the optimizers of `with_steady_adam`, which do not enlarge rounding errors.
    """
    look = look or _look
    try:
        look(method, few, ids, server)
    except Mixed:
        if few.device.type == "mps":
            raise
        with default_type(torch.float64), suppress(RuntimeError, IndexError, TypeError):
            return look(with_steady_adam(method), few.to(few.device, torch.float64), ids, server)
        raise


def _look(method: Method, few: Federation, ids: Tensor, server: Tensors | None) -> None:
    """Run all checks of `validate_method` on a few rows of a few clients."""
    first = _first(method, few, ids, server)
    state = RoundState(0, first, {}, torch.zeros(few.clients).bool())
    written, steps = set[str](), list[WatchedStep]()
    phases = (*method.phases, *method.adapt)
    short = tuple(watched_phase(phase, written, steps) for phase in phases)
    trial = TestRound(method, few, state, short)
    trial_round = _run_round(trial)
    if not all(v.isfinite().all() for v in trial_round.local.values()):
        return  # the round reports it, and names the clients
    training = slice(few.clients)
    received, local = (cut(t, training) for t in (trial_round.received, trial_round.local))
    look = ProgramChecker(method, few, received, local)
    look.refuse_wrong_sites()
    look.refuse_broken_constraints()
    again = Reruns(look, any(phase.batch for phase in phases))
    again.refuse_mixed_rows()
    again.refuse_mixed_clients()
    again.refuse_cut_sites()
    again.refuse_conditional_sites()
    refuse_still(trial, steps)
    trial.refuse_mixed_clients(trial_round, again.refuse_mixed_clients)
    message = trial.message(trial_round)
    refuse_ineffective_aggregation_patterns(method, state.server, message)
    after = _aggregated(method, few, state.server, message)
    refuse_unmatched_patterns(method, local, state.server, after, message | received, look.sites)
    refuse_odd_views(method, look)
    trial.refuse_mixed_results(trial_round)
    look.warn_of_still_tensors(
        {n: v for n, v in trial_round.before_training.items() if n not in written}
    )


def _look_at_clients(method: Method, few: Federation, ids: Tensor, server: Tensors | None) -> None:
    """Check only that model and guide give each client the same results alone and with others."""
    first = _first(method, few, ids, server)
    state = RoundState(0, first, {}, torch.zeros(few.clients).bool())
    received, private = client_inputs(method, few, state, few.cohort(torch.arange(few.clients)), 0)
    again = Reruns(ProgramChecker(method, few, received, private | received), False)
    if not again.has_row_sites:
        again.refuse_mixed_clients()


def _first(method: Method, few: Federation, ids: Tensor, initial: Tensors | None) -> Tensors:
    """Return the initial server state; raise ValueError for missing tensors or wrong shapes."""
    with calling("init"), refuse_global_draws("init", few.device):
        initial_state = method.init(stream(0, Stream.START), few.clients)
    server = as_tensors("what init returns", initial_state)
    if initial is not None:
        lacking = [n for n in server if n not in as_tensors("server", initial)]
        if lacking:
            raise ValueError(
                f"server_state lacks {', '.join(lacking)}; pass a state of this method, with "
                f"{', '.join(server)}"
            )
        for name in (n for n in server if not matches(n, f"server/* {method.per_client}")):
            if initial[name].shape != (shape := server[name].shape):
                raise ValueError(
                    f"server_state has {name!r} of shape {list(initial[name].shape)}; expected "
                    f"{list(shape)}, the shape in the result of init"
                )
        server = initial | {n: v[ids] for n, v in pick(initial, method.per_client).items()}
    return to_data(server, few)


def _run_round(trial: TestRound) -> TrialRound:
    """Run the method's training phases on a few rows; raise ValueError on failure."""
    few = trial.data

    def look() -> ProgramChecker:
        """Return a checker of the model and guide with the clients' tensors before training."""
        cohort = few.cohort(torch.arange(few.clients))
        received, private = client_inputs(trial.method, few, trial.state, cohort, 0)
        return ProgramChecker(trial.method, few, received, private | received)

    try:
        with refuse_global_draws("a loss", few.device):
            return trial.run_round(trial.ids)
    except Drew:
        look().refuse_wrong_sites()  # its message names the program, if that is the cause
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
    """Return the largest, the smallest and a held-out client, with at most three rows each.

    The ids of the training clients are returned too. The smallest client has fewer rows than a
    minibatch, so that it is padded.
    """
    batches = [phase.batch for phase in (*method.phases, *method.adapt) if phase.batch]
    rows = (VALIDATION_ROWS, 1 if 2 in batches else 2, 1)
    order = data.sizes[: data.clients].argsort(descending=True, stable=True).tolist()
    good = [i for i in order if _finite(data, i)]
    order = good or order  # the rounds reject clients with bad rows
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


def _several(data: Federation) -> Tensor:
    """Return the ids of the largest, the middle and the smallest client with finite rows."""
    order = data.sizes[: data.clients].argsort(descending=True, stable=True).tolist()
    good = [i for i in order if _finite(data, i)] or order
    places = {0, len(good) // 2, len(good) - 1} if len(good) < 4 else {0, 1, len(good) // 2, -1}
    return torch.tensor(sorted(good[at] for at in places))


def _beginning(data: Federation, client: int) -> Tensor:
    """Return the first `VALIDATION_ROWS` training rows of a client that have nonzero weight."""
    rows = data.train[client]
    return (rows if data.weights is None else rows[data.weights[rows] > 0])[:VALIDATION_ROWS]


def _finite(data: Federation, client: int) -> bool:
    """Return whether a client's rows that are used for validation have only finite values."""
    rows = _beginning(data, client)
    return bool(data.x[rows].isfinite().all() and data.y[rows].isfinite().all())


def _aggregated(
    method: Method, few: Federation, server: Tensors, message: Tensors
) -> Tensors | None:
    """Aggregate trial messages if by an `Aggregator`; raise ValueError for new tensor names."""
    if not isinstance(method.aggregate, Aggregator):
        return None
    cohort = few.cohort(torch.arange(few.clients))
    try:
        with calling(f"the aggregation of messages of {', '.join(message) or 'nothing'}"):
            aggregated = method.aggregate(server, message, cohort, stream(0, Stream.MERGE))
    except AggregationError:
        return None  # three clients may be too few for it
    after = to_data(as_tensors("what aggregate returns", aggregated), few)
    validated_state(server, after, few.clients)
    # Names under "server/" are the state of the server's optimizer or sampler.
    for name in (n for n in after if n not in server and not n.startswith("server/")):
        raise ValueError(
            f"the aggregation adds {name!r} to the server's state, which has "
            f"{', '.join(server) or 'no tensors'}; name messages as the tensors of that state, or "
            f"leave {name!r} out of the aggregation"
        )
    return after


def refuse_odd_views(method: Method, look: ProgramChecker) -> None:
    """Raise ValueError if a predictive model has unknown tensors, or lacks required ones."""
    received, local = look.received, look.local
    tensors = received | local
    for view in method.views:
        view_tensors = method.read_view(view, received, local)
        for model in view_tensors if isinstance(view_tensors, list) else [view_tensors]:
            for name in (n for n in model if n not in tensors):
                raise ValueError(
                    f"view {view!r} returns {name!r}, which is neither received nor a client "
                    f"state; expected names from {', '.join(tensors)}"
                )
            try:
                look.run(look.batch, received, model)
            except KeyError as error:
                raise ValueError(
                    f"view {view!r} lacks {error}, which the programs read; return it too"
                ) from error
