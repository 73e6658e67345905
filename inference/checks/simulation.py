"""Simulation-based calibration: ranks of simulated true values among posterior draws.

Talts, Betancourt, Simpson, Vehtari and Gelman, "Validating Bayesian Inference Algorithms with
Simulation-Based Calibration", 2018.

    theta ~ p(theta),  y ~ p(y | theta),  theta_1 ... theta_L ~ q(theta; y)
    rank = number of theta_l below theta,  uniform on 0 ... L if q is the posterior

Ranks show how reliable a method is: p values of the test that they are uniform, and the coverage of
intervals.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Generator, Tensor

from pyrofl.arguments import Count, Range, Whole, check_name, checked
from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.inference.checks import replicas
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, Stream, stream
from pyrofl.inference.definition.table_method import prepare_data
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.start import first, method_schedule
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.monitoring.losses import Losses, comparable
from pyrofl.inference.monitoring.status import ConvergenceStatus
from pyrofl.inference.posteriors.arviz import of_prior
from pyrofl.inference.posteriors.axes import ClientAxes, Variable
from pyrofl.inference.posteriors.corrected import EXACT_POSTERIOR, CorrectionOutcome
from pyrofl.inference.posteriors.draws import draws_specification, posterior
from pyrofl.inference.posteriors.export import coordinates
from pyrofl.returned import ClientError, calling
from pyrofl.tensors import Tensors
from pyrofl.user_warnings import warn_user

if TYPE_CHECKING:
    import pandas
    import xarray

AtLeastTwo = Annotated[int, Range(2)]

MAX_BYTES = 500_000_000  # memory for rows of replications that are fitted together
LEVELS = (0.5, 0.8, 0.95)
REPLICATIONS_PER_BIN = 10  # replications in a bin
FEW_BINS = 4  # with fewer, ranks hardly show a posterior that is too narrow


@dataclass(frozen=True)
class Ranks:
    """Ranks of simulated true values among posterior draws, with calibration tests.

    Attributes:
        ranks: rank of every site, 0 to L, dims replication, client (not for shared sites) and the
            site's own; NaN where the fit failed.
        draws: number L of posterior draws.
        bins: number of bins of the test for uniform ranks.
        failed: "replication: reason" of fits that failed, diverged or are not finite. The ranks
            exclude these replications, so they describe the method only if this is empty.
        uncorrected: "replication: reason" of draws that could not be corrected by importance
            weights, although `sbc` was to correct them. Their ranks are those of the guide.
    """

    ranks: xarray.Dataset
    draws: int
    bins: int
    failed: tuple[str, ...] = ()
    uncorrected: tuple[str, ...] = ()

    @property
    def places(self) -> xarray.Dataset:
        """Return ranks scaled to (0, 1), as (rank + 1/2) / (L + 1) with L posterior draws."""
        return (self.ranks + 0.5) / (self.draws + 1)

    def of_client(self, client: str) -> dict[str, Any]:
        """Return the ranks [R], scaled to (0, 1), of one client's true parameters, by entry.

        Raises:
            ValueError: if there is no such client.
        """
        if "client" in self.ranks.coords:
            check_name(client, self.ranks["client"].values.tolist(), "client")
        at = {"client": client} if "client" in self.ranks.dims else {}
        return {
            place: values.isel(index).to_numpy()
            for values in self.places.sel(at).values()
            for place, index in coordinates(values.isel(replication=0))
        }

    def coverage(self, levels: Sequence[float] = LEVELS) -> xarray.Dataset:
        """Return the coverage of central posterior intervals, for each parameter entry and level.

        Intervals end at draws, which avoids interpolation; levels are rounded to those of such
        intervals, (L + 1 - 2 k) / (L + 1). With R replications, the standard error of a coverage
        is (level (1 - level) / R)^1/2.

        Raises:
            ValueError: if a level is not between 0 and 1.
        """
        import xarray

        is_list = isinstance(levels, Sequence) and bool(levels)
        if not is_list or not all(isinstance(one, Real) and 0 < one < 1 for one in levels):
            raise ValueError(f"levels are {levels!r}; expected numbers between 0 and 1")
        ranks = self.ranks.dropna("replication")
        tails = [round((1 - level) / 2 * (self.draws + 1)) for level in levels]
        inside = [((ranks >= k) & (ranks <= self.draws - k)).mean("replication") for k in tails]
        exact = [1 - 2 * k / (self.draws + 1) for k in tails]
        return xarray.concat(inside, xarray.Variable("level", exact))

    def p_values(self) -> xarray.Dataset:
        """Return the p value of a chi-square test for uniform ranks, for each parameter entry.

        Ranks of one coordinate are independent. Ranks of two clients in one replication (if they
        share a site) or of two coordinates of a client are not: they are never pooled.
        """
        import xarray
        from scipy.stats import chi2

        at = self.ranks.dropna("replication") // ((self.draws + 1) // self.bins)
        expected = at.sizes["replication"] / self.bins
        excess = sum(((at == b).sum("replication") - expected) ** 2 for b in range(self.bins))
        probabilities: xarray.Dataset = xarray.apply_ufunc(
            chi2.sf, excess / expected, self.bins - 1
        )
        return probabilities

    def table(self) -> pandas.DataFrame:
        """Return a table of p values and interval coverage, with a row for each parameter entry.

        Columns: variable; p, see `p_values`; p_holm, adjusted for the number of rows, which holds
        under any dependence (Holm, 1979); and the coverage of intervals of about 50%, 80% and 95%,
        under the levels that these draws permit.
        """
        import pandas

        p, coverage = self.p_values(), self.coverage()
        rows = {}
        for name, values in p.items():
            for place, at in coordinates(values):
                covered = coverage[name].isel(at)
                rows[place] = {"variable": name, "p": float(values.isel(at))}
                levels = covered["level"].values.tolist()
                rows[place] |= {f"{v:.0%}": float(c) for v, c in zip(levels, covered, strict=True)}
        table = pandas.DataFrame.from_dict(rows, orient="index")
        ordered = table["p"].sort_values()
        holm = (ordered * list(range(len(ordered), 0, -1))).clip(upper=1.0).cummax()
        table.insert(2, "p_holm", holm)
        return table

    @property
    def p_value(self) -> float:
        """Return the smallest p value of the tests for uniform ranks, after Holm's adjustment."""
        return float(self.table()["p_holm"].min())


