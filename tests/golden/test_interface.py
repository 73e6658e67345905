"""Names, settings, options, messages and files are those that were listed."""

from __future__ import annotations

import pytest
from golden import interface


@pytest.fixture(scope="module")
def now() -> set[str]:
    return set(interface.lines())


def test_the_list_has_every_part(now):
    kinds = {line.partition(" ")[0] for line in now}
    assert kinds == {
        *("name", "setting", "command", "option", "message", "server", "file", "entry"),
        *("guarantee", "tensor"),
    }
    assert len(now) > 1200


def test_nothing_has_changed_unnoticed(now):
    """After a change: python tests/golden/interface.py --make, and a line in CHANGELOG.md."""
    before = set(interface.PATH.read_text().splitlines())
    assert sorted(before - now) == []
    assert sorted(now - before) == []
