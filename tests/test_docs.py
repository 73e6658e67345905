"""The pages of examples/docs run as printed: code, what it prints, and numbers in tables."""

from __future__ import annotations

import csv
import inspect
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pyro
import pytest
from matplotlib import pyplot
from papers import plots
from pictures import overlaps
from promises import others_slow

import pyrofl
from pyrofl import figures
from pyrofl.choices import IMAGES, MANUAL
from pyrofl.cli.parser import parser
from pyrofl.experiments.methods import builds
from pyrofl.flower.disclosure import leaving
from pyrofl.flower.project import Project
from pyrofl.flower.tables import read_site_tables
from pyrofl.flower.template import new
from pyrofl.inference import hmc as sampler
from pyrofl.inference.posteriors import corrected, importance_sampling
from pyrofl.inference.transport.site_rules import SiteRules
from pyrofl.models import pvi
from pyrofl.nouns import use

DOCS = Path(__file__).parent.parent / "examples" / "docs"
BEGIN, *SECTIONS = re.split(r"(?m)^(?=## )", (DOCS / "programs.md").read_text())
POSTERIORS = DOCS.parent / "posteriors"


def code(text: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def printed(text: str, names: dict[str, object]) -> str:
    """Run the code of a text, one block after the other, and return what it prints."""
    with redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code(text), names)
    pyplot.close("all")  # what ArviZ drew for the reader would stay for the tests that follow
    return out.getvalue()


def compared(name: str) -> dict[str, list[dict[str, str]]]:
    """Return the lines of a table of posteriors, by section of the page."""
    found: dict[str, list[dict[str, str]]] = {}
    with (POSTERIORS / f"{name}.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            found.setdefault(line["section"], []).append(line)
    return found


def told(text: str) -> str:
    """Return what a text says that its code prints."""
    return "".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL))


def title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("## ")


PRINTING = [
    "conformal",
    "how_a_round_works",
    "what_leaves_a_client",
    "own_network",
    "own_tables",
    "image_data",
    "priors",
    "regression",
    "../../CONTRIBUTING",
]


@pytest.mark.parametrize("page", PRINTING)
def test_a_page_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / f"{page}.md").read_text()
    assert printed(text, {}) == told(text)


def test_the_page_of_images_has_all_data_sets():
    text = (DOCS / "image_data.md").read_text()
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert set(re.findall("`([^`]+)`", "".join(cells))) == IMAGES.keys() | MANUAL.keys()


def test_the_page_of_sites_has_the_commands_and_the_table_that_there_are(tmp_path):
    text = (DOCS / "flower.md").read_text()
    commands = re.findall(r"(?m)^(?:\w+=\S+ )*pyrofl (.+)$", text)
    assert len(commands) >= 5
    for words in commands:
        parser().parse_args(shlex.split(words))
    project = Project.read(new(tmp_path / "study"))
    rows = read_site_tables(project, str(tmp_path / "study/sites/hospital_2.csv"), "hospital_2")
    with use(project.nouns):
        assert leaving(project, rows, rules=SiteRules()) in text


def test_noise_and_secure_sums_are_as_the_page_says():
    pytest.importorskip("dp_accounting")
    pytest.importorskip("cryptography")
    text = (DOCS / "privacy.md").read_text()
    assert printed(text, {}) == told(text)


@pytest.fixture
def few(monkeypatch):
    """Shorten importance sampling and the chains of likelihood factors."""
    monkeypatch.setattr(corrected, "MIN_SHARED_DRAWS", 40)
    monkeypatch.setattr(importance_sampling, "PILOT_DRAWS_PER_ENTRY", 10)
    monkeypatch.setattr(importance_sampling, "MAX_TRIED", 40)
    for name, value in {
        "NUM_METRIC_UPDATES": 1,
        "ITERATIONS_PER_UPDATE": 4,
        "DRAWS_PER_CHAIN": 4,
        "THINNING": 1,
    }.items():
        monkeypatch.setattr(sampler, name, value)
    monkeypatch.setattr(pvi, "DEFAULT_NUM_PARTICLES", 2)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("section", SECTIONS, ids=title)
