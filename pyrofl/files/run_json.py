"""The file run.json of a run, with hashes of itself and of the run's tables.

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

from pyrofl.files.run_folder import write_json

NAME = "run.json"
HASHES = "hashes"  # entry of run.json: name of a file -> its hash
SHOWN = 12  # characters of a hash in messages


def write(folder: Path, facts: Mapping[str, Any], names: Iterable[str]) -> None:
    """Write run.json, with hashes of those of the named files that are in the folder."""
    there = {name: path for name in names if (path := folder / name).is_file()}
    hashes = {name: _of_file(path) for name, path in there.items()}
    write_json(folder / NAME, {**facts, HASHES: {NAME: of_facts(facts), **hashes}})


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
    hashes = hashes if isinstance(hashes, dict) else {NAME: hashes}
    found = {NAME: of_facts(facts)} if NAME in hashes else {}
    for name in hashes.keys() - {NAME} if tables else ():
        if Path(name).name == name and (file := path.with_name(name)).is_file():
            found[name] = _of_file(file)
    for name, now in sorted(found.items()):
        if now != (was := hashes[name]):
            raise ValueError(
                f"{path.with_name(name)} was altered or cut off after the run wrote it (its hash "
                f"is {now[:SHOWN]}, and was {str(was)[:SHOWN]}); restore the file, or run again "
                f"with --overwrite; after an edit of your own, remove {HASHES!r} from {NAME}"
            )
    return facts


def _of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_facts(facts: Any) -> str:
    """Return a hash of the content of run.json, whatever its order and layout."""
    plain = json.loads(json.dumps(facts))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
