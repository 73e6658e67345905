"""Flower's programs as child processes that end together with this process."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from pyrofl.experiments.console import FAILED, Stopped
from pyrofl.files.link_safe_files import open_without_links, refuse_link
from pyrofl.files.lock import lock_folder
from pyrofl.files.run_folder import replacing

PROCESS_MARK = "PYROFL_FLOWER"  # in the environment of all that we have started
STOP_TIMEOUT = 10.0  # seconds that a process has to end by itself
START_TIMEOUT = 60.0  # seconds that Flower's server has to start
CONNECTION = "here"
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class ProcessGroup:
    """Group of child processes that are started and ended together.

    Flower's programs start others, which leave their group: these are found by a mark in their
    environment, where the system shows it, and ended one by one.
    """

    def __init__(self, home: Path) -> None:
        """Create Flower's folder `home`, used instead of the user's own Flower folder."""
        self.home, self.mark = home, uuid4().hex
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for path in (home, *(home.iterdir() if home.is_dir() else ())):  # Flower writes there too
            refuse_link(path)
        home.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of Flower's programs; telemetry and update checks are off."""
        own = {
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "PYTHONUNBUFFERED": "1",
            PROCESS_MARK: self.mark,
        }
        return {**os.environ, **own}

    def start(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a program of Flower in the background, with its output in HOME/name.log."""
        with os.fdopen(
            open_without_links(self.home / f"{name}.log", os.O_WRONLY | os.O_APPEND), "ab"
        ) as log:
            self.running[name] = subprocess.Popen(
                [program(words[0]), *words[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,  # an interrupt is for us, and we end them in order
                preexec_fn=_not_to_outlive(),
            )
        return self.running[name]

    def ask(self, *words: str) -> str:
        """Run a program of Flower to its end, and return its printed output."""
        done = subprocess.run(
            [program(words[0]), *words[1:]], capture_output=True, text=True, env=self.environment
        )
        if done.returncode:
            said = " ".join(f"{done.stdout} {done.stderr}".split())[-400:]
            raise Stopped(f"{' '.join(words[:2])} failed: {said}", FAILED)
        return done.stdout

    def last_words(self, name: str) -> str:
        """Return the last part of a program's log."""
        text = (self.home / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return " ".join(text.split())[-400:]

    def stop(self) -> None:
        """Stop all running programs of the group, the nodes before the server."""
        for name in reversed(self.running):
            end(self.running[name])
        for _ in range(20):
            if not (left := marked(self.mark)):
                return
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def _not_to_outlive() -> Callable[[], None] | None:
    """Return a function that makes a child process end with its parent (Linux); else None."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # before the fork: nothing may be loaded after it

    def follow() -> None:
        prctl(DEATH_SIGNAL, signal.SIGTERM)

    return follow


def program(name: str) -> str:
    """Return the path of one of Flower's programs, such as flower-superlink.

    Raises:
        ValueError: if it is missing, or Flower has no folder for temporary files.
    """
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise ValueError(
            f"{error}; expected one that can be written: set TMPDIR, or PrivateTmp=true in a "
            "systemd unit"
        ) from error
    here = Path(sys.executable).parent
    if path := shutil.which(name, path=os.pathsep.join([str(here), os.environ.get("PATH", "")])):
        return path
    raise ValueError(
        f"Flower's program {name} is missing; expected pip install -e '.[flower]' in the clone"
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process; kill it if it does not end in time."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def marked(mark: str) -> list[int]:
    """Return the ids of processes that have a given mark in their environment (Linux)."""
    wanted, process_ids = f"{PROCESS_MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                process_ids.append(int(folder.name))
    return [pid for pid in process_ids if pid != os.getpid()]


@contextmanager
def process_group(home: Path) -> Iterator[ProcessGroup]:
    """Yield a group of child processes and stop them at exit; SIGTERM acts as an interrupt."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    group, before = ProcessGroup(home), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        with lock_folder(home):
            yield group
    finally:
        # A second interrupt must not leave half of them.
        held = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            group.stop()
        finally:
            signal.signal(signal.SIGINT, held[signal.SIGINT])
            signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """Return an unused TCP port of this machine."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def connect(home: Path, address: str, ca: str = "") -> None:
    """Write the server's address to Flower's configuration file in `home`."""
    safe = f"root-certificates = {json.dumps(ca)}" if ca else "insecure = true"
    lines = ["[superlink]", f'default = "{CONNECTION}"', f"[superlink.{CONNECTION}]"]
    lines += [f'address = "{address}"', safe, ""]
    with replacing(home / "config.toml") as temporary:
        temporary.write_text("\n".join(lines), encoding="utf-8")


def wait_for_port(group: ProcessGroup, name: str, host: str, port: int) -> None:
    """Wait until a server accepts connections at a host and port."""
    until = time.monotonic() + START_TIMEOUT
    while time.monotonic() < until:
        if (code := group.running[name].poll()) is not None:
            raise Stopped(f"Flower's {name} ended with {code}: {group.last_words(name)}", FAILED)
        with suppress(OSError), socket.create_connection((host, port), 1):
            return
        time.sleep(0.1)
    raise Stopped(
        f"Flower's {name} does not listen on {host}:{port} after {START_TIMEOUT:g} s", FAILED
    )


def words_of(settings: Mapping[str, str | int | float]) -> str:
    """Format settings as one line of TOML, for Flower's --run-config and --node-config.

    >>> words_of({"a": "b c", "n": 3})
    'a="b c" n=3'
    """
    for name, value in settings.items():
        if isinstance(value, str) and set(value) & set("\"'\\\n"):
            raise ValueError(
                f"{name} is {value!r}; expected a string without quotes and backslashes"
            )
    return " ".join(f"{n}={json.dumps(v)}" for n, v in settings.items())
