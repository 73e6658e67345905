"""Warnings that name the user's line, however deep in the package they arise."""

from __future__ import annotations

import sys
import warnings

# Packages whose frames can lie between the user's line and the place of a warning.
BETWEEN = {"pyrofl", "pyro", "torch", "contextlib", "functools"}


def warn_user(text: str) -> None:
    """Issue a UserWarning that names the line outside of pyrofl from which it was called."""
    frame, level = sys._getframe(), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
