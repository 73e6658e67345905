"""Local reparametrization: sampling of a layer's outputs instead of its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import linear

from pyrofl.arguments import known
from pyrofl.nets.network import Network
from pyrofl.nets.stacked import constants
from pyrofl.tensors import Tensors

TINY = 1e-12  # keeps the slope of the root finite where all inputs of an output are zero

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class Reparametrised:
    """Network with random outputs: normal given normal weights of some layers, for each row.

    With independent weights of mean theta and variance v, the output of a linear layer has mean
    x theta + b and variance x^2 v. Drawing it costs one number per output, and every row draws its
    own, so that gradients vary less (Kingma, Salimans and Welling, "Variational Dropout and the
    Local Reparameterization Trick", NeurIPS 2015, eq. 6). The same holds for convolutions, where
    outputs that share weights are drawn independently.

    """

    def __init__(self, net: Network, names: Iterable[str]) -> None:
        """Copy a network for the given names of random weights."""
        self.names = tuple(names)
        self.module = copy.deepcopy(net.module)
        self._shapes: dict[Size, dict[str, Size]] = {}
        for name in self.names:
            known(name, net.shapes, "parameter that trains")
            path, _, leaf = name.rpartition(".")
            layer = self.module.get_submodule(path)
            if leaf != "weight" or not isinstance(layer, nn.Linear | Convolution):
                raise ValueError(
                    f"{name} belongs to {type(layer).__name__}; expected the weight of a linear "
                    "layer or a convolution; sample other weights directly"
                )
            layer.register_buffer("variance", torch.zeros(()))
            layer.register_buffer("noise", torch.zeros(()))
            layer.register_forward_hook(disturb)

    def noise_shapes(self, x: Tensor) -> dict[str, Size]:
        """Return the shape of a row's noise at every random weight, for rows x [C, B, *x]."""
        row = x.shape[2:]
        if row in self._shapes:
            return self._shapes[row]
        found = self._shapes[row] = {}

        def note(name: str) -> Any:
            return lambda layer, inputs, output: found.update({name: output.shape[1:]})

        layers = {n: self.module.get_submodule(n.rpartition(".")[0]) for n in self.names}
        hooks = [layer.register_forward_hook(note(n)) for n, layer in layers.items()]
        with torch.no_grad():
            like = next(self.module.parameters())
            zero = torch.zeros(1, *row, dtype=x.dtype, device=like.device)
            self.module(zero.to(like.dtype) if x.is_floating_point() else zero)
        for hook in hooks:
            hook.remove()
        return found

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        variance: Mapping[str, Tensor],
        noise: Mapping[str, Tensor],
        x: Tensor,
    ) -> Tensor:
        """Return outputs for x [C, B, *x]: [C, B, outputs], or with draws [K, C, B, outputs].

        Args:
            weights: means of the random weights, values of all other parameters, [C, 1, *p].
            variance: of the random weights, [C, 1, *p].
            noise: standard normal, of `noise_shapes`: [C, B, *out], or with draws [K, C, B, *out].
            x: the rows.
        """
        own = {n: v.squeeze(1) for n, v in weights.items()}
        own |= {n.removesuffix("weight") + "variance": variance[n].squeeze(1) for n in self.names}
        drawn = {n.removesuffix("weight") + "noise": noise[n] for n in self.names}
        axes = {n.dim() - len(self.noise_shapes(x)[m]) for m, n in noise.items()}
        run = vmap(self._apply)
        if 3 in axes:  # one run for all draws of what does not depend on them
            run = vmap(run, (None, 0, None))
        result: Tensor = run(own, drawn, x)
        return result

    def _apply(self, weights: Tensors, noise: Tensors, x: Tensor) -> Tensor:
        fixed = constants(self.module, next(iter(weights.values())))
        result: Tensor = functional_call(self.module, fixed | weights | noise, (x,))
        return result


def disturb(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Add the noise of a layer's random weights to its output; a forward hook."""
    squares, variance = inputs[0].square(), layer.get_buffer("variance")
    if not variance.dim():  # the module without random weights
        return output
    if isinstance(layer, Convolution):
        spread: Tensor = layer._conv_forward(squares, variance, None)
    else:
        spread = linear(squares, variance)
    return output + (spread + TINY).sqrt() * layer.get_buffer("noise")
