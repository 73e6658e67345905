"""Vectorized networks of many clients: one operation per layer for all clients.

Rows are x [*lead, B, *x] with lead (C,), or (K, C) once draws differ; a parameter is [*p],
[C, *p] or [K, C, *p]. Layers without draws are computed once for all draws. Unknown layers
run by `torch.func.vmap`, and layers whose parameters are all constants (requires_grad is False) on
all rows as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyrofl.nets.architectures import Noise, ResidualBlock, Shape
from pyrofl.nets.unsupported import as_outputs, explained
from pyrofl.tensors import Tensors

IMAGE_BYTES_PER_PASS = 600 * 2**10  # bytes of images per pass through convolutions: measured
PRODUCTS_ENTRIES = 2**9  # entries of a client's weight from which `Products` is faster: measured

Rule = Callable[[Any, Tensors, Tensor, int], Tensor]
"""(layer, its parameters by their names in it, x, axes of its lead) -> outputs."""


class Part(NamedTuple):
    """Layer of a network, its trainable parameters, and the function that runs it."""

    layer: nn.Module
    names: Mapping[str, tuple[str, int]]  # parameter that trains -> its name in the layer, its axes
    rule: Rule


def parts(module: nn.Module) -> list[Part]:
    """Return the layers of a sequential module in order; any other module counts as one layer."""
    names_by_id = {id(p): n for n, p in module.named_parameters()}
    parts_of_module = []
    for layer in _layers(module):
        layer_weights = {
            names_by_id[id(p)]: (n, p.dim()) for n, p in layer.named_parameters() if p.requires_grad
        }
        parts_of_module.append(Part(layer, layer_weights, _rule(layer)))
    return _smaller_first(parts_of_module)


def _smaller_first(chain: list[Part]) -> list[Part]:
    """Move each ReLU after the max-pooling that follows it: equal results at lower cost."""
    chain = chain[:]
    for i, (one, two) in enumerate(pairwise(chain)):
        kinds = type(one.layer), type(two.layer)
        if kinds == (nn.ReLU, nn.MaxPool2d) and anything not in (one.rule, two.rule):
            chain[i : i + 2] = two, one
    return chain


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    if type(module).forward is nn.Sequential.forward and not hooked(module):
        for layer in module:  # type: ignore[attr-defined]
            yield from _layers(layer)
    else:
        yield module


def hooked(layer: nn.Module) -> bool:
    """Return whether a layer has forward hooks."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def run(chain: list[Part], weights: Mapping[str, Tensor], x: Tensor, axes: int = 1) -> Tensor:
    """Run a chain of layers for all clients: x [C, B, *x] -> [C, B, outputs] or [K, C, B, outputs].

    Weights are [*p], [C, *p] or [K, C, *p]. Convolutions process the images of a few
    clients at a time, so that the outputs of a layer are still in the
    processor's cache when the next layer reads them.
    """
    layer_weights = {m: weights[m] for _, names, _ in chain for m in names}
    lead = {m: weights[m].dim() - dim for _, names, _ in chain for m, (_, dim) in names.items()}
    few = _few(chain, x)
    if len(x) <= few or axes > 1 or 0 in lead.values():
        return _run(chain, layer_weights, x, axes)
    parts = {m: v.split(few, lead[m] - 1) for m, v in layer_weights.items()}
    outputs = [
        _run(chain, {m: v[i] for m, v in parts.items()}, some, axes)
        for i, some in enumerate(x.split(few))
    ]
    return torch.cat(outputs, max(lead.values()) - 1)


