"""Network architectures as torch modules, built by name for a given input shape.

ResNets are those for small images of He, Zhang, Ren and Sun, "Deep Residual Learning for Image
Recognition", CVPR 2016, section 4.2, with GroupNorm (Wu and He, ECCV 2018) for BatchNorm.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from math import inf, prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pyrofl.arguments import check_name
from pyrofl.choices import DEPTHS, NETWORKS
from pyrofl.tensors import machine_memory
from pyrofl.turns import synchronized

Shape = tuple[int, ...]
Layers = Mapping[str, nn.Module]
Start = Callable[[nn.Sequential], None]
"""Initializer of the parameters of a network."""

CHECKED_WIDTH = 10_000  # width from which the available memory is checked


class Dot(nn.Module):
    """Linear model without intercept: inner product of a row with a parameter vector."""

    def __init__(self, features: int) -> None:
        """Initialize the parameter vector to zero."""
        super().__init__()
        self.w = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear model's outputs: inner products of rows and parameters, [B, 1]."""
        return (x.flatten(1) @ self.w)[:, None]


class Mean(Dot):
    """Model with a single parameter, which is the output for every row."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's single parameter as the output for every row: [B, 1]."""
        return self.w.expand(len(x), 1)


class Noise(nn.Module):
    """Layer that appends a learned log standard deviation, equal for all rows, to the outputs."""

    def __init__(self) -> None:
        """Initialize the standard deviation of the noise to 1."""
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1))

    def reset_parameters(self) -> None:
        """Reset the standard deviation of the noise to 1."""
        nn.init.zeros_(self.log_scale)

    def forward(self, x: Tensor) -> Tensor:
        """Append the log standard deviation of the noise to outputs x [B, 1]: [B, 2]."""
        return torch.cat([x, self.log_scale.expand(len(x), 1)], -1)


class Chain(nn.Sequential):
    """Sequential module of named layers, with an optional function that initializes it."""

    def __init__(self, layers: Layers, start: Start | None = None):
        """Store the layers in order, and the initialization function."""
        super().__init__(OrderedDict(layers))
        self.start = start

    def reset_parameters(self) -> None:
        """Apply the initialization function, which overrides the layers' own initialization."""
        if self.start:
            self.start(self)


def xavier_uniform(chain: nn.Sequential) -> None:
    """Initialize weights by the Xavier uniform rule and biases to zero (FedBE)."""
    for name, value in chain.named_parameters():
        if value.dim() > 1:  # GroupNorm keeps its ones
            nn.init.xavier_uniform_(value)
        elif name.endswith("bias"):
            nn.init.zeros_(value)


def xavier_normal(chain: nn.Sequential) -> None:
    """Initialize weights by the Xavier normal rule, except the Bayesian layer fc2 (MetaVD)."""
    for name, value in chain.named_parameters():
        if name.endswith("weight") and name != "fc2.weight":
            nn.init.xavier_normal_(value)


