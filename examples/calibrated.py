"""Measure the coverage of credible intervals of all methods with a posterior, on simulated data.

Run: python examples/calibrated.py [--quick] [--only NAMES] [--out FOLDER]
"""

import argparse
import csv
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, checks, figures, guides, likelihoods, nets
from pyrofl.files.text_tables import markdown
from pyrofl.inference.definition.metadata import SHARED
from pyrofl.models import (
    amortized,
    fald,
    fedabml,
    fedep,
    fedhb,
    fedivon,
    fedlap,
    fedpa,
    fedpop,
    fedwba,
    fisher,
    fola,
    ivonadmm,
    pfedbayes,
    pfedvem,
    priors,
    pvi,
)
from pyrofl.tensors import generator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with 20 replications.")
parser.add_argument("--only", default="", help="Methods, such as pvi,fald (default: all).")
parser.add_argument("--out", type=Path, default=Path("results/calibrated"))
args = parser.parse_args()
print("A full run takes about an hour on one core; --quick takes seconds.", flush=True)
torch.set_num_threads(1)

sizes = [14, 6, 9, 4, 7]
rows = torch.arange(sum(sizes)).split(sizes)
x = torch.randn(sum(sizes), 2, generator=generator(0), dtype=torch.float64)
x[:, 1] = 0.85 * x[:, 0] + 0.53 * x[:, 1]  # correlated columns, so that the weights are correlated
data = Federation(x, 0 * x[:, 0], rows, [r[:0] for r in rows], names=tuple("ABCDE"))
net = nets.build("linear", (2,), 1)
linear = {"likelihood": likelihoods.normal()}
fixed = linear | {"prior": priors.fixed(dist.Normal, 0.0, 1.0)}
sgd = {"epochs": 40 if args.quick else 300, "batch": None, "lr": 0.1}
full = {"guide": guides.full_covariance}
natural = {"moments": "natural", "lr": 1.0, "epochs": 3, "num_particles": 8}
natural_steps = fixed | {"temperature": 1.0, "batch": None, "lr": 0.05, "beta2": 0.99}
step = 0.3 / float(
    torch.linalg.eigvalsh(x.T @ x)[-1]
)  # of the chain, a seventh of the largest stable step
chain = fixed | {"batch": None, "lr": step, "discard": 0.2, "keep": 10_000}
longest = 20 if args.quick else 600
local = 2 if args.quick else 40

