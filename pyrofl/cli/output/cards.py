"""Method cards: description, equations, settings and message sizes, read from the code."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from textwrap import TextWrapper, fill
from types import ModuleType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from pyrofl import docstrings, nets
from pyrofl.arguments import check_name
from pyrofl.data import Federation
from pyrofl.experiments.console import show
from pyrofl.experiments.experiment import as_text
from pyrofl.experiments.methods import builds
from pyrofl.experiments.settings import (
    PROGRAMS,
    READERS,
    Epochs,
    arguments,
    readable,
    with_program,
)
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.nets import Network
from pyrofl.reports.calibration import sentence

WIDTH = 100  # of a card in a terminal
SCRIPT = 'method = pyrofl.hierarchical(program, data, shared="mu tau")'
OF_PROGRAMS = ("likelihood_factors",)  # methods for a user's program, without a network
INPUTS, OUTPUTS, SPEC = 64, 10, "mlp:50"  # the network of the digits


@dataclass(frozen=True)
class Setting:
    """Setting of a method: name, valid values, default and description."""

    name: str
    kind: str
    default: str
    about: str


@dataclass(frozen=True)
class Wire:
    """Measured sizes and contents of the messages between a client and the server in one round."""

    parameters: tuple[int, int]  # of the network, and of its head
    down: int  # bytes to a client
    up: int  # bytes from it
    sent: tuple[str, ...]  # roles of the tensors that go up
    kept: tuple[str, ...]  # roles of the tensors that the client keeps


@dataclass(frozen=True)
class Card:
    """Documentation card of a method, printed by `pyrofl explain`."""

    key: str
    paper: docstrings.Paper
    settings: tuple[Setting, ...]
    views: tuple[str, ...]
    wire: Wire
    plain: Wire

    def told(self) -> str:
        """Format a method's documentation card as text for a terminal."""
        paper, wire = self.paper, self.wire
        words = [f"{paper.name} ({self.key}): {paper.headline}.", paper.source, paper.use]
        words += [sentence(self.key)]
        words += [f"Models that can be tested: {', '.join(self.views)}.", self.bytes]
        words += [f"Goes up: {_listed(wire.sent)}. Stays at the client: {_listed(wire.kept)}."]
        parts = [fill(text, WIDTH) for text in words if text]
        equations = ["\n".join(f"    {line}" for line in block) for block in paper.equations[:2]]
        parts[2:2] = equations
        parts += ["\n".join(["settings, for --set NAME=VALUE", *map(_line, self.settings)])]
        parts += [fill(paper.departures, WIDTH)] if paper.departures else []
        return "\n\n".join(parts)

    @property
    def bytes(self) -> str:
        """Text with the measured bytes that each client receives and sends per round."""
        (all_, head), down, up = self.wire.parameters, self.wire.down, self.wire.up
        beside = f"{down / self.plain.down:.2f} and {up / self.plain.up:.2f} times FedAvg's"
        return (
            f"Bytes for each client in a round, with a network of {all_:,} parameters, {head:,} of "
            f"them its head: {down:,} down, {up:,} up; {beside}."
        )


def text(name: str) -> str:
    """Return the documentation of a method, as text for a terminal."""
    check_name(name, (*builds(), *OF_PROGRAMS), "method")
    if name not in OF_PROGRAMS:
        return card(name).told()
    paper_text = paper(name)
    words = [
        f"{paper_text.name} ({name}): {paper_text.headline}.",
        paper_text.source,
        paper_text.use,
    ]
    words += ["It has no command: in a script, write", paper_text.departures]
    parts = [fill(one, WIDTH) for one in words]
    parts[2:2] = ["\n".join(f"    {line}" for line in block) for block in paper_text.equations]
    parts[-1:-1] = [f"    {SCRIPT}"]
    return "\n\n".join(parts)


def paper(name: str) -> docstrings.Paper:
    """Return the parts of the documentation of a method's module."""
    return docstrings.paper(import_module(f"pyrofl.models.{name}").__doc__ or "")


def card(name: str) -> Card:
    """Return the documentation card of a method with default settings."""
    check_name(name, builds(), "method")
    module = import_module(f"pyrofl.models.{name}")
    views = tuple(made(name, network()).views)
    return Card(name, paper(name), tuple(settings(module.build)), views, wire(name), wire("fedavg"))


def network() -> Network:
    """Return the small example network with which message sizes are measured."""
    return nets.build(SPEC, (INPUTS,), OUTPUTS)


def made(name: str, net: Network) -> Method:
    """Build a method with default settings, to measure its messages."""
    build = builds()[name]
    own = {"server_data": rows().x} if "server_data" in inspect.signature(build).parameters else {}
    method: Method = build(net, **own)
    return method


