"""Tables as federations with one client for each group, and simulated federations.

Tables that are not in the folder data are read from the folder in the environment variable
HIERARCHICAL.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from binomial import HEART
from normal_models import CENTER, NES
from torch import Tensor

from pyrofl import Federation, datasets, federations
from pyrofl.tensors import generator

SCALES = dict(
    zip(
        HEART,  # a usual value and a usual spread of each
        [(54, 9), (0.5, 1), (0.5, 1), (140, 25), (0.5, 1), (1, 1), (240, 55), (0.5, 1)],
        strict=True,
    )
)


def read(name: str) -> pd.DataFrame:
    """Return the table NAME.csv."""
    included = Path(__file__).parent / "data" / f"{name}.csv"
    folder = Path(os.environ.get("HIERARCHICAL", "../shared/data/hierarchical"))
    path = included if included.exists() else folder / included.name
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; set HIERARCHICAL to the folder of the table"
        )
    return pd.read_csv(path)


def grouped(table: pd.DataFrame, group: str, x: list, y: pd.Series) -> Federation:
    """Return one client for each value of a column; x [N] each, y [N]."""
    rows = {str(n): torch.tensor(list(i)) for n, i in table.groupby(group).groups.items()}
    none = [torch.zeros(0, dtype=torch.long)] * len(rows)
    columns, answers = (np.asarray(v, dtype=float) for v in (np.stack(x, -1), y))
    return Federation(
        torch.tensor(columns), torch.tensor(answers), list(rows.values()), none, tuple(rows)
    )


def eight_schools() -> Federation:
    """8 schools, one row each."""
    return built_in("eight_schools")


def rat_tumours() -> Federation:
    """71 experiments, one row each."""
    return built_in("rat_tumours")


def baseball() -> Federation:
    """18 players, one row each."""
    return built_in("baseball")


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


def sleepstudy() -> Federation:
    """18 subjects, 10 days each."""
    return courses("sleepstudy", "Reaction", "Days", "Subject")


def rats_growth() -> Federation:
    """30 rats, 5 weights each."""
    return courses("rats_growth", "weight", "day", "rat")


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
    return sums(t, "year", t[list(NES)] - list(CENTER), t["partyid7"])


def radon_sums() -> Federation:
    """85 counties, of which there are log uranium and sums; see `lines.radon_sums`."""
    t = read("radon_minnesota")
    return sums(t, "county_name", t[["floor"]], t["log_radon"], ["log_uranium"])


def sums(
    t: pd.DataFrame, group: str, x: pd.DataFrame, y: pd.Series, first: Sequence[str] = ()
) -> Federation:
    """Return one row for each value of a column: sums of products, see `lines.of_sums`.

    Args:
        t: a table.
        group: its column.
        x: columns of the regression, without the intercept.
        y: responses.
        first: columns with one value in each group, which precede the sums.
    """
    made, counts, names = [], [], []
    for name, rows in t.groupby(group):
        columns = np.insert(x.loc[rows.index].to_numpy(float), 0, 1.0, axis=1)
        answers = y[rows.index].to_numpy(float)
        products = [*(columns.T @ columns).ravel(), *(columns.T @ answers), answers @ answers]
        made.append([*rows[list(first)].iloc[0], *products])
        counts.append(len(rows))
        names.append(name)
    return grouped(pd.DataFrame({group: names}), group, list(np.array(made).T), counts)


def heart_disease() -> Federation:
    """4 hospitals; what is missing counts as usual, so does a cholesterol of 0."""
    t = read("heart_disease")
    t = t.assign(chol=t["chol"].where(t["chol"] > 0), pain=1.0 * (t["cp"] == 4))
    x = [((t[n] - usual) / spread).fillna(0.0) for n, (usual, spread) in SCALES.items()]
    return grouped(t, "hospital", x, 1.0 * (t["target"] > 0))


def sblri() -> Federation:
    """5 clients with 20 rows each."""
    t = read("sblri")
    return grouped(
        t.assign(client=t.index // 20), "client", [t[f"x{i}"] for i in range(1, 6)], t["y"]
    )


def trauma() -> Federation:
    """3 hospitals; ages in decades from 40, scores near their standard deviations."""
    t = read("trauma")
    x = [t["sex"], (t["age"] - 40) / 20, (t["ISS"] - 25) / 12, (t["GCS"] - 10) / 4]
    return grouped(t, "hospital", x, t["mortality"])


def simulated(x: Tensor, y: Tensor, sizes: list[int]) -> Federation:
    """Return clients of given sizes; x [N, columns], y [N]."""
    t = pd.DataFrame({"client": np.repeat(np.arange(len(sizes)), sizes)})
    return grouped(t, "client", list(x.T), y)


def squares() -> Federation:
    """6 clients with 1 to 11 rows, normal around 1."""
    sizes = [1, 3, 5, 7, 9, 11]
    noise = torch.randn(sum(sizes), generator=generator(0), dtype=torch.float64)
    return simulated(torch.ones(len(noise), 1), 1 + noise - noise.mean(), sizes)


def separated() -> Federation:
    """8 clients with 8 rows; x separates the classes of the first, the second has one class."""
    source = generator(1)
    x = torch.randn(8, 8, generator=source, dtype=torch.float64)
    logits = torch.randn(8, 1, generator=source, dtype=torch.float64) + x
    uniform = torch.rand(8, 8, generator=source, dtype=torch.float64)
    y = (uniform < logits.sigmoid()).double()
    y[0], y[1] = (x[0] > 0).double(), 1.0
    return simulated(x.reshape(-1, 1), y.flatten(), [8] * 8)


def levels() -> Federation:
    """5 clients with 12 rows; only the first has rows of level 3, all of them of class 1."""
    source = generator(2)
    level = torch.randint(2, (60,), generator=source)
    level[:4] = 2
    logits = torch.tensor([-0.5, 0.5, 0.0], dtype=torch.float64)[level]
    y = (torch.rand(60, generator=source, dtype=torch.float64) < logits.sigmoid()).double()
    y[:4] = 1.0
    return simulated(torch.stack([level == 1, level == 2], -1).double(), y, [12] * 5)


def partitioned(data: Federation, name: str) -> Federation:
    """Return all rows in another partition.

    Args:
        data: a federation.
        name: "natural" leaves it unchanged; "one_large" gives 90% of the rows to one client and
            the others to five; "one_row" makes each row a client; "by_class" sorts the rows by y
            and cuts them into five clients, which lack classes; "by_level" makes each combination
            of the columns after the first a client, which lacks all others.
    """
    rows = torch.cat(data.train)
    if name == "natural":
        return data
    if name == "one_large":
        rows = rows[torch.randperm(len(rows), generator=generator(0))]
        parts = (rows[: -len(rows) // 10], *rows[-len(rows) // 10 :].tensor_split(5))
    elif name == "one_row":
        parts = rows.split(1)
    elif name == "by_class":
        parts = rows[data.y[rows].argsort(stable=True)].tensor_split(5)
    elif name == "by_level":
        _, level = data.x[rows, 1:].unique(dim=0, return_inverse=True)
        parts = tuple(rows[level == i] for i in range(int(level.max()) + 1))
    else:
        raise ValueError(f"partition is {name!r}; expected one of {', '.join(PARTITIONS)}")
    return Federation(data.x, data.y, parts, [rows[:0]] * len(parts))


PARTITIONS = ("natural", "one_large", "one_row", "by_class", "by_level")
