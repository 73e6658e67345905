"""VIRTUAL: Bayesian multi-task learning with one shared and many private networks.

Corinzia, Beuret and Buhmann, "Variational Federated Multi-Task Learning", 2019.

    p(theta) = Normal(0, S),   p(phi_j) = Normal(0, S)      theta shared, phi_j the client's own
    p(y | x, theta, phi_j)   = Categorical(logits=head(base(x; theta); phi_j))
    q(theta) = p(theta) prod_j s_j(theta)                   normal factors, as of PVI
    q(phi_j) = Normal, which stays with the client

    client   q_j(theta, phi_j) = argmax E[log p(D_j | theta, phi_j)]
                                   - KL(q_j(theta) || q(theta) / s_j(theta)) - KL(q_j(phi_j) || p)
    server   s_j = s_j^(1 - damping) (q_j s_j / q)^damping,  so q is moved by s_j^new / s_j^old

This is PVI of a program in which some parameters are shared and others a client's own: server and
clients are those of `pvi`. Without private parameters it is PVI, and without shared ones each
client trains alone.

Use it where a shared network and personal heads are to have posteriors both. It assumes normal
factors that a client may keep from round to round.

Of the paper's text the abstract could be read; no equation numbers. Departures from the paper: the
private network is the head (`private`), where the paper's reads every layer of the shared one by
lateral connections; the first rounds are federated averaging; the server keeps the factors and
sends the cavity; all reporting clients send at once, where the paper goes from one to the
next. How wide the prior is was chosen on handwritten digits.
"""

from __future__ import annotations

from dataclasses import replace

from pyrofl.arguments import Count, Positive, PositiveShare, Whole, checked, described
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Likelihood, Prior, Supervised
from pyrofl.models import guides
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import fixed
from pyrofl.models.pvi.mean_field import Optimizer, network_pvi
from pyrofl.models.shared.activations import Sampling
from pyrofl.models.shared.unconstrained import of_network
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable

WIDE_PRIOR = fixed(scale=3.0)  # Normal(0, 3^2)


SEARCH_GRID = {
    "lr": (0.003, 0.01, 0.03),
    "init_scale": (0.1, 0.2, 0.5, 1.0),
    "warm_start": (5, 10),
}


@rebuildable
@checked
def build(
    net: Network,
    *,
    private: str | None = None,
    likelihood: Likelihood = categorical,
    prior: Prior = WIDE_PRIOR,
    guide: guides.Family = guides.mean_field,
    sampling: Sampling = "auto",
    warm_start: Whole | None = None,
    optimizer: Optimizer | None = None,
    damping: PositiveShare | None = None,
    init_scale: Positive = 0.5,
    num_particles: Count | None = None,
    epochs: Whole = 10,
    batch: Count | None = None,
    lr: PositiveShare | None = None,
) -> Method:
    """Build the VIRTUAL method (variational federated multi-task learning).

    Args:
        net: the network; its parameters split in shared and private ones.
        private: patterns of the names that are the client's own. Default: the network's head.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters: a distribution such as dist.Normal(0.0, 1.0), a family or a
            function, see `pyrofl.priors`.
        guide: `mean_field` stands for the normals; `full_covariance` makes all of a client's depend
            on all, for a few hundred parameters; with `delta` clients move means alone.
        sampling: what a gradient step draws, "activations" or "weights"; see `pvi.build`.
        warm_start: rounds of federated averaging before the first of PVI, in which clients train
            the means of their own parameters, too; see `pvi.build`.
        optimizer: "adam" or "natural"; see `pvi.build`.
        damping: fraction of the update that the server applies; see `pvi.hierarchical`.
        init_scale: standard deviation of q before round one; see `pvi.build` for its unit.
        num_particles: Monte Carlo samples, an even number; see `pvi.build`.
        epochs: passes over the client's rows.
        batch: rows in a step; None takes all.
        lr: learning rate; see `pvi.build`.

    Raises:
        ValueError: if no parameter matches `private`, or all do; num_particles is odd, or the guide
            another one.
    """
    families = (guides.mean_field, guides.full_covariance, guides.delta)
    if guide not in families:
        raise ValueError(
            f"guide is {described(guide)}; expected mean_field, full_covariance or delta"
        )
    own = net.select_params(net.head if private is None else private)
    shared = [n for n in net.shapes if n not in own]
    if not shared:
        raise ValueError(
            "all parameters are private (without `private`, those of the head); expected some to "
            "be shared, as those of a network with hidden layers"
        )
    core = network_pvi(
        Supervised(net, likelihood, prior),
        of_network(net, prior, init_scale, " ".join(shared)),
        covariance="full" if guide is guides.full_covariance else "diagonal",
        is_random=guide is not guides.delta,
        sampling=sampling,
        warm_start=warm_start,
        damping=damping,
        init_scale=init_scale,
        num_particles=num_particles,
        optimizer=optimizer,
    )
    method = core.method(epochs, batch, core.lr if lr is None else lr)
    return replace(method, name="virtual")
