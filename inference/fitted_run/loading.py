"""Load runs from folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyrofl import recipes
from pyrofl.arguments import checked
from pyrofl.data import Federation
from pyrofl.data.fingerprint import set_fingerprint
from pyrofl.data.outlines import hidden
from pyrofl.files import checkpoint_file
from pyrofl.files.run_folder import CHECKPOINT
from pyrofl.inference.description import described
from pyrofl.inference.fitted_run.checkpoints import restore_run
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.fitted_run.saving import settings_of_run
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Seeds

MAX_NAMED = 3  # parts of a method that differ


@checked
def load(
    folder: str | Path,
    *,
    method: Method | Callable[[int], Method] | None = None,
    data: Federation | None = None,
) -> Run:
    """Load a run from a folder that `Run.save` or `pyrofl run` wrote; no code in it is run.

    It predicts bitwise as the run that was saved. Training rows are not in the folder: without
    `data` nothing that asks for them can be done, such as adapting, testing or going on.

    Args:
        folder: holds `checkpoint.safetensors`.
        method: None makes that of the library again, with its settings. One of your own, or that
            has parts of your own, is to be given, as it was; round number -> method if it was that.
            Frozen weights and buffers of its networks are set to those of the run; all else in
            them, and the constants and helpers that its functions use, must be the same.
        data: the federation that the run was fitted to, in the same order, or None.

    Raises:
        ValueError: if the file is damaged, or of other versions of PyTorch, Pyro or pyrofl; if the
            method or the data differ; or if a method of your own is not given.
    """
    path = Path(folder, CHECKPOINT)
    about, content = checkpoint_file.read_any(path, "cpu" if data is None else None)
    try:
        seeds = {n: int(about[f"seed of {n}"]) for n in vars(Seeds())}
        same = len(set(seeds.values())) == 1
        seed = seeds["init"] if same else Seeds(**seeds)
        rows = hidden(content["data"]) if data is None else data
        if data is None:
            set_fingerprint(rows, about["hash of the data"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is incomplete ({error!r}); expected what `save` writes"
        ) from error
    now = {name: value for name, value in settings_of_run(rows, seed, None).items()}
    now["type of device"] = about["type of device"] if data is None else now["type of device"]
    checkpoint_file.refuse_differences(f"checkpoint {path}", {n: about.get(n) for n in now}, now)
    return restore_run(
        path, content, _rebuild_method(path, content) if method is None else method, rows, seed
    )


def _rebuild_method(path: Path, content: dict[str, Any]) -> Method:
    """Build the method that a run was fitted with."""
    cure = "expected pyrofl.load(DIR, method=...), built as it was"
    recipe = content.get("recipe", {})
    if "made" not in recipe:
        why = recipe.get("lacking", "nothing tells how")
        raise ValueError(f"the method in {path} cannot be made again: {why}; {cure}")
    try:
        made = recipes.made(recipe["made"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the method in {path} cannot be made again: {error}; {cure}") from error
    if not isinstance(made, Method):
        raise ValueError(f"{path} makes a {type(made).__name__}; expected a method")
    was, now = content["method"], described(made)
    if changed := [name for name in was | now if was.get(name) != now.get(name)]:
        few = ", ".join(changed[:MAX_NAMED])
        raise ValueError(
            f"the method in {path} has parts that {made.name or 'the library'} does not make: "
            f"{few}; {cure}"
        )
    return made
