"""Pyro source of a regression: readable, and to be copied."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyrofl.inference.definition.programs import Program
from pyrofl.models.regression.design import OFFSET, Design, Grouped
from pyrofl.models.regression.families import SMALLEST
from pyrofl.models.regression.hurdle import Hurdle
from pyrofl.models.regression.priors import Priors

DOC, LINE = '"""', 96


def source(
    design: Design, priors: Priors, link: str, name: str, *, center: bool, new: bool = False
) -> tuple[str, list[str]]:
    """Return the source of the program, and the names of its shared sites.

    That for new rows samples their responses, and has their linear predictor as the site eta.
    """
    family, x, inside, shared = design.family, design.places, [], []
    listed = _wrapped("Columns of batch.x: " + ", ".join(f"{i} {n}" for n, i in x.items()) + ".")
    lines = [f"def program(received, local, batch):\n    {DOC}{design.formula.text}, {name}.\n"]
    lines += [*listed, DOC, "x, y = batch.x, batch.y"]
    if family.support == "positive":
        lines[-1] = f"x, y = batch.x, batch.y.clamp(min={SMALLEST})"
    normal, single = coefficients(priors)
    used = [*normal, *single]
    size = len(design.answers) - 1 if family.kind == "categorical" else 0
    if normal:
        codes = [priors.coefficients[n] for n in normal]
        loc, scale = ([_argument(code, i) for code in codes] for i in (0, 1))
        body = f"dist.Normal(x.new_tensor({loc}), x.new_tensor({scale}))"
        more = f".expand([{size}, {len(normal)}]).to_event(2)" if size else ".to_event(1)"
        inside.append(f'b = pyro.sample("b", {body}{more})')
        shared.append("b")
    for n, site in single.items():
        more = f".expand([{size}]).to_event(1)" if size else ""
        inside.append(f'{site} = pyro.sample("{site}", {priors.coefficients[n]}{more})')
        shared.append(site)
    is_centered = center and design.population.has_intercept and bool(used)
    means = dict(zip(design.terms, priors.means, strict=True))
    parts = _predictor(normal, single, x, size)
    if is_centered:
        if normal:
            inside.append(f"means = x.new_tensor({[means[n] for n in normal]})")
        at_mean = ["(means * b).sum(-1)"] * bool(normal)
        at_mean += [f"{means[n]} * {site}" for n, site in single.items()]
        parts = [part.replace("COLUMNS", _slice(normal, x)) for part in parts]
        parts = [part.replace("CENTER", " - means") for part in parts]
        for n, site in single.items():
            parts = [p.replace(f"AT {site}", f" - {means[n]}") for p in parts]
    else:
        parts = [part.replace("COLUMNS", _slice(normal, x)).replace("CENTER", "") for part in parts]
        for site in single.values():
            parts = [p.replace(f"AT {site}", "") for p in parts]
    if "Intercept" in priors.others:
        more = f".expand([{size}]).to_event(1)" if size else ""
        own = "Intercept_centered" if is_centered else "Intercept"
        inside.append(f'{own} = pyro.sample("{own}", {priors.others["Intercept"]}{more})')
        shared.append(own)
        if is_centered:
            event = ", event_dim=1" if size else ""
            value = f"{own} - {' - '.join(at_mean)}"
            inside.append(f'pyro.deterministic("Intercept", {value}{event})')
        parts.insert(0, own)
    if family.kind == "ordinal":
        inside += _cutpoints(priors, len(design.answers), at_mean if is_centered else [])
        shared += ["cut_first", "cut_gaps"]
    for code in family.auxiliary:
        inside.append(f'{code} = pyro.sample("{code}", {priors.others[code]})')
        shared.append(code)
    for one in design.groups:
        stated, names = _group(one, priors)
        inside, shared = inside + stated, shared + names
    rows = []
    if OFFSET in x:
        parts.append(f"x[..., {x[OFFSET]}]")
    if family.column:
        rows.append(f"{family.column} = {design.second}")
    rows.append(f"eta = {' + '.join(parts) or 'x.new_zeros(y.shape)'}")
    for one in design.groups:
        rows += _added(one, x)
    if size:
        rows.append("logits = torch.cat([torch.zeros_like(eta[..., :1]), eta], -1)")
    site = "".join(c if c.isalnum() else "_" for c in design.formula.response).strip("_") or "y"
    if site in {*shared, *(f"r_{one.name}" for one in design.groups), "Intercept"}:
        site += "_response"
    code = family.links[link]
    if new:
        rows.append('pyro.deterministic("eta", eta)')
        code = family.response or code
        with_response = family.kind != "cox"
        rows += ["with batch.rows():", f'    pyro.sample("{site}", {code})'] * with_response
    elif family.kind == "cox":
        rows.append(f'pyro.factor("{site}", {code})')
    elif family.kind == "factor" and not design.formula.second:  # nothing is censored
        rows += ["with batch.rows():", f'    pyro.sample("{site}", {family.response}, obs=y)']
    elif family.kind == "factor":
        rows += ["with batch.rows():", f'    pyro.factor("{site}", {code})']
    else:
        rows += ["with batch.rows():", f'    pyro.sample("{site}", {code}, obs=y)']
    whole = [*lines[1:], "with batch.clients():", *(f"    {line}" for line in [*inside, *rows])]
    return lines[0] + "\n" + "\n".join(f"    {line}" for line in whole) + "\n", shared


