"""Plates of a program's latent sites, and sites that cannot be fitted."""

from __future__ import annotations

from typing import Any

from pyrofl.inference.definition.elbo import base_of

RESERVED_SITE_NAMES = ("chain", "draw", "client", "row")
"""Axes of the result of to_arviz, where no site can have such a name."""


def own_plate(name: str, site: Any) -> tuple[str, int]:
    """Return name and size of a site's plate, other than the plates of clients and draws."""
    frames = {frame.name: frame for frame in site["cond_indep_stack"]}
    kind = type(base_of(site["fn"])).__name__
    if name in RESERVED_SITE_NAMES:
        raise ValueError(
            f"a site is named {name!r}, as an axis of the result of to_arviz; expected another "
            f"name than {', '.join(RESERVED_SITE_NAMES)}"
        )
    if site["fn"].support.is_discrete:
        raise ValueError(
            f"site {name!r} is a {kind}, which is discrete; expected continuous latent sites: sum "
            "it out, by dist.MixtureSameFamily or a logsumexp over its values in pyro.factor"
        )
    if kind == "Delta":
        raise ValueError(
            f"site {name!r} is a Delta, which is constant; write its value as a number or tensor, "
            "or by pyro.deterministic"
        )
    others = [frame for n, frame in frames.items() if n not in ("clients", "draws")]
    outside = "clients" not in frames
    if outside or len(others) > 1 or any(f.dim != -1 for f in others):
        plates = " and ".join(f"plate {n!r}" for n in sorted(f.name for f in others))
        raise ValueError(
            f"site {name!r} is {'outside batch.clients()' if outside else f'inside {plates}'}; "
            "expected it inside batch.clients(), and there at most in batch.rows() or one plate of "
            "your own, with dim=-1; sites that are one for all clients are named in shared"
        )
    if not others:
        shape = tuple(site["fn"].batch_shape)
        if shape and shape[-1] > 1:
            raise ValueError(
                f"site {name!r} has batch shape {shape}, and its last axis has no plate; expected "
                "[clients, 1]: give the prior of a vector .to_event(1), and read its entries as "
                "b[..., 0]"
            )
        return "", 1
    return others[0].name, 1 if others[0].name == "rows" else others[0].size
