"""Data flow of a method: what server and clients store and send, measured in a round of training.

Sizes are those that the rounds of `federate` count, tensor by tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro.ops.provenance import get_provenance, track_provenance
from torch import Tensor

from pyrofl.arguments import checked
from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.inference.definition.budget import Privacy
from pyrofl.inference.definition.description import describe
from pyrofl.inference.definition.metadata import WireCost, metadata_of_class
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed
from pyrofl.inference.definition.table_method import prepare_data
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import Draw, everyone
from pyrofl.inference.engine.start import method_schedule
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.fitted_run.chains import MethodOrBuilder
from pyrofl.inference.fitted_run.run import Run
from pyrofl.summaries import Summarized, picture
from pyrofl.tensors import Tensors, client_bytes, cut, dense_bytes, matches, pick

ROUNDS = 2  # the second one is that of the figure; the first may differ
PREFIX = "server/"  # of tensors that the server does not send by default
SERVER_ROWS_PATTERN = re.compile(
    r"aggregate\.(.*\.)?(rows|server_data)"
)  # unlabeled rows, in a description


@dataclass(frozen=True)
class FlowPart:
    """Tensors of one role that are stored or sent together.

    Attributes:
        role: first part of the names of the tensors, such as "w" of "w/head.bias"; with the layers
            if another part has the same role.
        numbers: entries of a client's tensors, or of the server's.
        bytes: their size for each client, or of the server's tensors.
        per_client: whether tensors of the server have a row for each client.
    """

    role: str
    numbers: int
    bytes: tuple[int, ...]
    per_client: bool = False


@dataclass(frozen=True, repr=False)
class DataFlow(Summarized):
    """Tensors that server and clients store, and send to each other, by place and direction.

    Attributes:
        name: name of the method.
        clients: number of training clients.
        rows: fewest and most training rows of a client.
        row_numbers: numbers of a row: features and response.
        once: what a client sends before round one; without means that a regression's formula takes
            over all clients.
        down: what each client receives in a round.
        up: what each client sends in a round.
        server: what the server stores between rounds.
        stays: what each client stores between rounds and its message is not computed from, such as
            a personal head. Through training, the message can still depend on it.
        stored: what each client stores between rounds and its message is computed from.
        first_round: bytes down and up of all clients in round one, where they differ from those of
            the next round; None if they are equal, or if the flow is that of a run.
    """

    name: str
    clients: int
    rows: tuple[int, int]
    row_numbers: int
    once: tuple[FlowPart, ...]
    down: tuple[FlowPart, ...]
    up: tuple[FlowPart, ...]
    server: tuple[FlowPart, ...]
    stays: tuple[FlowPart, ...]
    stored: tuple[FlowPart, ...]
    first_round: tuple[int, int] | None = None

    @property
    def bytes_down(self) -> int:
        """Bytes that the server sends in a round, to all clients."""
        return sum(sum(part.bytes) for part in self.down)

    @property
    def bytes_up(self) -> int:
        """Bytes that the server receives in a round, from all clients."""
        return sum(sum(part.bytes) for part in self.up)

    def overview(self) -> Mapping[str, object]:
        """Return the stored and the sent tensors with their numbers as text."""
        return {
            "clients": f"{self.clients}, each with {self.rows[0]} to {self.rows[1]} training rows",
            "server stores": _listed(self.server),
            "each round, down": f"{_listed(self.down)}; {self.bytes_down:,} bytes in all",
            "each round, up": f"{_listed(self.up)}; {self.bytes_up:,} bytes in all",
            "stays at a client": _listed(self.stays),
            "stored and sent": _listed(self.stored),
        }

    @property
    def title(self) -> str:
        """Title of the printed summary, with the name of the method."""
        return f"Data flow of {self.name}".strip()

    def _more_html(self) -> str:
        from pyrofl import figures

        return picture(figures.data_flow(self), f"{self.title}: what is stored and sent")


@checked
def get_data_flow(
    method: MethodOrBuilder | Run,
    data: Federation | Tables | None = None,
    *,
    seed: Seed = 0,
    participation: Draw = everyone,
    privacy: Privacy | None = None,
) -> DataFlow:
    """Return what server and clients of a method store and send, measured in a round of training.

    Of a method, two rounds are trained and the second one is described; of a run, the round after
    its last one. Losses, scores, predictions and the exchange by which `to_arviz` corrects draws
    are not included.

    Args:
        method: a method, round number (from 0) -> method, or a `Run`.
        data: the federation, or the tables of a regression; None for a run.
        seed: fixes all random numbers; that of a run is its own.
        participation: function that samples the reporting clients, as in `federate`.
        privacy: clipping and noise, as in `federate`.

    Returns:
        The `DataFlow`; `figures.data_flow` draws it.

    Raises:
        ValueError: as `federate`, if data is missing or given with a run, or if no client reports.

    Examples:
        >>> import pyrofl
        >>> from pyrofl import datasets, federations, nets
        >>> from pyrofl.models import fedper
        >>> data = federations.split(datasets.load("digits"), "slices:5", clients=4)
        >>> flow = pyrofl.get_data_flow(fedper.build(nets.build("mlp:50", (64,), 10)), data)
        >>> [(part.role, part.numbers) for part in flow.up]
        [('w (fc1)', 3250)]
        >>> [(part.role, part.numbers) for part in flow.stays]
        [('w (head)', 510)]
    """
    is_run = isinstance(method, Run)
    if is_run is (data is not None):
        raise ValueError(
            "data is given with a run, which has its own; pass the run alone"
            if is_run
            else "data is missing; pass get_data_flow(method, data), or a run alone"
        )
    if isinstance(method, Run):
        at, data, seed = method_schedule(method.method), method.data, method.seed
        begun: dict[str, Any] = {"resume_from": method.state}
        rounds = method.state.number + 1
    else:
        assert data is not None
        at, begun, rounds = method_schedule(method), {}, ROUNDS
        data = prepare_data(at(0), data)
    recorder = _FlowRecorder(at)
    begun |= {"participation": participation, "privacy": privacy, "check": False}
    states = []
    for state in federate(recorder.method, data, rounds, seed=seed, **begun):
        states.append((state, recorder.down))
        recorder.down = {}
    state, down = states[-1]
    if not len(state.reporters.ids):
        why = f": {state.rejected[0]}" if state.rejected else ""
        raise ValueError(f"no client reports in round {state.number}{why}; nothing is sent")
    totals = [(int(s.bytes_down.sum()), int(s.bytes_up.sum())) for s, _ in states]
    recorder.down = down
    first_round = totals[0] if totals[0] != totals[-1] else None
    return _flow(at(state.number - 1), data, state, recorder, first_round)


class _FlowRecorder:
    """Recorder of the downloads of a round, and of the tensors that messages are computed from."""

    def __init__(self, at: Callable[[int], Method]) -> None:
        self.at = at
        self.down: dict[str, tuple[int, list[int]]] = {}  # name -> entries, bytes of each client
        self.reads: dict[str, int] = {}  # local tensor -> entries that messages are computed from

    def method(self, number: int) -> Method:
        """Return the method of a round, which records its downloads and messages."""
        round_method = self.at(number)

        def upload(received: Tensors, local: Tensors) -> Tensors:
            for name, value in received.items():
                old_sizes = self.down.get(name, (0, []))[1]
                sizes = _bytes(round_method, name, received)
                self.down[name] = (value[0].numel(), [*old_sizes, *sizes])
            self.reads = _read(round_method, cut(received, slice(1)), cut(local, slice(1)))
            return round_method.upload(received, local)

        return replace(round_method, upload=upload)


def _read(method: Method, received: Tensors, local: Tensors) -> dict[str, int]:
    """Return how many entries of each of a client's tensors its message is computed from.

    These are entries with a gradient, or the whole tensor if a message depends on it without one,
    or is equal to it.
    """
    seen = {n: track_provenance(v, frozenset({n})) for n, v in local.items()}
    sent = method.upload(received, seen)
    names = frozenset[str]().union(*map(get_provenance, sent.values()))
    entry_counts = {n: local[n].numel() for n in names}
    entry_counts |= {
        n: v.numel()
        for n, v in local.items()
        if any(_is_equal_and_varies(v, m) for m in sent.values())
    }
    with torch.enable_grad():
        inputs = {n: local[n].detach().clone() for n in names if local[n].is_floating_point()}
        for value in inputs.values():
            value.requires_grad_()
        sent = method.upload(received, local | {n: v.view_as(v) for n, v in inputs.items()})
        weighed = [
            v.flatten() @ torch.linspace(1, 2, v.numel()).to(v)
            for v in sent.values()
            if v.requires_grad
        ]
        if not weighed:
            return entry_counts
        grads = torch.autograd.grad(
            torch.stack(weighed).sum(), [*inputs.values()], allow_unused=True
        )
    for name, grad in zip(inputs, grads, strict=True):
        if grad is not None and (count := int(grad.count_nonzero())):
            entry_counts[name] = count
    return entry_counts


def _is_equal_and_varies(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal and not constant, so that this is no coincidence."""
    alike = one.shape == other.shape and bool((one == other).all())
    return alike and bool((one != one.flatten()[:1]).any())


