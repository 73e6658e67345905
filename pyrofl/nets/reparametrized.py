"""Local reparametrization: sampling of a layer's outputs instead of its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import linear

from pyrofl.arguments import check_name
from pyrofl.nets import stacked
from pyrofl.nets.network import Network
from pyrofl.nets.stacked import attention_by_products, constants
from pyrofl.nets.unsupported import explained, refuse_integers
from pyrofl.tensors import Tensors

# Keeps the slope of the root finite where all inputs of an output are zero.
MIN_SQUARED_NORM = 1e-12

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
# Not subclasses, which compute other things.
SUPPORTED_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Reparametrized:
    """Network with normal parameters that draws the outputs of layers instead of the parameters.

    With independent parameters of mean theta and variance v, the output of a linear layer has mean
    x theta + b and variance x^2 v + v_b. Drawing it costs one number per output, and every row
    draws its own, so that gradients vary less (Kingma, Salimans and Welling, "Variational Dropout
    and the Local Reparameterization Trick", NeurIPS 2015, eq. 6). The same holds for convolutions,
    where outputs that share weights are drawn independently. Random parameters of other layers, and
    of layers that a call runs more than once, are drawn themselves, once for all rows of a client.
    """

    def __init__(self, net: Network, names: Iterable[str]) -> None:
        """Copy a network, and prepare its layers for the named random parameters."""
        self.names = tuple(names)
        self.module = copy.deepcopy(net.module)
        self._shapes: dict[Size, dict[str, Size]] = {}
        self._sizes = net.shapes
        self._parts = net.parts if type(net) is Network else []
        for name in self.names:
            check_name(name, net.shapes, "parameter that trains")
        paths = dict.fromkeys(name.rpartition(".")[0] for name in self.names)
        layers = {path: self.module.get_submodule(path) for path in paths}
        self._layers = {n: v for n, v in layers.items() if type(v) in SUPPORTED_LAYERS}
        for layer in self._layers.values():
            for buffer in ("weight_variance", "bias_variance", "noise"):
                layer.register_buffer(buffer, torch.zeros(()))
            layer.register_forward_hook(disturb)

    @property
    def has_outputs(self) -> bool:
        """Whether the outputs of at least one layer can be drawn instead of its parameters."""
        return bool(self._layers)

    def noise_shapes(self, x: Tensor) -> dict[str, Size]:
        """Return the shapes of the noise from which outputs for rows x [C, B, *x] are drawn.

        Returns:
            Path of a layer -> shape of a row's noise, for layers whose outputs are drawn; name of a
            parameter -> its shape, for parameters that are drawn themselves; see `of_rows`.
        """
        row = x.shape[2:]
        if row in self._shapes:
            return self._shapes[row]
        seen: dict[str, list[Size]] = {path: [] for path in self._layers}

        def note(path: str) -> Any:
            return lambda layer, inputs, output: seen[path].append(output.shape[1:])

        hooks = [layer.register_forward_hook(note(n)) for n, layer in self._layers.items()]
        with torch.no_grad():
            like = next(self.module.parameters())
            zero = torch.zeros(1, *row, dtype=x.dtype, device=like.device)
            self.module(zero.to(like.dtype) if x.is_floating_point() else zero)
        for hook in hooks:
            hook.remove()
        once = {path: shapes[0] for path, shapes in seen.items() if len(shapes) == 1}
        others = {n: self._sizes[n] for n in self.names if n.rpartition(".")[0] not in once}
        self._shapes[row] = once | others
        return self._shapes[row]

    def of_rows(self, name: str) -> bool:
        """Return whether the noise of a given name is drawn separately for every row."""
        return name not in self._sizes

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        variance: Mapping[str, Tensor],
        noise: Mapping[str, Tensor],
        x: Tensor,
    ) -> Tensor:
        """Return randomly drawn outputs for rows x [C, B, *x]: [C, B, outputs].

        With draws in the noise, they are [K, C, B, outputs].

        Args:
            weights: means of the random parameters, values of all others, [C, 1, *p].
            variance: of the random parameters, [C, 1, *p].
            noise: standard normal, of `noise_shapes`: [C, B, *out] or [C, 1, *p], or with draws
                [K, C, B, *out] or [K, C, 1, *p].
            x: the rows.
        """
        refuse_integers(self.module.modules(), x)
        shapes = self.noise_shapes(x)
        own = {n: v.squeeze(1) for n, v in weights.items()}
        if self._is_chain(shapes):
            variances = {n: v.squeeze(1) for n, v in variance.items()}
            return self._run(own, variances, noise, x)
        spread = {n: variance[n].squeeze(1) for n in self.names}
        own |= {f"{n}_variance": v for n, v in spread.items() if n not in shapes}
        direct = {n: v.sqrt() for n, v in spread.items() if n in shapes}
        drawn = {
            n: v if self.of_rows(n) else v.squeeze(-len(shapes[n]) - 1) for n, v in noise.items()
        }
        axes = {v.dim() - len(shapes[n]) for n, v in noise.items()}
        run = vmap(self._apply)
        if 3 in axes:  # one run for all draws of what does not depend on them
            run = vmap(run, (None, None, 0, None))
        with attention_by_products(), explained(self.module):
            result: Tensor = run(own, direct, drawn, x)
        return result

    def _is_chain(self, shapes: Mapping[str, Size]) -> bool:
        """Return whether all random parameters are those of linear layers in a chain of layers."""
        random = [part for part in self._parts if part.names.keys() & {*self.names}]
        drawn = {n.rpartition(".")[0] for part in random for n in part.names}
        rules = {part.rule for part in self._parts}
        is_linear = all(part.rule is stacked.linear for part in random)
        return is_linear and stacked.anything not in rules and drawn == shapes.keys()

    def _run(
        self, weights: Tensors, variance: Tensors, noise: Mapping[str, Tensor], x: Tensor
    ) -> Tensor:
        """Run a chain of layers for all clients by batched matrix products, without vmap."""
        axes = 1  # of clients, then of draws and clients
        for layer, names, rule in self._parts:
            layer_weights = {leaf: weights[n] for n, (leaf, _) in names.items()}
            spread = {leaf: variance[n] for n, (leaf, _) in names.items() if n in self.names}
            y = rule(layer, layer_weights, x, axes)
            if spread:
                if "weight" in spread:
                    scale = rule(layer, spread, x.square(), axes)
                else:
                    scale = spread["bias"][:, None]
                drawn = noise[next(iter(names)).rpartition(".")[0]]
                y = torch.addcmul(y, (scale + MIN_SQUARED_NORM).sqrt(), drawn)
                axes = drawn.dim() - 2
            x = y
        return x

    def _apply(self, weights: Tensors, sd: Tensors, noise: Tensors, x: Tensor) -> Tensor:
        fixed = constants(self.module, next(iter(weights.values())))
        values = weights | {n: weights[n] + v * noise[n] for n, v in sd.items()}
        values |= {f"{n}.noise".lstrip("."): v for n, v in noise.items() if n not in sd}
        result: Tensor = functional_call(self.module, fixed | values, (x,))
        return result


def disturb(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Add the noise of a layer's random parameters to the layer's output, as a forward hook."""
    names = ("weight_variance", "bias_variance")
    weight, bias = (v if v.dim() else None for v in map(layer.get_buffer, names))
    noise = layer.get_buffer("noise")
    if not noise.dim():  # a layer whose parameters are constants, or drawn themselves
        return output
    spread = torch.zeros((), dtype=output.dtype, device=output.device)
    if weight is None:
        channels = bias if bias is not None else spread
        space = output.dim() - 2 if isinstance(layer, Convolution) else 0
        spread = channels.reshape(*channels.shape, *(1,) * space)
    elif isinstance(layer, Convolution):
        spread = layer._conv_forward(inputs[0].square(), weight, bias)
    else:
        spread = linear(inputs[0].square(), weight, bias)
    return output + (spread + MIN_SQUARED_NORM).sqrt() * noise
