"""MetaVD in plain torch: local reparametrization, the product rule, a hypernetwork's VJP."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from golden.plain import (
    REPORTS,
    SIZES,
    Momentum,
    Tensors,
    batches,
    leaves,
    mean_by,
    named,
    noise,
    of_client,
    sizes_of,
    slopes,
    start,
)
from torch import Tensor
from torch.nn.functional import cross_entropy, leaky_relu

COMMON = {
    "num_particles": 3,
    "epochs": 2,
    "batch": 4,
    "lr": 0.05,
    "clip": 1.0,
    "embedding": 2,
    "width": 5,
}
COMMON |= {"depth": 1, "hyper_lr": 0.9, "init_scale": 0.3}
AUTHORS = COMMON | {"on": "reptile", "server_lr": 0.9, "beta": 10.0, "logit_average": True}
PAPER = COMMON | {"on": "fedavg", "beta": None, "logit_average": False}
LAYER, BOUND, DECAY = "fc2.weight", 8.5, 5e-4


def begin(settings: dict[str, Any]) -> Tensors:
    """Return the server's first state, the hypernetwork's with some size."""
    rng = np.random.default_rng(23)
    sizes = [settings["embedding"], settings["width"], start()[LAYER].numel()]
    psi: Tensors = {"embedding": torch.from_numpy(rng.normal(size=(len(SIZES), sizes[0])))}
    for i in range(2):
        weight = rng.normal(size=(sizes[i + 1], sizes[i])) * (2 / sum(sizes[i : i + 2])) ** 0.5
        psi[f"psi/weight{i}"] = torch.from_numpy(weight)
        psi[f"psi/bias{i}"] = torch.from_numpy(1e-3 * rng.normal(size=sizes[i + 1]))
    return named("loc", start()) | named("server", psi)


def spread(psi: Tensors, j: int, first: float) -> Tensor:
    """Return s_j = clamp(h(e_j)) + s of the start."""
    hidden = psi["psi/weight0"] @ psi["embedding"][j] + psi["psi/bias0"]
    raw = psi["psi/weight1"] @ leaky_relu(hidden, 0.1) + psi["psi/bias1"]
    return raw.clamp(-BOUND, BOUND).reshape(start()[LAYER].shape) + first


def objective(
    w: Tensors, s: Tensor, x: Tensor, y: Tensor, rows: int, how: dict[str, Any]
) -> Tensor:
    """Return mean CE over draws + beta * mean KL; beta = d / n_j without one."""
    variance = s.clamp(-BOUND, BOUND).exp()
    z = (x @ w["fc1.weight"].T + w["fc1.bias"]).relu()
    mean = z @ w[LAYER].T + w["fc2.bias"]
    sd = (z.square() @ variance.T).sqrt()
    draws = noise(len(x), how["num_particles"], mean.shape[1])  # of each row, its draws
    logits = [
        (mean + sd * draws[:, k]).relu() @ w["head.weight"].T + w["head.bias"]
        for k in range(how["num_particles"])
    ]
    if how["logit_average"]:
        logits = [sum(logits) / len(logits)]
    ce = sum(cross_entropy(one, y) for one in logits) / len(logits)
    kl = 0.5 * torch.log(1 + w[LAYER].detach().square() / variance)
    return ce + (kl.sum() / rows if how["beta"] is None else how["beta"] * kl.mean())


def clipped(g: Tensors, most: float) -> Tensors:
    """Shorten gradients to a norm of all together."""
    norm = sum(v.square().sum() for v in g.values()).sqrt()
    return {n: v * (most / (norm + 1e-6)).clamp(max=1) for n, v in g.items()}


def run(how: dict[str, Any]) -> list[tuple[Tensors, Tensors]]:
    """Return (server, private) after each round."""
    server = begin(how)
    theta = {n.removeprefix("loc/"): v for n, v in server.items() if n.startswith("loc/")}
    psi = {n.removeprefix("server/"): v for n, v in server.items() if n.startswith("server/")}
    first = 2 * float(np.log(how["init_scale"]))
    plain = how["on"] == "fedavg"
    of_theta = Momentum(1.0) if plain else Momentum(how["server_lr"], 0.9)
    of_psi = Momentum(how["hyper_lr"], 0.6, DECAY)
    of_e = Momentum(how["hyper_lr"], 0.3, DECAY)
    states = []
    for cohort in REPORTS:
        own, found = [], []
        for j in cohort:
            x, y = of_client(j)
            w, s = dict(theta), spread(psi, j, first)
            for bx, by in batches(how["epochs"], how["batch"], x, y):
                at = leaves(w | {"s": s})
                inner = {n: v for n, v in at.items() if n != "s"}
                g = slopes(objective(inner, at["s"], bx, by, len(y), how), at)
                after = Momentum(how["lr"]).step(w | {"s": s}, clipped(g, how["clip"]))
                s = after.pop("s")
                w = after
            own.append(w)
            found.append(s)
        share = sizes_of(cohort) / sizes_of(cohort).sum()
        mean = mean_by(share, own)
        precision = [
            g / (s.clamp(-BOUND, BOUND).exp() + 1e-10) for g, s in zip(share, found, strict=True)
        ]
        weighed = sum(p * w[LAYER] for p, w in zip(precision, own, strict=True))
        mean[LAYER] = weighed / sum(precision)
        leaf = leaves(psi)
        sent = [spread(leaf, j, first) for j in cohort]
        gaps = zip(share, sent, found, strict=True)
        slope = slopes(sum(g * ((s.detach() - f) * s).sum() for g, s, f in gaps), leaf)
        all_of_it = clipped(named("loc", {n: v - mean[n] for n, v in theta.items()}) | slope, 100.0)
        theta = of_theta.step(theta, {n: all_of_it[f"loc/{n}"] for n in theta})
        table = of_e.step({"embedding": psi["embedding"]}, {"embedding": all_of_it["embedding"]})
        rest = {n: v for n, v in psi.items() if n != "embedding"}
        psi = of_psi.step(rest, {n: all_of_it[n] for n in rest}) | table
        states.append((named("loc", theta) | named("server", psi), {}))
    return states