@checked
def sbc(
    method: Method | Callable[[int], Method],
    data: Federation | Tables,
    rounds: Whole,
    replications: AtLeastTwo = 200,
    draws: Count = 199,
    seed: Seed = 0,
    *,
    server: Tensors | None = None,
    bins: AtLeastTwo | None = None,
    chunk_size: int | None = None,
    allow_diverged: bool = False,
    corrected: bool = False,
    **what: Any,
) -> Ranks:
    """Check a method's calibration on data simulated from its own prior and likelihood.

    The federation provides only clients and their rows x; all responses are simulated, so a method
    built for it fits every replication. All sites of the posterior are ranked, including
    deterministic ones. Replications are fitted together, in the time of one federation with that
    many more clients.

    Draws are those of `pyrofl.posterior`, that is, of the guide. With `corrected`, they are those
    that `Run.to_arviz` returns by default: resampled by importance weights where possible.

    Args:
        method: a method, or round number (from 0) -> method.
        data: template federation, or the tables of a regression; held-out clients and test rows are
            ignored.
        rounds: rounds of every fit.
        replications: number R of replications.
        draws: number L of draws from the posterior of every replication.
        seed: fixes all random numbers.
        server: server state for the simulation and before every fit; default that of
            `method.init`. Only a prior that reads the server depends on it. A point in a server's
            state is not drawn from a prior: calibration is then conditional on it, and a method
            that fits the point to the data will fail the check.
        bins: bins of the ranks, a divisor of draws + 1; default at most 20, with at least 10
            replications in each.
        chunk_size: clients per vectorized batch.
        allow_diverged: also rank fits that diverged; see `pyrofl.inference.monitoring.status`.
        corrected: correct the draws of every replication by importance weights, one replication
            after the other. A hierarchical model takes about a second for each.
        what: further arguments of `pyrofl.posterior`: model and adaptation. With rounds=0, the
            `server` of a fitted run and adaptation="fine_tune", the ranks are those of new clients.

    Returns:
        The ranks of all sites; see `Ranks`.

    Raises:
        ValueError: if the program fails on the data, the prior is improper, the model has several
            responses or none, or all fits failed.

    Warns:
        UserWarning: if fits failed, diverged or were not finite; `Ranks.failed` names them. Also if
            draws could not be corrected; `Ranks.uncorrected` names their replications.

    Examples:
        >>> import pyrofl, torch
        >>> from pyrofl import Federation, nets
        >>> from pyrofl.models import likelihoods, pvi
        >>> x = torch.linspace(-1.0, 1.0, 8)[:, None]
        >>> data = Federation.from_arrays({"A": (x, x[:, 0]), "B": (x, 0.5 - x[:, 0])})
        >>> method = pvi.build(nets.build("linear", (1,), 1), likelihood=likelihoods.normal(0.5))
        >>> simulated = sbc(method, data, rounds=2, replications=40, draws=19)
        >>> sorted(simulated.ranks)
        ['w']
    """
    import xarray

    bins = _bins(replications, draws, bins)
    at = method_schedule(method)
    template = replicas.compact(prepare_data(at(0), data))
    begin = first(at(0), template, seed, server)
    with calling("program"):
        truth, y = simulated(at(0), template, begin, replications, seed)
    source = stream(seed, Stream.CALIBRATION)
    seeds = torch.randint(2**62, (replications,), generator=source).tolist()
    last = at(max(rounds - 1, 0))
    ranks_by_replication: list[Tensors] = []
    failed: dict[int, str] = {}
    uncorrected: dict[int, str] = {}
    fits = _fits(
        at, template, y, begin, seeds, allow_diverged, rounds=rounds, chunk_size=chunk_size
    )
    for r, (state, bad) in enumerate(fits):
        seen: Tensors = {}
        if not bad:
            # Adaptation trains on the responses of this replication.
            simulated_data = replace(template, y=y[r].to(template.y))
            how = {**what, "draws": draws, "seed": seeds[r]}
            if corrected:
                seen, uncorrected[r] = _corrected_draws(last, simulated_data, state, how)
            seen = seen or posterior(last, simulated_data, state, **how)
            bad = _not_finite(seen)
        true_values = {n: v.value[r] for n, v in truth.items()}
        if bad:
            failed[r] = bad
            ranks_by_replication.append(
                {n: torch.full(v.shape, torch.nan) for n, v in true_values.items()}
            )
            continue
        source = stream(seeds[r], Stream.CALIBRATION)
        # Shared sites, and functions of them, are the same at all clients.
        client_draws = {
            n: seen[n] if "client" in v.axes else seen[n][:, 0] for n, v in truth.items()
        }
        ranks_by_replication.append(
            {n: rank(client_draws[n], value, source) for n, value in true_values.items()}
        )
    if len(failed) == replications:
        raise ValueError(
            f"all fits failed, the first because of {failed[0]}; lower the learning rates, or "
            "pass allow_diverged=True if all fits are finite"
        )
    if failed:
        which = f"replications {', '.join(map(str, failed))}"
        lost = f"{len(failed)} of {replications} fits are not finite or diverged"
        first_reason = next(iter(failed.values()))
        warn_user(f"{lost} and have no ranks: {which}, the first because of {first_reason}")
    uncorrected = {r: reason for r, reason in uncorrected.items() if reason}
    if uncorrected:
        warn_user(
            f"draws of {len(uncorrected)} of {replications} replications are not corrected: "
            f"{', '.join(map(str, uncorrected))}, the first because {uncorrected[min(uncorrected)]}"
        )
    ranks = {
        n: (
            ("replication", *v.axes[1:]),
            torch.stack([one[n].cpu() for one in ranks_by_replication]).numpy(),
        )
        for n, v in truth.items()
    }
    coords = {"replication": range(replications), "client": list(template.names)}
    reasons = (tuple(f"{r}: {why}" for r, why in some.items()) for some in (failed, uncorrected))
    return Ranks(xarray.Dataset(ranks, coords), draws, bins, *reasons)


