"""Networks: torch modules called with dicts of parameters, for many clients at once."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral
from typing import Any

import torch
from torch import Generator, Size, Tensor, nn
from torch.nn.utils import parametrize

from pyrofl.arguments import CONVERSIONS, Count, check_name, checked
from pyrofl.nets import stacked
from pyrofl.nets.architectures import Chain, Noise, module
from pyrofl.nets.drawing import Drawn
from pyrofl.nets.unsupported import refuse, refuse_integers
from pyrofl.recipes import rebuildable
from pyrofl.summaries import Summarized
from pyrofl.tensors import Tensors, matches, seeded

Forward = Callable[[Tensors, Tensor], Tensor]
"""(weights, x [C, B, *x]) -> outputs, as a `Network` or a substitute."""


MAX_LAYER_SIZE = 2**31  # of inputs or outputs, more than any layer has


class Network(Summarized):
    """Torch module as a function of its parameters, run for many clients at once.

    Parameters with requires_grad=False are constants: they are never trained, drawn, sent or given
    a distribution; every call uses the module's values, on the device and in the type of the rest.

    Attributes:
        module: a copy of the module; calls use only the values of its constants.
        shapes: name -> shape of every trainable parameter, in the module's order.
        head: shell patterns of the names that form the head; the rest is the base.
        keep: patterns of the parameters that start at the module's own values.

    Examples:
        >>> import torch
        >>> from pyrofl import nets
        >>> net = nets.build("mlp:8", (4,), 2)
        >>> {name: tuple(shape) for name, shape in net.shapes.items()}
        {'fc1.weight': (8, 4), 'fc1.bias': (8,), 'head.weight': (2, 8), 'head.bias': (2,)}
    """

    _forward: Forward | None = None  # inside `computed_by`

    @checked
    def __init__(
        self, module: nn.Module, head: str | None = None, *, pretrained: bool | str = False
    ) -> None:
        """Wrap a copy of a torch module; hooks added to the original later have no effect.

        Args:
            module: maps rows [B, *x] to outputs [B, outputs], each row independently.
            head: shell patterns separated by spaces; default: the last trainable layer.
            pretrained: start at the module's values, such as pretrained ones, instead of drawing
                new ones. Runs with different seeds then start alike, as do states that a method
                would initialize differently (branches, clusters). Or shell patterns of the
                parameters that do so.

        Raises:
            ValueError: if the module has no trainable parameter, no name matches `head` or
                `pretrained`, or a layer mixes rows, draws random numbers or keeps running
                statistics.
        """
        refuse(module)
        self.module = copy.deepcopy(module)
        self.keep = pretrained if isinstance(pretrained, str) else "*" * bool(pretrained)
        self.shapes: dict[str, Size] = _trained(self.module)
        if not self.shapes:
            kind = type(module).__name__
            raise ValueError(f"{kind} has no parameters that train; expected requires_grad of some")
        self.head = _last_layer(self.module) if head is None else head
        self.select_params(self.head)
        if self.keep:
            self.select_params(self.keep)
        self.parts = stacked.parts(self.module)

    def overview(self) -> dict[str, str]:
        """Return a summary of the network's module, parameters, head and base: label -> text."""
        every = _count(self.shapes.values())
        head = _count(shape for n, shape in self.shapes.items() if matches(n, self.head))
        constants = _count(p.shape for p in self.module.parameters()) - every
        return {
            "module": type(self.module).__name__,
            "parameters": f"{every:,} in {len(self.shapes)} tensors"
            + (f", and {constants:,} that are constants" if constants else ""),
            "head": f"{head:,} ({self.head})",
            "base": f"{every - head:,}",
            "start": self._start(),
        }

    def _start(self) -> str:
        """Describe how the network's parameters are initialized: pretrained or drawn."""
        if self.keep in ("", "*"):
            return "the module's own values" if self.keep else "drawn by the layers' rules"
        return f"the module's own values of {self.keep}; others drawn by the layers' rules"

    def select_params(self, patterns: str) -> dict[str, Size]:
        """Return shapes of the parameters with matching names; raise ValueError if none match."""
        selected = {n: shape for n, shape in self.shapes.items() if matches(n, patterns)}
        if not selected:
            every = ", ".join(self.shapes)
            raise ValueError(f"no parameter matches {patterns!r}; expected some of {every}")
        return selected

    def fan_in(self, name: str) -> int:
        """Return the fan-in of a parameter's layer: the number of inputs of each of its outputs."""
        check_name(name, self.shapes, "parameter")
        weight = self.shapes.get(f"{name.rpartition('.')[0]}.weight".lstrip("."), self.shapes[name])
        return max(1, weight[1:].numel())

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the axis names of a parameter: ("fc1_out", "fc1_in") for the weight of fc1."""
        check_name(name, self.shapes, "parameter")
        path, _, leaf = name.rpartition(".")
        axes = _axes_of(self.module.get_submodule(path), leaf)
        if len(axes) != len(self.shapes[name]):
            path, axes = name, tuple(f"axis{i}" for i in range(len(self.shapes[name])))
        return tuple(f"{path}_{axis}".replace(".", "_").lstrip("_") for axis in axes)

    def init(self, generator: Generator) -> Tensors:
        """Return initial values of the trainable parameters, on the CPU; see `init_module`."""
        start = self.init_module(generator)
        return {n: start.get_parameter(n).detach() for n in self.shapes}

    def init_module(self, generator: Generator) -> nn.Module:
        """Return a copy of the module, initialized by its layers with the given generator.

        Layers without `reset_parameters` and adapters of peft keep the module's values, as do all
        parameters with `pretrained`. A layer's rule runs after those of the layers inside it.
        """
        fresh = copy.deepcopy(self.module).cpu()
        if self.keep == "*":
            return fresh
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        drawn = Drawn(torch.Generator().manual_seed(int(seed)))
        with seeded(int(seed)), drawn:  # `seeded` for rules that draw in another way
            for layer in reversed(list(fresh.modules())):
                _initialize(layer)
        own = dict(fresh.named_parameters())
        modules = self.module.named_modules()
        # Adapters of peft add zero at the start, which the rules of their layers would change.
        peft = tuple(f"{n}." for n, layer in modules if hasattr(layer, "adapter_layer_names"))
        for name, value in self.module.named_parameters():
            is_pretrained = matches(name, self.keep) or name.startswith(peft)
            if is_pretrained or not value.requires_grad:  # the rules draw whole layers
                own[name].detach().copy_(value)
        return fresh

    def __call__(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the network's outputs for C clients: [C, B, outputs], or [K, C, B, outputs].

        The latter are for K draws of the weights.

        Args:
            weights: every parameter, [*p] if clients share it, [C, 1, *p] if each has its own,
                [K, C, 1, *p] for K draws of it. The 1 is the axis of rows.
            x: [C, B, *x]. Layers without draws or with shared weights are computed once.

        Raises:
            ValueError: if a parameter is missing or has other axes.
        """
        if self._forward is not None:
            return self._forward({**weights}, x)
        if x.dim() < 3:
            raise ValueError(
                f"x has the axes {list(x.shape)}, clients and rows, and no columns; expected "
                "features: x[:, None] for a single column"
            )
        refuse_integers((part.layer for part in self.parts), x)
        return stacked.run(self.parts, self._without_rows(weights, len(x)), x)

    @contextmanager
    def computed_by(self, forward: Forward) -> Iterator[None]:
        """Compute calls of the network by another function, inside this context."""
        self._forward = forward
        try:
            yield
        finally:
            self._forward = None

    def apply(self, weights: Tensors, x: Tensor) -> Tensor:
        """Return outputs [B, outputs] of the network for weights [*p] and rows x [B, *x]."""
        return stacked.call(self.module, weights, x)

    def split(self, patterns: str) -> tuple[Network, Network] | None:
        """Split a sequential module into the layers before the named parameters, and the rest.

        Returns:
            Base and head with head(base(x)) equal to the network and the same names, if the module
            is a `torch.nn.Sequential` whose last layers have just the parameters that match; None
            if it is not, has hooks of its own, shares parameters between layers, or no layer with
            parameters precedes them; or if this is a subclass that computes something else.
        """
        plain = type(self.module).forward is nn.Sequential.forward
        same = type(self).__call__ is Network.__call__
        if not (plain and same) or stacked.hooked(self.module):
            return None
        # Not `named_children`, which names a layer once, wherever it runs again.
        layers = {n: layer for n, layer in self.module._modules.items() if layer is not None}
        owner = {n: list(layers).index(n.split(".")[0]) for n in self.shapes}
        chosen = [n for n in self.shapes if matches(n, patterns)]
        at = owner[chosen[0]] if chosen else 0
        base, head = self._of(list(layers.items())[:at]), self._of(list(layers.items())[at:])
        whole = [*base.shapes, *head.shapes] == list(self.shapes)
        last = chosen == [n for n in self.shapes if owner[n] >= at]
        return (base, head) if whole and last and list(base.module.parameters()) else None

    def _of(self, layers: Iterable[tuple[str, nn.Module]]) -> Network:
        """Return the network that consists of the given consecutive layers."""
        part = copy.copy(self)
        part.module = nn.Sequential(OrderedDict(layers))
        part.shapes, part.parts = _trained(part.module), stacked.parts(part.module)
        return part

    def _without_rows(self, weights: Mapping[str, Tensor], clients: int) -> Tensors:
        """Remove the singleton row axis of all weights; raise ValueError for invalid shapes."""
        flat: Tensors = {}
        draws: int | None = None
        for name, shape in self.shapes.items():
            if name not in weights:
                raise ValueError(f"weights lack {name!r}; found {', '.join(weights) or 'none'}")
            shape_of_weights, own = tuple(weights[name].shape), tuple(shape)
            front = shape_of_weights[: len(shape_of_weights) - len(own)]
            if draws is None and len(front) == 3:
                draws = front[0]
            k = "K" if draws is None else draws
            if (
                front not in ((), (clients, 1), (k, clients, 1))
                or shape_of_weights[len(front) :] != own
            ):
                raise ValueError(
                    f"{name} has shape {shape_of_weights}; expected {own}, {(clients, 1, *own)} or "
                    f"{(k, clients, 1, *own)} for {clients} clients"
                )
            flat[name] = weights[name].squeeze(-len(own) - 1) if front else weights[name]
        return flat

    def check(self, x: Tensor, outputs: int) -> None:
        """Run the network on one row of zeros; raise ValueError if it does not fit the data.

        Args:
            x: [C, B, *x]; only the shape and type of a row matter.
            outputs: numbers that the likelihood needs per row, such as the number of classes.

        Raises:
            ValueError: if the network fails on the row, or returns another number of outputs.
        """
        row = tuple(x.shape[2:])
        dtype = x.dtype if x.is_floating_point() else None
        weights = {
            n: self.module.get_parameter(n).detach().to(x.device, dtype).expand(2, 1, *shape)
            for n, shape in self.shapes.items()
        }
        try:  # as in training, for two clients at once
            output = self(weights, x.new_zeros(2, 1, *row))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ValueError(f"the network cannot take rows of shape {row}: {error}") from error
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            raise ValueError(f"the network gives a {kind} for one row; expected a tensor")
        output_shape = tuple(output.shape[1:])
        if output_shape != (1, outputs):
            message = f"the network gives outputs of shape {output_shape} for one row"
            raise ValueError(f"{message}; expected {(1, outputs)}")


