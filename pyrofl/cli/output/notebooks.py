"""Notebooks of the course: those of teachers, and those of students without the solutions.

The cells of a lesson are tagged in its source, `examples/tutorials/NN_NAME.py`:

    solution      solution of an exercise, or answer to a question to explore; students get an empty
                  cell, and a question has a Markdown cell for words before it
    test          tests of the solution in the cell before; its points are in the exercise's heading
    remove-cell   checks of numbers in the text; part of the site's build only

Metadata and markers are those of nbgrader (schema 3), https://nbgrader.readthedocs.io.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

SCHEMA = 3  # version of nbgrader's metadata
MINUTES = {"basic": 5, "intermediate": 6, "advanced": 8}  # for an exercise
OPEN_QUESTION = 12  # minutes for one question without grade
WORDS_PER_MINUTE, LINES_PER_MINUTE = 62, 8  # read in a minute: words of prose, lines of code
EMPTY = "# YOUR CODE HERE\nraise NotImplementedError()"
OPTIONAL = "# Code for your answer, if it needs any."
HEADING = re.compile(r"(?m)^### (Exercise (\d+)) \((\w+), (\d+) points?\)$")


@dataclass(frozen=True)
class Exercise:
    """Graded exercise of a lesson: number, level, points, source of its solution and tests."""

    number: int
    level: str
    points: int
    solution: str
    test: str


def read(path: Path) -> Any:
    """Read a lesson as a notebook of nbformat, without its comment on a short run.

    Raises:
        ValueError: if jupytext is not installed.
    """
    notebook = check_installed().read(path, fmt="py:percent")
    for cell in notebook.cells:
        cell["source"] = re.sub(r"(?m)^# quick: .*\n?", "", cell["source"]).rstrip()
    return notebook


def write(notebook: Any) -> str:
    """Return the text of an .ipynb file."""
    return f"{check_installed().writes(notebook, fmt='ipynb').rstrip()}\n"


def check_installed() -> Any:
    """Return the module jupytext.

    Raises:
        ValueError: if it is not installed.
    """
    try:
        return import_module("jupytext")
    except ImportError as error:
        raise ValueError(
            "a course is written by jupytext; expected pip install -e '.[course]' in the clone"
        ) from error


def tags(cell: Any) -> set[str]:
    """Return the tags of a cell."""
    return {*cell["metadata"].get("tags", ())}


def exercises(notebook: Any) -> list[Exercise]:
    """Return the graded exercises of a lesson, in their order.

    Raises:
        ValueError: if an exercise is not followed by one cell with its solution and one with tests.
    """
    exercise_list, cells = [], notebook.cells
    for i, cell in enumerate(cells):
        if heading := HEADING.search(cell["source"]):
            name, number, level, points = heading.groups()
            after = [tags(c) & {"solution", "test"} for c in cells[i + 1 : i + 3]]
            if after != [{"solution"}, {"test"}]:
                raise ValueError(f"{name} is not followed by a solution and a test")
            cell_tags = (cells[i + 1]["source"], cells[i + 2]["source"])
            exercise_list.append(Exercise(int(number), level, int(points), *cell_tags))
    return exercise_list


def needs(notebook: Any) -> str:
    """Return what a lesson needs, as its first cell states: other lessons or knowledge."""
    text = " ".join(notebook.cells[0]["source"].split())
    return text.partition("You need ")[2].partition(". ")[0].removesuffix(".")


def minutes(notebook: Any) -> tuple[int, int]:
    """Estimate the minutes to read and run a lesson, and those of its exercises.

    One question to explore is included. The numbers per word, line and exercise are those of three
    trial readings of lessons 1 to 4, each about 60 to 65 minutes without these questions.
    """
    words = lines = 0
    for cell in notebook.cells:
        if cell["cell_type"] == "markdown":
            words += len(cell["source"].split())
        elif not tags(cell) & {"solution", "test", "remove-cell"}:
            lines += sum(bool(line.strip()) for line in cell["source"].splitlines())
    explored = [c["source"] for c in notebook.cells if "## Explore" in c["source"]]
    work = sum(MINUTES[e.level] for e in exercises(notebook)) + OPEN_QUESTION * bool(explored)
    return round(words / WORDS_PER_MINUTE + lines / LINES_PER_MINUTE), work


def of_course(path: Path, teacher: bool) -> Any:
    """Return a lesson as a notebook of nbformat, for teachers or for students."""
    notebook = read(path)
    points = {e.number: e.points for e in exercises(notebook)}
    cells, number, question = [], 0, 0
    for i, cell in enumerate(notebook.cells):
        cell_tags = tags(cell)
        if "remove-cell" in cell_tags:
            continue
        if heading := HEADING.search(cell["source"]):
            number = int(heading[2])
        elif cell["cell_type"] == "markdown":
            number = 0
        source = cell["source"]
        metadata: dict[str, Any] = {}
        if "solution" in cell_tags:
            question += not number
            metadata = grading_metadata(
                f"exercise-{number}" if number else f"question-{question}", 0
            )
            if not number:
                words = type(cell)(id=f"{path.stem}-{i}-words", cell_type="markdown")
                words.update(metadata={}, source=f"*Your answer to question {question}:*")
                cells.append(words)
            empty = EMPTY if number else OPTIONAL
            source = f"### BEGIN SOLUTION\n{source}\n### END SOLUTION" if teacher else empty
        elif "test" in cell_tags:
            metadata = grading_metadata(f"exercise-{number}-test", points[number])
        cell.update({"id": f"{path.stem}-{i}", "source": source, "metadata": metadata})
        cells.append(cell)
    notebook.cells = cells
    for key in {*notebook.metadata} - {"kernelspec"}:
        del notebook.metadata[key]
    return notebook


def grading_metadata(name: str, points: int) -> dict[str, Any]:
    """Return nbgrader's metadata of a cell: with points it holds tests, otherwise a solution."""
    test = points > 0
    about = {"grade": test, "grade_id": name, "locked": test, "schema_version": SCHEMA}
    about |= {"solution": not test, "task": False} | ({"points": points} if test else {})
    return {"nbgrader": about}
