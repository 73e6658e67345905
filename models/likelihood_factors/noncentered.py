"""Pyro handler that runs a program with its own normal sites in non-centered form."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyrofl.inference.definition.elbo import base_of
from pyrofl.inference.definition.programs import NONCENTERED
from pyrofl.inference.training.noise import is_unset_latent
from pyrofl.models.shared.unconstrained import as_deterministic


class NonCenteredRoots(Messenger):
    """Pyro handler that writes own normal sites as loc + root NAME_noncentered; it keeps each root.

    A root is a matrix [..., k, k] of a multivariate normal, or scales [..., *p].
    """

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self.names = names
        self.roots: dict[str, tuple[Tensor, bool]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] not in self.names or not is_unset_latent(msg):
            return
        fn, base = msg["fn"], base_of(msg["fn"])
        matrix = isinstance(base, torch.distributions.MultivariateNormal)
        if not matrix and not isinstance(base, torch.distributions.Normal):
            raise ValueError(
                f"site {msg['name']!r} is a {type(base).__name__} for some clients, and normal for "
                "others; expected the same distribution for all"
            )
        shape = fn.batch_shape + fn.event_shape
        standard = dist.Normal(base.loc.new_zeros(shape), base.loc.new_ones(shape))
        noise = pyro.sample(msg["name"] + NONCENTERED, standard.to_event(fn.event_dim))
        root = base.scale_tril if matrix else base.scale.expand(shape)
        value = base.loc + ((root @ noise[..., None])[..., 0] if matrix else root * noise)
        self.roots[msg["name"] + NONCENTERED] = root, matrix
        as_deterministic(msg, value)
