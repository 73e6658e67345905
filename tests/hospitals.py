"""Projects of three hospitals, and sites that answer without Flower."""

from __future__ import annotations

import csv
import json
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import arviz
import numpy as np
import torch

import pyrofl
from pyrofl.data import Federation
from pyrofl.files import checkpoint_file
from pyrofl.files.yaml_files import read_yaml
from pyrofl.flower.project import STUDY_FILE, Project
from pyrofl.flower.rows import rows_of
from pyrofl.flower.site import reply_or_refuse
from pyrofl.flower.template import new
from pyrofl.inference.engine.participation import everyone, sample_clients
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first, method_schedule
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.transport.records import Records, deserialize, serialize
from pyrofl.tensors import role

NAMES = ("hospital_1", "hospital_2", "hospital_3")


USUAL = {
    "methods": ["pfedvem"],
    "features": ["age", "dose", "pressure"],
    "target": "recovered",
    "classes": ["no", "yes"],
    "net": "softmax",
    "dtype": "float64",
    "rounds": 2,
}


def project(folder: Path, **changes: object) -> Project:
    """Write a study of networks with settings of its own, and read it."""
    new(folder)
    return written(folder, USUAL | changes)


def changed(folder: Path, **changes: object) -> Project:
    """Replace entries of a study file, or add them."""
    return written(folder, read_yaml(folder / STUDY_FILE, yes_is_word=True) | changes)


def written(folder: Path, entries: Mapping[str, object]) -> Project:
    """Write a study file, as JSON, which is YAML, and read it."""
    (folder / STUDY_FILE).write_text(json.dumps(entries, indent=1))
    return Project.read(folder)


def wards(folder: Path, count: int = 2) -> None:
    """Give every row of a project's sites a ward."""
    for path in sorted((folder / "sites").glob("*.csv")):
        with open(path, newline="") as file:
            header, *rows = csv.reader(file)
        with open(path, "w", newline="") as file:
            table = csv.writer(file)
            table.writerow([*header, "ward"])
            table.writerows([*row, f"ward {i % count}"] for i, row in enumerate(rows))


def whole(made: Project) -> Federation:
    """Join the rows of all sites."""
    parts = [rows_of(made, str(made.folder / f"sites/{name}.csv"), name) for name in NAMES]
    begin = torch.tensor([0, *(len(part.y) for part in parts)]).cumsum(0).tolist()
    rows = {
        kind: [r + at for part, at in zip(parts, begin, strict=False) for r in getattr(part, kind)]
        for kind in ("train", "test")
    }
    names = [name for part in parts for name in part.names]
    x, y = (torch.cat([getattr(part, n) for part in parts]) for n in ("x", "y"))
    return Federation(x, y, tuple(rows["train"]), tuple(rows["test"]), tuple(names), made.classes)


def looped(made: Project, label: str, absent: Sequence[set[str]] = ()) -> RoundState:
    """Make the rounds of a project in one process; absent: clients that are left out, by round."""
    data = whole(made)
    at = method_schedule(made.build(data.clients, server=True)[label])
    state = first(at(0), data, made.seed)
    for number in range(made.rounds):
        out = absent[number] if number < len(absent) else set()
        lost = torch.tensor([data.names.index(name) for name in out], dtype=torch.long)
        asked, ids = sample_clients(at(number), data.clients, made.seed, number, everyone, None)
        heard = asked[~torch.isin(asked, lost)]
        state = run_round(at(number), data, state, ids, heard, lost, seed=made.seed, chunk_size=1)
    return state


