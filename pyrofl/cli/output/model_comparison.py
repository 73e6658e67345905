"""Paired comparison of a model with each client's local model on the same test rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pyrofl.choices import RowScore
from pyrofl.experiments import rows
from pyrofl.experiments.rows import Model, rows_of_model, with_scores
from pyrofl.experiments.saved_runs import SavedRun
from pyrofl.files import run_folder
from pyrofl.paired import Calibration, Interval, calibrate, interval, interval_over_seeds

if TYPE_CHECKING:
    from pandas import DataFrame

BEST_SCORES: dict[RowScore, float] = {
    "accuracy": 1.0,
    "error": 0.0,
    "crps": 0.0,
}  # of `with_scores`
Tables = Mapping[Path, "DataFrame"]  # folder of a run -> its rows.csv

LOCAL_METHOD = "local"
WORDS = {"personal": "personalized model", "global": "global model"}


@dataclass(frozen=True)
class ClientComparison:
    """Comparison with the local model at one client: numbers of rows, scores and difference."""

    client: str
    size: int
    rows: int
    own: float
    score: float
    better: Interval


@dataclass(frozen=True)
class ModelComparison:
    """Comparison of a model with the clients' local models; larger scores are better."""

    model: Model
    sites: list[ClientComparison]  # the smallest first
    rows: int  # that were tested, of all sites
    better: Interval  # over all rows
    seeds: Interval | None  # over the means of several seeds
    open: int = 0  # runs of this method that have not converged
    open_own: int = 0  # runs of the clients' own models that have not converged
    runs: int = 1  # of each

    @property
    def name(self) -> str:
        """Name of the compared model, such as "global model of fedavg"."""
        method, view, _ = self.model
        return f"{WORDS.get(view, view)} of {method}"

    @property
    def convergence_note(self) -> str:
        """Note on whether the model or the local models have not converged; "" if all have."""
        opens = {"the clients' own models": self.open_own, f"the {self.name}": self.open}
        opened = [(what, n) for what, n in opens.items() if n]
        parts = ["" if n == self.runs else f" in {n} of {self.runs} runs" for _, n in opened]
        which = [f"{what}{part}" for (what, _), part in zip(opened, parts, strict=True)]
        one = len(which) == 1 and not self.open_own
        return f"{' and '.join(which)} {'has' if one else 'have'} not converged" if which else ""


def pair_with_local(folder: Path, saved: Sequence[SavedRun]) -> list[tuple[SavedRun, SavedRun]]:
    """Pair each run with the run of the method `local` (no federation) that has the same seed."""
    owns = {one.seed: one for one in saved if one.method == LOCAL_METHOD}
    pairs = [
        (owns[one.seed], one) for one in saved if one.method != LOCAL_METHOD and one.seed in owns
    ]
    if not pairs:
        held = ", ".join(sorted({one.path.name for one in saved}))
        raise ValueError(
            f"{folder} holds {held}; expected local, which is each site's own model, and another "
            "method of the same seed, as pyrofl compare local fedavg leaves them"
        )
    return pairs


def models_of_run(saved: SavedRun, table: DataFrame) -> list[Model]:
    """Return the models of a run to compare: the global model, if any, and the main model."""
    there = set(zip(table["model"], table["adaptation"], strict=True))
    main = tuple(saved.facts["tested"]["main"])
    requested = [one for one in dict.fromkeys([("global", "none"), main]) if one in there]
    return [(saved.method, *one) for one in requested]


def same_sites(saved: Sequence[SavedRun]) -> bool:
    """Return whether the runs of all seeds have the same clients: natural groups, or one split."""
    natural = all(str(one.facts["experiment"]["partition"]).startswith("groups") for one in saved)
    return natural or len({one.facts["seeds"]["split"] for one in saved}) == 1


def join_scores(
    pairs: Sequence[tuple[SavedRun, SavedRun]], model: Model, tables: Tables, by: RowScore
) -> DataFrame:
    """Join the scores of a model and of the local models, row by row, for all seeds.

    Columns: site, size, row, seed, own (score of the local model), score.
    """
    from pandas import concat

    parts = []
    same = same_sites([own for own, _ in pairs])
    for own, other in pairs:
        sizes = {r["client"]: int(r["size"]) for r in run_folder.read_csv(own.path / "clients.csv")}
        mine = with_scores(
            rows_of_model(tables[own.path], models_of_run(own, tables[own.path])[-1]), by
        )
        its = with_scores(rows_of_model(tables[other.path], model), by)
        of = ["client", "row", "y"]
        both = mine[[*of, "score"]].rename(columns={"score": "own"})
        both = both.merge(its[[*of, "score"]], on=of)
        if not len(mine) == len(its) == len(both):
            raise ValueError(
                f"{own.path} and {other.path} predict {len(mine)} and {len(its)} test rows, "
                f"{len(both)} of them both; expected the same rows"
            )
        whose = both["client"] + ("" if same else f" (seed {own.seed})")
        parts.append(both.assign(site=whose, size=both["client"].map(sizes), seed=own.seed))
    table = concat(parts, ignore_index=True)
    if bool((table.groupby("row")["y"].nunique() > 1).any()):  # made anew for each seed
        table["row"] = table["seed"].astype(str) + ":" + table["row"].astype(str)
    return table


def compare_models(
    table: DataFrame, model: Model, by: RowScore, pairs: Sequence[tuple[SavedRun, SavedRun]] = ()
) -> ModelComparison:
    """Compare a model with the clients' local models, given the scores that `join_scores` returns.

    A row that several seeds tested is one row, of their mean; so is one that several sites hold.
    """
    table = table.assign(better=table["score"] - table["own"])
    numbers, binary = ["own", "score", "better"], by == "accuracy"
    means = table.groupby(["site", "size", "row"], as_index=False)[numbers].mean()
    sites = []
    for (name, size), part in means.groupby(["site", "size"]):
        own, score = (float(part[n].mean()) for n in ("own", "score"))
        better = interval(part["better"].to_numpy(), binary)
        sites.append(ClientComparison(str(name), int(size), len(part), own, score, better))
    whole = means.groupby("row")["better"].mean().to_numpy()
    seeds = table.groupby("seed")[["score", "own"]].mean()
    least, most = 0.0 if binary else -np.inf, BEST_SCORES.get(by, np.inf)
    over = interval_over_seeds(seeds["score"].to_numpy(), seeds["own"].to_numpy(), least, most)
    opens = [sum(not one.converged for one in of) for of in zip(*pairs, strict=True)] or [0, 0]
    sites.sort(key=lambda site: (site.size, site.client))
    seen, runs = over if len(seeds) > 1 else None, max(len(pairs), 1)
    better = interval(whole, binary)
    return ModelComparison(model, sites, len(whole), better, seen, opens[1], opens[0], runs)


def mean_calibration(tables: Sequence[DataFrame]) -> Calibration | None:
    """Return the classifiers' calibration, averaged over seeds; None for regression or < 4 rows."""
    calibrations = []
    for table in tables:
        if not rows.classes_of(table) or len(table) < 4:
            return None
        # Sites in turn, so that each is in both halves.
        probs, y = rows.class_probabilities(table.sort_values(["client", "row"]))
        calibrations.append(calibrate(probs, y))
    ece, nll = (np.mean([getattr(one, n) for one in calibrations], axis=0) for n in ("ece", "nll"))
    cold = np.exp(np.mean([np.log(one.temperature) for one in calibrations]))
    return Calibration(float(cold), (ece[0], ece[1]), (nll[0], nll[1]))
