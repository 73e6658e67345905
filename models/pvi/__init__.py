"""PVI: partitioned variational inference with one factor of the posterior for each client.

Ashman, Bui, Nguyen, Markou, Weller, Swaroop and Turner, "Partitioned Variational Inference: A
Framework for Probabilistic Federated Learning", 2022; with latents z_j of each client's own,
Hassan, Salomone and Mengersen, "Federated Variational Inference Methods for Structured Latent
Variable Models", 2023.

    p(g, z, y)    = p(g) prod_j p(z_j | g) p(y_j | g, z_j)
    q(g)          = p0(g) prod_j t_j(g)                  normal factors; p0 stands for the prior
    q(g, z)       = q(g) prod_j q_j(z_j | g)             q_j normal, linear in g, then scaled:
    z_ji          = v_ji prod_k (s_k / b_k)^c_jik        s_k the positive shared variables

    client   q_j(g, z_j) = argmax E[log p(y_j, z_j | g) + log (p(g) / p0(g)) / J]
                                  - KL(q_j(g) || q(g) / t_j(g)) + entropy of q_j(z_j | g)
    server   t_j  = t_j^(1 - damping) (q_j t_j / q)^damping,  so q is moved by t_j^new / t_j^old

All variables are taken without constraints (log of positive ones). Each client has a share 1 / J
of what the prior is more than p0, so it need not be normal; where it is, p0 is the prior. Clients
climb by natural gradients: a normal model takes one step with lr=1, and one round with damping=1.
A step that raises the client's free energy, given its own draws, is halved until it does not.

For networks, `build` draws the outputs of linear layers and convolutions for every row instead of
the weights (local reparametrization, as the authors' code), computes the KL divergence in closed
form, and minimizes by Adam. Its first rounds (`warm_start`) are federated averaging of the means.

A client leaves by dividing its factor out, and joins with a factor of 1: `pyrofl.leave` and
`pyrofl.join`.

The powers c in [-1, 1] are learned, with covariance="full", for own variables with a fixed normal
prior (v normal and linear in g; c = 0 elsewhere). In a non-centered program the rows rule
eta = (theta - mu) / tau, so eta goes with 1 / tau; a normal joint of eta and log tau cannot, and is
too narrow in tau, federated or not. So a centered program, theta ~ N(mu, tau), is run non-centered:
a normal site NAME whose scale is random becomes loc + scale * NAME_noncentered. Written in its own
way such a fit would also stay where tau is small, as EM does: there theta = mu, for any data.
Effects that clients share with their scale, a ~ N(mu, tau), are centered again as far as the rows
rule them; see `centering`. Standard deviations of the population's spread over NUTS's:

                                            schools   baseball   rat tumours   radon
    normal, all clients pooled                 0.82       0.71          0.60    0.57
    normal, federated                          0.82       0.71          0.64    0.62
    with powers, federated                     1.02       0.85          0.99    0.91
    the same, corrected=True                   1.00       0.96          1.00

`to_arviz(corrected=True)` weighs draws by importance: that is what to look at in the end.

With a guide for what clients share, q(g) is of that family and has no factors: the server holds its
parameters, and clients send gradients of their parts of the free energy (SFVI, the second paper;
its equations are in `pyrofl.models.pvi.sfvi`):

    pvi.hierarchical(model, data, shared="mu tau", guide=guides.flow(3))

Standard deviations of log tau over NUTS's, whose long left tail no normal has; 80 rounds:

                                            schools   baseball
    normal                                     0.65       0.50
    guides.copula                              0.77       0.60
    guides.flow(3)                             0.86       0.70
    guides.flow(3), corrected=True             1.00       0.96

Use it where the posterior itself is wanted: hierarchical programs, clients that leave, and with
covariance="full" intervals that hold. It assumes that posteriors are near normal; work with
covariance="full" grows with the cube of the number of shared variables.

Departures from the papers: all reporting clients update at once (synchronous PVI), without a
sequential or asynchronous schedule; the powers, shortened steps, and damping that adapts. The
server keeps the factors and sends the cavity q / t_j, so that a client which trains and drops out
does no harm; messages have the same size. Where q would not be a distribution any more, the server
halves its step until it is. The factors start at `init` of the network, not at 1, and networks
start with rounds of federated averaging. Those of SFVI are in `pyrofl.models.pvi.sfvi`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pyro
import pyro.distributions as dist
import torch

from pyrofl.arguments import Count, Positive, PositiveShare, Whole, checked, described
from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import (
    Likelihood,
    Prior,
    Program,
    Supervised,
    as_prior,
    of_network,
)
from pyrofl.models.guides import Family, delta
from pyrofl.models.guides import mean_field as independent_normals  # a submodule has its name
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import fixed
from pyrofl.models.pvi.mean_field import Optimizer, network_pvi
from pyrofl.models.pvi.partitioned import Partitioned
from pyrofl.models.pvi.server import Covariance
from pyrofl.models.pvi.sfvi import SharedGuide
from pyrofl.models.pvi.supported_guides import refuse_unsupported_guide
from pyrofl.models.shared.activations import Sampling
from pyrofl.models.shared.declared import Declared
from pyrofl.models.shared.gaussians import Normals, draw_count
from pyrofl.models.shared.sites import Layout
from pyrofl.models.shared.unconstrained import (
    layouts,
    noncentered,
    with_hidden_rows,
    with_real_values,
)
from pyrofl.models.shared.unconstrained import of_network as layouts_of
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, pick, times

__all__ = ["build", "hierarchical"]

STANDARD = fixed()  # Normal(0, 1)
DEFAULT_NUM_PARTICLES = 128  # Monte Carlo draws of a client with few variables

SEARCH_GRID = {
    "lr": (0.003, 0.01, 0.03),
    "init_scale": (0.2, 0.5, 1.0),
    "warm_start": (5, 10),
    "epochs": (10, 20),
}


@rebuildable
@checked
def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: Prior = STANDARD,
    guide: Family = independent_normals,
    covariance: Literal["diagonal", "full"] = "diagonal",
    sampling: Sampling = "auto",
    warm_start: Whole | None = None,
    optimizer: Optimizer | None = None,
    damping: PositiveShare | None = None,
    init_scale: Positive = 0.5,
    num_particles: Count | None = None,
    epochs: Whole = 20,
    batch: Count | None = None,
    lr: PositiveShare | None = None,
) -> Method:
    """Build PVI (partitioned variational inference) for a network with shared random weights.

    Args:
        net: the network.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters: a distribution such as dist.Normal(0.0, 1.0), a family or a
            function, see `pyrofl.priors`.
        guide: `mean_field` stands for the normal q(w); with `delta` clients move its mean alone,
            and its variance stays.
        covariance: "diagonal", or "full" for at most 1,000 parameters, better a few hundred.
        sampling: what a gradient step draws: "activations" draws the outputs of linear layers and
            convolutions for every row, which has much less noise and needs a diagonal covariance
            and a normal prior; "weights" draws the parameters. "auto" takes activations where it
            can.
        warm_start: rounds of federated averaging before the first of PVI, in which the means
            move and the standard deviations do not; only with activations. None takes 5 with
            activations and none with weights.
        optimizer: "adam" or "natural", natural gradients. None takes Adam with activations, which
            trains networks faster, and natural gradients with weights. Natural gradients reach the
            optimum of linear models exactly; Adam's noise leaves means some 5% of a standard
            deviation away.
        damping: fraction of the update that the server applies; see `hierarchical`. None adapts it,
            with activations between 1 / M and 2 / M of M clients.
        init_scale: standard deviation of q(w) before round one, in units of the inverse square root
            of the number of inputs of a parameter's layer.
        num_particles: Monte Carlo samples, an even number; None takes 2 with activations, and 8
            with weights. See `hierarchical`.
        epochs: passes over the client's rows. With few of them proposals of successive rounds turn
            back, and the damping falls.
        batch: rows in a step; None takes all.
        lr: learning rate; None takes 0.01 for Adam and 0.3 for natural gradients.

    Raises:
        ValueError: if num_particles is odd, the guide another one, or the other arguments do not
            permit drawing activations and `sampling` or `warm_start` asks for it.
    """
    if guide not in (independent_normals, delta):
        raise ValueError(
            f"guide is {described(guide)}; expected mean_field or delta; correlations are those of "
            "covariance='full'"
        )
    weights, nothing = layouts_of(net, prior, init_scale)
    model, q, tilted = network_programs(net, likelihood, prior, weights, covariance)
    core = network_pvi(
        model,
        (weights, nothing),
        covariance=covariance,
        is_random=guide is independent_normals,
        sampling=sampling,
        warm_start=warm_start,
        damping=damping,
        init_scale=init_scale,
        num_particles=num_particles,
        optimizer=optimizer,
    )
    lr = core.lr if lr is None else lr
    return core.method(epochs, batch, lr, guide=q, pair=core.pair(tilted, q))


def network_programs(
    net: Network, likelihood: Likelihood, prior: Prior, weights: Layout, covariance: Covariance
) -> tuple[Supervised, Program, Program]:
    """Return PVI of a network as Pyro programs: model, guide, and a client's tilted distribution.

    Clients train the same objective by `Partitioned.free_energy`, or in closed form by
    `MeanField.loss`; the server's update is `FactorServer.aggregate`. Args are those of `build`,
    and the layout of all weights in one vector.
    """
    normal = Normals(weights.size, full=covariance != "diagonal")
    p0 = normal.independent(*weights.prior())
    shapes, p = net.shapes, as_prior(prior, net.shapes)

    @of_network(net, likelihood, prior)
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the shared weights w from the prior p(w), then the responses of all rows."""
        with batch.clients():
            w = {n: pyro.sample(n, p(n, shapes[n], received, local, batch)) for n in shapes}
            with batch.rows():
                pyro.sample("y", likelihood(net(w, batch.x), batch.x), obs=batch.y)

    def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the weights w = m + S e from q_j(w), a normal with the covariance S S'."""
        m, s = local["mean"], local["root"]
        with batch.clients():
            standard = dist.Normal(torch.zeros_like(m), torch.ones_like(m)).to_event(1)
            e = pyro.sample("_shared", standard, infer={"is_auxiliary": True})
            w = m + (times(s, e) if normal.full else s * e)
            left = -normal.log_det(s).expand(w.shape[:-1])  # log q(w) - log p(e)
            for site, value, growth in weights.constrained(w):  # growth is 0 of real weights
                fn = dist.Delta(value, log_density=left - growth, event_dim=len(site.shape))
                pyro.sample(site.name, fn)
                left = torch.zeros_like(left)

    def tilted(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample w from q(w) / t_j(w) times (p(w) / p0(w))^(1 / J), then the client's responses.

        The cavity q / t_j replaces the prior, by a factor.
        """
        with batch.clients():
            each = {n: p(n, shapes[n], received, local, batch) for n in shapes}
            w = {n: pyro.sample(n, fn) for n, fn in each.items()}
            u, growth = weights.unconstrained(w)
            log_p = sum(fn.log_prob(w[n]) for n, fn in each.items()) + growth  # of u
            cavity, zero = (
                normal.log_density(u, {n: v.to(u) for n, v in pick(t, "shift precision").items()})
                for t in (received, p0)
            )
            share = received.get("share", 0.0)  # 1 / J, where p is not p0
            pyro.factor("cavity", cavity + share * (log_p - zero) - log_p)
            with batch.rows():
                pyro.sample("y", likelihood(net(w, batch.x), batch.x), obs=batch.y)

    return model, guide, tilted


@checked
def hierarchical(
    model: Program,
    data: Federation,
    *,
    shared: str,
    guide: Family | None = None,
    covariance: Covariance = "full",
    damping: PositiveShare | None = None,
    num_particles: Count | None = None,
    steps: Whole | None = None,
    batch: Count | None = None,
    lr: PositiveShare = 1.0,
    improper_sd: Positive = 10.0,
) -> Method:
    """Build PVI (partitioned variational inference) for your own hierarchical Pyro program.

    Args:
        model: a program (received, local, batch), all of whose sites are in `batch.clients()`; it
            reads neither of the first two. A latent site may also be inside `batch.rows()`, or one
            plate of the program's own: each client has then one for each row or place.
        data: the federation; the model is run on its first client to see its sites.
        shared: names or shell patterns, separated by spaces, of the sites that are one for all
            clients, such as "mu tau" or "beta_*"; others are each client's own.
            Both are shown before the fit, and by `print(method)`; a warning names own sites that
            no client can learn from its rows.
        guide: of the shared sites. None is a normal, which PVI is about; `guides.flow(3)`,
            `guides.copula` and their like bend one, see above. They take some 50 to 100 rounds, and
            no covariance or damping.
        covariance: "full" learns all dependences; "blocks" cuts what a client's own sites depend on
            the shared ones; "diagonal" cuts everything.
        damping: share of the way that the factors of reporting clients are moved. None adapts it
            between 1 / M for M of them and 1: it starts at J^-1/2, and with the cosine of the angle
            between the proposals of successive rounds it grows up to threefold while these point
            the same way, and falls up to sixfold where they turn back.
        num_particles: Monte Carlo samples of a step, an even number; None takes 128, or four times
            as many as a client has variables if these are more. Unless covariance is "diagonal", a
            smaller number than twice the variables is raised to that: steps in a normal model then
            have no noise, and with fewer draws covariances would be guessed.
        steps: natural-gradient steps in a round; with `batch` epochs of them. None takes 40; with
            a guide 2, as these are of a client's own variables alone.
        batch: rows in a step; None takes all, as do the gradients that a guide needs, and as it
            must be with latent sites of rows.
        lr: of natural gradients; of all rates, where there is a guide.
        improper_sd: initial standard deviation for improper priors, without effect on the result.

    Raises:
        ValueError: if num_particles is odd, a pattern of shared matches no site, the prior of a
            shared site depends on a client's own sites or data, or a site is unsuitable: discrete,
            outside `batch.clients()`, or inside `batch.rows()` and shared, or with batch or a
            guide; if the guide is; or if covariance or damping are given with a guide.

    Examples:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> from pyrofl import datasets, federations
        >>> from pyrofl.inference.fit import fit
        >>> data = federations.split(datasets.load("eight_schools"), "groups", 8)
        >>> def schools(received, local, batch):
        ...     with batch.clients():
        ...         mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        ...         tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        ...         theta = pyro.sample("theta", dist.Normal(mu, tau))
        ...         with batch.rows():
        ...             pyro.sample("y", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)
        >>> method = hierarchical(schools, data, shared="mu tau")
        >>> run = fit(method, data, rounds=3, progress=False)
        >>> tuple(run.posterior(10)["theta"].shape)
        (10, 8)
    """
    if guide:
        refuse_unsupported_guide(guide)
    if guide and (covariance != "full" or damping is not None):
        raise ValueError(
            f"covariance is {covariance!r} and damping is {damping}, and there is a guide; "
            "expected 'full' and None, as these are of the normal, guide=None"
        )
    one = data.batch(torch.tensor([0]))
    program, model = model, with_real_values(model, data)
    model = noncentered(model, one) if covariance == "full" else model
    sites = layouts(model, one, shared, improper_sd, rows=int(data.sizes.max()))
    if (batch or guide) and (names := sites[1].of_rows):
        condition = f"batch is {batch}" if batch else "there is a guide"
        raise ValueError(
            f"{condition}, and site {names[0]!r} is inside batch.rows(), where every row has its "
            f"own; expected {'batch' if batch else 'guide'}=None, or a likelihood that it is "
            "integrated out of"
        )
    declared = Declared(program, data, *sites)
    declared.check()
    declared.check_responses()
    declared.warn()
    model = with_hidden_rows(model, sites[1])
    size = sum(layout.size for layout in sites)
    samples = draw_count(num_particles or max(DEFAULT_NUM_PARTICLES, 4 * size), size, covariance)
    if guide:
        method = SharedGuide(model, *sites, guide, samples, lr).method(
            2 if steps is None else steps, batch
        )
    else:
        core = Partitioned(model, *sites, covariance, samples, damping)
        method = core.method(40 if steps is None else steps, batch, lr)
    return replace(method, metadata=replace(method.metadata, sites=declared.text()))
