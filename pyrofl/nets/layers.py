"""What a network needs to know of its layers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


def refuse(module: nn.Module) -> None:
    """Refuse layers that mix rows, draw random numbers or cannot run for many clients at once.

    Raises:
        ValueError: naming the layer and what to use instead.
    """
    for name, layer in module.named_modules():
        dropout = getattr(layer, "dropout", 0.0)  # the rate inside attention and recurrent layers
        advice = ""
        if isinstance(layer, _BatchNorm) or getattr(layer, "track_running_stats", False):
            advice = "use GroupNorm, which keeps no statistics over rows"
        elif isinstance(layer, _DropoutNd) or (isinstance(dropout, float) and dropout > 0):
            advice = "remove it, and put a prior on the weights instead"
        elif isinstance(layer, nn.RNNBase | nn.LSTMCell):
            advice = "torch.vmap cannot run it; use GRUCell, or write it with linear layers"
        if advice:
            raise ValueError(f"layer {name or 'module'!r} is {type(layer).__name__}: {advice}")


def last_layer(module: nn.Module) -> str:
    """Return patterns for the parameters of the last layer that has any."""
    name, layer = [
        (name, layer)
        for name, layer in module.named_modules()
        if any(True for _ in layer.parameters(recurse=False))
    ][-1]
    return f"{name}.*" if name else " ".join(n for n, _ in layer.named_parameters(recurse=False))


def axes_of(layer: nn.Module, leaf: str) -> tuple[str, ...]:
    """Name the axes of a layer's weight or bias; () where they have no common names."""
    space = ("depth", "height", "width")
    known = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
    for kind, dimensions in known.items():
        if isinstance(layer, kind):
            axes = ("out", "in", *space[3 - dimensions :])
            return {"weight": axes, "bias": ("out",)}.get(leaf, ())
    return ()
