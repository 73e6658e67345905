"""Processes of their own, none of which is waited for without end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

LIMIT = 600.0  # seconds: many times what any of them takes


def child(what: str, words: Sequence[str], limit: float = LIMIT) -> str:
    """Return what a process writes; one that takes longer than a limit, in seconds, is killed.

    Raises:
        ValueError: naming what was run, if it took longer or failed.
    """
    try:
        return subprocess.run(
            words,
            check=True,
            text=True,
            stdin=subprocess.DEVNULL,  # one that asks something does not wait for an answer
            capture_output=True,
            timeout=limit,
        ).stdout
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{what} took longer than {limit:g} s and was killed; expected it to end: run alone "
            f"{' '.join(words)}"
        ) from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or ["no message"]
        raise ValueError(f"{what} ended with {error.returncode}: {last[0]}") from error
