"""Regression problems with known references: tables of three clients of different sizes."""

import numpy as np
import pandas as pd

SIZES = {"bern": 60, "basel": 130, "chur": 170}


def frames():
    """Return the tables: columns x, g and exposure, and a response for each family."""
    random, bounds = np.random.default_rng(20), np.random.default_rng(21)
    found = {}
    for name, n in SIZES.items():
        x, g = random.normal(size=n), random.choice(["no", "yes"], n)
        eta = 0.3 + 0.5 * x - 0.4 * (g == "yes")
        p, mean = 1 / (1 + np.exp(-eta)), np.exp(eta)
        exposure = random.uniform(0.5, 3.0, n)
        frame = pd.DataFrame({"x": x, "g": g, "exposure": exposure})
        frame["log_exposure"] = np.log(exposure)
        frame["copies"] = random.integers(1, 4, n)
        frame["y"] = eta + random.normal(0, 0.8, n)
        frame["lasting"] = np.exp(frame["y"])
        frame["died"] = (random.uniform(size=n) < p).astype(int)
        frame["trials"] = random.integers(1, 9, n)
        frame["wins"] = random.binomial(frame["trials"], p)
        frame["count"] = random.poisson(mean * exposure)
        frame["spread"] = random.negative_binomial(1.5, 1.5 / (1.5 + mean))
        zero = random.uniform(size=n) < 0.3
        frame["inflated"] = np.where(zero, 0, random.poisson(mean))
        positive = np.array([next(v for v in random.poisson(m, 200) if v) for m in mean])
        frame["hurdle"] = np.where(zero, 0, positive)
        frame["cost"] = random.gamma(2.0, mean / 2.0)
        frame["share"] = random.beta(8 * p, 8 * (1 - p)).clip(1e-6, 1 - 1e-6)
        latent = eta + random.logistic(size=n)
        grades = ["1 low", "2 mid", "3 top"]
        codes = np.digitize(latent, [-0.5, 1.2])
        frame["grade"] = pd.Categorical.from_codes(codes, grades, ordered=True)
        cause = np.stack([np.zeros(n), eta - 0.2, 0.4 - 0.6 * x], 1) + random.gumbel(size=(n, 3))
        frame["cause"] = np.array(["a", "b", "c"])[cause.argmax(1)]
        time = random.weibull(1.3, n) * np.exp(-eta / 1.3)
        limit = random.uniform(0.3, 2.5, n)
        frame["seen"] = (time <= limit).astype(int)
        frame["time"] = np.minimum(time, limit).round(2).clip(0.01)
        frame["entry"] = (frame["time"] * bounds.choice([0.0, 0.2, 0.6], n)).round(3)
        frame["after"] = np.where(bounds.uniform(size=n) < 0.5, frame["time"], frame["entry"])
        frame["after"] = np.where(frame["seen"] == 1, frame["after"], frame["time"])
        found[name] = frame
    return found


BOUNDS = [0.2, 0.4, 0.7, 1.0, 1.6]  # of Kaplan-Meier curves
RIGHT = "x + g"
PROBLEMS = {
    "gaussian": (f"y ~ {RIGHT}", {}),
    "gaussian, weights": (f"y ~ {RIGHT}", {"weights": "copies"}),
    "gaussian, offset": (f"y ~ {RIGHT} + offset(exposure)", {}),
    "lognormal": (f"lasting ~ {RIGHT}", {"family": "lognormal"}),
    "logit": (f"died ~ {RIGHT}", {"family": "bernoulli"}),
    "probit": (f"died ~ {RIGHT}", {"family": "bernoulli", "link": "probit"}),
    "binomial": (f"p(wins, trials) ~ {RIGHT}", {"family": "binomial"}),
    "poisson, offset": (f"count ~ {RIGHT} + offset(log_exposure)", {"family": "poisson"}),
    "poisson, weights": (f"inflated ~ {RIGHT}", {"family": "poisson", "weights": "copies"}),
    "negative binomial": (f"spread ~ {RIGHT}", {"family": "negative_binomial"}),
    "zero inflated": (f"inflated ~ {RIGHT}", {"family": "zero_inflated_poisson"}),
    "hurdle": (f"hurdle ~ {RIGHT}", {"family": "hurdle_poisson"}),
    "gamma": (f"cost ~ {RIGHT}", {"family": "gamma"}),
    "beta": (f"share ~ {RIGHT}", {"family": "beta"}),
    "ordinal": (f"grade ~ {RIGHT}", {"family": "cumulative"}),
    "categorical": (f"cause ~ {RIGHT}", {"family": "categorical"}),
    "exponential": (f"censored(time, seen) ~ {RIGHT}", {"family": "exponential"}),
    "weibull": (f"censored(time, seen) ~ {RIGHT}", {"family": "weibull"}),
    "cox": (f"censored(time, seen) ~ {RIGHT}", {"family": "cox"}),
    "weibull, entry": (f"censored(time, seen, entry=entry) ~ {RIGHT}", {"family": "weibull"}),
    "weibull, interval": (f"censored(after, seen, upper=time) ~ {RIGHT}", {"family": "weibull"}),
    "cox, entry": (f"censored(time, seen, entry=entry) ~ {RIGHT}", {"family": "cox"}),
}
