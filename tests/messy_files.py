"""Files of seven hospitals as people write them, and the same rows after their correction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

SIZES = {"bern": 60, "basel": 40, "chur": 3, "genf": 45, "luzern": 50, "thun": 30, "zug": 40}
REGIONS = {"north": ("basel", "luzern", "zug"), "south": ("chur", "genf"), "west": ("bern", "thun")}
"""Sites of a study, each with the rows of its hospitals."""

COLUMNS = {
    "age": {"unit": "years", "range": [18, 110]},
    "creatinine": {"unit": "umol/L", "range": [20, 1500]},
    "admitted": {"type": "integer", "unit": "days since 2020-01-01", "range": [0, 3000]},
    "sex": {"levels": ["f", "m"]},
    "died": {"levels": ["0", "1"]},
}
MILLIGRAMS = 88.42  # umol/L in 1 mg/dL of creatinine
PROBLEMS = {  # file -> column -> what the check must say of it
    "basel": {"": "decimal mark ','"},
    "genf": {"admitted": "has dates such as"},
    "luzern": {"creatinine": "is called 'creatinine (mg/dL)'", "age": "is called 'Age'"},
    "thun": {"sex": "has 'Weiblich' in", "creatinine": "has no value"},
    "zug": {"admitted": "is missing", "creatinine": "that are not from 20 to 1500 umol/L"},
}


def correct_tables() -> dict[str, pd.DataFrame]:
    """Return the rows of each hospital; those of thun have no creatinine."""
    tables = {}
    for number, (name, n) in enumerate(SIZES.items()):
        random = np.random.default_rng([77, number])
        age, sex = random.normal(65, 9, n).round(1), random.choice(["f", "m"], n)
        creatinine = np.exp(random.normal(4.4, 0.3, n)).round(1)
        admitted = random.integers(0, 1000, n)
        risk = 0.05 * (age - 65) + 0.5 * (sex == "m") + 1.2 * (np.log(creatinine) - 4.4)
        risk += 0.4 * random.normal()
        died = (random.random(n) < 1 / (1 + np.exp(-risk))).astype(int)
        days = (40 * np.exp(-0.5 * risk) * random.weibull(1.4, n)).clip(0.1).round(1)
        frame = pd.DataFrame({"age": age, "sex": sex, "creatinine": creatinine, "days": days})
        frame = frame.assign(admitted=admitted, died=died, id=np.arange(n).astype(float))
        if n > 3:
            frame.loc[2, "age"] = np.nan
        if name == "thun":
            frame["creatinine"] = np.nan
        tables[name] = frame
    return tables


def write_messy(folder: Path) -> list[str]:
    """Write the hospitals' files as people write them, and return their paths."""
    folder.mkdir()
    for name, frame in correct_tables().items():
        how = {"sep": ";", "decimal": ","} if name == "basel" else {}
        _messy(name, frame).to_csv(folder / f"{name}.csv", index=False, **how)
    return [str(folder / f"{name}.csv") for name in SIZES]


def _messy(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a hospital's rows as it writes them."""
    if name == "genf":
        dates = pd.Timestamp("2020-01-01") + pd.to_timedelta(frame["admitted"], "D")
        half = len(frame) // 2
        words = [*dates[:half].dt.strftime("%d.%m.%Y"), *dates[half:].dt.strftime("%Y-%m-%d")]
        return frame.assign(admitted=words)
    if name == "luzern":
        frame = frame.assign(creatinine=(frame["creatinine"] / MILLIGRAMS).round(3))
        return frame.rename(columns={"creatinine": "creatinine (mg/dL)", "age": "Age"})
    if name == "thun":
        words = frame["sex"].map({"f": "F", "m": "M"})
        return frame.assign(sex=words.where(words.index % 2 == 0, words.replace("F", "Weiblich")))
    if name == "zug":
        in_milligrams = frame.index % 3 == 0
        mixed = frame["creatinine"].where(~in_milligrams, frame["creatinine"] / MILLIGRAMS)
        return frame.assign(creatinine=mixed.round(3)).drop(columns="admitted")
    return frame


def write_correct(folder: Path) -> list[str]:
    """Write the corrected rows of each region, whose column hospital names the hospital."""
    folder.mkdir()
    tables = correct_tables()
    for region, names in REGIONS.items():
        parts = [tables[name].assign(hospital=name) for name in names]
        pd.concat(parts).to_csv(folder / f"{region}.csv", index=False)
    return [str(folder / f"{region}.csv") for region in REGIONS]