def test_programs_run(section):
    """In one round, with few weights; a site of every line of the table is there."""
    short = BEGIN.replace("fit(method, data,", "fit(method, data, 1,")
    names: dict[str, object] = {}
    printed(short.replace("draws=4000", "draws=4"), names)
    assert printed(section, names) == told(section)
    for line in compared("programs")[title(section)]:
        values = names["found"][line["site"]].values  # type: ignore[index]
        assert values[0, 0].size > int(line["element"] or 0)


def test_tables_of_posteriors_have_the_sections_of_their_pages():
    assert [*compared("programs")] == [title(section) for section in SECTIONS]
    assert [*compared("cookbook")] == [title(section) for section in COOKBOOK]


@pytest.mark.parametrize("section", SECTIONS, ids=title)
def test_tables_of_programs_agree_with_the_reference(section):
    """Means within 0.12 standard deviations, spreads within 12 %, both and 0.01 for the rounding.

    Both sides are draws: of the fit 4000 that are worth 1700 or more, of NUTS 4000 that are worth
    1000 or more. So by chance means differ by 0.04 standard deviations, and spreads by 3 to 4 %, as
    tails of some are longer than a normal one's: 0.12 is three standard errors.
    """
    for line in compared("programs")[title(section)]:
        mean, sd = float(line["mean"]), float(line["sd"])
        expected, spread = float(line["reference_mean"]), float(line["reference_sd"])
        assert abs(mean - expected) < 0.12 * spread + 0.01
        assert abs(sd - spread) < 0.12 * spread + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS, ids=title)
def test_programs_find_what_their_tables_say(section):
    names: dict[str, object] = {}
    printed(BEGIN, names)
    printed(section, names)
    for line in compared("programs")[title(section)]:
        one, sd = drawn(names, line["site"], line["element"]), float(line["sd"])
        assert one.mean() == pytest.approx(float(line["mean"]), abs=0.1 * sd + 0.005)
        assert one.std() == pytest.approx(sd, abs=0.1 * sd + 0.005)


RECIPES, *COOKBOOK = re.split(r"(?m)^(?=## )", (DOCS / "cookbook.md").read_text())


def drawn(names: dict[str, Any], site: str, place: str) -> np.ndarray:
    """Return the draws of one element of a site of a fitted program."""
    values = names["found"][site].values
    return values.reshape(values.shape[0] * values.shape[1], -1)[:, int(place or 0)]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("section", COOKBOOK, ids=title)
def test_recipes_run_and_their_tables_have_the_truth(section):
    """In one round; the page's posterior is within 3 standard deviations of the truth."""
    short = RECIPES.replace("fit(method, data,", "fit(method, data, 1,")
    names: dict[str, Any] = {}
    printed(short.replace("draws=2000", "draws=4"), names)
    printed(section, names)
    lines = compared("cookbook")[title(section)]
    assert len(lines) >= 3
    for line in lines:
        assert drawn(names, line["site"], line["element"]).size == 4
        assert abs(float(line["mean"]) - float(line["truth"])) < 3 * float(line["sd"])


@pytest.mark.slow
@pytest.mark.parametrize("section", COOKBOOK, ids=title)
def test_recipes_find_the_truth(section):
    """As printed: the truth within 3 sd, and the page's numbers within 0.25 sd and the rounding.

    2,000 weighted draws are worth 500 or more, so that means are off by up to 0.05 sd: five of it.
    """
    names: dict[str, Any] = {}
    printed(RECIPES, names)
    assert printed(section, names).startswith("converged")
    for line in compared("cookbook")[title(section)]:
        found = drawn(names, line["site"], line["element"])
        assert abs(found.mean() - float(line["truth"])) < 3 * found.std()
        assert abs(found.mean() - float(line["mean"])) < 0.25 * float(line["sd"]) + 0.005


def shown(page: str) -> str:
    """Return the text of a page of the site that was built, once for all tests."""
    return (built() / page).read_text()


