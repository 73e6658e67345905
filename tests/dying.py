"""Commands in children of one process that has imported everything: they are fast, and may die.

As a script it reads a job from each line, `{"commands": [[...], ...], "doom": {...}}`, forks a
child that runs the commands one after the other under that doom, and answers with how it ended. A
command that begins with a script runs that instead of `pyrofl`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, NoReturn

NEW_NAMESPACES = 0x10000000 | 0x00020000  # of users, of mounts
READ_ONLY, REMOUNT, BIND, PRIVATE = 1, 32, 4096, 1 << 18 | 1 << 14  # as mount(2) numbers them


class Ended(NamedTuple):
    """How a child ended: exit codes of its commands, or minus the signal; and what it told."""

    codes: list[int]
    told: list[str]


class Nursery:
    """Starts the process; called with commands and what is to befall them, it runs a child."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def __call__(self, *commands: Sequence[str], **doom: Any) -> Ended:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"commands": commands, "doom": doom}) + "\n")
        self.process.stdin.flush()
        return Ended(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def serve() -> None:
    """Import all that a command needs, and run the jobs."""
    import matplotlib.pyplot  # noqa: F401

    from pyrofl import checks, reference  # noqa: F401
    from pyrofl.cli.parser import main

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    words = ["run", "pfedvem", "--per-class", "6", "--clients", "2", "--rounds", "1", "--quiet"]
    with TemporaryDirectory() as out:
        assert main([*words, "--posterior-draws", "1", "--out", out]) == 0
    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(write, 2)
            live(**json.loads(line))
        os.close(write)
        with os.fdopen(read) as file:
            told = file.read().splitlines()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        codes = json.loads(told.pop()) if code == 0 else [code]
        answers.write(json.dumps({"codes": codes, "told": told}) + "\n")
        answers.flush()


def live(commands: Sequence[Sequence[str]], doom: dict[str, Any]) -> NoReturn:
    """Run commands; the doom befalls the first of them."""
    code = 1
    try:
        stages = [found for kind, value in doom.items() if (found := DOOMS[kind](value))]
        codes = []
        for words in commands:
            for stage in stages:
                next(stage, None)
            codes.append(script(words) if words[0].endswith(".py") else command(words))
        for stage in stages:
            next(stage, None)
        sys.stderr.write(f"{json.dumps(codes)}\n")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def command(words: Sequence[str]) -> int:
    """Run a command of `pyrofl`, without its figures, which take longer than all else."""
    from pyrofl.cli.parser import main
    from pyrofl.experiments import results

    results.draw = lambda *_: iter(())
    return main(words)


def script(words: Sequence[str]) -> int:
    """Run a script, for some minutes at most; what it prints is told."""
    signal.alarm(signal.alarm(0) or 240)
    sys.argv, sys.path[0] = [*words], str(Path(words[0]).parent)
    try:
        with redirect_stdout(sys.stderr):
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_training(count: int) -> None:
    """Die before the so-manieth group of clients trains."""
    from pyrofl.inference.engine.round import LocalClients

    real, calls = LocalClients.train, iter(range(1, count))

    def train(*args: Any) -> Any:
        next(calls, None) or die()
        return real(*args)

    LocalClients.train = train


def in_step(count: int) -> None:
    """Die before (counts 1, 3...) or after (2, 4...) a file takes its place."""
    real, steps = os.replace, iter(range(1, count))

    def replace(*args: Any) -> None:
        next(steps, None) or die()
        real(*args)
        next(steps, None) or die()

    os.replace = replace


def in_write(size: int) -> None:
    """Let the kernel kill the process as soon as a file is to be longer than so many bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def at_full(count: int) -> None:
    """Let the disk be full from the so-manieth time on that a file is begun, flushed or placed."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from pyrofl.files import checkpoint_file, run_folder

    left = iter(range(1, count))

    def full(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if next(left, None) is None:
                raise OSError(28, "No space left on device")
            return real(*args, **options)

        return call

    def opened(path: Any, mode: str = "r", **options: Any) -> Any:
        return (full(open) if mode[0] == "w" else open)(path, mode, **options)

    def saved(*args: Any) -> None:
        if next(left, None) is None:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(*args)

    run_folder.open, checkpoint_file.save_file = opened, saved
    os.fsync, os.replace = full(os.fsync), full(os.replace)


def on_full_disk(where: Sequence[Any]) -> Iterator[None]:
    """Let a folder be a disk of so many bytes, or its files no longer than these without a mount.

    After the first command there is room; what is there after the last is copied elsewhere.
    """
    path, size, copy = where
    if mounted("tmpfs", path, 0, f"size={size}"):
        yield
        mount("tmpfs", path, REMOUNT, "size=64m")
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    yield
    shutil.copytree(path, copy)


def on_read_only_disk(path: str) -> None:
    """Let a folder lie on a disk that cannot be written; without a mount, only take the rights."""
    if not mounted(path, path, BIND, ""):
        os.chmod(path, 0o555)
    else:
        mount(path, path, REMOUNT | BIND | READ_ONLY, "")


def at(folder: str) -> None:
    """Be in a folder, which is also the home."""
    os.chdir(folder)
    os.environ["HOME"] = folder


def within(limits: Sequence[int]) -> None:
    """Let the kernel end it after so many seconds, and give it so many bytes more than it has."""
    seconds, memory = limits
    has = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (has + memory, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(seconds)


def mounted(what: str, path: str, flags: int, options: str) -> bool:
    """Mount something that only this process sees; False where the system does not permit it."""
    me = os.getuid(), os.getgid()
    with suppress(OSError):
        _call("unshare", NEW_NAMESPACES)
        Path("/proc/self/setgroups").write_text("deny")
        for name, number in zip(("uid_map", "gid_map"), me, strict=True):
            Path(f"/proc/self/{name}").write_text(f"0 {number} 1")
        mount("none", "/", PRIVATE, "")
        mount(what, path, flags, options)
        return True
    return False


def mount(what: str, path: str, flags: int, options: str) -> None:
    kind = b"tmpfs" if what == "tmpfs" else None
    _call("mount", what.encode(), path.encode(), kind, flags, options.encode())


def _call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)


DOOMS: dict[str, Callable[[Any], Iterator[None] | None]] = {
    "training": in_training,
    "step": in_step,
    "write": in_write,
    "full": at_full,
    "disk": on_full_disk,
    "read_only": on_read_only_disk,
    "at": at,
    "within": within,
}


if __name__ == "__main__":
    serve()
