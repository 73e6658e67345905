"""Refusal of handlers and modes of the caller that would change what programs compute."""

from __future__ import annotations

import torch
from pyro.poutine.runtime import _PYRO_STACK

from pyrofl.turns import synchronized

AROUND = {  # public names of Pyro's handlers
    "ScaleMessenger": "poutine.scale",
    "MaskMessenger": "poutine.mask",
    "plate": "a plate",
}


@synchronized  # another thread may be inside a handler of its own
def refuse_surroundings() -> None:
    """Raise ValueError if called inside Pyro handlers, autocast or inference mode."""
    if _PYRO_STACK:
        kind = type(_PYRO_STACK[-1]).__name__
        raise ValueError(
            f"fit runs inside {AROUND.get(kind, kind)}, which would change the programs; call fit "
            "outside of it, and use handlers of Pyro inside the programs"
        )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ValueError(
            "fit runs inside autocast, which would round the results of programs; call fit outside "
            "of it"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "torch.inference_mode() is on, which disables gradients; call fit outside of it"
        )