def _corrected_draws(
    method: Method, data: Federation, state: RoundState, options: Mapping[str, Any]
) -> tuple[Tensors, str]:
    """Return draws [S, C, *p] of all sites, corrected by importance weights if possible.

    Returns:
        The draws, none if they cannot be corrected; and the reason, "" if there is none or if the
        draws of the guide are of the exact posterior.
    """
    clients = torch.arange(data.clients)
    correction = CorrectionOutcome(None, False, ConvergenceStatus("converged", "", state.number))
    axes, how = ClientAxes(data, clients, method.shared, {}), draws_specification(method, options)
    with warnings.catch_warnings():  # `sbc` warns once about all replications
        warnings.simplefilter("ignore", UserWarning)
        by_client, _ = correction.draws(method, data, state, axes, how, rows=False)
    if by_client is None:
        exact = correction.outcome == EXACT_POSTERIOR
        return {}, "" if exact else correction.outcome.removeprefix("no: ")
    parts = [{n: v for n, v in one["posterior"].items() if not v.rows} for one in by_client]
    return {n: torch.cat([one[n].value.squeeze(2) for one in parts], 1) for n in parts[0]}, ""


def simulated(
    method: Method, data: Federation, state: RoundState, count: int, seed: Seed = 0
) -> tuple[dict[str, Variable], Tensor]:
    """Simulate R data sets: true values from the prior, and responses [R, N, ...] given them."""
    axes = ClientAxes(data, torch.arange(data.clients), method.shared, {})
    groups = of_prior(axes, method, state, EvaluationSpec(draws=count, seed=seed))
    sites = {n: v for n, v in groups["prior"].items() if "row" not in v.axes}
    responses = {n: v for n, v in groups["prior_predictive"].items() if v.axes[1] == "row"}
    if len(responses) == 1:
        return sites, responses.popitem()[1].value
    names = sorted(responses)
    raise ValueError(
        f"responses inside batch.rows() are {names}; sbc needs exactly one, such as 'y'"
    )


