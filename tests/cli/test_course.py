"""The command `pyrofl course`: its files, and what the tests of its exercises accept and reject."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import pytest

pytest.importorskip("jupytext")
pytest.importorskip("docutils")

from pyrofl.cli import main
from pyrofl.cli.commands import course
from pyrofl.cli.output import lesson_figures, notebooks, slides

LESSONS = course.lessons()


def lesson(path: Path) -> tuple[dict[str, Any], list[notebooks.Exercise]]:
    """Return the names that a lesson imports, and its graded exercises."""
    matplotlib.use("agg")
    notebook = notebooks.read(path)
    imports = next(cell["source"] for cell in notebook.cells if cell["cell_type"] == "code")
    names: dict[str, Any] = {}
    exec(re.sub(r"(?m)^%.*", "", imports), names)
    return names, notebooks.exercises(notebook)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in wrong answers
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_tests_accept_the_solution_and_reject_wrong_answers(path):
    """Exercises need the imports of their lesson and the exercises before, nothing else."""
    names, found = lesson(path)
    wrong = course.wrong_answers()[path.stem]
    assert [e.number for e in found] == [*wrong]
    for exercise in found:
        before = dict(names)
        exec(exercise.solution, names)
        exec(exercise.test, names)
        assert len(wrong[exercise.number]) >= 3
        for answer in wrong[exercise.number]:
            own = dict(before)
            exec(answer.code, own)
            with pytest.raises(AssertionError) as raised:
                exec(exercise.test, own)
            assert str(raised.value), f"{answer.why}: the test has no message"
        with pytest.raises(NotImplementedError):
            exec(notebooks.EMPTY, dict(before))


def bound(source: str) -> set[str]:
    """Return the names that a cell binds outside functions and comprehensions."""
    found, nodes = set(), list(ast.parse(re.sub(r"(?m)^%.*", "", source)).body)
    local = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif not isinstance(node, local):
            found |= (
                {node.id}
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                else set()
            )
            nodes += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_no_cell_that_students_get_takes_the_name_of_an_exercise(path):
    """Otherwise the tests of an empty exercise call this value."""
    notebook = notebooks.read(path)
    asked = set().union(*(bound(e.solution) for e in notebooks.exercises(notebook)))
    assert asked
    for cell in notebook.cells:
        if cell["cell_type"] == "code" and not notebooks.tags(cell) & {"solution", "remove-cell"}:
            assert not asked & bound(cell["source"])


def expressions(source: str) -> dict[str, ast.expr]:
    """Return the expressions of a cell by their form, in which names do not count."""
    tree = ast.parse(re.sub(r"(?m)^%.*", "", source))
    return {
        re.sub(r"(?:id|arg)='\w+'|ctx=\w+\(\)", "", ast.dump(node)): node
        for node in ast.walk(tree)
        if isinstance(node, ast.expr)
    }


def results(source: str) -> list[ast.expr]:
    """Return the values that a solution assigns and returns."""
    nodes = ast.walk(ast.parse(source))
    return [n.value for n in nodes if isinstance(n, ast.Return | ast.Assign) and n.value]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_no_solution_is_in_the_cells_of_the_lesson_with_other_names(path):
    notebook = notebooks.read(path)
    hidden = {"solution", "test", "remove-cell"}
    seen = set[str]()
    for cell in notebook.cells:
        if cell["cell_type"] == "code" and not notebooks.tags(cell) & hidden:
            seen |= expressions(cell["source"]).keys()
    for exercise in notebooks.exercises(notebook):
        forms = [next(iter(expressions(ast.unparse(v)))) for v in results(exercise.solution)]
        assert not forms or not {*forms} <= seen, f"exercise {exercise.number} is a copy"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_messages_of_tests_do_not_state_the_solution(path):
    for exercise in notebooks.exercises(notebooks.read(path)):
        nodes = ast.walk(ast.parse(exercise.test))
        messages = [ast.unparse(n.msg) for n in nodes if isinstance(n, ast.Assert) and n.msg]
        assert messages
        for message in (re.sub(r"[\s*`]", "", one) for one in messages):
            for value in (re.sub(r"[\s*]", "", ast.unparse(v)) for v in results(exercise.solution)):
                assert len(value) < 6 or value not in message, f"{exercise.number}: {message}"


def of_pyrofl(value: Any) -> bool:
    return (getattr(value, "__module__", None) or getattr(value, "__name__", "")).startswith(
        "pyrofl"
    )


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_has_an_exercise_that_uses_pyrofl(path):
    names, found = lesson(path)
    library = {name for name, value in names.items() if of_pyrofl(value)}
    assert library
    for exercise in found:
        code = ast.walk(ast.parse(f"{exercise.solution}\n{exercise.test}"))
        if library & {node.id for node in code if isinstance(node, ast.Name)}:
            return
    pytest.fail("no exercise uses pyrofl")


def test_every_lesson_has_exercises_of_three_levels():
    assert [int(path.stem[:2]) for path in LESSONS] == [*range(1, len(LESSONS) + 1)]
    for path in LESSONS:
        levels = [e.level for e in notebooks.exercises(notebooks.read(path))]
        assert {*levels} == {"basic", "intermediate", "advanced"}
        assert levels == sorted(levels, key=["basic", "intermediate", "advanced"].index)


def test_lessons_take_the_minutes_that_they_state():
    for path in LESSONS:
        estimate = sum(notebooks.minutes(notebooks.read(path)))
        (stated,) = re.findall(r"After this lesson \(about (\d+) minutes\)", path.read_text())
        assert abs(estimate - int(stated)) <= 3
        assert 45 <= estimate <= 75


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("course") / "out"
    assert main(["course", str(out), "--no-figures"]) == 0
    return out


def cells(path: Path) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    return [c | {"source": "".join(c["source"])} for c in notebook["cells"]]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_students_get_the_lesson_without_solutions(path, written):
    name = f"{path.stem}/{path.stem}.ipynb"
    teacher, student = cells(written / "source" / name), cells(written / "release" / name)
    assert len(teacher) == len(student)
    solved = 0
    for one, other in zip(teacher, student, strict=True):
        assert one["id"] == other["id"]
        assert one["metadata"] == other["metadata"]
        if "### BEGIN SOLUTION" in one["source"]:
            question = one["metadata"]["nbgrader"]["grade_id"].startswith("question-")
            assert other["source"] == (notebooks.OPTIONAL if question else notebooks.EMPTY)
            solved += 1
        else:
            assert one["source"] == other["source"]
        assert "# quick:" not in one["source"]
        assert not re.search(r"(?i)\btutorials?\b(?!/)", one["source"]), "notebooks are lessons"
    words = [c for c in student if c["source"].startswith("*Your answer to question ")]
    asked = re.findall(
        r"(?m)^# (\d+)\. ", path.read_text().split("# ## Explore")[1].split("# %%")[0]
    )
    assert [c["source"] for c in words] == [f"*Your answer to question {n}:*" for n in asked]
    assert all(c["cell_type"] == "markdown" and "nbgrader" not in c["metadata"] for c in words)
    tagged = [c for c in notebooks.read(path).cells if "solution" in notebooks.tags(c)]
    assert solved == len(tagged) > 0
    checks = [c["source"] for c in notebooks.read(path).cells if "remove-cell" in notebooks.tags(c)]
    assert not {*checks} & {c["source"] for c in student}


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_metadata_is_that_of_nbgrader(path, written):
    about = [
        cell["metadata"]["nbgrader"]
        for cell in cells(written / "release" / path.stem / f"{path.stem}.ipynb")
        if "nbgrader" in cell["metadata"]
    ]
    names = [one["grade_id"] for one in about]
    assert len({*names}) == len(names) >= 6
    assert all(one["schema_version"] == 3 and not one["task"] for one in about)
    explored = [one for one in about if one["grade_id"].startswith("question-")]
    assert all(one["solution"] and not one["grade"] for one in explored)
    about = about[: -len(explored)]
    for solution, test in zip(about[::2], about[1::2], strict=True):
        assert (solution["solution"], solution["grade"], solution["locked"]) == (True, False, False)
        assert (test["solution"], test["grade"], test["locked"]) == (False, True, True)
        assert test["points"] > 0
        assert test["grade_id"] == f"{solution['grade_id']}-test"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_notebooks_of_teachers_pass_and_those_of_students_fail_where_empty(path, written):
    imports, _ = lesson(path)
    for folder, solved in (("source", True), ("release", False)):
        names = dict(imports)
        for cell in cells(written / folder / path.stem / f"{path.stem}.ipynb"):
            if not cell["metadata"].get("nbgrader", {}).get("grade_id", "").startswith("exercise-"):
                continue
            if solved:
                exec(cell["source"], names)
            else:
                missing = (
                    NameError if cell["metadata"]["nbgrader"]["grade"] else NotImplementedError
                )
                with pytest.raises(missing):
                    exec(cell["source"], names)


@pytest.mark.slow
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_notebooks_of_teachers_run_in_a_kernel(path, written, tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    book = nbformat.read(written / "source" / path.stem / f"{path.stem}.ipynb", as_version=4)
    nbformat.validate(book)
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute(cwd=str(tmp_path))


@pytest.mark.slow
def test_nbgrader_gives_all_points_to_the_solution_and_none_to_an_empty_notebook(written, tmp_path):
    pytest.importorskip("nbgrader")
    api = pytest.importorskip("nbgrader.api")
    course_folder, name = tmp_path / "graded", "04_factors"
    shutil.copytree(written, course_folder)
    known = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for who, folder in (("teacher", "source"), ("empty", "release")):
        to = course_folder / "submitted" / who / name
        shutil.copytree(written / folder / name, to)
    for words in (["generate_assignment"], ["autograde"]):
        command = ["nbgrader", *words, name, "--force"]
        subprocess.run(command, cwd=course_folder, env=known, check=True, capture_output=True)
    with api.Gradebook(f"sqlite:///{course_folder / 'gradebook.db'}") as book:
        points = {who: book.find_submission(name, who).score for who in ("teacher", "empty")}
        assert points == {"teacher": book.find_assignment(name).max_score, "empty": 0.0}
        assert points["teacher"] > 0


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_slides_are_complete_and_need_no_network(path, written):
    text = (written / "slides" / f"{path.stem}.html").read_text()
    assert slides.slides_title(notebooks.read(path)) in text
    assert text.count("<section>") >= 5
    assert "{{" not in text.partition("<body>")[0]
    assert not re.search(r"""(?:src|href)=["']|@import|url\(""", text)
    assert "$$" not in text
    for slide in re.findall(r"(?s)<section>(.*?)</section>", text):
        inside = re.sub(r"(?s)<h\d>.*?</h\d>", "", slide).strip()
        assert not re.fullmatch(r"(?s)<p>(?:(?!</p>|[.?] [A-Z]).)*</p>", inside), "one sentence"
    solutions = [e.solution for e in notebooks.exercises(notebooks.read(path))]
    assert not any(line in text for s in solutions for line in s.splitlines() if "return" in line)


