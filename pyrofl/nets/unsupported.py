"""Layers that cannot run for many clients at once: refused in one line, with what to use instead.

`refuse` sees what a module is made of. What its forward does shows at its first call: random
numbers, operations without a rule in torch.vmap, and tensors that it stores or changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

STATELESS = "a network runs for several clients at once and keeps nothing between its calls"
REASONS = {
    r"randomness error mode|aten::rrelu": "draws random numbers, as functional.dropout does; leave "
    "that out, or set its rate to 0, and use a prior on the weights instead",
    r"calling \.item\(\)": "reads a number of a tensor by .item(); compute with the tensor instead",
    r"data-dependent control flow": "has a branch that depends on a tensor's values; use "
    "torch.where instead",
    r"match the broadcast shape|inplace arithmetic|in-place": "changes a tensor in place that is "
    f"the same for all rows, such as a buffer; {STATELESS}: use GroupNorm for BatchNorm",
    r"same dtype|dtypes must be the same|expected scalar type": "multiplies numbers of two types; "
    "pass rows x of integers as x.float(), and images of 0 to 255 as x / 255.0",
    r"'indices' to have one of .* scalar types": "looks up rows in an embedding; it needs rows x "
    "of integers; pass x.long()",
    r"Batching rule not implemented for (?P<op>[\w:.]+)|yet support (?P<other>[\w:.]+)": "calls "
    "{op}, which torch.vmap cannot run; write it with other operations",
}
"""Pattern of an error of torch.vmap -> what the module does, and what to do instead."""

_inspected: WeakSet[nn.Module] = WeakSet()


def refuse(module: nn.Module) -> None:
    """Raise ValueError if a layer mixes rows, draws random numbers or does not support vmap."""
    for name, layer in module.named_modules():
        if advice := _advice(layer):
            raise ValueError(f"layer {name or 'module'!r} is {type(layer).__name__}: {advice}")


def _advice(layer: nn.Module) -> str:
    """Return what to use instead of a layer that cannot run; "" if it can."""
    # The rate of a dropout layer, or that inside attention and recurrent layers.
    rate = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0.0)
    if isinstance(layer, _BatchNorm) or getattr(layer, "track_running_stats", False):
        return "use GroupNorm, which keeps no statistics over rows"
    if isinstance(rate, int | float) and rate > 0:
        return f"set its dropout, {rate:g}, to 0, and use a prior on the weights instead"
    if isinstance(layer, nn.RReLU):
        return "it draws random slopes; use LeakyReLU"
    if isinstance(layer, nn.RNNBase | nn.LSTMCell):
        return "torch.vmap cannot run it; use GRUCell, or write it with linear layers"
    if any(is_lazy(p) for p in layer.parameters(recurse=False)):
        return "its shape is not known yet; use the layer that is not lazy, or run it once"
    parameters = [*layer.parameters(recurse=False)]
    if any(p.is_meta for p in parameters):
        return "its parameters are on the meta device, without values; build it on the CPU"
    if any(p.is_complex() for p in parameters):
        return "its parameters are complex; use a real one for each part, and torch.complex of both"
    hooks = layer._forward_pre_hooks.values()
    if isinstance(layer, _SpectralNorm) or any(isinstance(h, SpectralNorm) for h in hooks):
        return (
            f"spectral_norm changes its vectors at every call, and {STATELESS}; use "
            "parametrizations.weight_norm, or a prior on the weights"
        )
    if any(isinstance(h, WeightNorm) for h in hooks):
        return "utils.weight_norm stores tensors in the layer; use parametrizations.weight_norm"
    return ""


def refuse_integers(layers: Iterable[nn.Module], x: Tensor) -> None:
    """Raise ValueError if rows are integers, and the first layer with parameters multiplies them.

    Other layers, such as embeddings, may read integers.
    """
    if x.is_floating_point():
        return
    first = next((one for one in layers if any(True for _ in one.parameters())), None)
    if isinstance(first, nn.Linear | _ConvNd | nn.GroupNorm):
        raise ValueError(
            f"rows x are {str(x.dtype).removeprefix('torch.')}, and the first layer is "
            f"{type(first).__name__}; expected floating-point rows: x.float(), or x / 255.0 of "
            "images"
        )


def as_outputs(layer: nn.Module, output: Any) -> Tensor:
    """Return the outputs of a layer; raise ValueError if they are no tensor."""
    if not isinstance(output, Tensor):
        raise ValueError(
            f"{_forward(layer)} returns a {type(output).__name__}; expected one tensor of outputs "
            "[rows, outputs]"
        )
    return output


@contextmanager
def explained(layer: nn.Module) -> Iterator[None]:
    """Run a layer by vmap; raise ValueError if it cannot run so, or stores or changes tensors.

    The latter is inspected at the layer's first call.
    """
    before = None if layer in _inspected else _attributes(layer)
    try:
        yield
    except IndexError as error:
        if "index out of range in self" not in str(error):
            raise
        raise ValueError(
            f"{_forward(layer)} looks up a row that an embedding does not have; expected integers "
            "x from 0 to num_embeddings - 1"
        ) from error
    except RuntimeError as error:
        for pattern, reason in REASONS.items():
            if match := re.search(pattern, str(error)):
                op = next((v for v in match.groups() if v), "")
                raise ValueError(f"{_forward(layer)} {reason.format(op=op)}") from error
        raise
    finally:
        changed = [] if before is None else _restored(layer, before)
    if changed:
        raise ValueError(
            f"{_forward(layer)} stores or changes tensors in {', '.join(changed)}; {STATELESS}: "
            "use GroupNorm for statistics of rows, and store nothing"
        )
    _inspected.add(layer)


def _forward(layer: nn.Module) -> str:
    return f"the forward function of {type(layer).__name__}"


def _attributes(layer: nn.Module) -> dict[str, tuple[nn.Module, dict[str, Any], dict[str, int]]]:
    """Return the attributes of all layers inside, with shallow copies of lists and dicts."""
    attributes = {}
    for name, part in layer.named_modules():
        held = {n: v for n, v in vars(part).items() if not n.startswith("_")}
        plain = {n: copy(v) if isinstance(v, list | dict) else v for n, v in held.items()}
        versions = {n: v._version for n, v in _own_tensors(part)}
        attributes[name] = part, plain, versions
    return attributes


def _own_tensors(part: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Return a layer's buffers, and the tensors among its attributes, that are not wrapped."""
    every = {**vars(part), **part._buffers}
    tensors = ((n, v) for n, v in every.items() if isinstance(v, Tensor))
    return [(n, v) for n, v in tensors if not is_functorch_wrapped_tensor(v)]


def _restored(
    layer: nn.Module, before: dict[str, tuple[nn.Module, dict[str, Any], dict[str, int]]]
) -> list[str]:
    """Restore attributes that hold tensors of a call; return their names, "self.NAME"."""
    changed = []
    for path, (part, held, versions) in before.items():
        own = f"self.{path}." if path else "self."
        changed += [
            own + n for n, v in _own_tensors(part) if n in versions and v._version != versions[n]
        ]
        for name, value in list(vars(part).items()):
            if not name.startswith("_") and value is not held.get(name) and _holds_tensor(value):
                changed.append(own + name)
                vars(part).pop(name)
                vars(part).update({name: held[name]} if name in held else {})
    return changed


def _holds_tensor(value: Any) -> bool:
    """Return whether a value is a tensor inside vmap, or a list or dict with one."""
    if isinstance(value, Tensor):
        return is_functorch_wrapped_tensor(value)
    inside = value.values() if isinstance(value, dict) else value
    return isinstance(value, list | tuple | dict) and any(
        isinstance(v, Tensor) and is_functorch_wrapped_tensor(v) for v in inside
    )