def _flow(
    method: Method,
    data: Federation,
    state: RoundState,
    recorder: _FlowRecorder,
    first_round: tuple[int, int] | None,
) -> DataFlow:
    """Return the data flow of a round, from the state after it and the recorded downloads."""
    down = recorder.down
    up = {n: (v[0].numel(), _bytes(method, n, state.message)) for n, v in state.message.items()}
    client_states = {n: v[:1] for n, v in state.get_client_states(state.trained[:1]).items()}
    sizes_of_states = {n: (v[0].numel(), [client_bytes({n: v})]) for n, v in client_states.items()}
    server = {n: (v.numel(), [v.numel() * v.element_size()]) for n, v in state.server.items()}
    for name, text in describe(method).parts.items():
        shape = (
            json.loads(text.split(" ", 1)[1].rpartition(" ")[0])
            if SERVER_ROWS_PATTERN.fullmatch(name)
            else []
        )
        if tuple(shape[1:]) == data.x.shape[1:]:
            numbers = torch.Size(shape).numel()
            server["unlabeled rows"] = (numbers, [numbers * data.x.element_size()])
    stays: dict[str, tuple[int, list[int]]] = {}
    stored: dict[str, tuple[int, list[int]]] = {}
    for name, (numbers, (size,)) in sizes_of_states.items():
        read = recorder.reads.get(name, 0)
        for target, count in ((stored, read), (stays, numbers - read)):
            if count or numbers == 0:
                target[name] = (count, [size * count // max(numbers, 1)])
    alike = _roles({**down, **up, **sizes_of_states})
    sizes = data.sizes[: data.clients].tolist()

    return DataFlow(
        name=method.name,
        clients=data.clients,
        rows=(min(sizes), max(sizes)),
        row_numbers=data.x[0].numel() + data.y[0].numel(),
        once=_upload_before_rounds(data),
        down=_parts(down, alike),
        up=_parts(up, alike),
        server=_parts(server, _roles(server), method.per_client),
        stays=_parts(stays, alike),
        stored=_parts(stored, alike),
        first_round=first_round,
    )


def _upload_before_rounds(data: Federation) -> tuple[FlowPart, ...]:
    """Return what a client sends before round one: its name and size, and sums of its columns."""
    names = data.names[: data.clients]
    parts = [FlowPart("name and number of rows", 1, tuple(len(n.encode()) + 8 for n in names))]
    prepared = data.source.preparation if data.source is not None else None
    columns = [c for c in prepared.columns if c.is_standardized] if prepared else []
    if count := len(columns) + bool(data.source is not None and data.source.is_standardized):
        numbers = 4 * count  # values, missing values, mean and sum of squared deviations
        parts.append(FlowPart("sums of standardized columns", numbers, (8 * numbers,) * len(names)))
    return tuple(parts)


def _bytes(method: Method, name: str, tensors: Tensors) -> list[int]:
    """Return the bytes of a tensor of a message, for each client, as `Method.message_bytes`."""
    for names, cost in metadata_of_class(method.metadata.tensors, WireCost):
        if matches(name, names):
            return [int(v) for v in cost.count(name, tensors)]
    return [int(v) for v in dense_bytes({name: tensors[name]})]


def _role(name: str) -> tuple[str, str]:
    """Return the role of a tensor and its layer: "w", "fc1" of "w/fc1.bias"."""
    prefix = PREFIX if name.startswith(PREFIX) else ""
    role, _, rest = name.removeprefix(prefix).partition("/")
    return prefix + role, rest.rpartition("/")[2].partition(".")[0]


def _roles(tensors: Iterable[str]) -> Mapping[str, frozenset[str]]:
    """Return the layers of each role in all of these tensors."""
    layers_by_role: dict[str, set[str]] = {}
    for role, layer in map(_role, tensors):
        layers_by_role.setdefault(role, set()).add(layer)
    return {role: frozenset(layers) for role, layers in layers_by_role.items()}


def _parts(
    tensors: Mapping[str, tuple[int, list[int]]],
    layers: Mapping[str, frozenset[str]],
    per_client: str = "",
) -> tuple[FlowPart, ...]:
    """Join tensors of one role, which is named with its layers if these are not all of the role."""
    names_by_role: dict[str, list[str]] = {}
    for name in tensors:
        names_by_role.setdefault(_role(name)[0], []).append(name)
    parts = []
    for role, names in names_by_role.items():
        shown_layers = dict.fromkeys(_role(name)[1] for name in names)
        short = role.removeprefix(PREFIX)
        label = role if short in names_by_role else short
        detail = (
            ", ".join(filter(None, shown_layers)) if shown_layers.keys() != layers[role] else ""
        )
        label = f"{label} ({detail})" if detail else label
        sizes = zip(*(tensors[name][1] for name in names), strict=True)
        numbers, each = sum(tensors[name][0] for name in names), tuple(map(sum, sizes))
        is_table = bool(pick(dict.fromkeys(names, torch.zeros(0)), per_client))
        parts.append(FlowPart(label, numbers, each, is_table))
    return tuple(parts)


def _listed(parts: Iterable[FlowPart]) -> str:
    return ", ".join(f"{part.role} ({part.numbers:,})" for part in parts) or "nothing"
