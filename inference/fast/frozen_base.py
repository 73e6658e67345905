"""Heads that train on what a base that stands still makes of all rows, computed once."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import NamedTuple, cast

import torch

from pyrofl.data import Batch, Federation
from pyrofl.inference.elbo import Elbo, with_rows
from pyrofl.inference.fast.short import ShortElbo, Way
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.inference.programs import Supervised
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, matches

ROWS = 16  # of a client that go through a base at once, lest what lies between layers fill memory
FEATURES = "rows/features"  # local tensor with what the base makes of the client's rows


def on_frozen_base(
    method: Method, phase: Phase, local: Tensors, data: Federation
) -> tuple[tuple[Phase, ...], float] | None:
    """Rewrite a phase that moves the last layers of a network, the others being points."""
    model = method.model
    steps = [m for m in phase.moves if isinstance(m, Step) and isinstance(m.loss, Elbo)]
    if not isinstance(model, Supervised) or model.forward is not None:
        return None
    if phase.epochs == 0 or len(steps) < len(phase.moves):
        return None
    moving, homes = " ".join(step.names for step in steps), model.homes(method.guide, local)
    still = {n: home for n, home in homes.items() if not matches(home, moving)}
    head = " ".join(n for n in model.net.shapes if n not in still)
    cut = _cut(model.net, head) if still and head else None
    if cut is None:
        return None
    below, above = cut

    def features(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Run the base on all rows."""
        weights = with_rows({n: local[still[n]] for n in below.shapes}, len(batch))
        return {FEATURES: torch.cat([below(weights, x) for x in batch.x.split(ROWS, 1)], 1)}

    def forget(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Drop the features."""
        return {FEATURES: local[FEATURES][:, :0].clone()}  # a view would hold on to all of them

    moves = tuple(
        replace(step, loss=ShortElbo(step.loss, cast("Way", FromFeatures(above)))) for step in steps
    )
    return (Phase((features,)), replace(phase, moves=moves), Phase((forget,))), inf


class FromFeatures(NamedTuple):
    """What runs the layers above the base on the features of a batch."""

    above: Network

    def __call__(
        self, model: Supervised, received: Tensors, local: Tensors, batch: Batch
    ) -> tuple[Supervised, Tensors, Tensors]:
        """Return it, see `Way`."""
        known = batch.of(local[FEATURES])
        rest = {n: v for n, v in local.items() if n != FEATURES}
        return replace(model, forward=lambda w, _: self.above(w, known)), received, rest


@lru_cache(maxsize=64)
def _cut(net: Network, head: str) -> tuple[Network, Network] | None:
    return net.split(head)