CONVERSIONS[Network] = nn.Module, Network  # methods take modules as they are


@rebuildable
@checked
def build(spec: str, input_shape: tuple[int, ...], outputs: Count) -> Network:
    """Build a `Network` from a name such as "mlp:100", for rows of the given shape.

    Args:
        spec: a name of `NETWORKS`, for some with widths: "mlp:200,100", "cnn-metavd:256".
        input_shape: shape of one row, (channels, height, width) for a CNN.
        outputs: number of classes, or 1 for a response that is a number.

    Raises:
        ValueError: if the name is unknown, widths are not positive integers or not allowed, or the
            network does not suit the shape or the outputs.
    """
    whole = isinstance(input_shape, Sequence) and not isinstance(input_shape, str)
    if not whole or not input_shape or not all(isinstance(n, Integral) for n in input_shape):
        raise ValueError(f"input_shape is {input_shape!r}; expected whole numbers, such as (64,)")
    if not all(0 < n < MAX_LAYER_SIZE for n in (*input_shape, outputs)):
        message = f"input_shape is {tuple(input_shape)} and outputs {outputs}"
        raise ValueError(f"{message}; expected numbers from 1 to {MAX_LAYER_SIZE - 1}")
    return Network(module(spec, tuple(map(int, input_shape)), int(outputs)))


