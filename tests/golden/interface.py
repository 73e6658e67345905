"""List what users and scripts rely on, so that no change of it goes unnoticed.

The list has the names of the package with their arguments, the settings of all methods, the options
of all commands, the names, shapes and types of messages, the files of a saved run with their
entries and tensors, and the rows of the page of guarantees. A line that is removed or changed
belongs into CHANGELOG.md.

Run: python tests/golden/interface.py [--make]
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import sys
from argparse import _SubParsersAction
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_origin

sys.path.insert(0, str(Path(__file__).parents[1]))

import promises
import toys
from safetensors.torch import load_file

import pyrofl
import pyrofl.models
from pyrofl.cli.parser import main, parser
from pyrofl.models import pfedvem

PATH = Path(__file__).with_suffix(".txt")
EXAMPLES = Path(__file__).parents[2] / "examples"
GUARANTEES = (EXAMPLES / "docs" / "guarantees.md", EXAMPLES / "FAULTS.md")


def lines() -> list[str]:
    """Return the sorted list of all parts."""
    parts = (names(), settings(), options(), messages(), files(), guarantees())
    return sorted({line for part in parts for line in part})


def names() -> Iterator[str]:
    """Yield the public functions and classes with their arguments."""
    for name in (*pyrofl.__all__, *pyrofl.FUNCTIONS):
        yield f"name pyrofl.{name}{arguments(getattr(pyrofl, name))}"
    for module in pyrofl.MODULES.keys() - {"models"}:
        home = getattr(pyrofl, module)
        for name in getattr(home, "__all__", ()):
            yield f"name pyrofl.{module}.{name}{arguments(getattr(home, name))}"
    for kind in (pyrofl.Run, pyrofl.Federation, pyrofl.Batch):
        for name, value in inspect.getmembers(kind):
            if name[0] != "_" and inspect.isroutine(value):
                yield f"name pyrofl.{kind.__name__}.{name}{arguments(value)}"


def arguments(value: Any) -> str:
    """Return the names of a function's arguments, "(net, *, head)"; "" if there are none."""
    if not callable(value) or get_origin(value):  # of a type, 3.13 has a signature
        return ""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # of a type of C
        return ""
    return f"({', '.join(p.name for p in parameters)})"


def settings() -> Iterator[str]:
    """Yield the settings of all methods, with their defaults."""
    for module in pkgutil.iter_modules(pyrofl.models.__path__):
        build = getattr(import_module(f"pyrofl.models.{module.name}"), "build", None)
        if build is None:
            continue
        for name, parameter in inspect.signature(build).parameters.items():
            default = parameter.default
            if inspect.isroutine(default) or inspect.isclass(default):
                default = default.__name__
            shown = "" if default is parameter.empty else f"={default}"
            yield f"setting {module.name}.{name}{shown}"


def options() -> Iterator[str]:
    """Yield the options of all commands."""

    def of(command: Any, words: str) -> Iterator[str]:
        for action in command._actions:
            if isinstance(action, _SubParsersAction):
                for name, sub in action.choices.items():
                    yield f"command {words} {name}"
                    yield from of(sub, f"{words} {name}")
            elif action.option_strings:
                yield f"option {words} {' '.join(action.option_strings)}"
            else:
                yield f"option {words} {action.dest}"

    yield from of(parser(), "pyrofl")


def messages() -> Iterator[str]:
    """Yield names, shapes and types of the tensors that clients send and that a server keeps."""
    data = toys.blobs()
    for module in pkgutil.iter_modules(pyrofl.models.__path__):
        build = getattr(import_module(f"pyrofl.models.{module.name}"), "build", None)
        if build is None:
            continue
        method = build(toys.net(), **promises.of(module.name).settings)
        state = toys.last(method, data, 1)
        for name, value in state.message.items():
            yield f"message {module.name} {name} {list(value.shape[1:])} {value.dtype}"
        for name, value in state.server.items():
            yield f"server {module.name} {name} {list(value.shape)} {value.dtype}"


def files() -> Iterator[str]:
    """Yield the files of runs of command and script, entries of JSON files, stored tensors."""
    with TemporaryDirectory() as folder:
        data = ["--data", "digits", "--clients", "4", "--per-class", "5", "--rounds", "1"]
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            main(["run", "pfedvem", *data, "--out", f"{folder}/command", "--quiet"])
        run = pyrofl.fit(pfedvem.build(toys.net()), toys.blobs(), 1, progress=False)
        run.save(Path(folder) / "script")
        for path in sorted(Path(folder).rglob("*")):
            yield f"file {path.relative_to(folder)}"
            if path.suffix == ".json":
                for name in json.loads(path.read_text()):
                    yield f"entry {path.relative_to(folder)} {name}"
            if path.suffix == ".safetensors":
                for name, value in load_file(path).items():
                    shape, dtype = list(value.shape), value.dtype
                    yield f"tensor {path.relative_to(folder)} {name} {shape} {dtype}"


def guarantees() -> Iterator[str]:
    """Yield the headings and the first cells of the pages of guarantees and faults."""
    for line in "\n".join(page.read_text() for page in GUARANTEES).splitlines():
        if line.startswith("## "):
            yield f"guarantee {line}"
        elif found := re.match(r"\| ([^|]*[a-z][^|]*) \|", line):
            yield f"guarantee {found.group(1)}"


if __name__ == "__main__":
    if "--make" in sys.argv:
        PATH.write_text("\n".join(lines()) + "\n")
    before, now = set(PATH.read_text().splitlines()), set(lines())
    for line in sorted(before - now):
        print("-", line)
    for line in sorted(now - before):
        print("+", line)
