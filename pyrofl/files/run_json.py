"""The file run.json of a run, with hashes of itself, of the run's tables and of its settings.

The hashes show that a file was altered or cut off after the run. They are not signatures: anyone
with write access to a folder can replace them. Folders of older versions, without hashes, are read
without this check.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyrofl.files.run_folder import CHECKPOINT, write_json

RUN_FILE = "run.json"
HASHES = "hashes"  # entry of run.json: name of a file -> its hash
SHOWN_HASH_CHARACTERS = 12  # characters of a hash in messages


def write(
    folder: Path,
    facts: Mapping[str, Any],
    names: Iterable[str],
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Write run.json, with hashes of those of the named files that are in the folder.

    The hash of the checkpoint is that of its `settings`, with the seeds and a hash of the data: a
    run that is resumed replaces its checkpoint before run.json.
    """
    there = {name: path for name in names if (path := folder / name).is_file()}
    hashes = {name: _of_file(path) for name, path in there.items()}
    hashes |= {CHECKPOINT: hash_of_facts(settings)} if settings else {}
    write_json(folder / RUN_FILE, {**facts, HASHES: {RUN_FILE: hash_of_facts(facts), **hashes}})


def read(path: Path, tables: bool = False) -> Any:
    """Return the content of run.json, without hashes.

    Args:
        path: of run.json.
        tables: whether the files of its folder are compared with their hashes, too; those that were
            removed are not.

    Raises:
        ValueError: if the file cannot be read, or one was altered or cut off.
    """
    try:
        if not path.is_file():
            raise ValueError("it is no file")
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}; expected a run's facts") from error
    hashes = facts.pop(HASHES, {}) if isinstance(facts, dict) else {}
    hashes = hashes if isinstance(hashes, dict) else {RUN_FILE: hashes}
    current_hashes = {RUN_FILE: hash_of_facts(facts)} if RUN_FILE in hashes else {}
    for name in hashes.keys() - {RUN_FILE, CHECKPOINT} if tables else ():
        if Path(name).name == name and (file := path.with_name(name)).is_file():
            current_hashes[name] = _of_file(file)
    for name, now in sorted(current_hashes.items()):
        if now != (was := hashes[name]):
            raise ValueError(
                f"{path.with_name(name)} was altered or cut off after the run wrote it (its hash "
                f"is {now[:SHOWN_HASH_CHARACTERS]}, and was {str(was)[:SHOWN_HASH_CHARACTERS]}); "
                "restore the file, or run again "
                f"with --overwrite; after an edit of your own, remove {HASHES!r} from {RUN_FILE}"
            )
    return facts


def refuse_other_checkpoint(folder: Path, settings: Mapping[str, Any], number: int) -> None:
    """Raise ValueError if a folder's checkpoint, after round `number`, is not of its run.json.

    A run that was resumed and interrupted has a checkpoint of a later round than run.json.
    """
    path = folder / RUN_FILE
    try:
        facts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        was, rounds = facts[HASHES][CHECKPOINT], int(facts["rounds"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return  # it has no such hash, or `read` reports what is wrong
    other = "another run" if was != hash_of_facts(settings) else f"round {number} of {rounds}"
    if was != hash_of_facts(settings) or number < rounds:
        raise ValueError(
            f"{folder / CHECKPOINT} is of {other} than {path} describes; restore both files of one "
            "run, or run again with --overwrite"
        )


def _of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_of_facts(facts: Any) -> str:
    """Return a hash of the content of run.json, whatever its order and layout."""
    plain = json.loads(json.dumps(facts))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
