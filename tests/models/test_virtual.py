"""VIRTUAL: PVI of a network in two parts, exact where all is linear and normal."""

from __future__ import annotations

import torch
import toys
from checks import close
from promises import Promises
from regressions import MEAN, PRIOR, SD, TASK, Two

from pyrofl.models import guides, likelihoods, virtual
from pyrofl.models.shared.gaussians import Normals
from pyrofl.nets import Network

PROMISES = {
    "virtual": Promises(together="fc1.*", random=True, message=(2 * toys.BASE, 2 * toys.BASE + 1))
}


def test_it_is_the_exact_posterior_of_what_is_shared_and_of_what_is_not():
    method = virtual.build(
        Network(Two(), head="own"),
        likelihood=likelihoods.normal(),
        prior=PRIOR,
        guide=guides.full_covariance,
        damping=1.0,
        init_scale=SD,
        epochs=3,
        lr=1.0,
    )
    state = toys.last(method, TASK.federation, 2)
    # All weights of all clients at once: two in common, then one of each.
    joint = torch.zeros(7, 7).double() + torch.eye(7).double() / SD**2
    pull = torch.full((7,), MEAN / SD**2).double()
    for j, (p, m) in enumerate(zip(TASK.precision, TASK.mean, strict=True)):
        at = torch.tensor([0, 1, 2 + j])
        joint[at[:, None], at] += p
        pull[at] += p @ m
    covariance = torch.linalg.inv(joint)
    mean, root = Normals(2, True).moments(state.server)
    close(mean, (covariance @ pull)[:2], 1e-6)
    close(root @ root.T, covariance[:2, :2], 1e-6)


def test_heads_stay_at_home_and_factors_are_of_the_base():
    method = virtual.build(toys.net())
    state = toys.last(method, toys.blobs(), 2)
    assert {v.shape[-1] for v in state.message.values()} == {toys.BASE}
    assert state.client_states["mean"].shape == (12, toys.ALL)
