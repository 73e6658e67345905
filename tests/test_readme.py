"""The README's code and that of the pages it leads to runs as printed, with fewer rounds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_table import PAGE, shown, written
from matplotlib import pyplot
from packaging.requirements import Requirement
from packaging.version import Version

from pyrofl import reference

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
DOCS = ROOT / "examples" / "docs"
PAGES = "\n".join((DOCS / f"{page}.md").read_text() for page in ("scripts", "hierarchical"))

CLIENTS = "ABCDEFGH"
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
INDEX = (DOCS / "index.md").read_text()
ROW = re.compile(r"(?m)^\| (\w+)(?:\[(\w)\])? \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$")
ROUNDING = 0.05  # of the table
MOMENTS = """
| | mean | sd | NUTS mean | NUTS sd |
|---|---:|---:|---:|---:|
| mu | 4.3 | 3.3 | 4.4 | 3.3 |
| tau | 3.5 | 3.1 | 3.6 | 3.1 |
| theta[A] | 6.0 | 5.5 | 6.2 | 5.4 |
| theta[B] | 4.7 | 4.7 | 5.0 | 4.7 |
| theta[C] | 3.9 | 5.1 | 3.9 | 5.3 |
| theta[D] | 4.6 | 4.8 | 4.8 | 4.7 |
| theta[E] | 3.6 | 4.7 | 3.5 | 4.6 |
| theta[F] | 4.0 | 4.8 | 4.1 | 4.8 |
| theta[G] | 6.2 | 5.0 | 6.3 | 5.1 |
| theta[H] | 4.7 | 5.1 | 4.9 | 5.2 |
"""


def moments(posterior: Any, name: str, client: str) -> tuple[float, float]:
    """Return mean and standard deviation of a variable's draws."""
    draws = posterior["posterior"][name]
    draws = draws.sel(client=client) if client else draws
    return float(draws.mean()), float(draws.std())


def test_the_first_posterior_is_that_of_nuts(capsys):
    """Means within 0.1 standard deviations of NUTS, standard deviations within 10%.

    Of 4,000 weighted draws some 2,500 are effective: errors are 0.02 deviations, and 2% or, of the
    heavy tail of tau, 4%.
    """
    names: dict[str, Any] = {}
    exec(BLOCKS[0], names)
    printed, rows = capsys.readouterr().out, ROW.findall(MOMENTS)
    assert [name + client for name, client, *_ in rows] == [
        "mu",
        "tau",
        *(f"theta{c}" for c in CLIENTS),
    ]
    for name, client, *numbers in rows:
        assert f"{name}[{client}]" in printed if client else name in printed
        (mean, sd), (ours, width, nuts, exact) = (
            moments(names["posterior"], name, client),
            map(float, numbers),
        )
        for found, spread in ((mean, sd), (ours, width)):
            assert abs(found - nuts) < 0.1 * exact + 2 * ROUNDING
            assert abs(spread - exact) < 0.1 * exact + 2 * ROUNDING


@pytest.mark.slow
def test_nuts_has_the_moments_of_the_table():
    """Within 0.15 standard deviations: of 4,000 draws of tau at least 400 are effective (0.05)."""
    names: dict[str, Any] = {}
    exec(BLOCKS[0].partition("run = ")[0], names)
    found = reference.nuts(
        names["method"], names["schools"].to("cpu", torch.float64), 1000, jit=True
    )
    for name, client, _, _, nuts, exact in ROW.findall(MOMENTS):
        mean, sd = moments(found, name, client)
        assert abs(mean - float(nuts)) < 0.15 * sd + ROUNDING
        assert abs(sd - float(exact)) < 0.15 * sd + ROUNDING


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what is saved goes there
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL))
    code = (
        re.sub(r"rounds=\d+", "rounds=1", code)
        .replace("draws=500", "draws=5")
        .replace("seeds=4", "seeds=2")
    )
    names: dict[str, object] = {}
    exec(code, names)
    pyplot.close("all")  # what ArviZ drew
    assert {"client", "draw", "head_out"} <= set(names["posterior"]["posterior"].dims)  # type: ignore[index]
    assert (tmp_path / "client_3.png").exists()
    assert names["state"].number == 1  # type: ignore[attr-defined]


def test_the_first_page_of_the_site_shows_what_its_program_prints(capsys):
    """Within 0.2 standard deviations, as 4,000 weighted draws may differ with versions of torch."""
    shown = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", INDEX, re.DOTALL)
    assert shown
    names: dict[str, Any] = {}
    exec(shown[1], names)
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    stated_header, *stated = (line.split() for line in shown[2].splitlines())
    assert header == stated_header
    assert [row[0] for row in rows] == [row[0] for row in stated]
    assert len(rows) == 2 + len(CLIENTS)
    for (_, mean, sd, *_), (_, *expected) in zip(rows, stated, strict=True):
        assert abs(float(mean) - float(expected[0])) < 0.2 * float(expected[1])
        assert abs(float(sd) - float(expected[1])) < 0.2 * float(expected[1])
    assert names["figure"].axes


def test_every_link_leads_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert len(links) > 20


@pytest.mark.parametrize("page", ["CONTRIBUTING", "SECURITY"])
def test_every_path_of_a_page_exists(page):
    text = (ROOT / f"{page}.md").read_text()
    paths = re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:md|toml))", text)
    paths += [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    paths = [path for path in paths if "NAME" not in path]
    assert [path for path in paths if not (ROOT / path.partition("#")[0]).exists()] == []
    assert len(paths) > 2


def test_the_tests_that_the_check_names_are_there():
    named = re.findall(r"tests/[\w/.]+", (ROOT / ".ci" / "run").read_text())
    assert len(named) > 4
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_there_are_two_commands():
    commands = [
        line
        for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
        for line in block.split("\n")
        if line
    ]
    assert len(commands) == 2
    assert "pyrofl compare" in commands[0]
    assert commands[1].endswith("pytest")


@pytest.mark.slow
def test_the_fault_table_is_what_the_tests_inject():
    # `python tests/fault_table.py` writes it. With a new method there are more than it says.
    table, found = (
        [re.split(r" \| ", row) for row in text.splitlines()[2:]]
        for text in (shown(PAGE.read_text()), written())
    )
    for (kind, count, promise), (injected, number, kept) in zip(table, found, strict=True):
        assert (kind, promise) == (injected, kept)
        assert int(count.replace(",", "")) <= int(number.replace(",", "")), kind


def test_installed_cpu_builds_of_torch_are_kept():
    """No requirement of the package, or of its extras, asks pip for another build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for some in project["optional-dependencies"].values() for one in some]
    found = [Requirement(one) for one in (*project["dependencies"], *extras)]
    torches = [one for one in found if one.name in ("torch", "torchvision")]
    assert {one.name for one in torches} == {"torch", "torchvision"}
    for one in torches:
        assert one.specifier.contains(Version("2.14.1+cpu"))
        assert not one.url


def test_the_first_command_installs_what_the_course_needs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert any(Requirement(one).extras >= {"course"} for one in extras["test"])
    course = {Requirement(one).name for one in extras["course"]}
    assert course >= {"jupytext", "docutils"}
