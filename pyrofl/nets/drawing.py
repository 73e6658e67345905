"""Initialization of torch layers with a given random generator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

from pyrofl.tensors import lent

TOLD = {
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal),
    *(torch.bernoulli, torch.multinomial, Tensor.bernoulli, Tensor.multinomial),
    *(Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.random_, Tensor.bernoulli_),
    *(Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_),
}
UNTOLD = {torch.rand_like, torch.randn_like, torch.randint_like, torch.poisson}


class Drawn(TorchFunctionMode):
    """Context in which torch's random functions use the given generator by default.

    Other threads may use torch's global generator meanwhile.
    """

    def __init__(self, generator: Generator) -> None:
        """Store the random generator that torch's functions will use in the context."""
        super().__init__()
        self.generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function, passing the generator if it draws random numbers."""
        options = dict(kwargs or {})
        if (func in TOLD or "generator" in options) and options.get("generator") is None:
            options["generator"] = self.generator
        if func in UNTOLD:
            with lent(self.generator):
                return func(*args, **options)
        return func(*args, **options)
