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
CHAINS, WARMUP, DRAWS, TARGET = 4, 1000, 2000, 0.95  # of references, which must be reliable
CENTERED = 30  # rows of a level from which effects are drawn in centered form


def nuts(
    method: Regression,
    family: str,
    table: pd.DataFrame,
    seed: int = 0,
    draws: int = DRAWS,
    target: float = TARGET,
) -> dict[str, np.ndarray]:
    """Return draws [chain, draw, ...] of all sites of a regression, from the pooled rows.

    Args:
        method: a regression, for its formula and priors.
        family: name of its family.
        table: all rows, with a column of the clients.
        seed: seed of the chains.
        draws: draws of each chain.
        target: target acceptance probability.
    """
    model = _model(method, family, table)
    kernel = NUTS(model, target_accept_prob=target)
    sampler = MCMC(
        kernel,
        num_warmup=WARMUP,
        num_samples=draws,
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
    names = list(chosen.predictors[""].priors)
    x = np.column_stack([population[n] for n in names] or [np.zeros((len(table), 0))])
    assert [n for n in population if n != "Intercept"] == design.terms, (
        list(population),
        design.terms,
    )
    terms = _Terms(population, names, chosen.others, table)
    groups = []
    for one in design.groups:
        columns = _columns(one.group.text, table)
        words = table[list(one.group.factors)].astype(str).agg(":".join, axis=1)
        place = pd.factorize(words, sort=False)
        order = [":".join([str(v)]) for v in design.clients.frames]
        if one.kind == "shared":  # in the order of our effects, not of the rows
            levels = one.levels[""]
            several = len(one.group.factors) > 1
            order = [":".join(map(str, v)) if several else str(v) for v in levels]
            place = (pd.Categorical(words, order).codes, order)
        if one.kind == "client":
            place = (pd.Categorical(table[one.group.factors[0]].astype(str), order).codes, order)
        groups.append((one, np.column_stack(list(columns.values())), place[0], len(place[1])))
    name = design.formula.response
    if design.answers:
        y = pd.Categorical(table[name], design.answers).codes
    else:
        y = np.asarray(table[name], dtype=float)
    role = design.family.column or "event" * ("event" in design.formula.columns)
    family = "censored gamma" if (family, role) == ("gamma", "event") else family
    second = design.formula.columns.get(role)
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
        value, middle = terms.value(b)
        if "Intercept" in chosen.others:
            at_mean = numpyro.sample("Intercept_centered", prior(chosen.others["Intercept"], many))
            numpyro.deterministic("Intercept", at_mean - b @ means - middle)
            eta = eta + at_mean
        eta = eta + value
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
        if family in ("sratio", "acat"):
            cuts = numpyro.sample("cuts", prior(chosen.others["cuts"], len(design.answers) - 1))
            own["cuts"], specific = terms.thresholds(cuts)
            numpyro.deterministic("cutpoints", cuts + b @ means + specific)
        if family == "cumulative":
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


class _Terms:
    """Terms gp(x), mo(x) and cs(x) of the pooled rows, written as in the papers."""

    def __init__(
        self,
        population: dict[str, np.ndarray],
        names: list[str],
        priors: dict[str, str],
        table: pd.DataFrame,
    ) -> None:
        self.priors, self.names, self.parts = priors, names, {}
        for label in population:
            kind, _, rest = label.partition("(")
            variable = rest.partition(")")[0]
            if kind in ("gp", "mo", "cs") and variable in table:
                self.parts[f"{kind}_{variable}"] = np.asarray(table[variable], dtype=float)

    def value(self, b: Any) -> Any:
        """Return the sum of processes and monotonic effects, minus means; and those of the latter.

        The intercept is that of the lowest level of a monotonic effect.
        """
        total, middle = 0.0, 0.0
        for name, x in self.parts.items():
            if name.startswith("gp"):
                sd = numpyro.sample(f"sd_{name}", prior(self.priors[f"sd_{name}"]))
                length = numpyro.sample(f"lscale_{name}", prior(self.priors[f"lscale_{name}"]))
                middle, edge = (x.max() + x.min()) / 2, 1.5 * (x.max() - x.min()) / 2
                root = jnp.arange(1, 21) * jnp.pi / (2 * edge)
                density = (
                    sd**2 * jnp.sqrt(2 * jnp.pi) * length * jnp.exp(-((length * root) ** 2) / 2)
                )
                raw = numpyro.sample(f"raw_{name}", dist.Normal().expand([20]).to_event(1))
                basis = jnp.sin(root * (x[:, None] - middle + edge)) / jnp.sqrt(edge)
                curve = basis @ (jnp.sqrt(density) * raw)
                at = np.quantile(x, (0.05, 0.25, 0.5, 0.75, 0.95), method="nearest")
                places = [int(np.abs(x - one).argmin()) for one in at]
                numpyro.deterministic(f"curve_{name}", (curve - curve.mean())[np.array(places)])
            elif name.startswith("mo"):
                level = (x - x.min()).astype(int)
                steps = int(level.max())
                zeta = numpyro.sample(f"zeta_{name}", prior(self.priors[f"zeta_{name}"]))
                slope = b[self.names.index(f"mo({name[3:]})")]
                curve = (slope * steps * jnp.insert(jnp.cumsum(zeta), 0, 0.0))[level]
                # The line is in b already.
                curve = curve - slope * level
                middle = middle + curve.mean()
            else:
                continue
            total = total + curve - curve.mean()
        return total, middle

    def thresholds(self, cuts: Any) -> tuple[Any, Any]:
        """Return the cut points of each row [N, K - 1], and those at 0 minus those at the means."""
        more = 0.0
        for name, x in self.parts.items():
            if name.startswith("cs"):
                each = numpyro.sample(name, prior(self.priors[name], len(cuts)))
                cuts = cuts - each * (x[:, None] - x.mean())
                more = more + each * x.mean()
        return cuts, more


def gp(x: Any) -> np.ndarray:
    """Stand for the 20 sines of a process."""
    return np.zeros((len(x), 20))


def mo(x: Any) -> np.ndarray:
    """Return levels, and columns that stand for the steps."""
    level = np.asarray(x, dtype=float) - np.min(x)
    return np.column_stack([level, np.zeros((len(level), int(level.max())))])


def cs(x: Any) -> Any:
    """Return a variable of category-specific effects."""
    return np.asarray(x, dtype=float)


def _columns(text: str, table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return the columns of a right-hand side on the pooled rows, by name."""
    common = design_matrices(f"ones ~ {text}", table.assign(ones=1.0)).common
    found = {}
    for name, term in common.terms.items():
        values = np.asarray(common[name], dtype=float).reshape(len(table), -1)
        labels = ["Intercept"] if name == "Intercept" else term.labels
        count, plain = len(labels), name.startswith("mo(")
        if name.startswith(("gp(", "mo(")):
            labels = [name] * plain + [f"{name}[{k}]" for k in range(1, count - plain + 1)]
        found |= dict(zip(labels, values.T, strict=True))
    return found


def _logistic(values: Any) -> Any:
    return jax.nn.sigmoid(values)


def _cumulative(eta: Any, y: Any, more: Any, strata: Any, cuts: Any) -> Any:
    above = _logistic(jnp.append(cuts, jnp.inf)[y] - eta)
    below = _logistic(jnp.insert(cuts, 0, -jnp.inf)[y] - eta)
    return jnp.log(above - below)


def _log_survival(shape: Any, x: Any) -> Any:
    """Return log Q(shape, x) by the incomplete gamma function of jax, and its derivatives."""
    return jnp.log(jnp.clip(jax.scipy.special.gammaincc(shape, x), 1e-290))


def _stopping(eta: Any, y: Any, more: Any, strata: Any, cuts: Any) -> Any:
    stops = _logistic(cuts - eta[:, None])
    whole = jnp.column_stack([stops, jnp.ones(len(y))])
    passed = jnp.column_stack([jnp.ones(len(y)), jnp.cumprod(1 - stops, 1)])
    return jnp.log((whole * passed)[jnp.arange(len(y)), y])


def _adjacent(eta: Any, y: Any, more: Any, strata: Any, cuts: Any) -> Any:
    odds = jnp.cumsum(eta[:, None] - cuts, 1)
    logits = jnp.column_stack([jnp.zeros(len(y)), odds])
    return dist.CategoricalLogits(logits).log_prob(y)


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
    "censored gamma": lambda eta, y, seen, strata, shape: jnp.where(
        seen > 0,
        dist.Gamma(shape, shape / jnp.exp(eta)).log_prob(y),
        _log_survival(shape, jnp.where(seen > 0, 1.0, y * shape / jnp.exp(eta))),
    ),
    "cumulative": _cumulative,
    "sratio": _stopping,
    "acat": _adjacent,
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
