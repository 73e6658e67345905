"""Rounds of PVI without one client, whose factor stays fixed."""

from __future__ import annotations

from dataclasses import replace

import torch

from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.membership import leave
from pyrofl.models.shared.gaussians import PARAMETERS


def without_client(run: Run, client: str, rounds: int) -> RoundState:
    """Continue a run without one client, whose factor stays fixed, and return the new state.

    So q / t_j is what the others know, and the client's own information is its factor.
    """
    left = leave(run, client)
    if not rounds:
        return run.state
    end = run.state.number + rounds
    others = fit(run.method, left.data, end, resume_from=left, progress=False).state.server
    server, at = run.state.server, run.data.names.index(client)
    q = {n: others[n] + server[f"server/{n}"][at] for n in PARAMETERS}
    if "share" in server:  # the others share the whole prior out
        q["share"] = torch.zeros_like(server["share"])
    return replace(run.state, server=server | q)
