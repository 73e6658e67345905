"""Reference posteriors of regressions: NumPyro's NUTS on all rows together.

Design matrices are those of formulae on the pooled rows, and the likelihoods are written again
here. Only the priors are read from `pyrofl.regression`, as both posteriors need the same ones.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from formulae import design_matrices
from numpyro.infer import MCMC, NUTS

from pyrofl.models.regression import Regression

jax.config.update("jax_enable_x64", True)
CHAINS, WARMUP, DRAWS = 4, 1000, 2000
CENTERED = 30  # rows of a level from which effects are drawn in centered form


def nuts(
    method: Regression, family: str, table: pd.DataFrame, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return draws [chain, draw, ...] of all sites of a regression, from the pooled rows.

    Args:
        method: a regression, for its formula and priors.
        family: name of its family.
        table: all rows, with a column of the clients.
        seed: seed of the chains.
    """
    model = _model(method, family, table)
    kernel = NUTS(model, target_accept_prob=0.95)
    sampler = MCMC(
        kernel,
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    sampler.run(jax.random.PRNGKey(seed))
    return {n: np.asarray(v) for n, v in sampler.get_samples(group_by_chain=True).items()}


def prior(code: str, size: int = 0) -> Any:
    """Return the NumPyro distribution of a prior's Pyro code, for `size` numbers if above 0."""
    values = re.sub(r"\[.*\]", lambda m: f"jnp.array({m[0]})", code)
    made = eval(values, {"dist": dist, "jnp": jnp})
    return made.expand([size]) if size and not made.batch_shape else made


def _model(method: Regression, family: str, table: pd.DataFrame) -> Any:
    design, chosen = method.design, method.chosen
    assert design is not None
    assert chosen is not None
    used = [n for n in design.clients.frames[next(iter(design.clients.frames))] if n in table]
    table = table.dropna(subset=used).reset_index(drop=True)
    population = _columns(design.formula.population, table)
    has_intercept = "Intercept" in population
    x = np.column_stack(
        [v for n, v in population.items() if n != "Intercept"] or [np.zeros((len(table), 0))]
    )
    assert [n for n in population if n != "Intercept"] == design.terms, (
        list(population),
        design.terms,
    )
    groups = []
    for one in design.groups:
        columns = _columns(one.group.text, table)
        place = pd.factorize(
            table[list(one.group.factors)].astype(str).agg(":".join, axis=1), sort=False
        )
        order = [":".join([str(v)]) for v in design.clients.frames]
        if one.kind == "client":
            place = (pd.Categorical(table[one.group.factors[0]].astype(str), order).codes, order)
        groups.append((one, np.column_stack(list(columns.values())), place[0], len(place[1])))
    name = design.formula.response
    if design.answers:
        y = pd.Categorical(table[name], design.answers).codes
    else:
        y = np.asarray(table[name], dtype=float)
    second = design.formula.columns.get(design.family.column)
    more = np.asarray(table[second], dtype=float) if second in table else 1.0
    weights = design.formula.columns.get("weights")
    weight = 1.0 if weights is None else np.asarray(table[weights])
    strata = pd.factorize(table[design.client])[0]
    kind, means = design.family.kind, x.mean(0)
    many = len(design.answers) - 1 if kind == "categorical" else 0
    codes = list(chosen.predictors[""].priors.values())

    def model() -> None:
        b = jnp.zeros(0)
        if codes:
            scale = jnp.array([prior(c).scale for c in codes])
            loc = jnp.array([prior(c).loc for c in codes])
            each = dist.Normal(loc, scale)
            b = numpyro.sample(
                "b", each.expand([many, len(codes)]).to_event(2) if many else each.to_event(1)
            )
        eta = (x - means) @ b.T if has_intercept or kind == "ordinal" else x @ b.T
        if "Intercept" in chosen.others:
            at_mean = numpyro.sample("Intercept_centered", prior(chosen.others["Intercept"], many))
            numpyro.deterministic("Intercept", at_mean - b @ means)
            eta = eta + at_mean
        for one, z, codes_of, count in groups:
            k, label = z.shape[1], one.name
            sd = numpyro.sample(
                f"sd_{label}", prior(chosen.others[f"sd_{label}"], k if k > 1 else 0)
            )
            if k == 1 and len(y) > CENTERED * count:  # groups are known well: their own values mix
                each = dist.Normal(0.0, sd).expand([count, 1]).to_event(2)
                effect = numpyro.sample(f"raw_{label}", each)
            else:
                raw = numpyro.sample(f"raw_{label}", dist.Normal().expand([count, k]).to_event(2))
                effect = raw * sd
            if k > 1 and one.group.correlated:
                root = numpyro.sample(f"root_{label}", prior(chosen.others[f"corr_{label}"]))
                full = root @ root.T
                numpyro.deterministic(f"corr_{label}", full[1, 0] if k == 2 else full)
                effect = (raw @ root.T) * sd
            numpyro.deterministic(f"r_{label}", effect if k > 1 else effect[:, 0])
            eta = eta + (effect[codes_of] * z).sum(-1)
        own = {n: numpyro.sample(n, prior(chosen.others[n])) for n in design.family.auxiliary}
        if kind == "ordinal":
            first = numpyro.sample("cut_first", prior(chosen.others["cut_first"]))
            gaps = numpyro.sample(
                "cut_gaps", prior(chosen.others["cut_gaps"], len(design.answers) - 2)
            )
            cuts = jnp.concatenate([first[None], gaps]).cumsum()
            numpyro.deterministic("cutpoints", cuts + b @ means)
            own["cuts"] = cuts
        log_p = _LIKELIHOODS[family](eta, y, more, strata, **own)
        numpyro.factor("likelihood", (weight * log_p).sum())

    return model


def _columns(text: str, table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return the columns of a right-hand side on the pooled rows, by name."""
    common = design_matrices(f"ones ~ {text}", table.assign(ones=1.0)).common
    found = {}
    for name, term in common.terms.items():
        values = np.asarray(common[name], dtype=float).reshape(len(table), -1)
        labels = ["Intercept"] if name == "Intercept" else term.labels
        found |= dict(zip(labels, values.T, strict=True))
    return found


def _logistic(values: Any) -> Any:
    return jax.nn.sigmoid(values)


def _cumulative(eta: Any, y: Any, more: Any, strata: Any, cuts: Any) -> Any:
    above = _logistic(jnp.append(cuts, jnp.inf)[y] - eta)
    below = _logistic(jnp.insert(cuts, 0, -jnp.inf)[y] - eta)
    return jnp.log(above - below)


def _cox(eta: Any, y: Any, event: Any, strata: Any) -> Any:
    """Return the stratified partial log-likelihood with Efron's ties, by client and event time."""
    total = 0.0
    for time, stratum in {(t, s) for t, s, e in zip(y, strata, event, strict=True) if e}:
        risk = jnp.log(jnp.sum(jnp.where((strata == stratum) & (y >= time), jnp.exp(eta), 0.0)))
        dead = (strata == stratum) & (y == time) & (event > 0)
        tied = jnp.sum(jnp.where(dead, jnp.exp(eta), 0.0))
        count = int(dead.sum())
        total = total + jnp.sum(jnp.where(dead, eta, 0.0))
        total = total - sum(jnp.log(jnp.exp(risk) - k / count * tied) for k in range(count))
    return total


_LIKELIHOODS = {
    "gaussian": lambda eta, y, more, strata, sigma: dist.Normal(eta, sigma).log_prob(y),
    "student": lambda eta, y, more, strata, sigma, nu: dist.StudentT(nu, eta, sigma).log_prob(y),
    "bernoulli": lambda eta, y, more, strata: dist.BernoulliLogits(eta).log_prob(y),
    "binomial": lambda eta, y, more, strata: y * eta - more * jax.nn.softplus(eta),
    "poisson": lambda eta, y, more, strata: dist.Poisson(jnp.exp(eta)).log_prob(y),
    "negative_binomial": lambda eta, y, more, strata, shape: dist.NegativeBinomial2(
        jnp.exp(eta), shape
    ).log_prob(y),
    "zero_inflated_poisson": lambda eta, y, more, strata, zi: jnp.where(
        y == 0,
        jnp.log(zi + (1 - zi) * jnp.exp(-jnp.exp(eta))),
        jnp.log1p(-zi) + dist.Poisson(jnp.exp(eta)).log_prob(y),
    ),
    "gamma": lambda eta, y, more, strata, shape: dist.Gamma(shape, shape / jnp.exp(eta)).log_prob(
        y
    ),
    "lognormal": lambda eta, y, more, strata, sigma: dist.LogNormal(eta, sigma).log_prob(y),
    "beta": lambda eta, y, more, strata, phi: dist.Beta(
        phi * _logistic(eta), phi * (1 - _logistic(eta))
    ).log_prob(y),
    "cumulative": _cumulative,
    "categorical": lambda eta, y, more, strata: dist.CategoricalLogits(
        jnp.concatenate([jnp.zeros((len(y), 1)), eta], -1)
    ).log_prob(y),
    "exponential": lambda eta, y, more, strata: more * eta - y * jnp.exp(eta),
    "weibull": lambda eta, y, more, strata, shape: (
        more * (jnp.log(shape) + (shape - 1) * jnp.log(y) + eta) - y**shape * jnp.exp(eta)
    ),
    "cox": _cox,
}
"""Family -> function of linear predictor, response, its second column and strata."""