@dataclass
class Wire:
    """Sites in this process; a message is serialize and deserialize on both ways.

    Attributes:
        sites: node -> arguments of `Site`.
        spoil: (round of messages from 0, node, answer) -> what arrives; None: nothing does.
        tamper: (node, message) -> what the node gets.
        messages: all that came by, node -> message.
    """

    sites: dict[int, dict[str, Any]]
    spoil: Callable[[int, int, Records], Records | None] = lambda number, node, answer: answer
    tamper: Callable[[int, Records], Records] = lambda node, message: message
    messages: list[tuple[int, Records, Records]] = field(default_factory=list)
    number: int = 0

    def present(self) -> Sequence[int]:
        return list(self.sites)

    def exchange(self, messages: Mapping[int, Records], timeout: float) -> dict[int, Records]:
        answers = {}
        for node, message in messages.items():
            answer = sent(reply_or_refuse(self.sites[node], self.tamper(node, sent(message))))
            self.messages.append((node, message, answer))
            spoilt = self.spoil(self.number, node, answer)
            if spoilt is not None:
                answers[node] = spoilt
        self.number += 1
        return answers

    def tell(self, messages: Mapping[int, Records]) -> None:
        for node, message in messages.items():
            reply_or_refuse(self.sites[node], sent(message))


def sent(records: Records) -> Records:
    """Send a message over a wire that keeps what NumPy and JSON keep."""
    return deserialize(*serialize(records))


def wire(made: Project, states: Path, **options: Any) -> Wire:
    """Return the three sites of a project."""
    return Wire({10 + j: site(made, states, name) for j, name in enumerate(NAMES)}, **options)


def site(made: Project, states: Path, name: str, **options: Any) -> dict[str, Any]:
    """Return what a site is called with."""
    data = made.folder / f"sites/{name}.csv"
    usual = {"name": name, "project": str(made.file), "data": str(data)}
    return usual | {"state": str(states / name), "rules": lenient(states)} | options


def lenient(folder: Path) -> str:
    """Write rules that permit clients of one row, and return the path of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{name} = 1" for name in ("min-rows", "min-level-rows", "rows-per-parameter")]
    lines += ["min-events = 0", "exact-values = true"]
    (folder / "rules.toml").write_text("\n".join(lines) + "\n")
    return str(folder / "rules.toml")


EFFECTS = """
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl.models import fisher, pvi


