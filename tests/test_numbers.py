"""Pages of figures are what their commands make of files."""

from __future__ import annotations

import csv
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import import_module
from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PAPERS = EXAMPLES / "papers"
SAID_ELSEWHERE = {"tuned/scores.csv", "tuned/budget.csv", "tuned/reliability.csv"}  # by budget.csv


@pytest.mark.long  # starts a process
@pytest.mark.parametrize("script", ["numbers/make.py", "papers/tables.py", "regression/gallery.py"])
def test_pages_are_made_of_their_files(script: str):
    command = [sys.executable, str(EXAMPLES / script), "--check"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, f"{found.stdout}{found.stderr}; expected what {script} writes"


@pytest.fixture
def regression_scripts(monkeypatch) -> Path:
    """Return the folder of the scripts of the regression gallery, which import each other."""
    folder = EXAMPLES / "regression"
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_scripts_that_are_imported_by_name_have_unique_names():
    # Tests of a worker share `sys.modules`, where the first script of a name would hide others.
    root = EXAMPLES.parent
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]
    on_path = [root / name for name in settings["ini_options"]["pythonpath"]]
    on_path += [EXAMPLES / name for name in ("regression", "papers", "papers/parity")]
    on_path += [EXAMPLES / "docs", EXAMPLES / "docs/making", root / "tests/inference/acceleration"]
    scripts = [path for folder in on_path for path in sorted(folder.glob("*.py"))]
    imported = {
        name
        for path in [*scripts, *root.glob("tests/**/test_*.py")]
        for name in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M)
    }
    names = Counter(path.stem for path in scripts)
    assert [name for name in sorted(imported) if names[name] > 1] == []


def test_features_that_differ_from_r_are_those_with_a_reason(regression_scripts: Path):
    gallery = runpy.run_path(str(regression_scripts / "gallery.py"))
    features, other = (
        json.loads((regression_scripts / f"{name}.json").read_text())
        for name in ("features", "features_r")
    )
    assert {*gallery["FEATURES"]} == {*features} == {*other} - {"versions"}
    shift, (low, high) = gallery["FEATURE_LIMITS"]
    differing = set()
    for name, row in features.items():
        found, ratio = gallery["difference"](row["estimates"], other[name])
        if found > shift or not low <= (ratio or 1) <= high:
            differing.add(name)
    assert differing == {*gallery["REASONS"]}
    assert max(len(text.split()) for text in gallery["REASONS"].values()) <= 25
    assert features["kaplan_meier"]["estimates"].keys() == other["kaplan_meier"]["estimate"].keys()
    assert gallery["difference"](features["kaplan_meier"]["estimates"], other["kaplan_meier"])[
        0
    ] < (1e-5)


def test_references_of_regressions_can_be_read(regression_scripts: Path):
    script = runpy.run_path(str(regression_scripts / "fit_cases.py"))
    names = [path.stem for path in script["REFERENCES"].glob("*.json")]
    assert len(names) > 20
    assert all(script["Reference"].load(script["REFERENCES"], name).statistics for name in names)


def test_stored_fits_of_features_are_those_of_the_scripts(regression_scripts: Path):
    cases = runpy.run_path(str(regression_scripts / "features.py"))["CASES"]
    rows = json.loads((regression_scripts / "features.json").read_text())
    for name, case in cases.items():
        assert (rows[name]["formula"], rows[name]["family"]) == (case.formula, case.family), name
    script = re.sub(r"\s", "", (regression_scripts / "features.R").read_text())
    for name, row in json.loads((regression_scripts / "features_r.json").read_text()).items():
        assert name == "versions" or re.sub(r"\s", "", row["call"]) in script, name


def test_every_number_of_a_paper_says_how_it_was_made():
    for path in PAPERS.glob("*/*.csv"):
        name = path.relative_to(PAPERS).as_posix()
        if path.name == "paper.csv" or name in SAID_ELSEWHERE:
            continue
        lines = list(csv.DictReader(path.read_text().splitlines()))
        several = {line.get("settings") for line in lines}
        assert len(several) == 1, f"{name}: lines of {several}; expected those of one experiment"
        for line in lines:
            empty = [n for n in ("seed", "seconds", "commit", "command") if not line.get(n)]
            assert not empty, f"{name}: {line} has no {empty}"
            script = line["command"].split()[1]
            assert (EXAMPLES.parent / script).is_file(), f"{name}: {script} is not there"


