"""The tables as federations: one client for each group. They lie in the folder HIERARCHICAL."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from binomial import HEART
from lines import CENTRE, NES

from pyrofl import Federation, datasets, federations

SCALES = dict(
    zip(
        HEART,  # a usual value and a usual spread of each
        [(54, 9), (0.5, 1), (0.5, 1), (140, 25), (0.5, 1), (1, 1), (240, 55), (0.5, 1)],
        strict=True,
    )
)


def read(name: str) -> pd.DataFrame:
    """Return the table NAME.csv."""
    folder = Path(os.environ.get("HIERARCHICAL", "../shared/data/hierarchical"))
    if not (path := folder / f"{name}.csv").exists():
        raise FileNotFoundError(f"{path}; expected the folder of the tables in HIERARCHICAL")
    return pd.read_csv(path)


def grouped(table: pd.DataFrame, group: str, x: list, y: pd.Series) -> Federation:
    """Return one client for each value of a column; x [N] each, y [N]."""
    rows = {str(n): torch.tensor(list(i)) for n, i in table.groupby(group).groups.items()}
    none = [torch.zeros(0, dtype=torch.long)] * len(rows)
    columns, answers = (np.asarray(v, dtype=float) for v in (np.stack(x, -1), y))
    return Federation(
        torch.tensor(columns), torch.tensor(answers), list(rows.values()), none, tuple(rows)
    )


def built_in(name: str) -> Federation:
    """Return a data set of pyrofl."""
    return federations.split(datasets.load(name), "groups").to("cpu", torch.float64)


def surgical() -> Federation:
    """12 hospitals, one row each."""
    t = read("surgical")
    return grouped(t, "hospital", [t["operations"]], t["deaths"])


def seeds() -> Federation:
    """21 plates, one row each."""
    t = read("seeds")
    return grouped(t, "plate", [t["seeds"], t["type"], t["extract"]], t["germinated"])


def cbpp() -> Federation:
    """15 herds, up to 4 periods each."""
    t = read("cbpp")
    periods = [t["period"] == k for k in (2, 3, 4)]
    return grouped(t, "herd", [t["size"], *periods], t["incidence"])


def epil() -> Federation:
    """59 patients, 4 visits each."""
    t = read("epil")
    base, treated = np.log(t["base"] / 4), 1.0 * (t["treatment"] != "placebo")
    x = [base, treated, base * treated, np.log(t["age"]), 1.0 * t["visit4"]]
    return grouped(t, "subject", [v - v.mean() for v in x], t["seizures"])


def kidney() -> Federation:
    """38 patients, 2 times each; decades and months."""
    t = read("kidney")
    return grouped(t, "patient", [t["status"], t["age"] / 10, t["sex"] == 2], t["time"] / 30)


def radon() -> Federation:
    """85 counties."""
    t = read("radon_minnesota")
    return grouped(t, "county_name", [t["floor"], t["log_uranium"]], t["log_radon"])


def courses(name: str, target: str, time: str, group: str) -> Federation:
    """Return a response by time, both in standard deviations of the whole table."""
    t = read(name)
    x, y = ((t[n] - t[n].mean()) / t[n].std() for n in (time, target))
    return grouped(t, group, [x], y)


def reactions() -> Federation:
    """18 subjects, 10 days each; times in units of 300 ms, days from the middle."""
    t = read("sleepstudy")
    return grouped(t, "Subject", [(t["Days"] - 4.5) / 4.5], t["Reaction"] / 300)


def nes() -> Federation:
    """8 elections."""
    t = read("nes_1972_2000")
    return grouped(t, "year", [t[n] for n in NES], t["partyid7"])


def nes_sums() -> Federation:
    """8 elections, of which there are sums alone; see `lines.nes_sums`."""
    t = read("nes_1972_2000")
    x, y, years = [], [], []
    for year, rows in t.groupby("year"):
        columns = np.insert(rows[list(NES)].to_numpy(float) - CENTRE, 0, 1.0, axis=1)
        answers = rows["partyid7"].to_numpy(float)
        x.append([*(columns.T @ columns).ravel(), *(columns.T @ answers), answers @ answers])
        y.append(len(rows))
        years.append(year)
    return grouped(pd.DataFrame({"year": years}), "year", list(np.array(x).T), y)


def heart_disease() -> Federation:
    """4 hospitals; what is missing counts as usual, so does a cholesterol of 0."""
    t = read("heart_disease")
    t = t.assign(chol=t["chol"].where(t["chol"] > 0), pain=1.0 * (t["cp"] == 4))
    x = [((t[n] - usual) / spread).fillna(0.0) for n, (usual, spread) in SCALES.items()]
    return grouped(t, "hospital", x, 1.0 * (t["target"] > 0))