def schools(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


def logistic(received, local, batch):
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        b = pyro.sample("b", dist.Normal(mu, tau))
        with batch.rows():
            logits = b + (beta * batch.x).sum(-1)
            both = torch.stack([0 * logits, logits], -1)
            pyro.sample("y", dist.Categorical(logits=both), obs=batch.y)


def levels(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        value = mu + tau[..., None] * z
        at = batch.x[..., 0].long().expand(*value.shape[:-2], -1)
        with batch.rows():
            logits = value.squeeze(-2).gather(-1, at)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def counts(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with batch.rows():
            a = pyro.sample("a", dist.Normal(mu, tau))
            pyro.sample("y", dist.Poisson(a.exp()), obs=batch.y)


def eight_schools(data):
    return pyrofl.hierarchical(schools, data, shared="mu tau")


def mixed(data):
    return pyrofl.hierarchical(logistic, data, shared="beta mu tau")


def partitioned(data):
    return pvi.hierarchical(logistic, data, shared="beta mu tau")


def summed(data):
    net = pyrofl.nets.build("softmax", (3,), 2)
    return pyrofl.privacy.summed(fisher.build(net))


def of_levels(data):
    return pyrofl.hierarchical(levels, data, shared="mu tau")


def of_rows(data):
    return pyrofl.hierarchical(counts, data, shared="mu tau")
"""
SCHOOLS = {  # effect and standard error of each, at three sites
    "hospital_1": [("A", 28, 15), ("B", 8, 10), ("C", -3, 16)],
    "hospital_2": [("D", 7, 11)],
    "hospital_3": [("E", -1, 9), ("F", 1, 11), ("G", 18, 10), ("H", 12, 18)],
}


LEVELS = {  # level and response of the rows of clients; some lack a level, or have one row
    "hospital_1": [("A", v % 3, v % 2) for v in range(11)] + [("B", 1, 0)],
    "hospital_2": [("C", v % 2, v < 5) for v in range(7)],
    "hospital_3": [("D", 2, 1), ("D", 0, 1), ("E", 1, 0), ("E", 1, 1), ("E", 2, 0)],
}
COUNTS = {  # index and count of the rows of clients
    "hospital_1": [("A", 0, 2), ("A", 1, 0), ("A", 2, 5), ("B", 0, 1)],
    "hospital_2": [("C", 0, 3), ("C", 1, 1)],
    "hospital_3": [("D", 0, 0), ("E", 0, 4), ("E", 1, 2)],
}


def hierarchical(folder: Path, name: str, **changes: Any) -> Project:
    """Write a project of a hierarchical program, by the name of its method in `EFFECTS`."""
    changes = {"methods": (f"effects.py:{name}",), "test_fraction": 0.0} | changes
    tables = {"eight_schools": SCHOOLS, "of_levels": LEVELS, "of_rows": COUNTS}
    if name in tables:
        own: Any = {"client_column": "school", "features": ("error",), "target": "effect"}
        made = project(folder, classes=(), likelihood="normal:1", **own, **changes)
        for site_, rows in tables[name].items():
            order = (0, 1, 2) if rows is SCHOOLS[site_] else (0, 2, 1)
            table = [tuple(int(row[i]) if i else row[i] for i in order) for row in rows]
            with open(folder / f"sites/{site_}.csv", "w", newline="") as file:
                csv.writer(file).writerows([("school", "effect", "error"), *table])
    else:
        made = project(folder, **changes)
    (folder / "effects.py").write_text(EFFECTS)
    return made


def in_one_process(made: Project) -> pyrofl.Run:
    """Fit the project's method, built from the rows of all sites, until it has converged."""
    data, (spec,) = whole(made), made.methods
    method = runpy.run_path(str(made.folder / "effects.py"))[spec.rpartition(":")[2]](data)
    how: Any = {"seed": made.seed, "stop_when": "converged", "progress": False, "chunk_size": 1}
    return pyrofl.fit(method, data, made.rounds, **how)


def at_server(stored: Path, run: pyrofl.Run) -> pyrofl.Run:
    """Return a run in one process with the server's stored state of a study."""
    server = role("state", checkpoint_file.read_any(stored)[1])
    assert server.keys() == run.state.server.keys()
    return run.copy(state=replace(run.state, server=dict(server)))


def same_draws(stored: Path, run: pyrofl.Run, close: float = 1e-8) -> None:
    """Compare the draws of a server's stored state with those of a run in one process.

    The server's chains amplify rounding, more so in several rounds.
    """
    found = at_server(stored, run).posterior(200)
    for name, value in run.posterior(200).items():
        torch.testing.assert_close(found[name], value, rtol=close, atol=close)


def same_posteriors(out: Path, states: Path, run: pyrofl.Run) -> None:
    """Compare the posteriors that a study stored with `to_arviz` in one process.

    Args:
        out: folder of the method's results at the server.
        states: folder of the states of all sites.
        run: the fit in one process.
    """
    expected = run.to_arviz(1000, progress=False)
    found = arviz.from_netcdf(out / "posterior.nc")
    assert found["posterior"].attrs["corrected"] == expected["posterior"].attrs["corrected"]
    shared = set(run.method.shared.split()) & set(expected["posterior"])
    assert set(found["posterior"]) == shared
    _same(found, expected)
    for name in NAMES:
        own = arviz.from_netcdf(states / name / out.name / "posterior.nc")
        assert set(own["posterior"]) == set(expected["posterior"])
        assert own["posterior"].attrs["corrected"] == expected["posterior"].attrs["corrected"]
        _same(own, expected)


def _same(found: Any, expected: Any) -> None:
    """Compare draws, weights and their diagnostics; clients by their names."""
    for group in ("posterior", "sample_stats"):
        for name, value in found.get(group, {}).items():
            other = expected[group][name]
            if "client" in value.dims:
                other = other.sel(client=value["client"])
            np.testing.assert_allclose(value, other, rtol=1e-8, atol=1e-8, err_msg=name)


def weighed(wire: Wire) -> list[tuple[int, str]]:
    """Return node and label of each reply with marginal likelihoods, in their order."""
    return [(node, w) for node, _, told in wire.messages for w in told if w.startswith("weights/")]