# Shared parameters: one w for all clients. (method, setting, builder, rounds)
ONE = [
    ("pvi", "full", pvi.build(net, covariance="full", lr=1.0, epochs=3, **fixed), 8),
    ("pvi", "diagonal", pvi.build(net, lr=1.0, epochs=3, **fixed), 15),
    ("fisher", "full", fisher.build(net, **full, **sgd, **fixed), 1),
    ("fisher", "diagonal", fisher.build(net, **sgd, **fixed), 1),
    ("fola", "full, together, 1 round", fola.build(net, multiply=True, **full, **sgd, **fixed), 1),
    ("fola", "full, 5 rounds", fola.build(net, **full, **sgd, **fixed), 5),
    ("fola", "full, 20 rounds", fola.build(net, **full, **sgd, **fixed), 20),
    (
        "fedep",
        "full, mode",
        fedep.build(net, damping=None, init_scale=1.0, **full, **sgd, **fixed),
        5,
    ),
    ("fedep", "full, natural", fedep.build(net, damping=None, **natural, **full, **fixed), 8),
    ("fedep", "diagonal, natural", fedep.build(net, damping=None, **natural, **fixed), 15),
    (
        "fedep",
        "full, stateless",
        fedep.build(net, damping=None, stateless=True, **natural, **full, **fixed),
        12,
    ),
    (
        "fedep",
        "diagonal, stateless",
        fedep.build(net, damping=None, stateless=True, **natural, **fixed),
        15,
    ),
    ("fald", "1 local step", fald.build(net, epochs=1, **chain), longest),
    ("fald", "10 local steps", fald.build(net, epochs=10, **chain), longest // 4),
    (
        "fald",
        "10, surrogates",
        fald.build(net, epochs=10, surrogates="full", **chain),
        longest // 4,
    ),
    ("fedpa", "4 samples", fedpa.build(net, samples=4, batch=4, **fixed), 30),
    ("fedlap", "full", fedlap.build(net, covariance="full", damping=0.5, **sgd, **fixed), 12),
    ("fedlap", "diagonal", fedlap.build(net, damping=0.3, **sgd, **fixed), 30),
    ("fedivon", "", fedivon.build(net, epochs=local, fine_tune=0, **natural_steps), 20),
    ("ivonadmm", "", ivonadmm.build(net, epochs=local, damping=0.5, **natural_steps), 40),
]
# Local parameters: w_j of each client; the server learns the mean and spread of their population.
OWN = [
    (
        "fedwba",
        "60 particles",
        fedwba.build(
            net, particles=60, init_scale=0.5, epochs=local, batch=None, lr=0.02, **linear
        ),
        20,
    ),
    ("amortized", "", amortized.build(net, init_scale=1.0, **linear), 20),
    (
        "fedpop",
        "chain",
        fedpop.build(net, head="*", init_scale=1.0, epochs=local, lr_head=0.05, **linear),
        20,
    ),
    (
        "pfedbayes",
        "kl=1",
        pfedbayes.build(net, init_scale=1.0, kl=1.0, num_particles=8, epochs=local, **linear),
        20,
    ),
    (
        "pfedbayes",
        "kl=0.1",
        pfedbayes.build(net, init_scale=1.0, num_particles=8, epochs=local, **linear),
        20,
    ),
    (
        "pfedvem",
        "",
        pfedvem.build(net, head="*", head_epochs=5 * local, lr_head=0.01, **linear),
        20,
    ),
    (
        "fedabml",
        "kl=1",
        fedabml.build(net, init_scale=1.0, kl=1.0, epochs=local, lr=0.05, **linear),
        20,
    ),
    (
        "fedhb",
        "normal-inverse-Wishart",
        fedhb.build(net, init_scale=1.0, spread=1.0, num_particles=8, epochs=local, **linear),
        20,
    ),
    ("fedabml", "kl=0.1", fedabml.build(net, init_scale=1.0, epochs=local, lr=0.05, **linear), 20),
]


many = {"replications": 20, "draws": 19} if args.quick else {"replications": 200, "draws": 99}
curves = {"all clients": {}, "each client": {}}


def shared(method):
    """Return the method with w declared as shared by all clients."""
    return (
        method if method.shared else replace(method, metadata=method.metadata.extend({"w": SHARED}))
    )


def row(claim, name, setting, method, rounds):
    """Return a row of the table: coverage of the intervals, bytes and seconds of a fit."""
    # Few draws of a chain are nearly independent; ranks require independent draws.
    few = many | {"draws": 19} if name == "fald" else many
    found = checks.sbc(method, data, rounds=rounds, allow_diverged=True, **few)
    curves[claim][f"{name} {setting}"] = next(iter(found.of_client("A").values()))
    table = found.table()
    levels = [column for column in table if column.endswith("%")]  # such as 94%, by the draws
    covered = {
        name: float(table[level].mean())
        for name, level in zip(("50%", "80%", "95%"), levels, strict=True)
    }
    begun = perf_counter()
    run = pyrofl.fit(method, data, rounds, progress=False)
    seconds = perf_counter() - begun
    sent = rounds * int((run.state.bytes_up + run.state.bytes_down).max())
    error = (0.95 * 0.05 / few["replications"]) ** 0.5
    good = found.p_value > 0.01 and abs(covered["95%"] - 0.95) < 3 * error
    shares = {n: f"{v:.0%}" for n, v in covered.items()}
    return {
        "posterior of": claim,
        "method": name,
        "setting": setting,
        "rounds": rounds,
        **shares,
        "smallest p": f"{found.p_value:.2g}",
        "calibrated": "yes" if good else "**no**",
        "failed": len(found.failed),
        "bytes per client": sent,
        "seconds": f"{seconds:.2f}",
    }


chosen = args.only.split(",") if args.only else []
lines = []
for claim, variants in (("all clients", ONE), ("each client", OWN)):
    for name, setting, method, rounds in variants:
        if chosen and name not in chosen:
            continue
        rounds = min(rounds, longest, 4) if args.quick and name != "fald" else rounds
        method = shared(method) if claim == "all clients" else method
        lines.append(row(claim, name, setting, method, rounds))
        print(" | ".join(str(v) for v in lines[-1].values()), flush=True)

args.out.mkdir(parents=True, exist_ok=True)
known = args.out / "calibrated.csv"
if chosen and known.exists():  # keep the rows of other methods
    with known.open(newline="") as file:
        lines += [line for line in csv.DictReader(file) if line["method"] not in chosen]
with known.open("w", newline="") as file:
    writer = csv.DictWriter(file, list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)
text = markdown(list(lines[0]), [list(line.values()) for line in lines])
(args.out / "calibrated.md").write_text(text + "\n")
shown = {claim: places for claim, places in curves.items() if places}
figures.save(figures.coverage(shown), args.out / "calibrated.png")
print(f"tables: {known}, {args.out / 'calibrated.md'}")
