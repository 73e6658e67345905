"""The README's code and that of the pages it leads to runs as printed, with fewer rounds."""

from __future__ import annotations

import re
from pathlib import Path

from fault_table import PAGE, shown, written
from matplotlib import pyplot

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
DOCS = ROOT / "examples" / "docs"
PAGES = "\n".join(
    (DOCS / f"{page}.md").read_text() for page in ("scripts", "sites", "hierarchical")
)


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what is saved goes there
    first = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert first == re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)[:1]
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


def test_every_link_leads_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert len(links) > 20


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


def test_the_fault_table_is_what_the_tests_inject():
    # `python tests/fault_table.py` writes it. With a new method there are more than it says.
    table, found = (
        [re.split(r" \| ", row) for row in text.splitlines()[2:]]
        for text in (shown(PAGE.read_text()), written())
    )
    for (kind, count, promise), (injected, number, kept) in zip(table, found, strict=True):
        assert (kind, promise) == (injected, kept)
        assert int(count.replace(",", "")) <= int(number.replace(",", "")), kind
