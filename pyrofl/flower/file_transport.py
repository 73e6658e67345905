"""Messages of a study by signed files instead of a network: by e-mail or in a shared folder.

The coordinator runs as over Flower. It is stopped at an exchange whose replies are lacking, after
their requests were written; the next command runs it again from the stored states, and exchanges
that are complete have their replies from files. A request is known by the hash of its content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from pyrofl.files.checkpoint_file import refuse_differences
from pyrofl.files.link_safe_files import subfolder
from pyrofl.files.run_folder import prepare, replacing, write_json
from pyrofl.flower.site import STUDY_COMPLETE
from pyrofl.flower.site_state import read_own_json
from pyrofl.inference.transport.correction import RepliesNeeded
from pyrofl.inference.transport.message_checks import one_line
from pyrofl.inference.transport.message_files import (
    Message,
    fingerprint,
    message_id,
    read_message,
    write_message,
)
from pyrofl.inference.transport.records import Records

SERVER = "server"  # name of the server in messages
MESSAGES_FOLDER, TAKEN_FOLDER = "messages", "replies"
INDEX_FILE = "requests.json"  # id of the study, server's key, ids of requests by site, in order


def file_name(site: str, kind: str, number: int | str) -> str:
    """Return the name of a file with a message.

    >>> file_name("bern", "request", 3)
    'bern-request-3.json'
    """
    return f"{site}-{kind}-{number}.json"


class FileTransport:
    """Transport of messages by files; nodes are the sites whose public keys the server has.

    Args:
        folder: of the requests and of replies that have arrived.
        out: folder of the study's results, where replies that were taken are stored.
        name: name of the study.
        agreed: settings of the study that must not change once a site has replied.
        key: private key of the server.
        keys: site -> its public key.
        without: sites that the open exchange does not wait for.
        print_line: prints a line.
    """

    def __init__(
        self,
        folder: Path,
        out: Path,
        name: str,
        agreed: Mapping[str, Any],
        key: Any,
        keys: Mapping[str, Any],
        without: Collection[str],
        print_line: Callable[[str], None],
    ) -> None:
        self.folder, self.taken, self.key, self.keys = folder, out / TAKEN_FOLDER, key, keys
        self.name, self.agreed, self.print_line = name, dict(agreed), print_line
        self.without = set(without)
        self.sites = sorted(keys)
        self.index: dict[str, Any] = {}

    def present(self) -> Sequence[int]:
        """Return the numbers of all sites, in the order of their names."""
        return range(len(self.sites))

    def exchange(self, messages: Mapping[int, Records], timeout: float) -> dict[int, Records]:
        """Return the replies to messages, from files.

        Raises:
            RepliesNeeded: if replies are lacking; their requests are in files then.
        """
        if not self.index:
            self.open()
        numbers = {n: self._numbered(self.sites[n], records) for n, records in messages.items()}
        if any(STUDY_COMPLETE in records for records in messages.values()):
            return {node: {} for node in messages}  # without reply
        lacking = {n for n, number in numbers.items() if not self._path(n, number).exists()}
        names = sorted(self.sites[n] for n in lacking)
        if not self.without.issuperset(names):
            self.print_line(f"waiting for replies of {', '.join(names)} in {self.folder}")
            raise RepliesNeeded({})
        return {
            n: read_message(self._path(n, number), self.keys, self.index["study"]).records
            for n, number in numbers.items()
            if n not in lacking
        }

    def tell(self, messages: Mapping[int, Records]) -> None:
        """Send nothing: the server's output has the reason of a refusal."""

    def open(self) -> None:
        """Read which requests were written, and take the replies that have arrived.

        Raises:
            ValueError: if they were signed with another key, or the study has changed.
        """
        prepare(self.folder, overwrite=True)
        path, key = subfolder(self.taken) / INDEX_FILE, fingerprint(self.key.public_key())
        if path.exists():
            self.index = read_own_json(path)
        else:
            name = f"{self.name} {uuid4().hex[:12]}"
            self.index = {"study": name, "key": key, "requests": {}}
        if (first := self.index.get("key", key)) != key:
            raise ValueError(
                f"--key is {key}; expected the key of the first request, {first}, or another --out"
            )
        if any(self.taken.glob(file_name("*", "reply", "*"))):
            refuse_differences(
                self.taken.parent, self.index.get("agreed", self.agreed), self.agreed
            )
        self.index["agreed"] = self.agreed
        write_json(path, self.index)
        requests = {
            file_name(site, "request", number)
            for site, ids in self.index["requests"].items()
            for number in range(1, len(ids) + 1)
        }
        for path in sorted(self.folder.iterdir()):
            if path.name not in requests and not path.name.startswith("."):
                self._take(path)

    def forget(self, site: str) -> None:
        """Forget a site's replies, so that its requests are written again."""
        self.open()
        self.index["requests"][site] = [""] * len(self._ids(site))
        write_json(self.taken / INDEX_FILE, self.index)
        self.print_line(f"{site} will receive its requests again, from the first one")

    def _ids(self, site: str) -> list[str]:
        ids: list[str] = self.index["requests"].get(site, [])
        return ids

    def _path(self, node: int, number: int) -> Path:
        return self.taken / file_name(self.sites[node], "reply", number)

    def _numbered(self, site: str, records: Records) -> int:
        """Return the number of a request, which is written if it is new or its file is lost."""
        ids, about = self._ids(site), message_id(records)
        is_new = about not in ids
        number = len(ids) + 1 if is_new else ids.index(about) + 1
        path = self.folder / file_name(site, "request", number)
        if is_new or (number == len(ids) and not self._is_answered(site) and not path.exists()):
            head = {"study": self.index["study"], "sender": SERVER, "recipient": site}
            write_message(path, records, self.key, number=number, **head)
            if is_new:
                self.index["requests"][site] = [*ids, about]
                write_json(self.taken / INDEX_FILE, self.index)
                (self.folder / file_name(site, "request", number - 1)).unlink(missing_ok=True)
            self.print_line(f"wrote {path}")
        return number

    def _is_answered(self, site: str) -> bool:
        return (self.taken / file_name(site, "reply", len(self._ids(site)))).exists()

    def _take(self, path: Path) -> None:
        """Move a reply that has arrived to those of the study, or print why it is refused."""
        try:
            message = read_message(path, self.keys, self.index["study"])
            target = self.taken / file_name(message.sender, "reply", self._answered(message))
            if target.exists() and target.read_bytes() != path.read_bytes():
                raise ValueError(f"{path}: {message.sender} has replied before; that reply counts")
        except ValueError as error:
            self.print_line(f"refused: {one_line(str(error))}")
            return
        with replacing(target) as temporary:
            temporary.write_bytes(path.read_bytes())
        path.unlink()
        request = self.folder / file_name(message.sender, "request", message.number)
        request.unlink(missing_ok=True)

    def _answered(self, message: Message) -> int:
        """Return the number of the last request if a reply answers it; else raise ValueError."""
        site, ids = message.sender, self._ids(message.sender)
        number = ids.index(message.answers) + 1 if message.answers in filter(None, ids) else 0
        if not number or message.recipient != SERVER:
            raise ValueError(f"a file of {site} answers no request of this study")
        if number < len(ids):
            raise ValueError(
                f"a file of {site} replies to its request {number}; expected a reply to its "
                f"request {len(ids)}"
            )
        return number