def compile_program(text: str) -> Program:
    """Return the function of a program's source; its source is known to inspect."""
    place = f"<regression {abs(hash(text))}>"
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    namespace: dict[str, Any] = {"pyro": pyro, "dist": dist, "torch": torch}
    namespace |= {"cox": cox, "Hurdle": Hurdle}
    exec(compile(text, place, "exec"), namespace)
    program: Program = namespace["program"]
    return program


def cox(eta: Tensor, time: Tensor, event: Tensor | float, mask: Tensor) -> Tensor:
    """Return the log partial likelihood of each client, with ties as in Efron's method.

    Efron, "The Efficiency of Cox's Likelihood Function for Censored Data", JASA 1977. Clients are
    strata: the sum over clients is the stratified partial likelihood. Memory grows with the square
    of the number of rows of a client.

    Args:
        eta: log relative hazards, [..., C, B].
        time: times, [C, B].
        event: 1 where the event was seen and 0 where the time is censored, [C, B].
        mask: False for padding, [C, B].

    Returns:
        Log partial likelihoods, [..., C, 1].
    """
    died = (torch.as_tensor(event).expand(mask.shape) > 0) & mask
    same = (time[..., :, None] == time[..., None, :]) & died[..., :, None] & died[..., None, :]
    at_risk = (time[..., None, :] >= time[..., :, None]) & mask[..., None, :]
    before = torch.ones_like(same[0]).tril(-1) & same
    share = before.sum(-1) / same.sum(-1).clamp(min=1)  # of the tied events that is past
    eta = torch.where(mask, eta, 0.0)
    top = torch.where(mask, eta, -torch.inf).amax(-1, keepdim=True).detach()
    weight = at_risk.to(eta) - share[..., None].to(eta) * same.to(eta)
    total = (weight * (eta - top).exp()[..., None, :]).sum(-1)
    total = torch.where(died, total, 1.0)
    return torch.where(died, eta - top - total.log(), 0.0).sum(-1, keepdim=True)


def coefficients(priors: Priors) -> tuple[list[str], dict[str, str]]:
    """Return names of the coefficients with normal priors, and the others' names and sites."""
    normal = [n for n, code in priors.coefficients.items() if code.startswith("dist.Normal(")]
    others = [n for n in priors.coefficients if n not in normal]
    return normal, {n: f"b_{place}" for place, n in enumerate(others)}


def _argument(code: str, place: int) -> float:
    inside = code[code.index("(") + 1 : -1].split(",")[place]
    return float(inside.split("=")[-1])


def _slice(names: Sequence[str], x: dict[str, int]) -> str:
    """Return the code of columns of x."""
    places = [x[n] for n in names]
    if places == list(range(places[0], places[0] + len(places))) if places else False:
        return f"x[..., {places[0]}:{places[-1] + 1}]"
    return f"x[..., {places}]"


def _predictor(
    normal: Sequence[str], single: dict[str, str], x: dict[str, int], size: int
) -> list[str]:
    """Return the parts of the linear predictor, with places for columns and centers."""
    columns = "(COLUMNSCENTER)[..., None, :]" if size else "(COLUMNSCENTER)"
    parts = [f"(b * {columns}).sum(-1)"] * bool(normal)
    more = "[..., None]" if size else ""
    parts += [f"{site} * (x[..., {x[n]}]AT {site}){more}" for n, site in single.items()]
    return parts


def _cutpoints(priors: Priors, levels: int, at_mean: Sequence[str]) -> list[str]:
    """Return statements of ordered cut points between levels."""
    first, gaps = priors.others["cut_first"], priors.others["cut_gaps"]
    raw = "cutpoints" + "".join(f" + ({part})[..., None]" for part in at_mean)
    return [
        f'cut_first = pyro.sample("cut_first", {first})',
        f'cut_gaps = pyro.sample("cut_gaps", {gaps}.expand([{levels - 2}]).to_event(1))',
        "cuts = torch.cat([cut_first[..., None], cut_gaps], -1)",
        "cutpoints = cuts.cumsum(-1)",
        f'pyro.deterministic("cutpoints", {raw}, event_dim=1)',
    ]


def _group(one: Grouped, priors: Priors) -> tuple[list[str], list[str]]:
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
        lines.append(
            f'pyro.deterministic("corr_{name}", {root} @ {root}.mT, event_dim=2)'
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


def _added(one: Grouped, x: dict[str, int]) -> list[str]:
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
    return [*lines, f"eta = eta + {' + '.join(parts)}"]


def _wrapped(text: str) -> list[str]:
    """Return a text in lines of limited length."""
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) > LINE:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines
