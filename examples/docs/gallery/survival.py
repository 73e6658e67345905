"""Treated patients survive longer, and the bands of the two curves do not overlap after a year."""

import numpy as np
import pandas as pd

import pyrofl
from pyrofl import effects, federations, figures

random, frames = np.random.default_rng(0), {}
for name in ["bern", "basel", "chur", "zug"]:
    treat, limit = random.choice(["no", "yes"], 40), random.uniform(1, 5, 40)
    time = random.weibull(1.4, 40) * np.where(treat == "yes", 4, 2)
    died = (time <= limit).astype(int)
    frames[name] = pd.DataFrame({"time": np.minimum(time, limit), "died": died, "treat": treat})
tables = federations.from_frames(frames)
formula = "censored(time, died) ~ treat"
run = pyrofl.fit(pyrofl.regression(formula, tables, family="weibull"), tables, progress=False)
rows = {"treat": ["no", "yes"]}
figure = figures.survival(effects.survival(run, rows, np.linspace(0, 5, 51)), "years")
