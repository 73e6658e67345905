"""The expected score falls with age, and is higher with a treatment."""

import numpy as np
import pandas as pd

import pyrofl
from pyrofl import effects, federations, figures

random, frames = np.random.default_rng(0), {}
for name in ["bern", "basel", "chur", "zug"]:
    age, treat = random.normal(60, 8, 40), random.choice(["no", "yes"], 40)
    score = 50 - 0.3 * age + 4 * (treat == "yes") + random.normal(0, 3) + random.normal(0, 5, 40)
    frames[name] = pd.DataFrame({"score": score, "age": age, "treat": treat})
tables = federations.from_frames(frames)
method = pyrofl.regression("score ~ center(age) + treat + (1 | client)", tables)
run = pyrofl.fit(method, tables, progress=False)
figure = figures.conditional(effects.conditional(run, "age", by="treat", points=40))
