"""Pyro source of a regression: readable, and to be copied."""

from __future__ import annotations

import linecache
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyrofl.inference.definition.programs import Program
from pyrofl.models.regression.columns import Columns
from pyrofl.models.regression.design import Design, GroupTerm, offset_of
from pyrofl.models.regression.distributions import (
    SkewNormal,
    ZeroOneInflatedBeta,
    adjacent,
    stopping,
)
from pyrofl.models.regression.families import LINKS, SMALLEST
from pyrofl.models.regression.hurdle import Hurdle
from pyrofl.models.regression.priors import Priors, block_sites, cut_sites, of
from pyrofl.models.regression.smooths import (
    Block,
    CategorySpecific,
    Monotonic,
    Process,
    process_scale,
)
from pyrofl.models.regression.survival import (
    BOUNDS,
    SMALLEST_BOUND,
    log_gamma_survival,
    log_within,
)
from pyrofl.models.regression.truncated import Truncated

DOC, LINE = '"""', 96
# Columns from which products with coefficients are matrix products, as those of S draws would be
# temporary tensors [S, C, B, P].
MANY_COLUMNS = 8


def source(
    design: Design, priors: Priors, link: str, name: str, *, center: bool, new: bool = False
) -> tuple[str, list[str]]:
    """Return the source of the program, and the names of its shared sites.

    That for new rows samples their responses, and has their linear predictor as the site eta.
    """
    family, x = design.family, design.places
    listed = _wrapped("Columns of batch.x: " + ", ".join(f"{i} {n}" for n, i in x.items()) + ".")
    lines = [f"def program(received, local, batch):\n    {DOC}{design.formula.text}, {name}.\n"]
    lines += [*listed, DOC, "x, y = batch.x, batch.y"]
    if family.support == "positive":
        smallest = SMALLEST_BOUND if "upper" in design.formula.columns else SMALLEST
        lines[-1] = f"x, y = batch.x, batch.y.clamp(min={smallest})"
    inside: list[str] = []
    shared: list[str] = []
    rows: list[str] = []
    for parameter, columns in design.predictors.items():
        size = len(design.answers) - 1 if family.kind == "categorical" else 0
        linear = _linear(parameter, columns, priors, x, size, center=center)
        inside, shared = inside + linear.inside, shared + linear.shared
        rows.append(f"{of('eta', parameter)} = {linear.value or 'x.new_zeros(y.shape)'}")
        if family.kind == "ordinal":
            specific = _specific(design, priors, center=center)
            inside += _cutpoints(design, priors, linear.at_mean, specific)
            shared += [*cut_sites(family), *specific.shared]
            rows += [f"cutpoints = cutpoints - {part}" for part in specific.thresholds]
    for code in design.auxiliary:
        inside.append(f'{code} = pyro.sample("{code}", {priors.others[code]})')
        shared.append(code)
    for one in design.groups:
        stated, names = _group(one, priors)
        inside, shared = inside + stated, shared + names
    for one in design.groups:
        rows += _added(one, x)
    rows += [f"{n} = eta_{n}{LINKS[n]}" for n in design.parameters]
    rows += [f"{n} = x.new_tensor({value})" for n, value in design.formula.values.items()]
    rows += _columns(design)
    if size:
        rows.append("logits = torch.cat([torch.zeros_like(eta[..., :1]), eta], -1)")
    rows += _likelihood(design, _site(design, shared), link, new=new)
    whole = [*lines[1:], "with batch.clients():", *(f"    {line}" for line in [*inside, *rows])]
    return lines[0] + "\n" + "\n".join(f"    {line}" for line in whole) + "\n", shared


class _Linear(NamedTuple):
    """Statements of a linear predictor, names of shared sites, its value, and that at the means.

    The last are statements of rows that change the thresholds of ordered categories.
    """

    inside: list[str]
    shared: list[str]
    value: str
    at_mean: list[str]
    thresholds: list[str]


