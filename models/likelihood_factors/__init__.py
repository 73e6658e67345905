"""Likelihood factors: an accurate posterior of a hierarchical program in one to nine exchanges.

Normal factors of each client's likelihood, in the space where it is nearly normal, and the exact
hierarchy at the server: Vehtari et al., "Expectation Propagation as a Way of Life", JMLR 2020, with
factors by second-order expansions as in Smola, Vishwanathan and Eskin, "Laplace Propagation",
NeurIPS 2003.

    p(g, e, y) = p(g) prod_j N(e_j; 0, T(g) T(g)') p(y_j | u, e_j)    u of g: what likelihoods read
    p(y_j | u, e_j)  is replaced by  t_j(u, e_j) = exp(-v' P_j v / 2 + h_j' v),  v = (u, e_j)

    client   at the highest point u of cavity x L_j(u, T), with L_j its exact marginal likelihood:
             t_j has the gradients of L_j by u and T, and the second derivatives by u
    server   integrates e_j over t_j in closed form, and draws g from p(g) prod_j t_j(g) by
             Hamiltonian Monte Carlo, without an exchange; cavity of j: these draws, weighted by
             1 / t_j

PVI multiplies normal factors of g itself, for which a hierarchical posterior is a funnel: here g
has no approximation but that of the likelihoods. For normal responses, linear in v, clients send
sufficient statistics, and one exchange is exact for known or unknown noise variances; see `linear`.
Effects e_j of a client follow given each draw of g, in closed form.

A few more exchanges correct the draws: `to_arviz` weighs the server's draws by prod_j L_j / t_j,
for which each client reports L_j at every draw. No weight shows a tail in which the server has no
draw, so draws of one or two t distributions near the weighted moments follow; see
`pyrofl.inference.posteriors.proposals.ProposalMixture`. A warning names estimates in which these
sets of draws differ. Pareto k measures the remaining error, except that of a mode that no draw has
reached: points with other signs, and on a line along each shared variable, look for one in a last
exchange. Clients search for a second maximum of their likelihoods, and `Run.warnings` counts those
that have found one; see `factors`.

The program may be centered or not; see `pyrofl.models.likelihood_factors.structure`. A client that
has not reported has the factor 1, and `Run.warnings` counts these clients. The server learns each
client's factor, so it knows as much of a client's effects as the client does.

Use it for a hierarchical program of your own (`pyrofl.hierarchical`). It assumes that each client's
own variables are normal given the shared ones.

Departures from the papers: factors match the marginal likelihood of a client, not moments of a
joint tilted distribution, which is unstable for many clients, nor the curvature at a joint mode,
which has a bias for shared scales.
"""

from __future__ import annotations

import torch

from pyrofl.arguments import Positive, checked
from pyrofl.data import Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Program
from pyrofl.models.likelihood_factors.finding import find_structure
from pyrofl.models.likelihood_factors.method import LikelihoodFactors
from pyrofl.models.likelihood_factors.structure import blank, on_cpu

__all__ = ["hierarchical"]


@checked
def hierarchical(
    model: Program, data: Federation, *, shared: str, improper_sd: Positive = 10.0
) -> Method:
    """Build likelihood factors for your own hierarchical Pyro program; few rounds suffice.

    Args:
        model: a program (received, local, batch), all of whose sites are in `batch.clients()`; it
            reads neither of the first two. Each client's own sites are normal given the shared
            ones, centered or not; sites inside `batch.rows()`, if no client has more than 16 rows.
        data: the federation; the model is run on its first clients to find its structure. Of an
            outline without rows (`pyrofl.data.outline`), it is run on simulated rows.
        shared: names or shell patterns, separated by spaces, of the sites that are one for all
            clients, such as "mu tau" or "beta_*"; others are each client's own.
            Both are shown before the fit, and by `print(method)`.
        improper_sd: standard deviation of improper priors before round one; it does not change
            the result.

    Returns:
        A method whose server draws from the posterior in every round. One round suffices for linear
        models with normal responses, and four for others; fit more if Pareto k of `to_arviz`
        is above 0.7.

    Raises:
        ValueError: if a pattern of shared matches no site, the prior of a shared site depends on a
            client's own sites or data, or an own site is not normal, has a value for each of many
            rows, or a scale that depends on data or other own sites; then use `pvi.hierarchical`.

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
        >>> run = fit(method, data, rounds=1, progress=False)
        >>> tuple(run.posterior(10)["theta"].shape)
        (10, 8)
    """
    structure, text = find_structure(model, data, shared, improper_sd)
    one = blank(on_cpu(data.batch(torch.tensor([0]))))
    return LikelihoodFactors(structure, one).method(text)
