"""Statements of the pages in examples/docs that code can check."""

from __future__ import annotations

import inspect
import re
import shlex
import tomllib
from argparse import ArgumentParser, _SubParsersAction
from importlib import import_module
from pathlib import Path
from types import ModuleType

import promises
import pytest
import toys
from torch import nn

import pyrofl
from pyrofl import docstrings
from pyrofl.cli.output import cards
from pyrofl.cli.parser import parser
from pyrofl.experiments import console
from pyrofl.experiments.methods import builds
from pyrofl.experiments.settings import arguments, read_settings
from pyrofl.models.regression.families import FAMILIES
from pyrofl.reports import calibration

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "examples" / "docs"
CARD = re.compile(r"\]\(\.\./\.\./models/(\w+)(?:/__init__)?\.py\)")
INTERVALS = r"\*\*Do you need calibrated intervals\?\*\*"
ROUGH = r"\*\*Are approximate uncertainties enough\?\*\*"
PROGRAMS = {"likelihood_factors", "two_stage", "conjugate"}  # of programs, not of networks
UNMEASURED = "These methods are not part of the simulation:"


@pytest.fixture
def making(monkeypatch) -> ModuleType:
    """Return the package that makes pages."""
    for needed in ("jupytext", "docutils"):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(str(DOCS))
    pytest.importorskip("sphinx")
    return import_module("making")


def paper(name: str) -> docstrings.Paper:
    return docstrings.paper(import_module(f"pyrofl.models.{name}").__doc__ or "")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def between(text: str, begin: str, end: str) -> str:
    found = re.search(f"{begin}(.*?){end}", text, re.DOTALL)
    assert found
    return found.group(1)


def test_advice_on_intervals_follows_the_calibration_table(making):
    rows = calibration.intervals(calibration.LINEAR)
    assert len(rows) > 20
    holds = {row.method for row in rows if row.calibrated}
    text = page("which")
    assert {*CARD.findall(between(text, INTERVALS, ROUGH))} - PROGRAMS == holds
    rough = between(text, ROUGH, UNMEASURED)
    assert {*CARD.findall(rough)} == {row.method for row in rows} - holds
    stated = re.findall(CARD.pattern + r" \((\d+)(?: to (\d+))?%", rough)
    assert len(stated) == len(CARD.findall(rough))
    for method, low, high in stated:
        percents = [row.percent for row in rows if row.method == method]
        assert (min(percents), max(percents)) == (int(low), int(high or low)), method
    unmeasured = CARD.findall(between(text, UNMEASURED, r"\*\*Is one model"))
    assert len(unmeasured) >= 5
    assert not {*unmeasured} & {row.method for row in rows}
    names = {"PVI": "pvi", "FedLap": "fedlap", "FedEP": "fedep", "Fisher merging": "fisher"}
    diagonal = re.findall(rf"(\d+)(?: to (\d+))?% \(({'|'.join(names)})[,)]", text)
    assert len(diagonal) == len(names)
    for low, high, name in diagonal:
        own = [r for r in rows if r.method == names[name] and "diagonal" in r.setting]
        assert not any(r.calibrated for r in own)
        percents = [r.percent for r in own]
        assert (min(percents), max(percents)) == (int(low), int(high or low)), name


def test_the_decision_figure_follows_the_calibration_table(making):
    rows = calibration.intervals(calibration.LINEAR)
    questions = dict(import_module("making.which").QUESTIONS)
    chosen = {q: " ".join(m for _, m in answers).split() for q, answers in questions.items()}
    first, rough, *_ = chosen.values()
    assert {*first} - PROGRAMS == {row.method for row in rows if row.calibrated}
    assert {row.method for row in rows if not row.calibrated} - {*first} <= {*rough}
    every = [method for some in chosen.values() for method in some]
    assert sorted({*every} - PROGRAMS) == sorted(builds().keys() - {"local"})
    assert len(every) == len({*every})
    assert {*first} >= PROGRAMS


@pytest.mark.parametrize("name", ["pvi", "pfedvem", "fedpop", "fola", "fedavg"])
def test_a_card_reports_how_often_intervals_hold(name, making):
    rows = [r for r in calibration.intervals(calibration.LINEAR) if r.method == name]
    text = import_module("making.cards").page(cards.card(name))
    assert ("95% intervals contain the truth" in text) == bool(rows)
    for row in rows:
        kind = "not calibrated" if not row.calibrated else "calibrated"
        stated = between(text, "contain the truth", "See ")
        assert re.search(rf"(?<!not ){kind}: [^;]*\b{row.percent}%", stated), row


