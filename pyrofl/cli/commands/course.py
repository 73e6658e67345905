"""The command `pyrofl course`: notebooks, tests, slides, a project and an exam of a course."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import pyrofl
from pyrofl.cli.output import lesson_figures, notebooks, slides
from pyrofl.data.loaders import datasets
from pyrofl.experiments.console import show
from pyrofl.files import run_folder, text_tables
from pyrofl.user_warnings import warn_user

SOLUTION_BLOCK = re.compile(r"<!-- solution -->\n(.*?)<!-- end -->\n", re.DOTALL)
NBGRADER_CONFIG = """c = get_config()  # of nbgrader
c.CourseDirectory.course_id = "pyrofl"
c.Execute.timeout = 1800  # seconds of a cell; by default, fits of more than 30 s are stopped
c.Execute.iopub_timeout = 120
"""
PROJECT_DATA = "rat_tumours"


class WrongAnswer(NamedTuple):
    """Typical wrong answer to an exercise, which its tests must reject."""

    why: str
    code: str


def lessons_folder() -> Path:
    """Return the folder of the lessons: inside the installed package, or of the checkout.

    Raises:
        ValueError: if there is neither.
    """
    package = Path(pyrofl.__file__).parent
    for folder in (package / "lessons", package.parent / "examples" / "tutorials"):
        if (folder / "course").is_dir():
            return folder
    raise ValueError(
        "the lessons are not part of this installation; expected a wheel of pyrofl or a checkout"
    )


def lessons() -> list[Path]:
    """Return the source files of all lessons, in their order."""
    return sorted(lessons_folder().glob("[0-9]*.py"))


def wrong_answers() -> Mapping[str, Mapping[int, list[WrongAnswer]]]:
    """Return the typical wrong answers: lesson -> number of the exercise -> answers."""
    text = (lessons_folder() / "course" / "wrong_answers.yaml").read_text("utf-8")
    return {
        lesson: {
            number: [WrongAnswer(**one) for one in answers]
            for number, answers in wrong_answers_of.items()
        }
        for lesson, wrong_answers_of in yaml.safe_load(text).items()
    }


def course(args: Namespace) -> None:
    """Write a course into a folder, in the layout of nbgrader."""
    notebooks.check_installed()
    slides.check_installed()
    out = run_folder.prepare(Path(args.out))
    files = dict(contents(not args.no_figures))
    for name, text in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    graded = sum(name.startswith("release/") for name in files)
    show(
        f"{out}: {graded} lessons for students in release/, with solutions in source/; slides/, "
        "project/, exam/; begin with README.md, which is for teachers"
    )


def contents(with_figures: bool = True) -> Iterator[tuple[str, str]]:
    """Yield name and text of every file of the course; for figures, the lessons are run."""
    read = {path.stem: notebooks.read(path) for path in lessons()}
    for name, notebook in read.items() if with_figures else ():
        show(f"running lesson {name} for the figures of its slides (--no-figures omits them)")
        try:
            lesson_figures.run_cells(notebook)
        except Exception as error:  # of any code of the lesson
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            warn_user(f"slides/{name}.html lacks figures, as the lesson fails: {reason}")
    for path in lessons():
        for folder, teacher in (("source", True), ("release", False)):
            text = notebooks.write(notebooks.of_course(path, teacher))
            yield f"{folder}/{path.stem}/{path.stem}.ipynb", text
        yield f"slides/{path.stem}.html", slides.deck(read[path.stem])
    own = lessons_folder() / "course"
    for name in ("exam", "project"):
        text = (own / f"{name}.md").read_text("utf-8")
        yield f"{name}/{name}.md", SOLUTION_BLOCK.sub("", text)
        yield f"{name}/{name}_answers.md", SOLUTION_BLOCK.sub(r"\1", text)
    yield f"project/{PROJECT_DATA}.csv", project_data()
    yield "nbgrader_config.py", NBGRADER_CONFIG
    page = (own / "teachers.md").read_text("utf-8")
    yield (
        "README.md",
        "\n".join([page.rstrip() + "\n", *lesson_table(read), *exercise_lines(read), ""]),
    )


def project_data() -> str:
    """Return the data of the project as CSV: rats and rats with a tumor in 71 experiments."""
    data = datasets.load(PROJECT_DATA)
    rows = zip(data.x[:, 0].tolist(), data.y.tolist(), strict=True)
    lines = [f"{i},{int(rats)},{int(ill)}" for i, (rats, ill) in enumerate(rows, 1)]
    return "\n".join(["experiment,rats,tumors", *lines, ""])


def lesson_table(read: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table of times, needs and points, given the lessons."""
    measured = yaml.safe_load((lessons_folder() / "course" / "cpu_seconds.yaml").read_text("utf-8"))
    head = ("Lesson", "Needs", "CPU minutes to run", "Minutes to read", "Minutes of exercises")
    rows = []
    for lesson, notebook in read.items():
        reading, work = notebooks.minutes(notebook)
        points = sum(one.points for one in notebooks.exercises(notebook))
        run = f"{measured[lesson] / 60:.1f}"
        rows.append((lesson, notebooks.needs(notebook), run, reading, work, points))
    yield text_tables.markdown((*head, "Points"), rows)


def exercise_lines(read: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines on exercises and typical wrong answers, given the lessons."""
    yield "\n## Exercises and typical wrong answers\n\nThe tests reject each of these answers.\n"
    wrong = wrong_answers()
    for lesson, notebook in read.items():
        for one in notebooks.exercises(notebook):
            why = "; ".join(answer.why for answer in wrong[lesson][one.number])
            about = f"exercise {one.number} ({one.level}, {one.points} points)"
            yield f"- **{lesson}, {about}**: {why}"
