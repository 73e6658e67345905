"""Networks: any torch module, its parameters held in dicts and run for many clients at once."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch
from torch import Generator, Size, Tensor, nn

from pyrofl.nets import stacked
from pyrofl.nets.architectures import NETWORKS, module
from pyrofl.nets.layers import axes_of, last_layer, refuse
from pyrofl.tensors import Tensors, matches

__all__ = ["NETWORKS", "Forward", "Network", "build"]

Forward = Callable[[Tensors, Tensor], Tensor]
"""(weights, x [C, B, *x]) -> outputs, as a `Network` or what stands for one."""


class Network:
    """A torch module as a function of its parameters.

    Attributes:
        module: a copy of the module; its own values are never used in a call.
        shapes: of every parameter, by name, in the module's order.
        head: shell patterns of the names that form the head; the rest is the base.
    """

    def __init__(self, module: nn.Module, head: str | None = None) -> None:
        """Wrap a module, which is copied: hooks that it gets later have no effect here.

        Args:
            module: maps rows [B, *x] to outputs [B, outputs], each row by itself.
            head: shell patterns separated by spaces; by default the last layer with parameters.

        Raises:
            ValueError: if the module has no parameter, no name matches `head`, or a layer mixes
                rows, draws random numbers or keeps running statistics.
        """
        refuse(module)
        self.module = copy.deepcopy(module)
        self.shapes: dict[str, Size] = {n: p.shape for n, p in self.module.named_parameters()}
        if not self.shapes:
            raise ValueError(f"{type(module).__name__} has no parameters; expected at least one")
        self.head = last_layer(self.module) if head is None else head
        self.matching(self.head)
        self.parts = stacked.parts(self.module)

    def matching(self, patterns: str) -> dict[str, Size]:
        """Return the shapes of the parameters whose names match one of the patterns.

        Raises:
            ValueError: if none does.
        """
        found = {n: shape for n, shape in self.shapes.items() if matches(n, patterns)}
        if not found:
            raise ValueError(
                f"no parameter matches {patterns!r}; expected some of {', '.join(self.shapes)}"
            )
        return found

    def dims(self, name: str) -> tuple[str, ...]:
        """Name the axes of a parameter: ("fc1_out", "fc1_in") for the weight of a linear fc1.

        Raises:
            ValueError: if there is no such parameter.
        """
        if name not in self.shapes:
            raise ValueError(f"no parameter {name!r}; expected one of {', '.join(self.shapes)}")
        path, _, leaf = name.rpartition(".")
        axes = axes_of(self.module.get_submodule(path), leaf)
        if len(axes) != len(self.shapes[name]):
            path, axes = name, tuple(f"axis{i}" for i in range(len(self.shapes[name])))
        return tuple(f"{path}_{axis}".replace(".", "_").lstrip("_") for axis in axes)

    def init(self, generator: Generator) -> Tensors:
        """Draw a start for every parameter [*p], on the CPU; see `fresh`."""
        return {n: p.detach() for n, p in self.fresh(generator).named_parameters()}

    def fresh(self, generator: Generator) -> nn.Module:
        """Return a copy of the module, its parameters drawn as its layers' own rules say.

        A parameter whose layers have no `reset_parameters` keeps the module's value. A layer's
        rule runs after those of the layers inside it. The caller's random state is not touched.
        """
        fresh = copy.deepcopy(self.module).cpu()
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would seed the caller's accelerators too.
            torch.default_generator.manual_seed(int(seed))
            for layer in reversed(list(fresh.modules())):
                for rule in ("reset_parameters", "_reset_parameters"):  # the latter: attention
                    getattr(layer, rule, lambda: None)()
        return fresh

    def __call__(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Run the network for C clients: [C, B, outputs], or with draws [K, C, B, outputs].

        Args:
            weights: every parameter, [*p] if clients share it, [C, 1, *p] if each has its own,
                [K, C, 1, *p] for K draws of it. The 1 is the axis of rows.
            x: [C, B, *x]. What is shared or has no draws is computed once.

        Raises:
            ValueError: if a parameter is missing or has other axes.
        """
        lead = self.leading_axes(weights, len(x))
        flat = {
            n: weights[n].squeeze(-len(p) - 1) if lead[n] else weights[n]
            for n, p in self.shapes.items()
        }
        return stacked.run(self.parts, flat, x)

    def apply(self, weights: Tensors, x: Tensor) -> Tensor:
        """Run the module once: weights [*p], x [B, *x] -> [B, outputs]."""
        return stacked.call(self.module, weights, x)

    def split(self, patterns: str) -> tuple[Network, Network] | None:
        """Cut a sequential module in two: what precedes the named parameters, and the rest.

        Returns:
            Base and head with head(base(x)) equal to the network and the same names, if the module
            is a `torch.nn.Sequential` whose last layers have just the parameters that match; None
            if it is not, has hooks of its own, shares parameters between layers, or no layer
            precedes them; or if this is a subclass that computes something else.
        """
        if type(self).__call__ is not Network.__call__:
            return None
        # Not `named_children`, which names a layer once, wherever it runs again.
        layers = {n: layer for n, layer in self.module._modules.items() if layer is not None}
        mine = [matches(n, patterns) for n in self.shapes]
        owner = [n.split(".")[0] for n in self.shapes]
        at = list(layers).index(owner[mine.index(True)]) if any(mine) and layers else 0
        rest = list(layers)[at:]
        plain = type(self.module).forward is nn.Sequential.forward and not stacked.hooked(
            self.module
        )
        if not plain or not any(o not in rest for o in owner):
            return None
        if any(matched != (o in rest) for matched, o in zip(mine, owner, strict=True)):
            return None
        base, head = (
            Network(nn.Sequential(OrderedDict((n, layers[n]) for n in names)))
            for names in ([n for n in layers if n not in rest], rest)
        )
        return (base, head) if [*base.shapes, *head.shapes] == list(self.shapes) else None

    def leading_axes(self, weights: Mapping[str, Tensor], clients: int) -> dict[str, int]:
        """Return how many axes precede each parameter's own: 0, 2 or 3.

        Raises:
            ValueError: if a parameter is missing, has other axes (an unstacked one would
                broadcast without an error) or another number of clients or draws.
        """
        lead: dict[str, int] = {}
        draws: int | None = None
        for name, shape in self.shapes.items():
            if name not in weights:
                raise ValueError(f"weights lack {name!r}; found {', '.join(weights) or 'none'}")
            found, own = tuple(weights[name].shape), tuple(shape)
            front = found[: len(found) - len(own)]
            if draws is None and len(front) == 3:
                draws = front[0]
            k = "K" if draws is None else draws
            if front not in ((), (clients, 1), (k, clients, 1)) or found[len(front) :] != own:
                raise ValueError(
                    f"{name} has shape {found}; expected {own}, {(clients, 1, *own)} or "
                    f"{(k, clients, 1, *own)} for {clients} clients"
                )
            lead[name] = len(front)
        return lead

    def check(self, x: Tensor, outputs: int) -> None:
        """Run a row of zeros for two clients, to refuse data that the network does not fit.

        Args:
            x: [C, B, *x] or [1, 1, *x]; only the shape and type of a row count.
            outputs: numbers that the likelihood needs per row, such as the number of classes.

        Raises:
            ValueError: if the network cannot take the row, or gives another number of outputs.
        """
        rows = x.new_zeros(2, 1, *x.shape[2:])
        dtype = x.dtype if x.is_floating_point() else None
        weights = {
            n: p.detach().to(x.device, dtype).expand(2, 1, *p.shape)
            for n, p in self.module.named_parameters()
        }
        try:  # as in training, for two clients side by side
            found = tuple(self(weights, rows).shape[1:])
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ValueError(
                f"the network cannot take rows of shape {tuple(x.shape[2:])}: {error}"
            ) from error
        if found != (1, outputs):
            raise ValueError(
                f"the network gives outputs of shape {found} for one row; expected {(1, outputs)}"
            )


def build(spec: str, input_shape: tuple[int, ...], outputs: int) -> Network:
    """Build a network by name for rows of one shape.

    Args:
        spec: a name of `NETWORKS`, for some with widths: "mlp:200,100", "cnn-metavd:256".
        input_shape: of one row, (channels, height, width) for a CNN.
        outputs: classes, or 1 for a response that is a number.

    Raises:
        ValueError: as `pyrofl.nets.architectures.module`.
    """
    return Network(module(spec, tuple(input_shape), outputs))
