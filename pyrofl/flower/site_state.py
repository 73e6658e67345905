"""Record of a site in its state folder: its name, study and table, and a digest of the table.

The digest is that of the table whose numbers have left, so that a study has one table of a site.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyrofl.files.run_folder import write_json
from pyrofl.inference.transport.message_checks import InvalidRequestError
from pyrofl.nouns import nouns

SITE_FILE = "site.json"
PATHS = ("project", "data", "rules")


def read_own_json(path: Path) -> dict[str, Any]:
    """Read a file that these commands wrote; raise ValueError if it is damaged."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); restore it from a backup") from error
    return content


def refuse_other_state(state: str | Path, data: str, *, may_be_new: bool) -> None:
    """Raise InvalidRequestError if a site has lost its state, or has other rows than before.

    Args:
        state: folder of the site's state.
        data: path of its table.
        may_be_new: whether the folder may be without a study.
    """
    path = Path(state, SITE_FILE)
    if not path.exists():
        if may_be_new:
            return
        raise InvalidRequestError(
            f"{path.parent.name} has no state of this study, which has begun; expected the --state "
            f"of earlier replies, or --rejoin, by which the {nouns().site} returns as a new client"
        )
    before = read_own_json(path).get("rows")
    if before and before != _digest(data):
        raise InvalidRequestError(
            f"{Path(data).name} has changed since numbers of its rows left; expected the same rows "
            "in all rounds (a study of other rows needs another --state, and begins again)"
        )


def record_site(site: Mapping[str, Any], *, rows: bool) -> None:
    """Write the record of a site.

    Args:
        site: name, project, data, state and rules of the site.
        rows: whether numbers of its rows leave now.
    """
    path = Path(site["state"], SITE_FILE)
    about = read_own_json(path) if path.exists() else {}
    about |= {"name": str(site["name"])}
    about |= {n: str(Path(site[n]).absolute()) for n in PATHS if site.get(n)}
    about |= {"rows": _digest(site["data"])} if rows else {}
    write_json(path, about)


def _digest(data: str) -> str:
    """Return the SHA-256 of a file."""
    with open(data, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
