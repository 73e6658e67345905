"""The README's code runs as printed, with fewer rounds, and its commands are two."""

from __future__ import annotations

import re
from pathlib import Path

from fault_table import shown, written

TEXT = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what is saved goes there
    code = "\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
    code = (
        re.sub(r"rounds=\d+", "rounds=1", code)
        .replace("draws=500", "draws=5")
        .replace("seeds=4", "seeds=2")
    )
    names: dict[str, object] = {}
    exec(code, names)
    assert {"client", "draw", "head_out"} <= set(names["posterior"]["posterior"].dims)  # type: ignore[index]
    assert names["state"].number == 1  # type: ignore[attr-defined]


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
        for text in (shown(TEXT), written())
    )
    for (kind, count, promise), (injected, number, kept) in zip(table, found, strict=True):
        assert (kind, promise) == (injected, kept)
        assert int(count.replace(",", "")) <= int(number.replace(",", "")), kind