DRAWN = """# # A lesson
#
# First sentence.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
from pyrofl import figures

figure, axes = plt.subplots()
axes.plot([0, 1], label="a")
plt.show()

# %%
print("not on a slide")
figures.coverage({"mu": {"pvi": [0.1, 0.5, 0.7]}})

# %% [markdown]
# ## A section
#
# A **definition**.

# %%
moving = figures.moving(lambda axes, frame: axes.plot([0, frame]), range(2))
moving

# %% [markdown]
# ## Exercises

# %%
raise RuntimeError("exercises are not run")
"""


def test_figures_of_a_lesson_are_on_its_slides(capsys):
    notebook = import_module("jupytext").reads(f"# %% [markdown]\n{DRAWN}", fmt="py:percent")
    bare = slides.deck(notebook)
    assert "<img" not in bare
    lesson_figures.run_cells(notebook)
    assert capsys.readouterr().out == ""
    deck = slides.deck(notebook)
    images = re.findall(r'<img src="data:image/png;base64,([^"]+)"', deck)
    assert len(images) == 3
    assert all(b64decode(image).startswith(b"\x89PNG") for image in images)
    assert re.search(r"A section</h2>\s*<p>A <strong>definition</strong>.</p>\s*<p><img", deck)
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", deck)


def test_short_code_has_what_it_prints_on_its_slide():
    lesson = "# # 1. A lesson\n\n# %% [markdown]\n# ## Numbers\n#\n# A **sum**.\n\n# %%\n"
    cell = "print(1234 + 5678)\n\n# %%\nimport pandas as pd\n\npd.DataFrame({'size': [41, 43]})\n"
    notebook = import_module("jupytext").reads(f"# %% [markdown]\n{lesson}{cell}", fmt="py:percent")
    assert "6912" not in slides.deck(notebook)
    lesson_figures.run_cells(notebook)
    (slide,) = slides.slides_of(notebook)[1:]
    assert "print(1234 + 5678)\n```\n\n```text\n6912\n```" in slide
    assert "size" in slide.rpartition("```text")[2]