def _linear(
    parameter: str, columns: Columns, priors: Priors, x: dict[str, int], size: int, *, center: bool
) -> _Linear:
    """Return the population part of a linear predictor, with `size` values for each row, or one."""
    coefs, sites = priors.predictors[parameter], coefficients(priors, parameter)
    b, means, intercept = (of(site, parameter) for site in ("b", "means", "Intercept"))
    normal, more = coefs.normal, f".expand([{size}]).to_event(1)" if size else ""
    inside, shared = [], [*([b] if normal else []), *sites.values()]
    if normal:
        codes = [coefs.priors[n] for n in normal]
        loc, scale = ([_argument(code, i) for code in codes] for i in (0, 1))
        body = f"dist.Normal(x.new_tensor({loc}), x.new_tensor({scale}))"
        event = f".expand([{size}, {len(normal)}]).to_event(2)" if size else ".to_event(1)"
        inside.append(f'{b} = pyro.sample("{b}", {body}{event})')
    inside += [f'{s} = pyro.sample("{s}", {coefs.priors[n]}{more})' for n, s in sites.items()]
    is_centered, at_mean, parts = center and columns.has_intercept and bool(shared), [], []
    if normal:
        minus = f" - {means}" if is_centered else ""
        numbers = f"({_slice(normal, x)}{minus})"
        categories = f"({b} * {numbers}[..., None, :]).sum(-1)"
        parts.append(categories if size else _product(b, numbers, len(normal)))
    for n, site in sites.items():
        minus = f" - {coefs.means[n]}" if is_centered else ""
        parts.append(f"{site} * (x[..., {x[n]}]{minus})" + ("[..., None]" if size else ""))
    if is_centered:
        if normal:
            inside.append(f"{means} = x.new_tensor({[coefs.means[n] for n in normal]})")
            at_mean.append(f"({means} * {b}).sum(-1)")
        at_mean += [f"{coefs.means[n]} * {site}" for n, site in sites.items()]
    for name, block in columns.blocks.items():
        if not isinstance(block.transform, CategorySpecific):
            term = _block(name, block, parameter, priors, x, center=is_centered)
            inside, shared = inside + term.inside, shared + term.shared
            parts, at_mean = [*parts, term.value], at_mean + term.at_mean
    if intercept in priors.others:
        site = f"{intercept}_centered" if is_centered else intercept
        inside.append(f'{site} = pyro.sample("{site}", {priors.others[intercept]}{more})')
        if is_centered:
            event = ", event_dim=1" if size else ""
            value = f"{site} - {' - '.join(at_mean)}"
            inside.append(f'pyro.deterministic("{intercept}", {value}{event})')
        shared.append(site)
        parts.insert(0, site)
    if columns.offsets:
        parts.append(f"x[..., {x[offset_of(parameter)]}]")
    return _Linear(inside, shared, " + ".join(parts), at_mean, [])


def _block(
    name: str, block: Block, parameter: str, priors: Priors, x: dict[str, int], *, center: bool
) -> _Linear:
    """Return statements, shared sites and value of a term whose columns have one prior."""
    transform, columns = block.transform, _slice(block.labels, x)
    sites, coefs = block_sites(name, block, parameter), priors.predictors[parameter]
    inside = [f'{site} = pyro.sample("{site}", {_code(priors.others[site])})' for site in sites]
    means = [coefs.means[label] for label in block.labels]
    if isinstance(transform, CategorySpecific):
        site, code = sites[0], priors.others[sites[0]]
        inside = [f'{site} = pyro.sample("{site}", {code}.expand([cuts.shape[-1]]).to_event(1))']
        minus, at_mean = (f" - {means[0]}", [f"{means[0]} * {site}"]) if center else ("", [])
        return _Linear(inside, sites, "", at_mean, [f"{site} * ({columns}{minus})"])
    if isinstance(transform, Monotonic):
        b = coefficients(priors, parameter).get(block.line, "")
        b = b or f"{of('b', parameter)}[..., {coefs.normal.index(block.line)}]"
        weights, minus, at_mean = f"({transform.steps} * {sites[0]} - 1)", "", []
        if center:
            inside.append(f"means_{name} = x.new_tensor({means})")
            minus, at_mean = f" - means_{name}", [f"{b} * ({weights} * means_{name}).sum(-1)"]
        return _Linear(
            inside, sites, f"{b} * ({weights} * ({columns}{minus})).sum(-1)", at_mean, []
        )
    scale, effects = f"{sites[0]}[..., None]", of(name, parameter)
    if isinstance(transform, Process):
        frequencies = f"x.new_tensor({transform.frequencies.tolist()})"
        scale = f"process_scale({frequencies}, {transform.edge!r}, {', '.join(sites)})"
    normal = f"dist.Normal(x.new_zeros({len(block.labels)}), {scale}).to_event(1)"
    inside.append(f'{effects} = pyro.sample("{effects}", {normal})')
    value = _product(effects, columns, len(block.labels))
    return _Linear(inside, [*sites, effects], value, [], [])


