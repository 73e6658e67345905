"""Save runs to files, with the specification that rebuilds their method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from pyrofl import recipes
from pyrofl.data import Federation
from pyrofl.data.fingerprint import fingerprint
from pyrofl.data.outlines import facts
from pyrofl.files import checkpoint_file
from pyrofl.files.run_folder import compared_versions, versions
from pyrofl.inference.definition.description import describe
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, separate
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.fitted_run.records import RoundRecord

RECORDS = tuple(f.name for f in fields(RoundRecord) if f.name != "number")  # that follows
STATE = tuple(f.name for f in fields(RoundState) if f.name != "reporters")


class SavableRun(Protocol):
    """Interface (protocol) of a run with the attributes that are saved to a file.

    It is a protocol because `Run` imports this module.
    """

    method: Method
    data: Federation
    state: RoundState
    seed: Seed
    draws: int | None
    records: list[RoundRecord]
    history: list[dict[str, Any]]
    ending: dict[str, str]
    switched: str


def save(run: SavableRun, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
    """Write a run's last state and all its records to a file, except custom metrics.

    Frozen weights and buffers of its networks are saved too, and `load` restores them.

    Args:
        run: as `fit` returns it, or passes it to `callback`.
        path: file, replaced once the new one is on the disk.
        about: settings of the run, as JSON; `load` raises ValueError if one differs. The data, the
            seeds, the versions of pyrofl, torch and Pyro and the parts of the method, see
            `pyrofl.inference.definition.description.describe`, are always compared.

    Raises:
        OSError: if the file cannot be written, such as on a full disk.
    """
    state = {name: getattr(run.state, name) for name in STATE} | run.state.reporters._asdict()
    state["client_states"] = dict(run.state.client_states.items())
    records: dict[str, Any] = {"draws": run.draws, "metrics": run.history, "ending": run.ending}
    records["switched"] = run.switched
    records |= {name: [getattr(record, name) for record in run.records] for name in RECORDS}
    about = settings_of_run(run.data, run.seed, about)
    description = describe(run.method)
    content: dict[str, Any] = {"state": state, "records": records, "method": description.parts}
    content["constants"] = {n: v.detach() for n, v in description.constants.items()}
    content |= {"recipe": _specification(run.method), "data": facts(run.data)}
    content["versions"] = versions()  # to be read by people
    checkpoint_file.write(path, about, content)


def _specification(method: Method) -> dict[str, Any]:
    """Return the settings from which the library can rebuild a method, or why it cannot."""
    if recipes.spec_of(method) is None:
        return {"lacking": "it is a custom method, or a part of it was replaced"}
    try:
        return {"made": recipes.told(method)}
    except ValueError as error:
        return {"lacking": str(error)}


def settings_of_run(
    data: Federation, seed: Seed, about: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the settings that must be equal when a run is resumed, such as seeds and versions."""
    settings: dict[str, Any] = {"hash of the data": fingerprint(data)}
    settings |= compared_versions()
    settings |= {f"seed of {n}": int(v) for n, v in vars(separate(seed)).items()}
    return {**settings, "type of device": data.x.device.type, **(about or {})}