@lru_cache
def rows() -> Federation:
    """Return a small federation of two clients, to measure message sizes."""
    one = torch.linspace(-1, 1, 6 * INPUTS).reshape(6, INPUTS), torch.arange(6) % OUTPUTS
    sites = {"one": one, "two": one}
    return Federation.from_arrays(sites, classes=OUTPUTS)


@lru_cache
def wire(name: str) -> Wire:
    """Run one round of a method, and return the sizes and contents of its messages."""
    net = network()
    (state,) = federate(made(name, net), rows(), 1, check=False)
    sizes = {n: shape.numel() for n, shape in net.shapes.items()}
    head = sum(sizes[n] for n in net.select_params(net.head))
    down, up = (int(sent[0]) for sent in (state.bytes_down, state.bytes_up))
    sent, stored = (_roles(tensors) for tensors in (state.message, state.client_states))
    return Wire((sum(sizes.values()), head), down, up, sent, stored)


def _roles(tensors: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.partition("/")[0] for name in tensors))


def settings(build: Callable[..., Any]) -> Iterator[Setting]:
    """Yield a method's settings: its own arguments, then those it passes on to other functions."""
    hints, about = get_type_hints(build, include_extras=True), docstrings.arguments(build)
    for name, parameter in inspect.signature(build).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in ("server_data", "elapsed"):
            yield Setting(
                name, kind_of(name, hints[name]), value(parameter.default), about.get(name, "")
            )
        elif parameter.kind is parameter.VAR_KEYWORD:  # **name: Unpack[a TypedDict]
            yield from _handed_on(get_args(hints[name])[0])


def _handed_on(fields: Any) -> Iterator[Setting]:
    """Yield the method settings listed in a TypedDict, with descriptions from its module."""
    home = import_module(fields.__module__)
    near = [m for m in vars(home).values() if inspect.ismodule(m) and "pyrofl.models" in m.__name__]
    makers = [f for m in (home, *near) for f in vars(m).values() if _belongs(f, m)]
    for name, hint in get_type_hints(fields, include_extras=True).items():
        makers_with_name = (f for f in makers if name in docstrings.arguments(f))
        if name != "elapsed" and (maker := next(makers_with_name, None)):
            default = inspect.signature(maker).parameters[name].default
            yield Setting(
                name, kind_of(name, hint), value(default), docstrings.arguments(maker)[name]
            )


def _belongs(function: Any, module: ModuleType) -> bool:
    return inspect.isfunction(function) and function.__module__ == module.__name__


def kind_of(name: str, hint: Any) -> str:
    """Describe the valid values of a method's setting, given its name and type annotation."""
    return kind(with_program(name, hint) if name in PROGRAMS else hint)


def kind(hint: Any) -> str:
    """Describe the valid values of a method's setting, given its type annotation.

    >>> from pyrofl.arguments import Count
    >>> kind(Count | None), kind(Literal["full", "deviation"])
    ('a whole number of at least 1, or none', 'full|deviation')
    """
    one = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return ", or ".join(dict.fromkeys(map(_kind, one)))


def _kind(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        base, bounds, *_ = (*get_args(hint), "")
        return f"{READERS[base][0]} {bounds}"
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if isinstance(hint, type) and hint in READERS:
        return READERS[hint][0]
    return "in a script: a function" if callable(hint) else str(hint)


def value(default: Any) -> str:
    """Format the default value of a method's setting as a user would type it.

    >>> value(None), value(True), value(0.001), value(torch.relu)
    ('none', 'true', '0.001', 'relu')
    """
    if default is inspect.Parameter.empty:
        return "-"
    return as_text(getattr(default, "__name__", default))


def _line(setting: Setting) -> str:
    text = f"  {setting.name}={setting.default}  [{setting.kind}] {setting.about}"
    return fill(text.rstrip(), WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"


def explain(args: Namespace) -> None:
    """Print the documentation card of a method: equations, settings and message sizes."""
    show(text(args.method))


def variants() -> str:
    """Format the settings of every method that --set accepts, with their valid words, as text."""
    under = TextWrapper(100, initial_indent="  ", subsequent_indent=" " * 12)
    under.break_long_words = under.break_on_hyphens = False
    return "\n".join(
        under.fill(
            f"{name:<9} {'  '.join(setting_of(n, kind) for n, kind in arguments(build).items())}"
        )
        for name, build in builds().items()
    )


def setting_of(name: str, kind: Any) -> str:
    """Format the name of a method's setting, with its valid values if they are words."""
    words = [str(word) for one in readable(kind) for word in get_args(one) if one != Epochs]
    return f"{name}={'|'.join(words)}" if words else name
