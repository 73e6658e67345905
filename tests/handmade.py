"""Folders of a comparison, written by hand: rows whose scores are known, and nothing fitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pyrofl.experiments.rows import COLUMNS
from pyrofl.files.run_folder import CLIENTS, METRICS, SCHEMA, write_csv, write_json

CLASSES = ("no", "yes")


def run(folder: Path, method: str, seed: int, right: dict[str, Any], **more: Any) -> Path:
    """Write a run of a global model: client -> 1 where it is right, 0 where not, a row each."""
    path = folder / f"{method}-{seed}"
    path.mkdir(parents=True)
    view = "personal" if method == "local" else "global"
    lines, number = [], 0
    for client, each in right.items():
        for correct in each:
            y, p = number % 2, (0.8 if correct else 0.3)
            probs = (p, 1 - p) if y == 0 else (1 - p, p)
            told = ("training", client, number, view, "none", CLASSES[y], np.log(p))
            lines.append((*told, *probs))
            number += 1
    write_csv(path / "rows.csv", (*COLUMNS, *(f"p({c})" for c in CLASSES)), lines)
    sizes = [(c, 10 * (i + 1), view, "none", "accuracy", 0.5) for i, c in enumerate(right)]
    write_csv(path / "clients.csv", CLIENTS, sizes)
    score = (1, view, "none", "training", "accuracy", 0.75)
    write_csv(path / "metrics.csv", METRICS, [score])
    write_json(path / "run.json", facts(method, seed, view, list(right)) | more)
    return path


def facts(method: str, seed: int, view: str, clients: list[str]) -> dict[str, Any]:
    """Return what run.json holds of such a run."""
    verdict = {
        "text": "not converged: w changed by 1 % in the last round",
        "kind": "not converged",
        "merged": 2,
    }
    given = {"methods": [method], "data": "csv:sites.csv", "partition": "groups", "seed": seed}
    given |= {"target": "sick", "rounds": 2, "settings": ["lr=0.1"], "out": f"runs/{method}"}
    return {
        "schema": SCHEMA,
        "experiment": given,
        "versions": {"python": "3", "pyrofl": "0.1.0"},
        "seed": seed,
        "seeds": {"split": seed, "init": seed, "participation": seed, "noise": seed},
        "data": {"rows": 100, "likelihood": "categorical", "classes": list(CLASSES)},
        "rounds": 2,
        "status": verdict,
        "clients": len(clients),
        "message_scalars": 12,
        "seconds": [0.5, 0.25],
        "bytes_down": [96, 96],
        "bytes_up": [48, 96],
        "trained": [2, 2],
        "steps": [4, 4],
        "reported": [1, 2],
        "silent": [[clients[0]], []],
        "rejected": [[], [f"{clients[-1]}: left: w is nan; expected a finite number"]],
        "rejected_by_kind": {"a finite number": 1},
        "tested": {"rows": "test", "policy": "same_shares", "main": [view, "none"]},
    }