def test_a_formula_has_the_sentence_that_leads_to_it_on_its_slide():
    shown = list(slides.pages("## A", ["a.", "b.", "c.", "d.", "e.", "f:", "$$x$$"]))
    assert shown == ["## A\n\na.\n\nb.\n\nc.\n\nd.\n\ne.", "## A (continued)\n\nf:\n\n$$x$$"]
    text = "One. Two. This is **three**. Four. Its mean is\n\n$$x.$$"
    assert slides.key_points(text) == ["Two.", "This is **three**.", "Its mean is", "$$x.$$"]


def test_a_figure_has_room_on_its_slide():
    shown = list(slides.pages("## A", ["one", "two", "three", "![figure](data:)", "four"]))
    assert shown == ["## A\n\none\n\ntwo\n\nthree", "## A (continued)\n\n![figure](data:)\n\nfour"]


def test_a_lesson_that_fails_is_named_and_keeps_its_slides(monkeypatch):
    def fail(notebook):
        raise ModuleNotFoundError("No module named 'dp_accounting'")

    monkeypatch.setattr(course.lesson_figures, "run_cells", fail)
    monkeypatch.setattr(course, "lessons", lambda: LESSONS[:1])
    with pytest.warns(UserWarning, match=r"slides/01_\w+.html lacks figures.*dp_accounting"):
        found = dict(course.contents())
    assert f"slides/{LESSONS[0].stem}.html" in found