def test_no_card_promises_intervals_that_do_not_hold(making):
    holds = {r.method for r in calibration.intervals(calibration.LINEAR) if r.calibrated}
    for name in builds().keys() - holds:
        use = paper(name).use
        assert not re.search(r"intervals (?!are too narrow)|how sure|calibrated", use), name


def test_guarantees_name_the_methods_without_secure_sums():
    net, refused = toys.net(), set()
    for name, build in builds().items():
        needs = "server_data" in inspect.signature(build).parameters
        try:
            pyrofl.privacy.summed(build(net, **({"server_data": toys.blobs().x} if needs else {})))
        except ValueError:
            refused.add(name)
    (stated,) = re.findall(r"The servers of (.+?) read\s+individual", page("guarantees"))
    assert {name.lower() for name in re.split(r", | and ", stated)} == refused
    (apart,) = re.findall(r"robust aggregation rules, (.+?)\. PVI", page("privacy"), re.DOTALL)
    assert {n.lower() for n in re.split(r",\s|\sand ", apart)} == refused - {"pvi"}


def test_no_page_claims_that_a_method_is_missing():
    missing = re.compile(r"([A-Z]\w+(?:, \w+)*(?: and \w+)?) (?:is|are) (?:not here|missing)")
    names = {paper(name).name.lower() for name in builds()} | builds().keys()
    for path in DOCS.glob("*.md"):
        for found in missing.findall(path.read_text()):
            some = {n.lower() for n in re.split(r", | and ", found)}
            assert not some & names, (path.name, found)


PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]
PAGES += sorted((ROOT / "examples" / "tutorials").glob("[0-9]*.py"))
SPAN = re.compile(r"`([^`\n]+)`")
OF_RAY = {"--head", "--num-cpus", "--node-ip-address", "--include-dashboard", "--address"}
OF_FLOWER = {
    *("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile", "--enable-supernode-auth"),
    *("--disable-runtime-dependency-installation", "--superlink", "--root-certificates"),
    *("--auth-supernode-private-key", "--node-config", "--run-config"),
}
OTHERS = (
    OF_RAY | OF_FLOWER | {"--disable-usage-stats", "--no-index", "--find-links"}
)  # of other programs
OF_SCRIPTS = {
    option
    for path in (ROOT / "examples").rglob("*.py")
    for option in re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", path.read_text())
}


def flags(of: ArgumentParser) -> set[str]:
    """Return all long options of a parser and of those of its commands."""
    found = {word for action in of._actions for word in action.option_strings}
    for action in of._actions:
        if isinstance(action, _SubParsersAction):
            found = found.union(*map(flags, action.choices.values()))
    return found


def spans(path: Path) -> list[str]:
    """Return what a page has between backticks, outside of blocks of code."""
    return SPAN.findall(re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL))


def test_every_option_on_a_page_is_one_of_the_command_line():
    known = flags(parser()) | OTHERS | OF_SCRIPTS
    for path in PAGES:
        assert {*re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text())} <= known, path.name


def test_every_command_on_a_page_is_understood(capsys):
    count = 0
    for path in PAGES:
        text = re.sub(r"\\\n\s*", " ", path.read_text())
        for line in re.findall(
            r"(?m)^(?:    |\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?pyrofl (\w+ .+)$", text
        ):
            words = line.partition(" # ")[0].partition(" > ")[0]
            if "..." in words or not re.match(r"[a-z]+ ", words) or words.endswith((".", ",")):
                continue
            if words.split()[0] in flags_of_commands():
                parser().parse_args(shlex.split(words))  # exits with 2 otherwise
                count += 1
    assert count > 10


ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
ALL_PAGES += [*(ROOT / "examples").glob("*.md"), *(ROOT / "examples/papers").glob("**/README.md")]


