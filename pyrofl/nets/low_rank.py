"""Low-rank adapters (LoRA) for linear and attention layers with frozen weights.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022. A weight W0 of a trained
network is constant, and is changed by B A of rank r:

    W = W0 + alpha / r B A,    A [r, in] drawn at the start,    B [out, r] zero at the start

Only A and B train, so only they are drawn, sent, and have a prior and a posterior. The weights of
attention that give queries, keys and values are stacked in one matrix and have one update.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from pyrofl.arguments import Count, Positive, checked
from pyrofl.nets.network import Network
from pyrofl.nets.stacked import hooked
from pyrofl.tensors import matches


class LowRank(nn.Module):
    """Mixin of layers with a frozen weight and a trainable low-rank update (LoRA)."""

    adapted: str
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    axis_names: Mapping[str, tuple[str, ...]] = {
        "lora_A": ("rank", "in"),
        "lora_B": ("out", "rank"),
    }

    def add_adapters(self, rank: int, scale: float) -> None:
        """Add the trainable low-rank factors A and B to the layer."""
        out, into = self.frozen.shape
        self.lora_scale = scale
        self.lora_A = nn.Parameter(self.frozen.new_zeros(rank, into))
        self.lora_B = nn.Parameter(self.frozen.new_zeros(out, rank))
        self.reset_parameters()

    @property
    def frozen(self) -> Tensor:
        """Return the layer's frozen weight, without the low-rank update: [out, in]."""
        parameters = self._parameters[self.adapted]
        assert parameters is not None
        return parameters

    @property
    def updated(self) -> Tensor:
        """Return the layer's frozen weight plus its low-rank update: [out, in]."""
        return self.frozen + self.lora_scale * self.lora_B @ self.lora_A

    def reset_parameters(self) -> None:
        """Initialize the low-rank factor A like a linear layer's weight, and B to zero."""
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)
        nn.init.zeros_(self.lora_B)


# The parameters of a layer keep their names. Attention and torch's fused transformer layers read
# weights by these names, without a call of the layer: the properties go before the parameters.


class LowRankLinear(LowRank):
    """Linear layer with a frozen weight and bias, and a low-rank update of the weight."""

    adapted = "weight"
    bias: Tensor | None
    weight = LowRank.updated

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs [..., out]; compute the frozen part once for all clients."""
        update = linear(linear(x, self.lora_A), self.lora_B)
        return linear(x, self.frozen, self.bias) + self.lora_scale * update


class LowRankAttention(LowRank, nn.MultiheadAttention):
    """Attention layer with frozen weights, and a low-rank update of the input weights."""

    adapted = "in_proj_weight"
    in_proj_weight = LowRank.updated  # type: ignore[assignment]

    def _reset_parameters(self) -> None:
        """Do nothing when weights are to be initialized, since the layer's weights are frozen."""


KINDS: Mapping[type[nn.Module], type[LowRank]] = {
    nn.Linear: LowRankLinear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: LowRankLinear,
    nn.MultiheadAttention: LowRankAttention,
}


@checked
def lora(
    module: nn.Module,
    rank: Count,
    *,
    alpha: Positive | None = None,
    layers: str = "*",
    train: str = "",
    head: str | None = None,
) -> Network:
    """Return a network with frozen weights and trainable low-rank adapters (LoRA).

    The adapters have names that end in lora_A and lora_B. With `head="*lora_*"` methods with a
    personal head, such as pFedVEM, have personal adapters.

    Args:
        module: trained module; it is not changed.
        rank: rank r of each update.
        alpha: an update is scaled by alpha / r; None: by 1.
        layers: shell patterns, separated by spaces, of the linear and attention layers with
            adapters.
        train: shell patterns of further parameters that train, from their present values. A layer
            with a weight that trains has no adapters.
        head: shell patterns of the names that form the head; default: the last trainable layer.

    Returns:
        The network. Its constants are not sent, and all clients compute with one copy of them.

    Raises:
        ValueError: if no linear or attention layer matches `layers`, no parameter matches `train`,
            or a layer has hooks or inputs of several sizes; or as `Network`.

    Examples:
        >>> from torch import nn
        >>> from pyrofl import nets
        >>> trained = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
        >>> net = nets.lora(trained, rank=2, train="2.bias")
        >>> {name: tuple(shape) for name, shape in net.shapes.items() if name.startswith("2")}
        {'2.bias': (10,), '2.lora_A': (2, 100), '2.lora_B': (10, 2)}
    """
    adapted = copy.deepcopy(module).requires_grad_(False)
    adapted_layers = {n: layer for n, layer in adapted.named_modules() if type(layer) in KINDS}
    frozen = {
        n: f"{n}.{KINDS[type(layer)].adapted}".lstrip(".") for n, layer in adapted_layers.items()
    }
    chosen = {
        n: layer
        for n, layer in adapted_layers.items()
        if matches(n, layers) and not matches(frozen[n], train)
    }
    if not chosen and any(matches(n, layers) for n in adapted_layers):
        raise ValueError(
            f"all layers that match {layers!r} have weights that match train, {train!r}; expected "
            "train to leave the weight of at least one of them frozen, for the adapters"
        )
    if not chosen:
        raise ValueError(
            f"no linear or attention layer matches {layers!r}; expected some of "
            f"{', '.join(adapted_layers) or 'a module with such layers'}"
        )
    for name, layer in chosen.items():
        unusual = "hooks" if hooked(layer) else ""
        if not getattr(layer, "_qkv_same_embed_dim", True):
            unusual = "kdim or vdim"
        if unusual:
            raise ValueError(
                f"layer {name!r} has {unusual}, which adapters do not support; select others by "
                "`layers`"
            )
        adapter: Any = layer
        adapter.__class__ = KINDS[type(layer)]
        adapter.add_adapters(rank, 1.0 if alpha is None else alpha / rank)
    every = dict(adapted.named_parameters())
    more = [n for n in every if matches(n, train)]
    if train and not more:
        raise ValueError(
            f"no parameter matches train={train!r}; expected some of {', '.join(every)}"
        )
    for name in more:
        every[name].requires_grad_(True)
    # Where a method draws heads by a rule of its own, updates still start at zero.
    return Network(adapted, head, pretrained=f"{train} *lora_B".strip())
