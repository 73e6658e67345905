"""Load a fitted run from the folder in which it was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyrofl import recipes
from pyrofl.arguments import checked
from pyrofl.data import Federation
from pyrofl.data.fingerprint import set_fingerprint
from pyrofl.data.frames import Tables
from pyrofl.data.outlines import outline_federation
from pyrofl.files import checkpoint_file, run_json
from pyrofl.files.run_folder import CHECKPOINT
from pyrofl.inference.definition.description import described
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seeds
from pyrofl.inference.definition.table_method import prepare_data
from pyrofl.inference.engine.start import method_schedule
from pyrofl.inference.fitted_run.checkpoints import MAX_PARTS_IN_ERROR, restore_run
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.fitted_run.saving import settings_of_run


@checked
def load(
    folder: str | Path,
    *,
    method: Method | Callable[[int], Method] | None = None,
    data: Federation | Tables | None = None,
) -> Run:
    """Load a run from a folder written by `Run.save` or `pyrofl run`; execute no code in it.

    Its predictions equal those of the saved run bit for bit. The folder holds no training rows:
    without `data` the run cannot be adapted, evaluated or resumed.

    Args:
        folder: folder with `checkpoint.safetensors`.
        method: None rebuilds a method of the library with its saved settings. A custom method, or
            one with custom parts, must be passed as it was fitted (round number -> method if it
            was that). Frozen weights and buffers of its networks are set to those of the run;
            other attributes, and constants and helpers of its functions, must be the same.
        data: the federation that the run was fitted to, in the same order, or None; tables, if the
            method is a `regression`, which must be passed, too.

    Returns:
        The saved run.

    Raises:
        ValueError: if the file is damaged or was written by other versions of PyTorch, Pyro or
            pyrofl; if it is of another run than the folder's run.json; if the method or the data
            differ; or if a custom method is not passed.
    """
    path = Path(folder, CHECKPOINT)
    if isinstance(data, Tables):
        if method is None:
            raise ValueError(
                "data are tables and method is None; expected the regression of these tables as "
                "method"
            )
        data = prepare_data(method_schedule(method)(0), data)
    about, content = checkpoint_file.read_any(path, "cpu" if data is None else None)
    try:
        seeds = {n: int(about[f"seed of {n}"]) for n in vars(Seeds())}
        same = len(set(seeds.values())) == 1
        seed = seeds["init"] if same else Seeds(**seeds)
        rows = outline_federation(content["data"]) if data is None else data
        if data is None:
            set_fingerprint(rows, about["hash of the data"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is incomplete ({error!r}); expected a file written by `Run.save`"
        ) from error
    now = {name: value for name, value in settings_of_run(rows, seed, None).items()}
    now["type of device"] = about["type of device"] if data is None else now["type of device"]
    checkpoint_file.refuse_differences(f"checkpoint {path}", {n: about.get(n) for n in now}, now)
    run_json.refuse_other_checkpoint(path.parent, about, content["state"]["number"])
    return restore_run(
        path, content, _rebuild_method(path, content) if method is None else method, rows, seed
    )


def _rebuild_method(path: Path, content: dict[str, Any]) -> Method:
    """Build the method of a saved run from the specification in its checkpoint."""
    cure = "build the method as it was and pass it: pyrofl.load(DIR, method=...)"
    recipe = content.get("recipe", {})
    if "made" not in recipe:
        why = recipe.get("lacking", "its specification is missing")
        raise ValueError(f"the method in {path} cannot be rebuilt: {why}; {cure}")
    try:
        method = recipes.made(recipe["made"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the method in {path} cannot be rebuilt: {error}; {cure}") from error
    if not isinstance(method, Method):
        raise ValueError(f"{path} specifies a {type(method).__name__}, not a method; {cure}")
    was, now = content["method"], described(method)
    if changed := [name for name in was | now if was.get(name) != now.get(name)]:
        few = ", ".join(changed[:MAX_PARTS_IN_ERROR])
        raise ValueError(
            f"the method in {path} differs from {method.name or 'the method'} of the library in "
            f"{few}; {cure}"
        )
    return method