def test_every_option_of_a_script_on_a_page_is_one_of_that_script():
    count = 0
    for path in ALL_PAGES:
        text = re.sub(r"\\\n\s*", " ", path.read_text())
        for script, words in re.findall(
            r"python (examples/[\w/]+\.py)([^`#|]*?)(?:`|#|\n\n|$)", text
        ):
            own = (ROOT / script).read_text()
            known = set(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", own))
            asked = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", words.partition("\npython")[0]))
            assert asked <= known, f"{path.name}: {script} has no {asked - known}"
            count += bool(asked)
    assert count > 20


def test_every_extra_on_a_page_is_one_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    known = set(tomllib.loads(text)["project"]["optional-dependencies"])
    for path in ALL_PAGES:
        for named in re.findall(r"(?:pyrofl|\.)\[([a-z,]+)\]'", path.read_text()):
            assert set(named.split(",")) <= known, (path.name, named)
    listed = re.search(r"further extras \(([^)]+)\)", (ROOT / "CONTRIBUTING.md").read_text())
    assert listed
    assert set(re.findall(r"`(\w+)`", listed.group(1))) <= known


def test_settings_of_commands_on_pages_are_those_of_their_methods():
    count = 0
    for path in ALL_PAGES:
        text = re.sub(r"\\?\n\s*", " ", path.read_text())
        for command in re.findall(r"pyrofl ((?:compare|run|tune) [^`#]*?--set [^`#]*)", text):
            words = shlex.split(command.split("```")[0])
            start = words.index("--set") + 1
            end = next((i for i, w in enumerate(words) if i > start and w[0] == "-"), len(words))
            chosen = [w for w in words[start:end] if "=" in w]
            names = [w for w in words[1 : words.index("--set")] if w in builds()]
            assert chosen, command
            assert names, command
            read_settings(chosen, {name: builds()[name] for name in names})
            count += 1
    assert count >= 3


def flags_of_commands() -> set[str]:
    """Return the names of the commands."""
    return {
        name
        for action in parser()._actions
        if isinstance(action, _SubParsersAction)
        for name in action.choices
    }


def test_every_name_and_file_on_a_page_is_there():
    homes = "checks|figures|reference|federations|nets|datasets|participation|aggregation|guides"
    name = re.compile(
        rf"(?:pyrofl\.|(?={homes}|privacy|pvi))((?:{homes}|privacy|pvi|[a-z]\w*)(?:\.\w+)*)"
    )
    file = re.compile(r"[\w./-]+\.py|(?:examples|inference|models|pyrofl|tests)/[\w./-]+")
    seen = 0
    for path in PAGES:
        for span in spans(path):
            if file.fullmatch(span) and "NAME" not in span and not span.endswith("_app.py"):
                places = (ROOT, ROOT / "examples", DOCS)
                assert any((place / span).exists() for place in places), (path.name, span)
                seen += 1
            elif (found := name.match(span)) and "." in span and " " not in span.partition("(")[0]:
                value: object = pyrofl
                dotted = found.group(1)
                for part in (
                    f"models.{dotted}".split(".") if dotted[:4] == "pvi." else dotted.split(".")
                ):
                    assert hasattr(value, part) or _imported(value, part), (path.name, span)
                    value = getattr(value, part)
                seen += 1
            elif (own := re.match(r"run\.(\w+)", span)) and span != "run.json":
                fields = pyrofl.Run.__dataclass_fields__
                assert hasattr(pyrofl.Run, own.group(1)) or own.group(1) in fields, span
    assert seen > 60


def test_every_public_name_in_a_text_or_program_exists():
    """Names such as `pyrofl.checks.loco`, in prose, in code blocks and in tutorials."""
    texts = [*ALL_PAGES, *(ROOT / "examples" / "tutorials").rglob("*.*")]
    missing, seen = set(), 0
    for path in {p for p in texts if p.suffix in {".md", ".py"} and p.name != "CHANGELOG.md"}:
        for dotted in re.findall(
            r"(?<![\w./-])pyrofl((?:\.[A-Za-z_]\w*)+)", path.read_text("utf-8")
        ):
            value: object = pyrofl
            for part in dotted.split(".")[1:]:
                if not (hasattr(value, part) or _imported(value, part)):
                    missing.add((path.name, f"pyrofl{dotted}"))
                    break
                value = getattr(value, part)
            seen += 1
    assert missing == set()
    assert seen > 250


def _imported(home: object, name: str) -> bool:
    try:
        import_module(f"{home.__name__}.{name}")  # type: ignore[attr-defined]
    except (ImportError, AttributeError):
        return False
    return True


def test_settings_on_the_pages_of_variants_and_notation_are_those_of_the_methods():
    key = {paper(name).name: name for name in builds()}
    known = {name: {*arguments(build), "net", "server_data"} for name, build in builds().items()}
    seen = 0
    for bullet in re.split(r"(?m)^- ", page("variants"))[1:]:
        title = re.match(r"\*\*(.+?)\*\*", bullet)
        name = key.get(title.group(1)) if title else None
        for word in re.findall(r"`(\w+)=[\w.]+`", bullet) if name else ():
            assert word in known[name], (name, word)
            seen += 1
        for words in re.findall(r"`((?:\w+=\w+ ?)+)` ", bullet) if name else ():
            assert {w.partition("=")[0] for w in words.split()} <= known[name], (name, words)
    for section in re.split(r"(?m)^## ", page("notation"))[1:]:
        name = key.get(section.partition("\n")[0])
        if name is None:
            continue
        method = builds()[name]
        few = toys.blobs((4, 5))
        more = {"server_data": few.x, "distil": "none"} if name == "fedbe" else {}
        made = method(toys.net(), **more)
        state = next(pyrofl.federate(made, few, rounds=1, check=False))
        moves = [move for phase in made.phases for move in phase.updates]
        steps = " ".join(getattr(move, "names", "") for move in moves).split()
        known_names = (*state.server, *state.message, *state.client_states, *steps)
        tensors = {n.partition("/")[0] for n in known_names}
        for row in re.findall(r"(?m)^\|.*\|(.+)\|$", section):
            for word in re.findall(r"`(\w+)(?:/NAME)?`", row):
                assert word in known[name] | tensors, (name, word)
                seen += 1
    assert seen > 12


def test_folders_and_files_of_the_architecture_exist():
    top, seen = "", 0
    for line in re.findall(r"(?m)^    .+$", page("architecture")):
        if begins := re.match(r"    (\w+)/ ", line):
            top = begins.group(1)
            assert (ROOT / top).is_dir()
        for name in re.findall(r"(?<![\w/.])(\w+(?:/|\.py))(?!\w)", line):
            assert (ROOT / top / name).exists() or (ROOT / name).exists(), name
            seen += 1
    assert seen > 25


def test_the_table_of_all_methods_has_every_method():
    assert set(re.findall(r"(?m)^\| `(\w+)`", page("all_methods"))) - PROGRAMS == set(builds())


def test_the_table_of_all_methods_has_the_numbers_that_are_sent():
    """Formulas of numbers down and up are those of a small network, as the contract counts them."""
    sizes = {"D": toys.ALL, "d": toys.HEAD, "L": 2, "B": 5, "K": 2, "M": 5, "S": 5}
    # The layer before the head; its components; the encoder; particles.
    own = {"metavd": {"d": 48}, "fedem": {"K": 3}, "amortized": {"E": 2986}}
    own["fedwba"] = {"S": 3}
    rows = re.findall(r"(?m)^\| `(\w+)`.*\| ([^|]+) \|$", page("all_methods"))
    seen = 0
    for name, both in rows:
        down, _, up = both.partition("; ")
        formulas = down, up or down
        if (sent := promises.of(name).message) is None:
            continue
        known = sizes | own.get(name, {})
        for formula, number in zip(formulas, reversed(sent), strict=True):
            terms = re.sub(r"(?<=[\w)])\s*(?=[A-Za-z(])", " * ", formula)
            assert eval(terms, {}, known) == number, (name, formula, number)
            seen += 1
    assert seen > 70


def test_the_page_of_regressions_names_every_family():
    (named,) = re.findall(r"(?s)Families are (.+?) \(stratified by client\)", page("regression"))
    assert set(re.split(r",\s+|\s+and\s+", named)) == set(FAMILIES)


def test_exit_codes_are_those_of_the_commands():
    stated = "0 success; 2 an error before any work; 3 an error during the work"
    text = " ".join(page("guarantees").split())
    assert stated in text
    diverged = "; 4 all rounds completed, but the fit diverged or aggregated no update"
    assert f"{diverged}; 130 interrupted" in text
    assert (console.REFUSED, console.FAILED, console.UNLEARNED, console.INTERRUPTED) == (
        2,
        3,
        4,
        130,
    )


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nn.BatchNorm1d(8), "BatchNorm1d"),
        (nn.Dropout(0.5), "Dropout"),
        (nn.LSTM(8, 4), "LSTM"),
        (nn.GRU(8, 4), "GRU"),
        (nn.RNN(8, 4), "RNN"),
    ],
)
def test_layers_that_the_guarantees_name_are_refused(layer, told):
    with pytest.raises(ValueError, match=f"is {told}: "):
        pyrofl.Network(nn.Sequential(nn.Linear(8, 8), layer))