def test_exam_and_project_have_answers_for_teachers_only(written, monkeypatch):
    exam, answers = ((written / "exam" / f"exam{end}.md").read_text() for end in ("", "_answers"))
    assert len(re.findall(r"(?m)^## Question \d+ \(\d+ points\)$", exam)) == 10
    assert answers.count("**Answer.**") == 10
    assert "Answer" not in exam
    assert "<!--" not in exam + answers
    for code in re.findall(r"```python\n(.*?)```", answers, re.DOTALL):
        exec(code, {})
    brief = (written / "project" / "project.md").read_text()
    lines = (written / "project" / "rat_tumours.csv").read_text().splitlines()
    assert f"{len(lines) - 1} experiments" in brief
    assert lines[0] == "experiment,rats,tumors"
    rats, ill = (sum(int(line.split(",")[k]) for line in lines[1:]) for k in (1, 2))
    key = (written / "project" / "project_answers.md").read_text()
    assert f"all rats together {ill}/{rats:,} = {ill / rats:.2f}" in key
    monkeypatch.chdir(written / "project")
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", brief, re.DOTALL)[0], names)
    assert names["data"].clients == len(lines) - 1
    assert float(names["data"].y.sum()) == ill


def test_the_page_for_teachers_lists_all_lessons_and_wrong_answers(written):
    text = (written / "README.md").read_text()
    for path in LESSONS:
        (line,) = re.findall(rf"(?m)^\| {path.stem} \| (.*) \|$", text)
        needed, minutes, *_ = line.split(" | ")
        assert float(minutes) > 0
        assert needed in " ".join(path.read_text().replace("#", "").split())
        earlier = [int(n) for n in re.findall(r"\d+", needed)]
        assert max(earlier, default=0) < int(path.stem[:2])
    for found in course.wrong_answers().values():
        for some in found.values():
            assert all(answer.why in text for answer in some)


def test_a_folder_that_is_not_empty_is_refused(tmp_path, capsys):
    (tmp_path / "mine.txt").touch()
    assert main(["course", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_missing_libraries_are_refused_before_any_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jupytext", None)
    assert main(["course", str(tmp_path / "out")]) == 2
    assert "pip install -e '.[course]' in the clone" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("short", [r"\tfrac12", r"\frac12", r"\frac 1 2", r"\frac1{2}"])
def test_short_fractions_are_read_as_latex_reads_them(short):
    assert slides.mathml(short, False) == slides.mathml(r"\frac{1}{2}", False)
    assert slides.mathml(rf"{short}\alpha", False) == slides.mathml(r"\frac{1}{2}\alpha", False)