def test_scripts_that_pages_name_are_there():
    for page in PAPERS.glob("**/README.md"):
        for script in re.findall(r"python (examples/[\w/]+\.py)", page.read_text()):
            assert (EXAMPLES.parent / script).is_file(), f"{page}: {script} is not there"


@pytest.mark.long  # starts a process
def test_what_is_in_a_file_is_not_run_again(tmp_path: Path, monkeypatch):
    fill = runpy.run_path(str(PAPERS / "files.py"))["fill"]
    monkeypatch.setattr(sys, "argv", [str(PAPERS / "x.py"), "--data", "npz:/here/rows.npz"])
    path, head, made = tmp_path / "a.csv", ("method", "seed", "score"), []

    def measure(method: str, seed: int) -> list[list[float | None]]:
        if seed == 2:
            raise KeyboardInterrupt
        made.append((method, seed))
        return [[0.5 + seed], [None]]

    fill(path, head, [("a", 0)], measure)
    with pytest.raises(KeyboardInterrupt):
        fill(path, head, [("a", 0), ("a", 1), ("a", 2)], measure)
    lines = fill(path, head, [("a", 0), ("a", 1)], measure)
    assert made == [("a", 0), ("a", 1)]
    assert [line["score"] for line in lines] == ["0.5", "", "1.5", ""]
    assert {line["command"] for line in lines} == {
        "python examples/papers/x.py --data npz:rows.npz"
    }
    other = fill(path, head, [("a", 0)], measure, net="mlp:/here/2", rounds=3)
    assert made == [("a", 0), ("a", 1), ("a", 0)]  # with other settings it is another run
    assert {line["settings"] for line in other} == {"net=mlp:2 rounds=3"}
    assert fill(path, head, [("a", 0)], measure) == lines
    with pytest.raises(ValueError, match=r"expected .*'other'"):
        fill(path, ("method", "seed", "other"), [("a", 0)], measure)


def test_the_methods_that_beat_training_alone_are_those_of_the_table():
    text = " ".join((EXAMPLES / "NUMBERS.md").read_text().split())
    (count, named) = re.findall(r"(\w+) methods are better than training alone: ([^.]+)\.", text)[0]
    table = text.partition("methods are better than training alone")[2].partition("CIFAR-10, 200")[
        0
    ]
    rows = re.findall(r"\| `(\w+)` \| [^|]+ \|[^|]+\|([^|]*)\|([^|]*)\|([^|]*)\|", table)
    best = {
        name: max(float(cell.split(" ")[1]) for cell in cells if cell.strip())
        for name, *cells in rows
    }
    better = {name for name, value in best.items() if value > best["local"]}
    words = {word.replace("-", "").lower() for word in re.findall(r"[\w-]+", named)}
    assert len(best) == 43
    assert words & best.keys() == better
    assert (count, len(better)) == ("fifteen", 15)