def _fits(
    at: Callable[[int], Method],
    data: Federation,
    y: Tensor,
    begin: RoundState,
    seeds: list[int],
    allow_diverged: bool,
    **how: Any,
) -> Iterator[tuple[RoundState, str]]:
    """Fit each simulated data set; yield its final state, and the reason of a failure or ""."""
    step = max(1, MAX_BYTES // max(data.x.nbytes, 1))
    for k, some in enumerate(y.split(step)):
        failed, left = dict[int, str](), list(range(len(some)))
        fitted: list[tuple[RoundState, str]] = []
        while left:
            try:
                fitted = _fit_together(
                    at, data, some[left], begin, seeds[k * step], allow_diverged, **how
                )
                break
            except ClientError as error:
                # An error ends the fit of all copies: fit those without it from the start.
                if not error.names:
                    raise
                reason = str(error).partition(": ")[2]
                failed |= {left[int(name.partition("/")[0])]: reason for name in error.names}
                left = [copy for copy in left if copy not in failed]
        outcomes = dict(zip(left, fitted, strict=True))
        outcomes |= {copy: (begin, reason) for copy, reason in failed.items()}
        yield from (outcomes[copy] for copy in range(len(some)))


def _fit_together(
    at: Callable[[int], Method],
    data: Federation,
    y: Tensor,
    begin: RoundState,
    seed: int,
    allow_diverged: bool,
    **how: Any,
) -> list[tuple[RoundState, str]]:
    """Fit copies of the federation with responses y [R, N, ...]; return what `_fits` yields."""
    clients, refused = data.clients, dict[int, str]()

    def side_by_side(number: int) -> Method:
        return replicas.side_by_side(at(number), clients, refused)

    many, bad = replicas.with_responses(data, y), [""] * len(y)
    state = start = replicas.first_of(begin.server, len(y), clients)
    losses = Losses(len(y))
    for state in federate(side_by_side, many, seed=seed, resume_from=start, check=False, **how):
        of_clients = (reason.partition("/") for reason in state.rejected)
        rejected = [(int(copy), client) for copy, _, client in of_clients]
        for copy, reason in (*rejected, *refused.items()):
            bad[copy] = bad[copy] or f"{reason} in round {state.number}"
        refused.clear()
        begun = comparable(at(state.number - 1).metadata.tensors, state.first_loss)
        losses.add(state.number, state.of_all(begun), state.of_all(state.loss))
    fitted = []
    each = zip(replicas.rounds_of(state, clients), bad, losses.risen(), strict=True)
    for one, reason, loss in each:
        diverged = f"diverged {loss}" if loss and not allow_diverged else ""
        reason = reason or _not_finite({**one.server, **one.client_states}) or diverged
        fitted.append((one, reason))
    return fitted


def _not_finite(tensors: Tensors) -> str:
    """Return a text that names the tensors with non-finite values, or "" if there are none."""
    bad = [n for n, v in tensors.items() if not bool(v.isfinite().all())]
    return f"{', '.join(bad)} not finite" if bad else ""


def rank(draws: Tensor, truth: Tensor, source: Generator) -> Tensor:
    """Return the rank of a true value among S posterior draws, with ties broken at random."""
    ties = (draws == truth).sum(0)
    chance = torch.rand(ties.shape, generator=source, dtype=torch.float64).to(draws.device)
    return (draws < truth).sum(0) + (chance * (ties + 1)).floor()


def _bins(replications: int, draws: int, bins: int | None) -> int:
    """Validate or choose the number of bins for the chi-square test of uniform ranks."""
    most = min(20, max(2, replications // REPLICATIONS_PER_BIN))
    fitting = [b for b in range(2, most + 1) if (draws + 1) % b == 0]
    num_bins = bins or max(fitting, default=0)
    if num_bins and not (draws + 1) % num_bins:
        if num_bins < FEW_BINS and bins is None:
            warn_user(
                f"{replications} replications permit {num_bins} bins of ranks, which hardly show "
                "posteriors that are too narrow; expected 100 replications or more"
            )
        return num_bins
    raise ValueError(
        f"draws is {draws} and bins is {bins}; draws + 1 must be a multiple of the number of bins "
        f"(by default at most {most}), such as 199 draws and 20 bins"
    )
