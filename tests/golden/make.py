"""Write the golden files: what the papers' arithmetic gives after one and four rounds.

Run: python tests/golden/make.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from golden import fedabml, fedbe, metavd, pfedmb, pfedvem, plain  # noqa: E402

Case = tuple[dict[str, Any], plain.Tensors, Callable[[], list[tuple[plain.Tensors, plain.Tensors]]]]

CASES: dict[str, Case] = {
    "pfedvem": (pfedvem.SETTINGS, pfedvem.begin(), pfedvem.run),
    "pfedmb": (pfedmb.SETTINGS, pfedmb.begin(), pfedmb.run),
    **{
        f"metavd_{name}": (how, metavd.begin(how), partial(metavd.run, how))
        for name, how in (("authors", metavd.AUTHORS), ("paper", metavd.PAPER))
    },
    **{
        f"fedbe_{how['posterior']}": (how, fedbe.begin(), partial(fedbe.run, how))
        for how in (fedbe.GAUSSIAN, fedbe.DIRICHLET)
    },
    **{
        f"fedabml_{name}": (how, fedabml.begin(), partial(fedabml.run, how))
        for name, how in (("plain", fedabml.PLAIN), ("natural", fedabml.NATURAL))
    },
}


def content(name: str) -> dict[str, Any]:
    """Return what the file of a case holds, by names."""
    settings, start, run = CASES[name]
    x, y = plain.rows()
    found: dict[str, Any] = {"x": x, "y": y, "sizes": plain.SIZES, "noise": plain.TABLE}
    found |= {"settings": json.dumps(settings), "reports": json.dumps(plain.REPORTS)}
    if name.startswith("fedbe"):
        found["unlabelled"] = fedbe.SERVER_DATA
    found |= {f"start/{n}": v for n, v in start.items()}
    for number, (server, private) in enumerate(run(), 1):
        if number in plain.SHOWN:
            found |= {f"round{number}/server/{n}": v for n, v in server.items()}
            found |= {f"round{number}/private/{n}": v for n, v in private.items()}
    return {n: np.asarray(v) for n, v in found.items()}


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for case in CASES:
        np.savez_compressed(folder / f"{case}.npz", **content(case))
        print(folder / f"{case}.npz")