def _few(chain: list[Part], x: Tensor) -> int:
    """Return how many clients to process at a time: few for convolutions on a CPU, else all."""
    kinds = (convolution, residual)
    convolved = any(getattr(part.rule, "func", part.rule) in kinds for part in chain)
    if not convolved or x.device.type != "cpu" or not x.numel():  # measured on CPUs only
        return len(x)
    return max(1, IMAGE_BYTES_PER_PASS * len(x) // (x.numel() * x.element_size()))


def _run(chain: list[Part], weights: Mapping[str, Tensor], x: Tensor, axes: int) -> Tensor:
    for layer, names, rule in chain:
        layer_weights = {n: weights[m] for m, (n, _) in names.items()}
        x = rule(layer, layer_weights, x, axes)
        axes = max([axes, *(weights[m].dim() - dim for m, (_, dim) in names.items())])
    return x


def _rule(layer: nn.Module) -> Rule:
    """Return the function that runs a layer for all clients at once; vmap for unusual layers."""
    trains = {p.requires_grad for p in layer.parameters()}
    if trains == {False}:
        return constant
    rule = RULES.get(type(layer), anything)  # exact types: a subclass may compute something else
    unusual = (
        hooked(layer)
        or len(trains) == 2
        or getattr(layer, "padding_mode", "zeros") != "zeros"
        or getattr(layer, "groups", 1) != 1
        or not getattr(layer, "affine", True)
        or (rule is flatten and not (layer.start_dim == 1 and layer.end_dim == -1))
    )
    if type(layer) is ResidualBlock and not unusual:
        return partial(residual, parts(layer.inner))
    return anything if unusual else rule


def linear(layer: nn.Linear, layer_weights: Tensors, x: Tensor, axes: int) -> Tensor:
    """Apply a linear layer for all clients as one batched matrix product.

    K draws of a layer are one layer with K times the outputs: inputs are read once and not copied
    for every draw, which is three times faster than vmap.
    """
    lead = {v.dim() - getattr(layer, n).dim() for n, v in layer_weights.items()}
    if lead == {0}:
        return functional.linear(x, layer_weights["weight"], layer_weights.get("bias"))
    if lead == {2} and axes == 1:
        wide = {n: v.transpose(0, 1).flatten(1, 2) for n, v in layer_weights.items()}
        y = linear(layer, wide, x, 1)
        return torch.unflatten(y, -1, (len(layer_weights["weight"]), -1)).movedim(-2, 0)
    if lead == {1} and axes == 2:
        y = linear(layer, layer_weights, x.transpose(0, 1).flatten(1, 2), 1)
        return torch.unflatten(y, 1, x.shape[:3:2]).transpose(0, 1)
    front, layer_weights, x = aligned(layer, layer_weights, x, axes)
    y = products(x.flatten(1, -2), layer_weights["weight"], layer_weights.get("bias"))
    return y.view(*front, *x.shape[1:-1], y.shape[-1])


def convolution(layer: Any, layer_weights: Tensors, x: Tensor, axes: int) -> Tensor:
    """Apply a convolution for all clients as one grouped convolution."""
    apply = CONVOLUTIONS[type(layer)]
    how = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    if all(v.dim() == getattr(layer, n).dim() for n, v in layer_weights.items()):
        y = apply(x.flatten(0, axes), layer_weights["weight"], layer_weights.get("bias"), **how)
        return torch.unflatten(y, 0, x.shape[: axes + 1])
    front, layer_weights, x = aligned(layer, layer_weights, x, axes)
    flat = {n: v.flatten(0, 1) for n, v in layer_weights.items()}
    weight = quick(flat["weight"])
    y = apply(beside(x, 1), weight, flat.get("bias"), groups=len(x), **how)
    return apart(y, front)


def group_norm(layer: nn.GroupNorm, layer_weights: Tensors, x: Tensor, axes: int) -> Tensor:
    """Apply group normalization with each client's scale and shift, for all clients at once."""
    front, layer_weights, x = aligned(layer, layer_weights, x, axes)
    flat = {n: v.flatten() for n, v in layer_weights.items()}
    y = functional.group_norm(beside(x, 1), len(x) * layer.num_groups, **flat, eps=layer.eps)
    return apart(y, front)


def pooling(layer: nn.Module, layer_weights: Tensors, x: Tensor, axes: int) -> Tensor:
    """Run a layer that treats channels independently, such as pooling, for all clients."""
    if x.dim() < axes + 4:  # rows without an axis of channels
        return torch.unflatten(layer(x.flatten(0, axes)), 0, x.shape[: axes + 1])
    return apart(layer(beside(x, axes)), x.shape[:axes])


def beside(x: Tensor, axes: int) -> Tensor:
    """Concatenate the channels of all clients' images: [*lead, B, channels, ...] -> [B, all, ...].

    The outputs have the memory layout of the kernels, so that this and `apart` copy nothing
    between layers.
    """
    return quick(x.movedim(axes, 0).flatten(1, axes + 1))


def apart(y: Tensor, lead: Shape) -> Tensor:
    """Split the concatenated channels of images by client, which undoes `beside`.

    [B, all, ...] -> [*lead, B, ...].
    """
    return torch.unflatten(y, 1, (*lead, -1)).movedim(0, len(lead))


def quick(x: Tensor) -> Tensor:
    """Convert images to channels-last memory on a CPU, which speeds up pooling and convolution.

    Pooling is 10 times faster, convolutions 1.3 times.
    """
    last = x.dim() == 4 and x.device.type == "cpu"  # measured on CPUs only
    return x.contiguous(memory_format=torch.channels_last) if last else x


def residual(
    chain: list[Part], layer: ResidualBlock, layer_weights: Tensors, x: Tensor, axes: int
) -> Tensor:
    """Return the outputs of a residual block: its residual branch plus its shortcut."""
    inner = _run(chain, layer_weights, x, axes)
    return torch.relu(inner + layer.shortcut(x))


def flatten(layer: nn.Module, layer_weights: Tensors, x: Tensor, axes: int) -> Tensor:
    """Flatten each row to one axis, for all clients."""
    return x.flatten(axes + 1)


def by_entry(layer: nn.Module, layer_weights: Tensors, x: Tensor, axes: int) -> Tensor:
    """Run an elementwise layer, such as ReLU, on the rows of all clients."""
    y: Tensor = layer(x)
    return y


def noise(layer: nn.Module, layer_weights: Tensors, x: Tensor, axes: int) -> Tensor:
    """Append each client's log standard deviation to every row as an additional output."""
    front, layer_weights, x = aligned(layer, layer_weights, x, axes)
    y = torch.cat([x, layer_weights["log_scale"][:, None].expand(*x.shape[:-1], 1)], -1)
    return y.view(*front, *y.shape[1:])


def constant(layer: nn.Module, layer_weights: Tensors, x: Tensor, axes: int) -> Tensor:
    """Run a layer without trainable parameters on the rows of all clients as one batch."""
    return torch.unflatten(call(layer, {}, x.flatten(0, axes)), 0, x.shape[: axes + 1])


def anything(layer: nn.Module, layer_weights: Tensors, x: Tensor, axes: int) -> Tensor:
    """Run a layer of any type for all clients by vmap."""
    lead = {n: v.dim() - layer.get_parameter(n).dim() for n, v in layer_weights.items()}
    y = vmap(partial(call, layer), ({n: 0 if k else None for n, k in lead.items()}, 0))
    if 2 in (axes, *lead.values()):
        y = vmap(y, ({n: 0 if k == 2 else None for n, k in lead.items()}, 0 if axes == 2 else None))
    with attention_by_products(), explained(layer):
        result = y(layer_weights, x)
    return as_outputs(layer, result)


@contextmanager
def attention_by_products() -> Iterator[None]:
    """Disable fused attention kernels in the context, since vmap runs them one by one."""
    fast = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mha.set_fastpath_enabled(fast)


def call(module: nn.Module, weights: Tensors, x: Tensor) -> Tensor:
    """Run a module for one client, with weights [*p] on rows [B, *x]."""
    fixed = constants(module, next(iter(weights.values()), x))
    result: Tensor = functional_call(module, fixed | weights, (x,))
    return result


def constants(module: nn.Module, like: Tensor) -> Tensors:
    """Return a module's buffers and frozen parameters, on the device and type of a tensor."""
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    fixed = {n: p.detach() for n, p in module.named_parameters() if not p.requires_grad}
    fixed |= dict(module.named_buffers())
    kinds = {n: dtype if v.is_floating_point() else None for n, v in fixed.items()}
    return {n: v.to(like.device, kinds[n]) for n, v in fixed.items()}


def aligned(
    layer: nn.Module, layer_weights: Tensors, x: Tensor, axes: int
) -> tuple[torch.Size, Tensors, Tensor]:
    """Expand clients' parameters and rows to common leading axes, flattened to one axis.

    Returns the common axes, parameters [N, *p] and rows [N, B, *x].
    """
    leads = {n: v.shape[: v.dim() - getattr(layer, n).dim()] for n, v in layer_weights.items()}
    shape = x.shape[:axes]
    if any(lead != shape for lead in leads.values()):
        shape = torch.broadcast_shapes(shape, *leads.values())
        layer_weights = {
            n: v.expand(*shape, *v.shape[len(leads[n]) :]) for n, v in layer_weights.items()
        }
        x = x.expand(*shape, *x.shape[axes:])
    if len(shape) > 1:
        layer_weights = {n: v.flatten(0, 1) for n, v in layer_weights.items()}
        x = x.flatten(0, 1)
    return shape, layer_weights, x


def products(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply the rows of each client by its own weight matrix, and add its bias."""
    if weight[0].numel() < PRODUCTS_ENTRIES or not torch.is_grad_enabled():
        return _product(x, weight, bias)
    y: Tensor = Products.apply(x, weight, bias)
    return y


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias[:, None], x, weight.mT)


class Products(torch.autograd.Function):
    """Autograd function of `products`, with gradients in the memory layout of the weights.

    The gradients of torch's own product are transposed, which slows down products, optimizers
    and copies.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return each client's rows times its weight matrix, plus its bias: [N, B, out]."""
        return _product(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save rows and weights for computing the gradients later."""
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Return the forward-mode derivative of the outputs, given the tangents of the inputs."""
        (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, tangents
        change = torch.zeros_like(torch.bmm(x, weight.mT))
        if of_x is not None:
            change = change + torch.bmm(of_x, weight.mT)
        if of_weight is not None:
            change = change + torch.bmm(x, of_weight.mT)
        return change if of_bias is None else change + of_bias[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, weights and biases; None if not required."""
        (x, weight), (grad,) = ctx.saved_tensors, grads
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if of_x else None,
            torch.bmm(grad.mT, x) if of_weight else None,
            grad.sum(1) if of_bias else None,
        )


CONVOLUTIONS: Mapping[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}
RULES: Mapping[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Flatten: flatten,
    nn.GroupNorm: group_norm,
    Noise: noise,
    **dict.fromkeys(CONVOLUTIONS, convolution),
    **dict.fromkeys(
        (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid), by_entry
    ),
    **dict.fromkeys((nn.Identity, nn.Dropout), by_entry),  # of probability 0
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d), pooling),
}