@cache
def built() -> Path:
    """Build the site, warnings as errors, without executing the tutorials."""
    for needed in ("sphinx", "myst_nb", "pydata_sphinx_theme", "sphinx_copybutton", "jupytext"):
        pytest.importorskip(needed)
    out = Path(mkdtemp()) / "site"
    words = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-t",
        "quick",
        "-b",
        "html",
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    made = [*words, "-d", str(out.parent / "trees"), str(DOCS), str(out)]
    done = subprocess.run(made, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_the_site_has_a_card_for_every_method():
    for name in builds():
        text = shown(f"made/methods/{name}.html")
        assert "<math" in text
        assert f'src="../../_images/{name}.svg"' in text
        assert f"made/methods/{name}.html" in shown("methods.html")


def offered(module: str) -> list[str]:
    """Name the public functions and classes of a module, or of `pyrofl` itself."""
    home = getattr(pyrofl, module) if module else pyrofl
    own = [n for n, v in vars(home).items() if getattr(v, "__module__", 0) and n[0] != "_"]
    own = [n for n in own if vars(home)[n].__module__.startswith(home.__name__)]
    values = {name: getattr(home, name) for name in getattr(home, "__all__", own)}
    return [n for n, v in values.items() if inspect.isclass(v) or inspect.isroutine(v)]


def test_the_reference_lists_every_public_name(monkeypatch):
    pytest.importorskip("sphinx")
    pytest.importorskip("jupytext")
    monkeypatch.syspath_prepend(DOCS)
    made = dict(import_module("making.pages").references())
    index = (DOCS / "reference.md").read_text()
    listed = set(re.findall(r"(?m)^   ([\w]+)$", index))
    assert listed == {*pyrofl.FUNCTIONS, *pyrofl.__all__} - {"ClosedFormUpdate", "Tensors"}
    assert "`pyrofl.Tensors` is a type" in index
    assert "`pyrofl.ClosedFormUpdate` is the type" in index
    assert sum(len(offered(module)) for module in pyrofl.MODULES.keys() - {"models"}) > 150
    for module in pyrofl.MODULES.keys() - {"models"}:
        assert f"<made/reference/{module}>`" in index
        page = made[f"reference/{module}.md"]
        named = getattr(getattr(pyrofl, module), "__all__", ())
        for name in {*named, *offered(module)}:
            assert re.search(rf"pyrofl\.(?:{module}\.)?{name}\b", page), (module, name)


@pytest.mark.slow
def test_every_public_name_has_a_page_with_a_link_to_its_source():
    names = [f"pyrofl.{name}" for name in (*pyrofl.FUNCTIONS, *offered(""))]
    for module in pyrofl.MODULES.keys() - {"models"}:
        home = getattr(pyrofl, module)
        own = (n for n in offered(module) if getattr(home, n) is not vars(pyrofl).get(n))
        names += [f"pyrofl.{module}.{name}" for name in own]
    for name in names:
        text = shown(f"made/api/{name}.html")
        assert f'id="{name}"' in text, name
        assert "_modules/" in text, name
        assert f"made/api/{name}.html" in shown("reference.html") + shown(
            f"made/reference/{name.split('.')[1]}.html" if name.count(".") > 1 else "reference.html"
        ).replace("../api", "made/api"), name


@pytest.mark.parametrize("thing", [pyrofl.fit, pyrofl.conformal, pyrofl.tune])
def test_a_signature_shows_all_arguments_by_name(thing, monkeypatch):
    for needed in ("sphinx", "jupytext"):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(DOCS)
    by_name = import_module("making.signs").by_name
    plain = re.sub(r": [^=,]+ = ", "=", str(inspect.signature(thing)).partition(" ->")[0])
    assert "**" in plain
    args, returns = by_name(None, "function", thing.__name__, thing, None, plain, "Run")
    assert "**" not in args
    assert returns == "Run"
    wanted = "participation=..., " if thing is not pyrofl.conformal else "chunk_size=..."
    assert wanted in args


@pytest.mark.slow
def test_the_page_of_fit_shows_its_arguments_by_name():
    text = re.sub(r"<[^>]+>", "", shown("made/api/pyrofl.fit.html"))
    (first, *others) = re.findall(r"fit\((method.*?)\)\[source\]", text, re.DOTALL)
    assert others == []  # no overloads
    assert "**" not in first
    assert all(name in first for name in ("eval_every", "callback", "participation", "privacy"))


def links(path: Path) -> set[str]:
    """Return the addresses in the checkout that a page links to, outside of code."""
    text = re.sub(r"(?s)<!-- site: .*?-->|^```.*?^```$", "", path.read_text(), flags=re.MULTILINE)
    found = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)}
    return {link for link in found if link and "://" not in link}


