"""FedABML in plain torch: k steps on phi, one on theta (plain, or natural), an even mean."""

from __future__ import annotations

from typing import Any

import torch
from golden.plain import (
    REPORTS,
    Momentum,
    Tensors,
    batches,
    leaves,
    loss_sum,
    mean_by,
    named,
    noise,
    of_client,
    slopes,
    start,
)

COMMON = {
    "num_particles": 2,
    "steps": 3,
    "epochs": 2,
    "batch": 4,
    "lr": 0.02,
    "kl": 0.1,
    "init_scale": 0.2,
}
PLAIN = COMMON | {"natural": False, "lr_prior": 0.05}
NATURAL = COMMON | {"natural": True, "lr_prior": 0.5}


def begin() -> Tensors:
    """Return the server's first state, theta = (m, nu)."""
    m = start()
    nu = {n: torch.full_like(v, 0.2).log() for n, v in m.items()}
    return named("loc", m) | named("log_scale", nu)


def divergence(m: Tensors, nu: Tensors, m0: Tensors, nu0: Tensors) -> torch.Tensor:
    """Return KL[N(m, exp(nu)^2) || N(m0, exp(nu0)^2)], summed."""
    return sum(
        (
            nu0[n]
            - nu[n]
            + ((2 * nu[n]).exp() + (m[n] - m0[n]).square()) / (2 * (2 * nu0[n]).exp())
            - 0.5
        ).sum()
        for n in m
    )


def client(theta: Tensors, j: int, how: dict[str, Any]) -> Tensors:
    """Return theta_j after its epochs."""
    x, y = of_client(j)
    phi, own, k, lam = dict(theta), dict(theta), how["num_particles"], how["kl"]

    def part(of: Tensors, what: str) -> Tensors:
        return {n.removeprefix(what): v for n, v in of.items() if n.startswith(what)}

    for bx, by in batches(how["epochs"], how["batch"], x, y):
        for _ in range(how["steps"]):
            at = leaves(phi)
            m, nu = part(at, "loc/"), part(at, "log_scale/")
            value = lam / len(y) * divergence(m, nu, part(own, "loc/"), part(own, "log_scale/"))
            for i in range(k):
                w = {n: v + nu[n].exp() * noise(k, *v.shape)[i] for n, v in m.items()}
                value = value + loss_sum(w, bx, by) / len(by) / k
            phi = Momentum(how["lr"]).step(phi, slopes(value, at))
        m, nu = part(phi, "loc/"), part(phi, "log_scale/")
        if how["natural"]:
            own = natural(own, m, nu, how["lr_prior"])
            continue
        at = leaves(own)
        value = lam / len(y) * divergence(m, nu, part(at, "loc/"), part(at, "log_scale/"))
        own = Momentum(how["lr_prior"]).step(own, slopes(value, at))
    return own


def natural(own: Tensors, m: Tensors, nu: Tensors, rho: float) -> Tensors:
    """Move first and second moments of the prior a share rho of the way to the posterior's."""
    new: Tensors = {}
    for n in m:
        mean, second = own[f"loc/{n}"], (2 * own[f"log_scale/{n}"]).exp() + own[f"loc/{n}"].square()
        target = (2 * nu[n]).exp() + m[n].square()
        new[f"loc/{n}"] = mean + rho * (m[n] - mean)
        moved = second + rho * (target - second)
        new[f"log_scale/{n}"] = 0.5 * (moved - new[f"loc/{n}"].square()).log()
    return new


def run(how: dict[str, Any]) -> list[tuple[Tensors, Tensors]]:
    """Return (server, private) after each round."""
    theta, states = begin(), []
    for cohort in REPORTS:
        theta = mean_by(torch.ones(len(cohort)), [client(theta, j, how) for j in cohort])
        states.append((theta, {}))
    return states
