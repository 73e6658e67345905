"""Checks that output files of a command do not replace its input files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pyrofl.data.loaders.datasets import parts_of
from pyrofl.data.tables.table_files import files_of
from pyrofl.experiments.experiment import Experiment
from pyrofl.files.run_folder import HALF

FLAGS = ("data", "own_rows", "server_data", "net", "partition")
WRITTEN = re.compile(  # names of the files that run, compare, tune, benefit and report write
    r"(run|tune)\.json|(metrics|clients|rows|compare|benefit|tune)\.csv|tune\.journal|(checkpoint|[\d-]+)\.safetensors"
    rf"|posterior\.nc|report\.html|{HALF}"
)


def refuse_replaced_inputs(arguments: object, folder: str | Path) -> None:
    """Raise ValueError if writing results to a folder could replace one of the command's inputs."""
    for flag, file in input_files(arguments):
        for path in {os.path.abspath(file), os.path.realpath(file)}:
            below = any(Path(path).is_relative_to(one) for one in _both(folder))
            top, name = os.path.split(path)
            if below and (WRITTEN.fullmatch(name) or os.path.basename(top) == "figures"):
                raise ValueError(
                    f"--{flag} reads {file}, which the results in {folder} would replace; expected "
                    "another folder: --out DIR"
                )


def refuse_replaced_input(
    arguments: object, path: str | Path, run: str | Path | None = None
) -> None:
    """Raise ValueError if an output path is an input file or belongs to the results of a run."""
    path = Path(path)
    if WRITTEN.fullmatch(path.name) and os.path.lexists(path.with_name("run.json")):
        raise ValueError(f"--out {path} belongs to the results of a run; expected another file")
    inputs = [(f"--{flag} reads", file) for flag, file in input_files(arguments)]
    if run is not None:
        inputs += [("the run was fitted to", file) for _, file in input_files(_options(run))]
    for name, file in inputs:
        if set(_both(file)) & set(_both(path)) or _same(file, path):
            name += f" {file}, which --out {path} would replace"
            raise ValueError(f"{name}; expected another file")


def _options(run: str | Path) -> object:
    """Return the command-line options recorded in a run's folder, or None if none are recorded."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        facts = json.loads(Path(run, "run.json").read_text(encoding="utf-8"))
        return Experiment.of(facts["experiment"])
    return None


def input_files(arguments: object) -> Iterator[tuple[str, str]]:
    """Yield the option name and the path of every file that a command reads."""
    for name in FLAGS:
        spec = getattr(arguments, name, None)
        is_path = hasattr(arguments, "own_rows") and name in (
            "data",
            "own_rows",
        )  # those of `predict`
        for path in _files(spec, is_path) if isinstance(spec, str) else ():
            yield name.replace("_", "-"), path


def _files(spec: str, is_path: bool) -> list[str]:
    """Return the paths of the files named in an option's value, such as "csv:PATH"."""
    kind, _, path = spec.partition(":")
    if is_path or kind == "csv":
        return files_of(spec if is_path else path)
    code = spec.rpartition(":")[0]
    if code.endswith(".py"):
        return [code]
    return [part.partition(":")[2] for part in parts_of(spec) if part.startswith("npz:")]


def _both(path: str | Path) -> tuple[str, str]:
    return os.path.abspath(path), os.path.realpath(path)


def _same(file: str, path: str | Path) -> bool:
    return os.path.exists(file) and os.path.exists(path) and os.path.samefile(file, path)
