"""The method that fits a hierarchical program in the fewest rounds.

These are likelihood factors (`pyrofl.models.likelihood_factors`), if each client's own sites are
normal given the shared ones, and otherwise PVI (`pyrofl.models.pvi`). Likelihood factors take one
round if the responses are normal and linear in the sites, and otherwise fewer than PVI. Both take
the same programs, and `to_arviz` corrects the draws of both.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pyrofl.arguments import OPTION_HINTS, Positive, checked
from pyrofl.choices import HierarchicalMethod
from pyrofl.data import Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Program
from pyrofl.models import likelihood_factors, pvi
from pyrofl.models.guides import Family
from pyrofl.models.likelihood_factors.linear import is_exact_after_one_round
from pyrofl.models.likelihood_factors.structure import OtherStructure, Structure

__all__ = ["hierarchical"]
OPTION_HINTS[__name__] = (pvi.hierarchical, "pvi.hierarchical")


@checked
def hierarchical(
    model: Program,
    data: Federation,
    *,
    shared: str,
    guide: Family | None = None,
    improper_sd: Positive = 10.0,
    method: HierarchicalMethod = "auto",
) -> Method:
    """Build the method with the fewest rounds for your own hierarchical Pyro program.

    The method is `likelihood_factors.hierarchical` if each client's own sites are normal given the
    shared ones, otherwise `pvi.hierarchical`. `print(method)` and the first line of a fit state
    which one it is, and which site prevents likelihood factors. To set other options of PVI, such
    as `covariance`, call `pvi.hierarchical`.

    If likelihood factors fail, as the server's chains do not mix (R-hat above 1.1 in two rounds, or
    above 2.2 in one), `fit` continues with PVI and warns. Remote clients cannot change their
    method: with `pyrofl.Server`, build both sides with method="pvi" then.

    Args:
        model: a program (received, local, batch), all of whose sites are in `batch.clients()`; it
            reads neither of the first two. A latent site may also be inside `batch.rows()`.
        data: the federation; the model is run on its first clients to find its structure. Of an
            outline without rows (`pyrofl.data.outline`), it is run on simulated rows. Each client
            checks that its own rows have this structure.
        shared: names or shell patterns, separated by spaces, of the sites that are one for all
            clients, such as "mu tau" or "beta_*"; others are each client's own.
            Both are shown before the fit, and by `print(method)`; a warning names own sites that
            no client can learn from its rows.
        guide: of the shared sites, by PVI, such as `guides.flow(3)`; see `pvi.hierarchical`.
        improper_sd: standard deviation of improper priors before round one; it does not change
            the result.
        method: "likelihood_factors" or "pvi" to have this method and no other; "auto" as above.

    Returns:
        The method, for `fit`; its name is "likelihood_factors" or "pvi".

    Raises:
        ValueError: if neither method can fit the program, see `pvi.hierarchical`, or if the
            chosen one cannot.

    Examples:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> import pyrofl
        >>> from pyrofl import datasets, federations
        >>> data = federations.split(datasets.load("eight_schools"), "groups", 8)
        >>> def schools(received, local, batch):
        ...     with batch.clients():
        ...         mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        ...         tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        ...         theta = pyro.sample("theta", dist.Normal(mu, tau))
        ...         with batch.rows():
        ...             pyro.sample("y", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)
        >>> built = pyrofl.hierarchical(schools, data, shared="mu tau")
        >>> built.name
        'likelihood_factors'
        >>> run = pyrofl.fit(built, data, progress=False)
        >>> run.status.kind
        'converged'
    """
    if guide and method == "likelihood_factors":
        raise ValueError(
            "a guide is given, which likelihood factors have not; expected method='pvi' or 'auto'"
        )
    by_pvi = partial(pvi.hierarchical, shared=shared, guide=guide, improper_sd=improper_sd)
    if guide or method == "pvi":
        return _described(by_pvi(model, data), f"PVI{', as a guide is given' if guide else ''}")
    try:
        built = likelihood_factors.hierarchical(model, data, shared=shared, improper_sd=improper_sd)
    except OtherStructure as error:
        if method == "likelihood_factors":
            raise
        return _described(by_pvi(model, data), f"PVI, as {error.reason}")
    assert isinstance(built.model, Structure)
    once = is_exact_after_one_round(built.model, data.dtype)
    built = _described(built, f"likelihood factors{', 1 round' if once else ''}")
    if method == "likelihood_factors":
        return built
    other = partial(hierarchical, model, shared=shared, improper_sd=improper_sd, method="pvi")
    return replace(built, metadata=replace(built.metadata, alternative=other))


def _described(method: Method, chosen: str) -> Method:
    """Return a method with its name in the description of its sites."""
    sites = f"{method.metadata.sites}; method: {chosen}"
    return replace(method, metadata=replace(method.metadata, sites=sites))
