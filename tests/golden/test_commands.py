"""The commands of README and start page print what they printed when it was stored."""

from __future__ import annotations

import json

import pytest
from golden import commands

STORED = json.loads(commands.PATH.read_text(encoding="utf-8"))


def test_the_stored_commands_are_those_of_the_pages():
    """If not: python tests/golden/commands.py --make."""
    found = commands.of_pages()
    assert list(STORED) == found
    assert {command.split()[1] for command in found} == {"list", "explain", "compare", "--help"}
    assert sum("compare" in command for command in found) == len(commands.PAGES)


def test_numbers_are_told_from_words():
    printed = {
        "stdout": ["fc1.bias  -0.5 (+1e-3 to 30,084) 95%"],
        "stderr": ["cnn-100 x2 round 3/5"],
    }
    lines, numbers = commands.words_and_numbers(printed)
    assert lines == ["fc1.bias # (# to #) #%", "cnn-# x2 round #/#"]
    assert numbers == [-0.5, 0.001, 30084, 95, 100, 3, 5]


@pytest.mark.slow
@pytest.mark.parametrize("command", STORED)
def test_a_command_prints_what_it_printed(command):
    found, stored = commands.run(command), STORED[command]
    assert found["status"] == stored["status"] == 0
    words, numbers = commands.words_and_numbers(found)
    stored_words, stored_numbers = commands.words_and_numbers(stored)
    assert words == stored_words
    # Accuracies and losses differ by rounding between processors.
    assert numbers == pytest.approx(stored_numbers, abs=0.02, rel=0.05)