def test_every_link_of_a_page_leads_to_a_file_of_the_checkout():
    pages = [*DOCS.glob("*.md"), *DOCS.parent.glob("*.md"), *DOCS.parent.glob("papers/**/*.md")]
    dead = {(p.name, n) for p in pages for n in links(p) if not (p.parent / n).exists()}
    assert dead == set()
    assert sum(len(links(page)) for page in pages) > 100
    generated = {name for page in pages for name in links(page) if name.startswith("made/")}
    assert generated == set()  # not tracked: `making.links` leads there on the site


def test_a_diagram_is_the_same_each_time_and_its_legend_has_every_kind(monkeypatch):
    pytest.importorskip("jupytext")  # of the formulas that `making` writes
    monkeypatch.syspath_prepend(DOCS)
    draw = import_module("making.cards").diagram
    written = draw("pfedvem")
    assert draw("pfedvem") == written
    shapes = re.findall(rb'<path id="(\w+)"', written)
    legend = written[written.index(b'id="legend_1"') :]
    marks = re.findall(
        rb'<use xlink:href="#(m\w+)"[^>]*style="fill: (#\w+); stroke: (#\w+)', legend
    )
    assert len(marks) == len({*marks}) == 4  # the server's, kept by the client, drawn, observed
    assert [name for name, *_ in marks] == [name for name in shapes if name.startswith(b"m")]


@pytest.mark.slow
def test_the_site_fetches_nothing():
    tag = r'<(?:script|link|img|iframe|source|video)\b[^>]*?\b(?:src|href|srcset)="(?:https?:)?//'
    loads = {".html": tag, ".css": r"(?:url\(|@import)\s*[\"']?(?:https?:)?//"}
    assert re.search(tag, '<link rel="stylesheet" href="https://a.b/c.css">')
    for page in built().rglob("*"):
        if pattern := loads.get(page.suffix):
            assert not re.search(pattern, page.read_text()), page.name


def pages_found(site: Path, query: str) -> set[str]:
    """Return the pages with all words of a query, without the words that the site ignores."""
    stemmer = pytest.importorskip("snowballstemmer").stemmer
    text = (site / "searchindex.js").read_text("utf-8")
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    language = (site / "_static" / "language_data.js").read_text("utf-8")
    ignored = json.loads(re.findall(r"stopwords = new Set\((\[.*?\])\)", language)[0])
    words = [word for word in re.findall(r"\w+", query.lower()) if word not in ignored]
    assert words, query
    found = []
    for word in stemmer("english").stemWords(words):
        numbers = set()
        for terms in (index["terms"], index["titleterms"]):
            value = terms.get(word, [])
            numbers |= {*value} if isinstance(value, list) else {value}
        found.append({index["docnames"][number] for number in numbers})
    return set.intersection(*found)


@pytest.mark.slow
@pytest.mark.parametrize("query", ["learning rate schedule", "own metric", "stopping rule"])
def test_the_search_of_the_site_finds_the_page_on_own_networks(query):
    assert "own_network" in pages_found(built(), query)


@pytest.mark.slow
def test_every_page_has_the_logo_and_the_versions_of_the_site():
    for page in ("index.html", "made/api/pyrofl.Run.html"):
        text = shown(page)
        assert "_static/logo.svg" in text
        assert re.search(r'class="versions">\s*<summary>\d+\.\d+', text)


def test_a_large_module_has_tables_by_subject(monkeypatch):
    pytest.importorskip("jupytext")
    monkeypatch.syspath_prepend(DOCS)
    pages = import_module("making.pages")
    made = dict(pages.references())
    for module in ("checks", "figures", "data", "priors"):
        assert made[f"reference/{module}.md"].count("autosummary::") >= 2, module
    tables = dict(pages.summaries()["pyrofl.Run"])
    assert {"save", "to_arviz"} <= {*tables["Methods"]}
    assert "status" in tables["Properties"]