def he(chain: nn.Sequential) -> None:
    """Initialize convolution weights by He's rule with mode fan_out (He et al., 2015)."""
    for layer in chain.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def norm(channels: int) -> nn.Module:
    """Return a GroupNorm layer with eight channels per group."""
    return nn.GroupNorm(max(1, channels // 8), channels)


class Conv(NamedTuple):
    """Settings of a convolutional layer with ReLU and optional max-pooling."""

    channels: int
    kernel: int
    padding: int = 0
    pool: Callable[[], nn.Module] | None = partial(nn.MaxPool2d, 2)


class Cnn(NamedTuple):
    """Settings of a CNN: convolutions, hidden layers and initialization."""

    convs: tuple[Conv, ...]
    hidden: Shape = ()
    slope: float = 0.0  # of the hidden layers' leaky ReLU
    average: bool = False  # average over the image instead of flattening it
    norm: bool = False  # GroupNorm after every convolution
    start: Start | None = None  # initializer


def convnet(name: str, width: int) -> Cnn:
    """Return the settings of a named CNN from a paper; `width` is used for MetaVD's CNN only."""
    overlapping = partial(nn.MaxPool2d, 2, 2, 1)
    fedbe = Cnn((Conv(32, 3), Conv(64, 3), Conv(64, 3, pool=None)), (64,), start=xavier_uniform)
    growing = (Conv(c, 3, 1, overlapping) for c in (32, 64, 128, 256))
    equal = (Conv(width, 3, 1),) * 3
    return {
        "cnn-pfedvem": Cnn((Conv(16, 5), Conv(32, 5)), (120, 84)),
        "cnn-pfedvem-100": Cnn((*growing, Conv(100, 3, pool=None)), average=True),
        "cnn-pfedmb": Cnn((Conv(6, 5), Conv(16, 5)), (120, 84)),
        "cnn-metavd": Cnn(equal, (4 * width, 2 * width), 0.1, start=xavier_normal),
        "cnn-fedbe": fedbe,
        "cnn-fedbe-gn": fedbe._replace(norm=True),
        "cnn-fedabml": Cnn((Conv(64, 5), Conv(64, 5)), (120, 64)),
    }[name]


def images(cnn: Cnn, channels: int) -> Layers:
    """Return the convolutional layers of a CNN: name -> layer."""
    layers: dict[str, nn.Module] = {}
    for i, conv in enumerate(cnn.convs, 1):
        layers[f"conv{i}"] = nn.Conv2d(channels, conv.channels, conv.kernel, padding=conv.padding)
        if cnn.norm:
            layers[f"norm{i}"] = norm(conv.channels)
        layers[f"relu{i}"] = nn.ReLU()
        if conv.pool:
            layers[f"pool{i}"] = conv.pool()
        channels = conv.channels
    return layers | ({"average": nn.AdaptiveAvgPool2d(1)} if cnn.average else {})


def dense(widths: Shape, outputs: int, slope: float = 0.0) -> Layers:
    """Return fully connected layers fc1, fc2, ... of the given widths, and an output layer."""
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    for i, (before, after) in enumerate(pairwise(widths), 1):
        layers[f"fc{i}"] = nn.Linear(before, after)
        layers[f"act{i}"] = nn.LeakyReLU(slope) if slope else nn.ReLU()
    return layers | {"head": nn.Linear(widths[-1], outputs)}


def features(layers: Layers, shape: Shape) -> int:
    """Return the number of outputs that layers compute per image; 0 if the image is too small."""
    try:
        return int(Chain(layers).to("meta")(torch.empty(1, *shape, device="meta")).numel())
    except RuntimeError:
        return 0


def cnn_for(name: str, cnn: Cnn, shape: Shape, outputs: int) -> nn.Module:
    """Build a CNN for images of the given shape; raise ValueError if they are too small."""
    width = features(images(cnn, shape[0]), shape)
    if not width:
        side = next(n for n in range(1, 99) if features(images(cnn, 1), (1, n, n)))
        raise ValueError(f"{name}: images are {shape[1]} x {shape[2]}; expected {side} or more")
    layers = {**images(cnn, shape[0]), **dense((width, *cnn.hidden), outputs, cnn.slope)}
    return Chain(layers, cnn.start)


class ResidualBlock(nn.Module):
    """ResNet block: two convolutions and a parameter-free shortcut (option A)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        """Build the layers of a ResNet block, given input channels, output channels and stride."""
        super().__init__()
        self.stride, self.missing = stride, after - before
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = norm(after)

    @property
    def inner(self) -> Chain:
        """Return the block's residual branch, without the shortcut, as a chain of layers."""
        names = ("conv1", "norm1", "relu", "conv2", "norm2")
        return Chain({n: getattr(self, n, nn.ReLU()) for n in names})

    def shortcut(self, x: Tensor) -> Tensor:
        """Return the ResNet shortcut of x: subsampled by the stride, channels padded by zeros."""
        if not self.missing:
            return x[..., :: self.stride, :: self.stride]
        near, left = x[..., :: self.stride, :: self.stride], self.missing // 2
        # Channels are padded as the last axis, their layout in channels-last memory.
        return pad(near.movedim(-3, -1), (left, self.missing - left)).movedim(-1, -3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the ResNet block's outputs [B, after, height / stride, width / stride]."""
        result: Tensor = (self.inner(x) + self.shortcut(x)).relu()
        return result


def resnet(depth: int, channels: int, outputs: int) -> Layers:
    """Return the layers of a ResNet with stages of 16, 32 and 64 channels, and a linear head."""
    conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
    layers: dict[str, nn.Module] = {"conv": conv, "norm": norm(16), "relu": nn.ReLU()}
    before = 16
    for stage, after in enumerate((16, 32, 64), 1):
        for block in range(1, (depth - 2) // 6 + 1):
            layers[f"stage{stage}_block{block}"] = ResidualBlock(
                before, after, stride=after // before
            )
            before = after
    return layers | {"average": nn.AdaptiveAvgPool2d(1), **dense((64,), outputs)}


@synchronized  # as the type of new numbers is the process's: that of a fit in another thread
def module(spec: str, shape: Shape, outputs: int) -> nn.Module:
    """Build a torch module from a specification such as "mlp:100", for a given row shape."""
    name, _, rest = spec.partition(":")
    check_name(name, NETWORKS, "network")
    widths = widths_of(spec, rest)
    if name in ("mean", "linear") and outputs != 1:
        raise ValueError(f"network {name!r} has 1 output; {outputs} outputs are required")
    if max(widths, default=0) > CHECKED_WIDTH:
        _find_room(spec, name, widths, shape, outputs)
    with torch.random.fork_rng(devices=[]):
        if name in ("mean", "linear"):
            return Mean(1) if name == "mean" else Dot(prod(shape))
        if name in ("softmax", "mlp"):
            hidden = () if name == "softmax" else widths or (100,)
            return Chain(dense((prod(shape), *hidden), outputs))
        if len(shape) != 3:
            raise ValueError(f"{name}: rows have shape {shape}; expected (channels, height, width)")
        if name in DEPTHS:
            return Chain(resnet(DEPTHS[name], shape[0], outputs), he)
        return cnn_for(name, convnet(name, *widths or (64,)), shape, outputs)


def _find_room(spec: str, name: str, widths: Shape, shape: Shape, outputs: int) -> None:
    """Raise MemoryError if a network would not fit in memory, before it is built."""
    numbers = inf
    with suppress(RuntimeError, TypeError, OverflowError), torch.device("meta"):
        mlp = dense((prod(shape), *widths), outputs) if name == "mlp" else {}
        chain = Chain(mlp) if mlp else cnn_for(name, convnet(name, *widths), shape, outputs)
        numbers = sum(value.numel() for value in chain.parameters())
    needed, room = (
        2 * 4 * numbers,
        machine_memory(),
    )  # bytes; a network keeps its own copy of a module
    if needed > room:
        raise MemoryError(
            f"network {spec!r} has {numbers:.3g} weights, which need {needed / 2**30:.3g} GiB of "
            f"{room / 2**30:.3g}; expected smaller widths"
        )


def widths_of(spec: str, text: str) -> Shape:
    """Parse the layer widths in a network specification such as "mlp:200,100".

    >>> widths_of("mlp:200,100", "200,100")
    (200, 100)
    """
    if not text and ":" not in spec:
        return ()
    if not all(part.isdecimal() and len(part) < 19 and int(part) for part in text.split(",")):
        message = f"network {spec!r}: found widths {text!r}"
        raise ValueError(f"{message}; expected positive integers below 1e18")
    widths = tuple(int(part) for part in text.split(","))
    most = {"mlp": len(widths), "cnn-metavd": 1}.get(spec.partition(":")[0], 0)
    if len(widths) > most:
        raise ValueError(f"network {spec!r}: found {len(widths)} widths; expected {most or 'none'}")
    return widths