@rebuildable
@checked
def with_noise(net: Network) -> Network:
    """Return the network with a second output: the log standard deviation of the noise.

    It is a parameter, the same for all rows, that starts at 0 and belongs to the base, so that all
    clients share it where heads are personal; `likelihoods.learned_normal` reads it. Parameters
    keep their names where the module is a `torch.nn.Sequential`, and have "net." before them
    otherwise.

    Args:
        net: the network, which is not changed.

    Returns:
        The network with the parameter "noise.log_scale", [1].
    """
    module, head = net.module, net.head
    layers = {n: layer for n, layer in module._modules.items() if layer is not None}
    plain = type(module).forward is nn.Sequential.forward and not stacked.hooked(module)
    if not plain:
        layers, head = {"net": module}, " ".join(f"net.{one}" for one in head.split())
    name = "noise"
    while name in layers:
        name += "_"
    start = module.start if isinstance(module, Chain) else None
    chain = Chain({**layers, name: Noise()}, start)
    return Network(chain, head, pretrained=net.keep)


def _initialize(layer: nn.Module) -> None:
    """Initialize a layer's own parameters by its rule; parametrized ones get the drawn value."""
    with parametrize.cached():  # the rule draws a parametrized tensor in place
        for rule in ("reset_parameters", "_reset_parameters"):  # the latter: attention
            getattr(layer, rule, lambda: None)()
        names: Any = layer.parametrizations if parametrize.is_parametrized(layer) else {}
        drawn = {name: getattr(layer, name).detach().clone() for name in names}
    for name, value in drawn.items():
        with suppress(NotImplementedError):  # without an inverse it stays as it is
            setattr(layer, name, value)


def _trained(module: nn.Module) -> dict[str, Size]:
    return {n: p.shape for n, p in module.named_parameters() if p.requires_grad}


def _count(shapes: Iterable[Size]) -> int:
    return sum(shape.numel() for shape in shapes)


def _last_layer(module: nn.Module) -> str:
    """Return shell patterns that match the parameter names of the last trainable layer."""
    own = (
        (name, [n for n, p in layer.named_parameters(recurse=False) if p.requires_grad])
        for name, layer in module.named_modules()
    )
    name, leaves = [(name, leaves) for name, leaves in own if leaves][-1]
    return f"{name}.*" if name else " ".join(leaves)


def _axes_of(layer: nn.Module, leaf: str) -> tuple[str, ...]:
    """Return the axis names of a layer's weight or bias; () if they are unknown."""
    if leaf in (named := getattr(layer, "axis_names", {})):
        axes: tuple[str, ...] = named[leaf]
        return axes
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return ()
    space = ("depth", "height", "width")[5 - layer.weight.dim() :]
    return {"weight": ("out", "in", *space), "bias": ("out",)}.get(leaf, ())
