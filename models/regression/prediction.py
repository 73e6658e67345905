"""Predictions of new rows of a table, by known clients and groups, or new ones.

The program of the regression runs at draws of the posterior, corrected by importance sampling.
Effects of levels without a training row are drawn from their distribution in the program, given
each draw of the standard deviations and correlations of its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyrofl.arguments import check_name, did_you_mean
from pyrofl.data import Batch
from pyrofl.data.frames import number_rows, place_of
from pyrofl.data.tables.owners import client_cells, owners_of
from pyrofl.data.tables.row_checks import outlier_position
from pyrofl.data.tables.wording import listed
from pyrofl.inference.definition.seeds import Stream, separate, stream
from pyrofl.inference.evaluation.predict import CLASSES, probabilities
from pyrofl.inference.evaluation.predictions import Predictions, in_order, predictive_values
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors.arviz import to_arviz
from pyrofl.inference.posteriors.export import SAMPLE_DIMS
from pyrofl.models.regression.design import Design, GroupTerm
from pyrofl.models.regression.program import compile_program, source
from pyrofl.models.regression.rows import kind_of, tensor
from pyrofl.plates import DRAWS_PLATE
from pyrofl.tensors import Tensors, default_type, seeded
from pyrofl.user_warnings import warn_user

DRAWN = 2000  # draws of the posterior, of all runs together
PIECE = 512  # rows that are predicted at once
NEW = "new client"

Effects = Literal["client", "shared", "none"]
"""Whether effects of groups are those of a client and its levels, those of levels that several
clients have (others being 0), or 0."""


class RegressionDraws(NamedTuple):
    """Posterior draws of a regression.

    Attributes:
        sites: name of the site -> draws [S, *p], and [S, J, *p] for effects of J clients.
        clients: names of the J clients.
        corrected: whether the draws are corrected by importance sampling, see `to_arviz`.
        seed: of the first run.
    """

    sites: Tensors
    clients: list[str]
    corrected: str
    seed: int


@dataclass
class ServerRun(Run):
    """Run at a server without rows, with its posterior draws of the shared sites.

    Attributes:
        shared_draws: ArviZ data, as of `pyrofl.inference.posteriors.shared.shared_to_arviz`.
    """

    shared_draws: Any = None


class RowPredictors(NamedTuple):
    """Linear predictor [S, 1, N, ...] and response distribution of new rows; None for Cox."""

    eta: Tensor
    response: Any
    frame: pd.DataFrame


def regression_of(fitted: Any) -> Any:
    """Return the regression that a run, or each of several, has fitted.

    Raises:
        ValueError: if it is not a run of a regression.
    """
    run = fitted[0] if isinstance(fitted, Sequence) and len(fitted) else fitted
    method = getattr(run, "method", None)
    if getattr(method, "design", None) is None:
        raise ValueError(
            f"fitted is a {type(run).__name__}"
            f"{f' of method {method.name}' if method else ''}; expected what pyrofl.fit returns "
            "for a pyrofl.regression"
        )
    return method


def posterior_draws(fitted: Any, draws: int | None = None) -> RegressionDraws:
    """Return draws of all sites of a run, or of several with equal weights."""
    regression_of(fitted)
    runs = list(fitted) if isinstance(fitted, Sequence) else [fitted]
    count = draws or -(-DRAWN // len(runs))
    if isinstance(runs[0], ServerRun):
        posterior = runs[0].shared_draws["posterior"]
    else:
        posterior = to_arviz(runs, count, groups=("posterior",), progress=False)["posterior"]
    sites = {}
    for name in map(str, posterior.data_vars):
        stacked = posterior[name].stack(draws=SAMPLE_DIMS).transpose("draws", ...)
        sites[name] = tensor(stacked.values)
    clients = [str(name) for name in runs[0].data.names[: runs[0].data.clients]]
    seed = separate(runs[0].seed).noise
    return RegressionDraws(sites, clients, str(posterior.attrs.get("corrected", "")), seed)


def read_table(design: Design, x: Any, client: str) -> pd.DataFrame:
    """Return the needed columns of new rows, with the types of the training rows.

    Raises:
        ValueError: if a column is missing, has a gap, is of another type, has an unknown level in
            a population term, or has impossible trials or standard errors.
    """
    frame = x if isinstance(x, pd.DataFrame) else None
    if frame is None:
        if not isinstance(x, Mapping):
            raise ValueError(
                f"new rows are a {type(x).__name__}; expected a data frame, or a dict of columns"
            )
        try:
            frame = pd.DataFrame(dict(x))
        except ValueError as error:
            raise ValueError(
                "new rows are a dict without a list of one length for each column; expected rows "
                "such as {'x': [1.0, 2.0], 'treat': ['no', 'yes']}"
            ) from error
    if not len(frame):
        raise ValueError("new rows are empty; expected at least one row")
    frame = number_rows(frame)
    train = design.clients.template
    columns = {}
    for name in design.needed:
        if name not in map(str, frame.columns):
            raise ValueError(
                f"new rows have no column {name!r}; expected all of {', '.join(design.needed)}"
                f"{did_you_mean(name, map(str, frame.columns))}"
            )
        column = frame[name].infer_objects()
        if column.isna().any():
            raise ValueError(
                f"column {name} of new rows is missing in "
                f"{place_of(frame, int(column.isna().argmax()))}; expected a value in every row"
            )
        levels = design.clients.levels.get(name)
        if levels is not None:
            for value in column.tolist():
                if value not in levels:
                    raise ValueError(
                        f"column {name} of new rows has level {value!r}, which no training row "
                        f"has; expected one of {', '.join(map(str, levels))}"
                    )
        elif name in train and kind_of(train[name]) != kind_of(column):
            raise ValueError(
                f"column {name} of new rows holds {kind_of(column)}; expected "
                f"{kind_of(train[name])}, as in training"
            )
        like = train[name].dtype if name in train else column.dtype
        if isinstance(like, pd.CategoricalDtype):
            cells = pd.Categorical(column.tolist(), like.categories, like.ordered)
            column = pd.Series(cells, frame.index)
        columns[name] = column.astype(like) if like.kind in "fb" else column
    level = design.level_of(client)
    table = pd.DataFrame({**columns, design.client: level}, index=frame.index)
    for role in ("trials", "se"):
        if role in design.formula.columns:
            design.check_role(role, "new rows", table)
    for part in (*design.predictors.values(), *(one.columns for one in design.groups)):
        for text in part.beyond(table):
            warn_user(
                f"{text}; beyond, the curve continues without data, and its intervals do not "
                "account for its shape there"
            )
    return table


class Known(Messenger):
    """Pyro handler that sets sites to posterior draws, and draws effects of new levels.

    Responses are set to 0, as only their distribution is used.

    Attributes:
        values: site -> draws [S, 1, 1 or levels, *p].
        levels: site of effects -> axis of its levels, if some of them are new.
        zero: names of sites that are 0.
    """

    def __init__(self, values: Tensors, levels: Mapping[str, int], zero: Sequence[str]) -> None:
        super().__init__()
        self.values, self.levels, self.zero = values, levels, zero

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        is_open = not (msg["done"] or msg["is_observed"] or msg["type"] != "sample")
        is_response = _of_rows(msg)
        if not is_open or not (is_response or name in self.values or name in self.zero):
            return
        if is_response or name in self.zero:
            value = torch.zeros(msg["fn"].batch_shape + msg["fn"].event_shape).double()
        elif name in self.levels:
            value, held = msg["fn"].sample(), self.values[name]
            axis = self.levels[name]
            value.narrow(axis, 0, held.shape[axis]).copy_(held)
        else:
            value = self.values[name]
        msg["value"], msg["done"] = value, True


def run_program(
    method: Any,
    drawn: RegressionDraws,
    frame: pd.DataFrame,
    client: str,
    effects: Effects = "client",
) -> RowPredictors:
    """Run the program of a regression on new rows of one client, at posterior draws."""
    design: Design = method.design
    groups = tuple(_with_levels(one, frame, client, design.client) for one in design.groups)
    wide = replace(design, groups=groups)
    frame = frame.assign(**{design.client: design.level_of(client)})
    text, _ = source(wide, method.chosen, method.link, "new rows", center=method.center, new=True)
    program = _compiled(text)
    values, levels = {}, {}
    count = len(next(iter(drawn.sites.values())))
    own = {f"r_{one.name}": one for one in groups if one.kind != "shared"}
    for name, value in drawn.sites.items():
        if name not in own:
            values[name] = value[:, None, None]  # [S, 1, 1, *p]
        elif client in drawn.clients:
            client_draws = value[:, drawn.clients.index(client), None]
            values[name] = client_draws if own[name].kind == "nested" else client_draws[:, None]
    for one, old in zip(groups, design.groups, strict=True):
        site = f"r_{one.name}"
        if one.kind == "client" or site not in values:
            continue
        held = len(old.levels.get("" if one.kind == "shared" else client, ()))
        axis = 3 if one.kind == "shared" else 2
        values[site] = values[site].narrow(axis, 0, held)
        if one.count > held:
            levels[site] = axis
    zero = [f"r_{one.name}" for one in groups if effects == "none" or one.kind != "shared"]
    zero = [] if effects == "client" else zero
    columns = wide.x(frame, client)
    _refuse_infinite(wide, columns, frame)
    x = tensor(columns)[None]  # [1, N, columns]
    rows = x.shape[1]
    ones = torch.ones(1, rows, dtype=torch.bool)
    size = torch.tensor([float(rows)]).double()
    batch = Batch(x, torch.zeros(1, rows).double(), ones, size, torch.zeros(1, dtype=torch.long))
    seed = int(torch.randint(2**62, (), generator=stream(drawn.seed, Stream.ROWS, client)))
    with (
        pyro.validation_enabled(False),
        torch.no_grad(),
        default_type(torch.float64),
        seeded(seed),
        Known(values, levels, zero),
        pyro.plate(DRAWS_PLATE, count, dim=-3),
    ):
        nodes = poutine.trace(program).get_trace({}, {}, batch).nodes
    # Offsets, or thresholds alone, have no draws of a linear predictor, or one for all rows.
    eta, shape = nodes["eta"]["value"], torch.Size([count, 1, rows])
    responses = [s["fn"] for s in nodes.values() if s["type"] == "sample" and _of_rows(s)]
    response = responses[0].expand(shape) if responses else None
    return RowPredictors(eta.expand(*shape, *eta.shape[3:]), response, frame)


def derived_sites(program: Any, design: Design, shared: Tensors) -> Tensors:
    """Return draws of the deterministic sites of a program, given draws [S, *p] of shared sites."""
    one = torch.ones(1, 1, dtype=torch.float64)
    x = torch.zeros(1, 1, len(design.places), dtype=torch.float64)
    batch = Batch(x, one, one > 0, one[0], torch.zeros(1, dtype=torch.long))
    values = {name: value.double()[:, None, None] for name, value in shared.items()}
    own = [f"r_{one.name}" for one in design.groups if one.kind != "shared"]
    with (
        pyro.validation_enabled(False),
        torch.no_grad(),
        default_type(torch.float64),
        Known(values, {}, own),
        pyro.plate(DRAWS_PLATE, len(next(iter(shared.values()))), dim=-3),
    ):
        nodes = poutine.trace(program).get_trace({}, {}, batch).nodes
    return {
        name: site["value"][:, 0, 0]
        for name, site in nodes.items()
        if site["type"] == "sample" and site["infer"].get("_deterministic")
    }


def _refuse_infinite(design: Design, columns: np.ndarray, frame: pd.DataFrame) -> None:
    """Raise ValueError if a column of the design is not finite in a new row."""
    bad = ~np.isfinite(columns)
    if bad.any():
        row, place = np.argwhere(bad)[0].tolist()
        cells = ", ".join(f"{name} = {frame[name].iloc[row]}" for name in design.needed)
        raise ValueError(
            f"{list(design.places)[place]} is not a finite number in the new row {cells}; expected "
            "values for which the formula is defined, as in training"
        )


def _of_rows(site: Any) -> bool:
    return any(one.name == "rows" for one in site["cond_indep_stack"])


@lru_cache(maxsize=64)
def _compiled(text: str) -> Any:
    return compile_program(text)


def _with_levels(one: GroupTerm, frame: pd.DataFrame, client: str, column: str) -> GroupTerm:
    """Return a group term whose levels contain those of new rows after the known ones."""
    if one.kind == "client":
        return one
    place = "" if one.kind == "shared" else client
    held = one.levels.get(place, ())
    new = [level for level in dict.fromkeys(one.level_of_rows(frame, column)) if level not in held]
    return replace(one, levels={place: (*held, *new)}, most=1)


def _refuse_negative_rates(rows: RowPredictors) -> None:
    """Raise ValueError if a Poisson distribution with an identity link has a negative rate."""
    if not isinstance(rows.response, pyro.distributions.Poisson):
        return
    if bool((below := rows.response.rate.isnan().flatten(1)).any()):  # [S, N]
        row = int(below.any(0).nonzero()[0])
        share = float(below[:, row].double().mean())
        raise ValueError(
            f"the expected count of {place_of(rows.frame, row)} is negative in {share:.1%} of the "
            "draws, as link 'identity' has no lower bound; use link 'log', or rows with larger "
            "counts"
        )


def mean_of_rows(rows: RowPredictors) -> Tensor:
    """Return the expected response of rows at each draw, [S, N], or probabilities [S, N, K].

    That of a Student distribution is its location, that of an asymmetric Laplace distribution its
    quantile, and that of a Cox model the log relative hazard.
    """
    fn = rows.response
    if fn is None:
        return rows.eta[:, 0]
    if isinstance(fn, CLASSES):
        return probabilities(fn)[:, 0]
    _refuse_negative_rates(rows)
    located = (pyro.distributions.StudentT, pyro.distributions.AsymmetricLaplace)
    mean: Tensor = fn.loc if isinstance(fn, located) else fn.mean
    return mean[:, 0]


def predict_rows(
    fitted: Any,
    x: Any,
    client: str | None = None,
    draws: int | None = None,
    seed: Any = None,
    **asked: Any,
) -> Predictions:
    """Predict responses of new rows of a table; see `pyrofl.effects.predict`."""
    method = regression_of(fitted)
    design: Design = method.design
    if asked:
        raise ValueError(
            f"{', '.join(asked)} cannot be given for a regression; expected only draws and seed"
        )
    if design.family.kind == "cox":
        raise ValueError(
            "a Cox model has no distribution of times, as it leaves the baseline hazard open; use "
            "pyrofl.effects.conditional for log relative hazards, or family 'weibull'"
        )
    drawn = posterior_draws(fitted, draws)
    frame, owners = new_rows(design, drawn, x, client)
    seed = drawn.seed if seed is None else seed
    each = {
        name: _of_client(method, drawn, frame[[one == name for one in owners]], name, seed)
        for name in dict.fromkeys(owners)
    }
    mean, values = in_order(owners, each)
    classes = tuple(map(str, design.answers)) or ("0", "1")
    new = [name for name in each if name not in drawn.clients]
    some = listed([name for name in each if name in drawn.clients])
    descriptions = [some] * bool(some) + [
        f"{listed(new)}, effects drawn from their distribution"
    ] * bool(new)
    about = (
        f"regression for {'; '.join(descriptions)}, {len(next(iter(drawn.sites.values())))} draws"
    )
    return Predictions(about, classes if mean.dim() > 1 else (), mean, values)


def new_rows(
    design: Design, drawn: RegressionDraws, x: Any, client: str | None
) -> tuple[pd.DataFrame, list[str]]:
    """Return new rows of a table, as `read_table` does, and the client of each, which may be new.

    Raises:
        ValueError: as `read_table`, or if the client is unknown or the rows name another one.

    Warns:
        UserWarning: if a number is far from those of training.
    """
    if client is not None:
        check_name(client, drawn.clients, "client")
    frame = read_table(design, x, NEW if client is None else client)
    _warn_of_far_rows(design, frame)
    return frame, _owners(design, drawn, x, client, len(frame))


def _warn_of_far_rows(design: Design, frame: pd.DataFrame) -> None:
    """Warn of the number that is farthest from its mean in training, if it is an outlier."""
    train, numbers = design.clients.template, design.clients.numbers
    names = [n for n in design.needed if n in numbers and train[n].dtype.kind == "f"]
    if not names:
        return
    ends = ("mean", "square", "low", "high")
    mean, square, low, high = (np.array([numbers[n][end] for n in names]) for end in ends)
    scale = np.where(square > 0, np.sqrt(square), np.inf)
    cells = frame[names].to_numpy(float)
    off = np.where((cells < low) | (cells > high), (cells - mean) / scale, 0.0)
    if cell := outlier_position(off):
        (row, place), name = cell, names[cell[1]]
        warn_user(
            f"column {name} of new rows holds {frame[name].iloc[row]:.6g} in "
            f"{place_of(frame, row)}, {abs(off[row, place]):.3g} standard deviations from its mean "
            "in training; predictions so far from all training rows are unreliable"
        )


def _owners(
    design: Design, drawn: RegressionDraws, x: Any, client: str | None, count: int
) -> list[str]:
    """Return the client of each row: the one requested, else the one that the row names, or new."""
    cells = client_cells(x, design.client)
    if cells is None:
        return [NEW if client is None else client] * count
    sites = {design.level_of(site): site for site in drawn.clients}
    level = next((level for level, site in sites.items() if site == client), client)
    return [sites.get(name, name) for name in owners_of(cells, list(sites), level)]


def _of_client(
    method: Any, drawn: RegressionDraws, frame: pd.DataFrame, client: str, seed: Any
) -> tuple[Tensor, Tensors]:
    """Return predictive means and statistics of one client's rows."""
    rng, parts = stream(seed, Stream.ROWS, client), []
    for begin in range(0, len(frame), PIECE):
        some = frame.iloc[begin : begin + PIECE]
        rows = run_program(method, drawn, some, client)
        _refuse_negative_rates(rows)
        parts.append(predictive_values(iter([rows.response]), len(some), len(rows.eta), rng))
    mean = torch.cat([part for part, _ in parts])
    return mean, {n: torch.cat([v[n] for _, v in parts]) for n in parts[0][1]}