def _product(coefs: str, numbers: str, count: int) -> str:
    """Return the code of the sum over columns of coefficients times numbers of rows."""
    if count < MANY_COLUMNS:
        return f"({coefs} * {numbers}).sum(-1)"
    return f'torch.einsum("...bi,...ji->...b", {numbers}, {coefs})'


def _code(prior: str) -> str:
    """Return the code of a prior in a program, in which lists are tensors."""
    return f"dist.Dirichlet(x.new_tensor({prior[15:-1]}))" if "Dirichlet" in prior else prior


def _columns(design: Design) -> list[str]:
    """Return statements that name the response's further columns; sigma has standard errors."""
    lines = []
    for role in design.roles:
        code = design.code(role)
        if role == "se":
            both = f"(sigma.square() + {code}.square()).sqrt()"
            role, code = "sigma", both if design.formula.adds_sigma else code
        if role in BOUNDS:
            tensor = code if design.constant(role) is None else f"x.new_tensor({code})"
            code = f"{tensor}.clamp(min={SMALLEST_BOUND})"
        lines.append(f"{role} = {code}")
    if "upper" in design.formula.columns:
        lines += ["within = event * (upper > y).to(x)", "event = event - within"]
    return lines


def _site(design: Design, shared: Sequence[str]) -> str:
    """Return the name of the responses' site."""
    site = "".join(c if c.isalnum() else "_" for c in design.formula.response).strip("_") or "y"
    is_taken = site in {*shared, *(f"r_{one.name}" for one in design.groups), "Intercept"}
    return f"{site}_response" if is_taken else site


def _likelihood(design: Design, site: str, link: str, *, new: bool) -> list[str]:
    """Return statements of the responses, or of new responses and their linear predictor."""
    family = design.family
    code = family.links[link]
    if design.formula.truncation:
        code = f"Truncated({', '.join([code, *map(_bound, design.formula.truncation)])})"
    if new:
        lines = ['pyro.deterministic("eta", eta)']
        if family.kind == "cox":
            return lines
        return [
            *lines,
            "with batch.rows():",
            f'    pyro.sample("{site}", {family.response or code})',
        ]
    if family.kind == "cox":
        code = f"{code[:-1]}, entry)" if "entry" in design.formula.columns else code
        return [f'pyro.factor("{site}", {code})']
    if "event" in design.formula.columns:
        return ["with batch.rows():", *(f"    {line}" for line in _times(design, site, code))]
    code = family.response if family.kind == "factor" else code  # nothing is censored
    return ["with batch.rows():", f'    pyro.sample("{site}", {code}, obs=y)']


def _times(design: Design, site: str, code: str) -> list[str]:
    """Return statements of the log density of times that may be censored or truncated."""
    columns, cumulative = design.formula.columns, design.family.cumulative
    if design.family.kind == "rows":
        code = f"event * {code}.log_prob(y) - (1 - event) * {_at('y', cumulative)}"
    if not {*BOUNDS} & {*columns}:
        return [f'pyro.factor("{site}", {code})']
    lines = [f"log_density = {code}"]
    if "upper" in columns:
        between = f"{_at('upper', cumulative)} - {_at('y', cumulative)}"
        lines.append(f"log_density = log_density + log_within(within, {between})")
    if "entry" in columns:
        lines.append(f"log_density = log_density + {_at('entry', cumulative)}")
    return [*lines, f'pyro.factor("{site}", log_density)']


def _bound(value: float) -> str:
    """Return a bound of a truncated response as code."""
    return repr(value) if math.isfinite(value) else f"{'-' * (value < 0)}torch.inf"


def _at(time: str, cumulative: str) -> str:
    """Return Pyro code of a cumulative hazard at a time, in parentheses."""
    return f"({cumulative.replace('{t}', time)})"


def compile_program(text: str) -> Program:
    """Return the function of a program's source; its source is known to inspect."""
    place = f"<regression {abs(hash(text))}>"
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    # With the name of this module the program counts as code of the library, which is tested.
    namespace: dict[str, Any] = {"__name__": __name__, "pyro": pyro, "dist": dist, "torch": torch}
    namespace |= {"cox": cox, "Hurdle": Hurdle, "SkewNormal": SkewNormal}
    namespace |= {"ZeroOneInflatedBeta": ZeroOneInflatedBeta, "log_within": log_within}
    namespace |= {"Truncated": Truncated, "process_scale": process_scale, "stopping": stopping}
    namespace |= {"adjacent": adjacent, "log_gamma_survival": log_gamma_survival}
    exec(compile(text, place, "exec"), namespace)
    program: Program = namespace["program"]
    return program


def cox(
    eta: Tensor,
    time: Tensor,
    event: Tensor | float,
    mask: Tensor,
    entry: Tensor | None = None,
) -> Tensor:
    """Return the log partial likelihood of each client, with ties as in Efron's method.

    Efron, "The Efficiency of Cox's Likelihood Function for Censored Data", JASA 1977. Clients are
    strata: the sum over clients is the stratified partial likelihood. Memory grows with the square
    of the number of rows of a client.

    Args:
        eta: log relative hazards, [..., C, B].
        time: times, [C, B].
        event: 1 where the event was seen and 0 where the time is censored, [C, B].
        mask: False for padding, [C, B].
        entry: times after which rows are at risk, [C, B]; None is from the start.

    Returns:
        Log partial likelihoods, [..., C, 1].
    """
    died = (torch.as_tensor(event).expand(mask.shape) > 0) & mask
    same = (time[..., :, None] == time[..., None, :]) & died[..., :, None] & died[..., None, :]
    at_risk = (time[..., None, :] >= time[..., :, None]) & mask[..., None, :]  # [C, B, B]
    if entry is not None:
        at_risk &= entry.expand(mask.shape)[..., None, :] < time[..., :, None]
    before = torch.ones_like(same[0]).tril(-1) & same
    share = before.sum(-1) / same.sum(-1).clamp(min=1)  # of the tied events that is past
    eta = torch.where(mask, eta, 0.0)
    top = torch.where(mask, eta, -torch.inf).amax(-1, keepdim=True).detach()
    weight = at_risk.to(eta) - share[..., None].to(eta) * same.to(eta)  # [C, B, B]
    total = (weight * (eta - top).exp()[..., None, :]).sum(-1)  # [..., C, B]
    total = torch.where(died, total, 1.0)
    return torch.where(died, eta - top - total.log(), 0.0).sum(-1, keepdim=True)


def coefficients(priors: Priors, parameter: str = "") -> dict[str, str]:
    """Return coefficient -> site, of the coefficients that have one because of their priors."""
    coefs = priors.predictors[parameter]
    others = [n for n in coefs.priors if n not in coefs.normal]
    return {n: f"{of('b', parameter)}_{place}" for place, n in enumerate(others)}


def _argument(code: str, place: int) -> float:
    inside = code[code.index("(") + 1 : -1].split(",")[place]
    return float(inside.split("=")[-1])


def _slice(names: Sequence[str], x: dict[str, int]) -> str:
    """Return the code of columns of x."""
    places = [x[n] for n in names]
    if places == list(range(places[0], places[0] + len(places))) if places else False:
        return f"x[..., {places[0]}:{places[-1] + 1}]"
    return f"x[..., {places}]"


def _cutpoints(
    design: Design, priors: Priors, at_mean: Sequence[str], specific: _Linear
) -> list[str]:
    """Return statements of cut points between levels, which are ordered in some families."""
    steps = len(design.answers) - 1
    sites = {
        "cut_first": "",
        "cut_gaps": f".expand([{steps - 1}]).to_event(1)",
        "cuts": f".expand([{steps}]).to_event(1)",
    }
    names = cut_sites(design.family)
    lines = [f'{n} = pyro.sample("{n}", {priors.others[n]}{sites[n]})' for n in names]
    if design.family.is_ordered:
        lines.append("cuts = torch.cat([cut_first[..., None], cut_gaps], -1)")
    lines += ["cutpoints = cuts" + ".cumsum(-1)" * design.family.is_ordered, *specific.inside]
    raw = "cutpoints" + "".join(f" + ({part})[..., None]" for part in at_mean)
    raw += "".join(f" + {part}" for part in specific.at_mean)
    return [*lines, f'pyro.deterministic("cutpoints", {raw}, event_dim=1)']


def _specific(design: Design, priors: Priors, *, center: bool) -> _Linear:
    """Return the statements of effects that differ between cut points."""
    parts = [
        _block(name, block, "", priors, design.places, center=center)
        for name, block in design.population.blocks.items()
        if isinstance(block.transform, CategorySpecific)
    ]
    joined = ([one for part in parts for one in part[place]] for place in (0, 1, 3, 4))
    inside, shared, at_mean, thresholds = joined
    return _Linear(inside, shared, "", at_mean, thresholds)


def _group(one: GroupTerm, priors: Priors) -> tuple[list[str], list[str]]:
    """Return statements of a group's scales and effects, and the names of its shared sites."""
    name, k = one.name, len(one.entries)
    sd, r, root = f"sd_{name}", f"r_{name}", f"root_{name}"
    prior, lines, shared = priors.others[sd], [], [sd]
    if k > 1:
        usual = prior.startswith("dist.HalfNormal([")
        prior = (
            f"dist.HalfNormal(x.new_tensor({prior[16:-1]})).to_event(1)"
            if usual
            else f"{prior}.expand([{k}]).to_event(1)"
        )
    lines.append(f'{sd} = pyro.sample("{sd}", {prior})')
    is_correlated = one.is_correlated
    if is_correlated:
        lines.append(f'{root} = pyro.sample("{root}", {priors.others[f"corr_{name}"]})')
        first, second = ([pair[place] for pair in one.pairs] for place in (0, 1))
        lines.append(
            f'pyro.deterministic("corr_{name}", ({root} @ {root}.mT)[..., {second}, {first}], '
            "event_dim=1)"
            if k > 2
            else f'pyro.deterministic("corr_{name}", {root}[..., 1, 0])'
        )
        shared.append(root)
    if one.kind == "shared":
        zeros = f"x.new_zeros({one.count}, {k})"
        scale = f"{sd}[..., None, :]" if k > 1 else f"{sd}[..., None, None]"
        effect = f"dist.Normal({zeros}, {scale}).to_event(2)"
        if is_correlated:
            scale = f"({sd}[..., None] * {root})[..., None, :, :]"
            effect = f"dist.MultivariateNormal({zeros}, scale_tril={scale}).to_event(1)"
        return [*lines, f'{r} = pyro.sample("{r}", {effect})'], [*shared, r]
    if is_correlated:
        effect = f"dist.MultivariateNormal(x.new_zeros({k}), scale_tril={sd}[..., None] * {root})"
    else:
        effect = f"dist.Normal(x.new_zeros({k}), {sd}).to_event(1)" if k > 1 else ""
        effect = effect or f"dist.Normal(0.0, {sd})"
    statement = f'{r} = pyro.sample("{r}", {effect})'
    if one.kind == "client":
        return [*lines, statement], shared
    plate = f'with pyro.plate("levels_{name}", {one.count}, dim=-1):'
    return [*lines, plate, f"    {statement}"], shared


def _added(one: GroupTerm, x: dict[str, int]) -> list[str]:
    """Return statements that add a group's effects to the linear predictor."""
    name, k, lines = one.name, len(one.entries), []
    size = len(one.answers)
    effects = f"r_{name}"
    if one.kind != "client":
        place = x[f"level of {one.group.name}"]
        lines.append(f"at = torch.nn.functional.one_hot(x[..., {place}].long(), {one.count}).to(x)")
        if one.kind == "shared":
            lines.append(f"rows_{name} = (at[..., None, :] @ {effects})[..., 0, :]")
        elif k > 1:
            lines.append(f"rows_{name} = at @ {effects}")
        else:
            lines.append(f"rows_{name} = (at @ {effects}[..., None])")
        effects = f"rows_{name}"
    parts = []
    for place, label in enumerate(one.labels):
        single = k == 1 and one.kind == "client"
        value = effects if single else f"{effects}[..., {place}]"
        if size:
            value = f"{effects}[..., {place * size}:{place * size + size}]"
        is_one = label == "Intercept" and one.columns.has_intercept and place == 0
        more = "[..., None]" if size else ""
        parts.append(value if is_one else f"{value} * x[..., {x[label]}]{more}")
    eta = of("eta", one.parameter)
    return [*lines, f"{eta} = {eta} + {' + '.join(parts)}"]


def _wrapped(text: str) -> list[str]:
    """Return a text in lines of limited length."""
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) > LINE:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines
