"""Validation that the tensors of a saved state are those of its method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.client_states import ClientStates
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState, client_inputs, to_data
from pyrofl.tensors import Tensors, matches


def validate_tensors(
    at: Callable[[int], Method],
    data: Federation,
    state: RoundState,
    *,
    exact: bool = True,
    stored: bool = True,
) -> RoundState:
    """Validate the tensors of a saved state; return it with the server's of the data's type.

    Args:
        at: round number -> method.
        data: the federation.
        state: the saved state, which a user may have edited, or one before round one.
        exact: whether all rounds have the same method; otherwise clients may have other tensors.
        stored: False permits that client states are stored elsewhere.

    Raises:
        ValueError: if tensors differ from those of `init` and `init_client` in names, shapes or
            types, or are not finite; naming the tensor, what it is and what is expected.
    """
    begin, ids = first(at(0), data, 0), state.seen.nonzero().flatten()
    saved = {n: v[0] for n, v in state.get_client_states(ids[:1]).items()} if len(ids) else {}
    # A run may be resumed in another precision, but not with tensors of several.
    types = {v.dtype for v in (*state.server.values(), *saved.values()) if v.is_floating_point()}
    dtype = types.pop() if len(types) == 1 else data.dtype

    def refuse_others(part: str, given: Tensors, expected: Tensors, function: str) -> None:
        like = {n: v.to(dtype) if v.is_floating_point() else v for n, v in expected.items()}
        # The state before round one may be that of a method with more tensors.
        _refuse_other_tensors(part, given, like, function, exact and bool(state.number))

    part = "resume_from.server" if state.number else "server_state"
    refuse_others(part, state.server, begin.server, "init")
    _refuse_not_finite(part, state.server)
    server = to_data(state.server, data)
    if any(
        (v.dtype, v.device) != (server[n].dtype, server[n].device) for n, v in state.server.items()
    ):
        # Otherwise the same dict, as a round without an aggregation is known by it.
        state = replace(state, server=server)
    if not isinstance(state.client_states, ClientStates):  # which only the engine writes
        _refuse_odd_rows(data, state)
    if len(ids) and (stored or saved):
        method, cohort = at(max(state.number - 1, 0)), data.cohort(ids[:1])
        _, new = client_inputs(method, data, replace(state, seen=begin.seen), cohort, 0)
        part = f"resume_from.client_states of {data.names[ids[0]]!r}"
        refuse_others(part, saved, {n: v[0] for n, v in new.items()}, "init_client")
    return state


def _refuse_other_tensors(
    what: str, given: Tensors, expected: Tensors, function: str, exact: bool
) -> None:
    """Raise ValueError if tensors differ from the expected ones in names, shapes or types.

    `function` returns the expected ones; names may differ if not `exact`.
    """
    for name in (n for n in expected if exact and n not in given):
        raise ValueError(
            f"{what} lacks {name!r}; expected {_form(expected[name])}, as returned by {function}"
        )
    for name, value in given.items():
        # Tensors of the server alone may be added and may grow, such as one for each client.
        free = matches(name, "server/*")
        if name in expected:
            like = expected[name]
            if value.dtype != like.dtype or (value.shape != like.shape and not free):
                raise ValueError(
                    f"{what}: {name!r} is {_form(value)}; expected {_form(like)}, as returned "
                    f"by {function}"
                )
        elif exact and not free:
            raise ValueError(
                f"{what} has {name!r}, which the method does not have; expected "
                f"{', '.join(expected) or 'no tensors'}, as returned by {function}"
            )


def _refuse_odd_rows(data: Federation, state: RoundState) -> None:
    """Raise ValueError for client states that are not finite, or of clients without a state."""
    what = "resume_from.client_states"
    for name, value in state.client_states.items():
        rows, seen = value.reshape(len(value), -1), state.seen.to(value.device)
        for j in (rows.any(1) & ~seen).nonzero().flatten().tolist()[:1]:
            raise ValueError(
                f"{what} of {data.names[j]!r}: {name!r} is not 0, but seen is False for this "
                "client; expected True, or 0"
            )
        for j in (~rows.sum(1).isfinite()).nonzero().flatten().tolist():
            _refuse_not_finite(f"{what} of {data.names[j]!r}", {name: value[j]})


def _refuse_not_finite(what: str, given: Mapping[str, Tensor]) -> None:
    """Raise ValueError for the first tensor that has a value that is not finite."""
    for name, value in given.items():
        if bool(value.sum().isfinite()):  # otherwise the sum of finite values may have overflowed
            continue
        for at in (~value.isfinite()).nonzero().tolist()[:1]:
            raise ValueError(
                f"{what}: {name!r} is {value[tuple(at)].item()} at {at}; expected finite numbers"
            )


def _form(value: Tensor) -> str:
    """Return a tensor's type and shape, such as "torch.float32 [10, 64]"."""
    return f"{value.dtype} {list(value.shape)}"
