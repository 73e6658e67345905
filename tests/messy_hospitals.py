"""Three hospitals with messy tables: lone levels, missing values, integers and floats, few rows."""

import numpy as np
import pandas as pd
from hospitals import written

from pyrofl import RegressionClient, RegressionServer, federations
from pyrofl.flower.template import new

SIZES = {"bern": 40, "basel": 25, "chur": 3}
LOGISTIC = ("died ~ center(age) + sex + arm + (1 | client)", {"family": "bernoulli"})
LINEAR = ("score ~ age + beds + sex + (1 | client)", {})


def hospitals():
    """Return the tables; the smallest has three rows, and basel writes beds as floats."""
    random, tables = np.random.default_rng(3), {}
    for name, n in SIZES.items():
        age, arm = random.normal(60, 8, n), random.choice(["a", "b"], n)
        if name == "bern":
            arm[:4] = "c"  # no other hospital has it
        sex = np.array(["f", "m"])[np.arange(n) % 2].astype(object)
        beds = random.integers(1, 9, n)
        odds = 0.05 * (age - 60) + (sex == "m") + random.normal()
        frame = pd.DataFrame({"age": age.round(1), "sex": sex, "arm": arm, "beds": beds})
        frame["died"] = (random.random(n) < 1 / (1 + np.exp(-odds))).astype(int)
        frame["score"] = (odds + random.normal(size=n)).round(3)
        frame["note"] = "not used"
        if n > 3:
            frame.loc[2, "age"], frame.loc[5, "sex"] = np.nan, None
        if name == "basel":
            frame["beds"] = frame["beds"].astype(float)
            frame.loc[9, "beds"] = np.nan
        tables[name] = frame
    return tables


def client_of(name, frame, formula, rules=None, **how):
    """Return the client side of one hospital, without rules."""
    return RegressionClient(formula, federations.from_frames({name: frame}), rules=rules, **how)


def clients_of(frames, formula, **how):
    """Return the client side of each hospital, which has its own table alone."""
    return {name: client_of(name, frame, formula, **how) for name, frame in frames.items()}


def agreed(frames, formula, *, spoil=lambda label, name, reply: reply, rules=None, **how):
    """Return server and clients after all exchanges.

    Args:
        frames: tables of the hospitals.
        formula: the formula.
        spoil: function of the label of an exchange, a hospital and its reply.
        rules: rules of each hospital.
        how: further arguments of both sides.
    """
    server, clients = RegressionServer(formula, list(frames), **how), {}
    clients = clients_of(frames, formula, rules=rules, **how)
    while not server.is_agreed:
        requests, replies = server.configure_describe(), {}
        for name, request in requests.items():
            reply = spoil(request["lacking"], name, clients[name].describe(request))
            if reply is not None:
                replies[name] = reply
        server.aggregate_describe(replies)
    return server, clients


def study(folder, formula, frames=None, **entries):
    """Write a project with a formula and the tables of three hospitals, and read it."""
    new(folder)
    for path in (folder / "sites").glob("*.csv"):
        path.unlink()
    for name, frame in (frames or hospitals()).items():
        frame.to_csv(folder / f"sites/{name}.csv", index=False)
    return written(folder, {"formula": formula, **entries})