def test_the_methods_that_beat_training_alone_on_cifar_are_those_that_the_page_names():
    scores: dict[str, dict[tuple[str, str], list[float]]] = {}
    with (PAPERS / "tuned/cifar10/scores.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            if line["metric"] == "accuracy":
                models = scores.setdefault(line["method"], {})
                key = (line["model"], line["adaptation"])
                models.setdefault(key, []).append(float(line["value"]))
    best = {name: max(map(mean, models.values())) for name, models in scores.items()}
    text = " ".join((EXAMPLES / "NUMBERS.md").read_text().split())
    better, below = re.findall(
        r"(pFedVEM's personal models are best, .+?)\.|training alone; ([^.]+) are [\d.]+ to", text
    )
    words = [
        {w.replace("-", "").lower() for w in re.findall(r"[\w-]+", "".join(s))}
        for s in (better, below)
    ]
    assert words[0] & best.keys() == {n for n, value in best.items() if value > best["local"]}
    apart = [100 * (best["local"] - best[name]) for name in words[1] & best.keys()]
    assert (f"{min(apart):.1f} to {max(apart):.1f} below") in text
    assert f"is {100 * (best['local'] - best['pfedme']):.1f} points below training alone" in text


DIFFERENT = {  # settings of pFedVEM's table, and those that the tuning chose; its page says so
    "Local": {"lr": (0.03, 0.01)},
    "FedAvg": {"fine_tune": (0, 5)},
    "FedProx": {"mu": (1.0, 0.1)},
    "FedPer": {"lr": (0.03, 0.01)},
    "FedRep": {"lr": (0.03, 0.01)},
    "pFedVEM": {"lr_head": (0.001, 0.01), "lr_base": (0.001, 0.0003)},
}
ABLATIONS = {"pFedVEM, uncertainty only": "uncertainty", "pFedVEM, deviation only": "deviation"}
OWN_RATES = {  # scripts whose pages state their settings, and claim no tuning of all methods
    *("pfedmb_pairs.py", "papers/pfedmb/others.py"),  # each method at the best of its own rates
    *("fedabml_new_clients.py", "fedabml_entropy.py", "papers/fedbe/students.py"),
    *("fedbe_swiss_roll.py", "papers/metavd/regimes.py", "papers/metavd/pull.py"),
    "papers/pfedvem/rounding.py",
    "papers/pfedvem/clients.py",  # runs of studies.py, which tests/test_studies.py compares
}


@pytest.fixture
def settings(monkeypatch) -> ModuleType:
    """Return the module that compares settings with those of the tuning."""
    monkeypatch.syspath_prepend(str(PAPERS))
    return import_module("settings")


def test_settings_of_tables_are_those_of_the_tuning_but_for_known_ones(settings: ModuleType):
    found = settings.differences(EXAMPLES / "pfedvem_table.py")
    ablations = {
        n: {"confidence": (v, "full")} | DIFFERENT["pFedVEM"] for n, v in ABLATIONS.items()
    }
    assert found == DIFFERENT | ablations


def test_another_setting_than_the_chosen_one_is_found(settings: ModuleType, tmp_path: Path):
    text = (EXAMPLES / "pfedvem_table.py").read_text()
    script = tmp_path / "table.py"
    script.write_text(text.replace('("scaffold", {"lr": 0.03})', '("scaffold", {"lr": 0.1})'))
    assert settings.differences(script)["SCAFFOLD"] == {"lr": (0.1, 0.03)}
    script.write_text(text.replace('("pfedme", {"lr": 0.05, ', '("pfedme", {'))
    assert settings.differences(script)["pFedMe"] == {"lr": (0.01, 0.05)}


def test_every_script_of_a_table_is_compared_or_has_rates_of_its_own():
    scripts = {
        path.relative_to(EXAMPLES).as_posix()
        for path in (*EXAMPLES.glob("*.py"), *PAPERS.glob("*/*.py"))
        if "files.fill(" in path.read_text()
    }
    assert scripts == OWN_RATES | {"pfedvem_table.py"}


@pytest.mark.parametrize("folder", ["tuned", "tuned/cifar10"])
def test_scores_are_of_the_settings_that_were_chosen(folder: str):
    with (PAPERS / folder / "budget.csv").open(newline="") as file:
        chosen = {line["method"]: line["chosen"] for line in csv.DictReader(file)}
    for name, column in (("scores.csv", "tuned"), ("reliability.csv", "settings")):
        if not (path := PAPERS / folder / name).exists():
            continue
        with path.open(newline="") as file:
            used = {(line["method"], line[column]) for line in csv.DictReader(file)}
        assert len(used) >= 5
        other = {(method, words) for method, words in used if words != chosen[method]}
        assert not other, f"{folder}/{name}: {other}; expected {chosen}"


def test_the_global_model_of_pfedvem_is_above_fedavg_as_the_page_says():
    with (PAPERS / "pfedvem" / "table.csv").open(newline="") as file:
        of = {
            (line["clients"], line["method"], line["seed"]): float(line["global"] or 0)
            for line in csv.DictReader(file)
        }
    wins = {
        clients: sum(
            of[clients, "pFedVEM", seed] > max(of[clients, m, seed] for m in ("FedAvg", "FedProx"))
            for seed in "012"
        )
        for clients in ("50", "100", "200")
    }
    text = " ".join((PAPERS / "pfedvem" / "README.md").read_text().split())
    assert "with 50 and 100 clients on every seed, but with 200 clients on two of three" in text
    assert wins == {"50": 3, "100": 3, "200": 2}


@pytest.mark.parametrize("name", ["pfedvem", "pfedmb", "metavd", "fedbe", "fedabml"])
def test_a_page_names_the_authors_of_its_paper(name: str):
    cited = import_module(f"pyrofl.models.{name}").__doc__.partition("\n\n")[2].partition(",\n")[0]
    cited = " ".join(cited.partition('"')[0].split()).rstrip(", ")
    page = " ".join((PAPERS / name / "README.md").read_text().split())
    (named,) = re.findall(r" of ((?:[A-Z]\w+(?:, | and )?)+(?: and others)?) \(", page)[:1]
    authors = re.split(r", | and ", cited)
    if named.endswith(" and others"):
        assert named == f"{authors[0]} and others"
    else:
        assert re.split(r", | and ", named) == authors