def test_figures_of_pages_can_be_read_on_a_telephone(monkeypatch):
    """At 390 px, the width of a telephone, text is at least nine pixels high."""
    pytest.importorskip("sphinx")
    pytest.importorskip("jupytext")
    monkeypatch.syspath_prepend(DOCS)
    drawn = import_module("making.which").which().decode()
    points = float(re.findall(r'<svg [^>]*?width="([\d.]+)pt"', drawn)[0])
    assert 10 * 390 / points >= 9  # text of 10 points
    readme = import_module("making.readme_figures")
    assert 10 / 72 * 390 / readme.WIDTH >= 9


DRAWING = [
    name
    for name, draw in vars(figures).items()
    if inspect.isfunction(draw) and draw.__annotations__.get("return") == "Figure"
]
DRAWING = sorted([*DRAWING, *plots.__all__])


def test_every_figure_is_in_the_gallery(monkeypatch):
    pytest.importorskip("jupytext")
    monkeypatch.syspath_prepend(DOCS)
    questions = import_module("making.gallery").QUESTIONS
    assert sorted(" ".join(questions.values()).split()) == DRAWING
    assert sorted(path.stem for path in (DOCS / "gallery").glob("*.py")) == DRAWING


@pytest.mark.parametrize("name", others_slow(DRAWING, DRAWING[::5]))
def test_an_entry_of_the_gallery_draws_its_figure_in_about_ten_lines(name):
    path = DOCS / "gallery" / f"{name}.py"
    lines = [line for line in path.read_text().splitlines() if line and "import" not in line]
    assert len(lines) <= 15
    module = "plots" if name in plots.__all__ else "figures"
    assert f"{module}.{name}(" in path.read_text()
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    figure = runpy.run_path(str(path))["figure"]
    assert overlaps(figure) == []
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_the_start_leads_to_a_posterior(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what is drawn goes there
    text = (DOCS / "start.md").read_text()
    first = (DOCS.parent.parent / "README.md").read_text()
    assert code(text).startswith(code(first).partition("print(")[0])  # tests/test_readme.py fits it
    short = text.replace("fit(method, schools)", "fit(method, schools, 1)").replace(
        "draws=4000", "draws=10"
    )
    told = printed(short, {})
    assert all(name in told for name in ("mu", "tau", "theta"))
    assert (tmp_path / "schools.png").exists()


@pytest.mark.parametrize(
    "text", ["w = sum_j tau_j mu_j / sum_j tau_j", "p(y | x_u; w), ||v_j - w||^2"]
)
def test_formulas_of_docstrings_become_mathml(text, monkeypatch):
    pytest.importorskip("docutils")
    monkeypatch.syspath_prepend(str(DOCS / "making"))
    made = import_module("formulas").mathml(text)
    assert made.startswith("<math")
    assert "<msub>" in made or "<munder>" in made


def test_the_page_for_pyro_users_runs():
    text = (DOCS / "pyro.md").read_text()
    with pyro.get_param_store().scope():
        assert printed(text, {}) == told(text)


def test_the_page_on_reading_a_method_quotes_its_file():
    text = (DOCS / "read_a_method.md").read_text()
    quotes = re.findall(r"```(?:python|text)\n(.*?)```", text, re.DOTALL)
    lines = (DOCS.parent.parent / "models" / "pfedvem.py").read_text().splitlines()
    source = "\n".join(line.strip() for line in lines)
    assert len(quotes) >= 8
    for quote in quotes:
        assert "\n".join(line.strip() for line in quote.strip().splitlines()) in source, quote


def test_the_page_on_rounds_quotes_the_code():
    text = (DOCS / "how_a_round_works.md").read_text()
    root = DOCS.parent.parent / "inference"
    source = "".join((root / f).read_text() for f in ("engine/round.py", "training/phases.py"))
    table = re.findall(r"(?m)^\| [^|]+ \| (`[^|]+) \|", text)
    quotes = [
        quote.partition("...")[0] for cell in table for quote in re.findall("`([^`]+)`", cell)
    ]
    assert len(quotes) >= 10
    assert [quote for quote in quotes if quote not in source] == []
    for name in re.findall(r"(?m)^ +([a-zA-Z_.]+)  +\S", text):
        assert (
            f"def {name.rpartition('.')[2]}(" in source + "def federate("
            or f"class {name}" in source
        )
