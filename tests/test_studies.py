"""Studies of papers: every table has settings, values and claims, and its results are current."""

from __future__ import annotations

import argparse
import csv
import re
import sys
from importlib import import_module
from pathlib import Path
from statistics import mean

import pytest
import torch
from dying import Nursery

PAPERS = Path(__file__).parent.parent / "examples" / "papers"
sys.path.append(str(PAPERS))

import cost  # noqa: E402
import files  # noqa: E402
import harness  # noqa: E402
import reproduce  # noqa: E402
import settings  # noqa: E402
import simulated_files  # noqa: E402
from papers import tables  # noqa: E402
from settings import edge_of, partition_of, tuned  # noqa: E402

STUDIES = {
    (paper, name): study
    for paper in harness.PAPERS
    if (PAPERS / paper / "studies.py").is_file()
    for name, study in reproduce.studies(paper).items()
}
CELL = ("paper", "50 clients", "pFedVEM")
every_study = pytest.mark.parametrize(
    ("paper", "name"), STUDIES, ids=lambda word: word if isinstance(word, str) else None
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files of all data sets."""
    path = tmp_path_factory.mktemp("data")
    simulated_files.write_all(path)
    return path


def lines_of(paper: str, name: str) -> list[dict[str, str]]:
    return harness.read(PAPERS / paper / "small" / f"{name}.csv")


def stale(study: harness.Study, lines: list[dict[str, str]]) -> list[tuple[str, str]]:
    """Return settings of rows, and those with which a study makes them today, if they differ."""
    found = []
    for line in lines:
        cell = (line["case"], line["row"], line["grid"])
        known = cell in study.runs("small")
        today = harness.in_words(study.recorded("small", *cell)) if known else "no such run"
        if line["settings"] != today:
            found.append((line["settings"], today))
    return found


@every_study
def test_results_are_of_todays_settings(paper: str, name: str):
    assert not stale(STUDIES[paper, name], lines_of(paper, name))


@every_study
def test_costs_are_of_todays_settings(paper: str, name: str):
    study = STUDIES[paper, name]
    for line in harness.read(PAPERS / paper / "cost" / f"{name}.csv"):
        grid = next(iter(study.grid), "")
        today = study.recorded("paper", line["case"], line["row"], grid) | {"seeds": 5}
        assert line["settings"] == harness.in_words(today)
        rounds = study.settings("paper", line["case"], line["row"]).rounds
        runs = 5 * max(1, len(study.grid))
        hours = float(line["round_seconds"]) * rounds * runs / 3600
        assert float(line["hours"]) == pytest.approx(hours, rel=1e-4)


def test_a_result_of_other_settings_or_defaults_is_stale():
    study = STUDIES["pfedvem", "table2"]
    cell = ("hetero", "pFedVEM", "")
    text = harness.in_words(study.recorded("small", *cell))
    line = dict(zip(("case", "row", "grid"), cell, strict=True)) | {"settings": text}
    assert stale(study, [line]) == []
    other_default = text[:-1] + ("0" if text[-1] != "0" else "1")
    for other in (text.replace("rounds=15", "rounds=16"), other_default):
        assert stale(study, [line | {"settings": other}]) == [(other, text)]
    assert stale(study, [line | {"row": "gone"}]) == [(text, "no such run")]


def test_a_figure_has_no_result_of_other_settings(capsys: pytest.CaptureFixture[str]):
    study = STUDIES["fedabml", "table1_cifar"]
    lines = lines_of("fedabml", "table1_cifar")
    assert reproduce.todays_lines(study, "small", lines) == lines
    assert capsys.readouterr().out == ""
    old = [line | {"settings": line["settings"].replace("lr=", "lr=9")} for line in lines[:2]]
    assert reproduce.todays_lines(study, "small", [*old, *lines]) == lines
    assert "the figure is without 2 lines with other settings" in capsys.readouterr().out


@every_study
def test_results_say_how_they_were_made(paper: str, name: str):
    for line in lines_of(paper, name):
        empty = [n for n in ("seed", "machine", "seconds", "commit", "command") if not line[n]]
        assert not empty, line


@every_study
def test_rows_have_the_settings_of_the_tuning(paper: str, name: str):
    """All rows of a table are tuned by one rule, but for what the table itself varies."""
    study = STUDIES[paper, name]
    for case, row, grid in study.runs("small"):
        entry = study.entries[row]
        chosen = tuned(study.tuning).get(entry.method, {}) if study.tuning else {}
        free = {w for w in grid.split()}
        words = set(study.words("small", case, row, grid)) | free
        differ = {n for n, word in chosen.items() if word not in words} - {
            w.partition("=")[0] for w in free
        }
        assert differ <= set(entry.varied), f"{row}: {differ} are not {chosen}"


@every_study
@pytest.mark.parametrize("size", ["small", "paper"])
def test_rows_of_a_table_have_equal_epochs(paper: str, name: str, size: str):
    study = STUDIES[paper, name]
    for case in study.cases:
        epochs = {study.value(size, case, row, "epochs") for row in study.entries}
        assert len(epochs - {None}) <= 1


def test_pages_state_the_local_training_and_the_choice_of_settings():
    study = STUDIES["pfedvem", "table1_cifar10"]
    assert tables.lengths(study) == (
        "Local training: epochs 5, epochs of bases 5, epochs of heads 10, inner steps 5, "
        "minibatches of 10 (pFedBayes: 50), draws 5."
    )
    few = harness.replace(study, entries={n: study.entries[n] for n in ("Local", "IFCA")})
    assert tables.choice(few) == (
        "Settings: chosen in `tuned/cifar10/budget.csv` on validation rows of another partition, "
        "dirichlet:0.3,min=10 with 20 clients and partition seed 0; of these, at the edge of the "
        "grid: `ifca` lr largest, grid since widened."
    )
    assert "best of 3 (lr=0.02 lr_alpha=0.2, " in tables.choice(STUDIES["pfedmb", "table2"])
    assert "not tuned" in tables.choice(STUDIES["fedbe", "table1"])


@every_study
def test_a_tuning_had_another_partition(paper: str, name: str):
    """The seeds of choice and of report are numbers from 0 on, of different partitions."""
    study = STUDIES[paper, name]
    if study.tuning:
        for case in study.cases:
            partition = study.settings("small", case, next(iter(study.entries))).partition
            assert not partition_of(study.tuning).startswith(f"{partition} ")


def test_an_edge_is_the_smallest_or_largest_of_three_numbers():
    assert edge_of("0.1", ["0.1", "0.3", "1.0"]) == "smallest"
    assert edge_of("1", ["0.1", "0.3", "1.0"]) == "largest"
    assert edge_of("0.3", ["0.1", "0.3", "1.0"]) == ""
    assert edge_of("0.9", ["0.0", "0.9"]) == ""
    assert edge_of("0.0", ["0.0", "0.5", "1.0"]) == ""
    assert edge_of("kl", ["kl", "renyi", "js"]) == ""


def test_a_chosen_number_at_an_edge_is_marked_and_a_wider_grid_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """FedAvg's grid of rates goes from 0.001 to 0.3 today."""
    (tmp_path / "tuned").mkdir()
    text = "method,chosen,grid\n"
    text += 'fedavg,lr=0.3 momentum=0.9,"lr=0.03,0.1,0.3 momentum=0.0,0.9"\n'
    text += (
        'fedprox,lr=0.1 mu=0.1,"lr=0.01,0.03,0.1 mu=0.01,0.1,1.0"\nlocal,lr=0.1,"lr=0.01,0.1,1"\n'
    )
    (tmp_path / "tuned" / "here.csv").write_text(text)
    monkeypatch.setattr(settings, "HERE", tmp_path)
    assert settings.edges("here.csv") == {
        "fedavg": {"lr": "largest"},
        "fedprox": {"lr": "largest, grid since widened"},
    }


def test_files_of_scripts_are_of_todays_defaults():
    """After a change of defaults, make the rows of a file again and replace the digest."""
    lines = harness.read(PAPERS / "defaults.csv")
    for line in lines:
        assert line["defaults"] == settings.digest(line["method"]), line
    others = {"paper.csv", "found.csv"}  # values of papers and of other people's code
    made = {path for path in PAPERS.glob("*/*.csv") if path.name not in others}
    names = {path.relative_to(PAPERS).as_posix() for path in made if path.parent.name != "tuned"}
    assert {line["file"] for line in lines} == names


@pytest.mark.parametrize("budget", ["budget.csv", "cifar10/budget.csv"])
def test_tuned_rows_are_of_todays_defaults_or_marked(budget: str):
    """A row that a change of defaults altered is made again, or its digest is emptied."""
    lines = harness.read(PAPERS / "tuned" / budget)
    old = {x["method"] for x in lines if x["defaults"] != settings.digest(x["method"])}
    assert old == {x["method"] for x in lines if not x["defaults"]}
    page = (PAPERS.parent / "NUMBERS.md").read_text()
    (sentence,) = re.findall(r"Rows of (.+) were measured before their defaults changed", page)
    assert old == set(re.findall("`([^`]+)`", sentence))


def test_grids_are_wider_where_both_tunings_chose_the_same_edge():
    both = [settings.edges(name) for name in ("budget.csv", "cifar10/budget.csv")]
    assert len(both[0]) > 10
    shared = 0
    for method in both[0].keys() & both[1].keys():
        for name, edge in both[0][method].items():
            word = edge.partition(",")[0]
            if both[1][method].get(name, "").startswith(word):
                assert edge == both[1][method][name] == f"{word}, grid since widened"
                shared += 1
    assert shared == 11


@every_study
def test_claims_are_about_rows_columns_and_scores_of_the_study(paper: str, name: str):
    study = STUDIES[paper, name]
    assert study.claims, f"{name} has no claim"
    for claim in study.claims:
        assert {claim.of, claim.than} <= study.entries.keys(), claim
        assert {claim.case, claim.than_case or claim.case} <= study.cases.keys(), claim
        assert {claim.metric, claim.than_metric or claim.metric} <= set(study.metrics), claim
        verdict = harness.judge(paper, name, study, claim, [])
        assert verdict.paper, f"{claim.text}: no values of the paper"
        assert verdict.word.startswith("not tried: ") or verdict.word == "not run"


@pytest.mark.parametrize("paper", sorted({paper for paper, _ in STUDIES}))
def test_values_of_papers_are_in_cells_of_their_studies(paper: str):
    with (PAPERS / paper / "paper.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        study = STUDIES[paper, line["study"]]
        assert line["case"] in study.cases, line
        assert line["row"] in study.entries, line
        assert line["metric"] in study.metrics, line
        float(line["value"].split(" ± ")[0])
    keys = [tuple(line.values())[:4] for line in lines]
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
@every_study
def test_every_study_runs_at_size_smoke(paper: str, name: str, tmp_path: Path, forked: Nursery):
    ended = forked([str(PAPERS / "reproduce.py"), paper, name, "--out", str(tmp_path)])
    assert ended.codes == [0], "\n".join(ended.told)
    lines = harness.read(tmp_path / f"{name}.csv")
    study = STUDIES[paper, name]
    assert [(x["case"], x["row"], x["grid"]) for x in lines] == study.runs("smoke")
    assert all(any(line[metric] for metric in study.metrics) for line in lines)
    assert (tmp_path / f"{name}.png").is_file() == bool(study.figure)


def test_verdicts_follow_the_interval_of_the_differences():
    """With three differences the 95% interval is mean ± 4.303 standard errors."""
    gaps = [2.0, 3.0, 4.0]  # standard error 0.577, half width 2.48
    assert harness.word_for(gaps, 1, None, 0) == "reproduced"
    assert harness.word_for(gaps, 1, 5.9, 0) == "reproduced"
    assert harness.word_for(gaps, 1, 6.1, 0) == "direction holds"  # under half of the paper's
    assert harness.word_for([1.0, 3.0, 5.0], 1, None, 0) == "direction holds"  # 3 ± 4.97
    assert harness.word_for(gaps, -1, None, 0) == "not reproduced"
    assert harness.word_for([-1.0, 0.0, 1.5], 1, None, 0) == "not reproduced: within the noise"
    assert mean(gaps) + 2.485 > 5.48
    assert harness.word_for(gaps, 0, None, 5.49) == "reproduced"
    assert harness.word_for(gaps, 0, None, 5.4) == "direction holds"
    assert harness.word_for(gaps, 0, None, 2.9) == "not reproduced"


def grid_lines(*rows: tuple[str, str, str, str]) -> tuple[harness.Study, list[dict[str, str]]]:
    """Return a study with a grid, and lines of seeds, settings, validation and test scores."""
    study = harness.replace(STUDIES["pfedvem", "table2"], grid=("lr=1", "lr=2"))
    head = ("seed", "grid", "validation", "personal")
    cell = {"case": "", "row": "a"}
    return study, [cell | dict(zip(head, row, strict=True)) for row in rows]


def test_the_grid_setting_is_chosen_on_validation_rows():
    study, lines = grid_lines(("0", "lr=1", "0.9", "0.1"), ("0", "lr=2", "0.8", "0.7"))
    assert harness.chosen_lines(study, lines) == lines[:1]


def test_seeds_of_choice_and_of_report_are_apart():
    """Seed 0 alone prefers lr=1, and the others lr=2, so that only they report lr=1 or lr=2."""
    study, lines = grid_lines(
        ("0", "lr=1", "1.0", "0.1"),
        ("1", "lr=1", "0.3", "0.2"),
        ("2", "lr=1", "0.3", "0.3"),
        ("0", "lr=2", "0.2", "0.4"),
        ("1", "lr=2", "0.5", "0.5"),
        ("2", "lr=2", "0.5", "0.6"),
    )
    chosen = harness.chosen_lines(study, lines)
    # Means of the others: .3 and .5 without seed 0; .65 and .35 without seed 1 or 2.
    assert [(x["seed"], x["grid"]) for x in chosen] == [("0", "lr=2"), ("1", "lr=1"), ("2", "lr=1")]
    assert [x["personal"] for x in chosen] == ["0.4", "0.2", "0.3"]
    lines[1]["validation"] = ""  # the run diverged, so that seeds 0 and 2 avoid its setting
    chosen = harness.chosen_lines(study, lines)
    assert [(x["seed"], x["grid"]) for x in chosen] == [("0", "lr=2"), ("1", "lr=1"), ("2", "lr=2")]


def test_data_that_cannot_be_loaded_are_named(tmp_path: Path):
    study = STUDIES["fedbe", "table4"]
    simulated_files.write_all(tmp_path)
    assert reproduce.missing(study, "paper", "Tiny-ImageNet", "FedBE", tmp_path) == ""
    (tmp_path / "tiny_imagenet.npz").unlink()
    harness.load.cache_clear()
    harness.whole.cache_clear()
    reason = reproduce.missing(study, "paper", "Tiny-ImageNet", "FedBE", tmp_path)
    assert reason.startswith("tiny_imagenet.npz is not in the folder of --data-dir")
    reason = reproduce.missing(STUDIES["pfedvem", "table1_sun397"], *CELL, tmp_path / "empty")
    assert reason.startswith(f"{tmp_path}/empty/SUN397/ClassName.txt does not exist")


def test_data_that_are_missing_are_looked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    study = STUDIES["fedbe", "table4"]
    looked = list[str]()

    def missing(study: harness.Study, size: str, case: str, *rest: object) -> str:
        looked.append(case)
        return "no files" if case == "Tiny-ImageNet" else ""

    monkeypatch.setattr(reproduce, "missing", missing)
    only = argparse.Namespace(cases=None, rows=None)
    cells = reproduce.selected(study, "paper", tmp_path, only)
    assert looked == [*study.cases]  # each has two rows
    assert cells == [c for c in study.runs("paper") if c[0] != "Tiny-ImageNet"]
    assert capsys.readouterr().out == "Tiny-ImageNet: not run: no files\n"


@pytest.mark.parametrize(
    ("paper", "name", "case"),
    [
        ("pfedvem", "table1_sun397", "50 clients"),
        ("pfedvem", "table7", "50 clients"),
        ("metavd", "table4", "40 of 160 clients"),
        ("metavd", "table5", "CelebA + CIFAR-100"),
        ("fedabml", "figure4", ""),
    ],
)
def test_studies_of_distributed_data_partition_them(paper: str, name: str, case: str, folder: Path):
    study = STUDIES[paper, name]
    data = study.trial("smoke", case, next(iter(study.entries)), data_dir=folder).task.data
    assert all(len(rows) for rows in (*data.train, *data.test))
    if name == "table4":
        assert data.names == tuple(f"f{i:04}_{i}" for i in range(5))


def test_a_study_trains_on_a_device(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a GPU, double precision stands for the device, as both are given to `to`."""
    move = harness.Federation.to
    devices = {"cpu": torch.float32, "cuda": torch.float64}
    monkeypatch.setattr(
        harness.Federation, "to", lambda data, name, *of: move(data, devices.get(name, name), *of)
    )
    study = STUDIES["fedbe", "table1"]
    for device, kind in devices.items():
        trial = study.trial("smoke", "Step, ConvNet", "FedBE", data_dir=folder, device=device)
        assert trial.task.data.x.dtype == trial.task.data.server_data.dtype == kind
    run = trial.fit(rounds=1)
    assert {value.dtype for value in run.state.server.values()} == {torch.float64}


def test_the_first_writers_are_used(folder: Path):
    study = STUDIES["metavd", "table4"]
    trial = study.trial("smoke", "40 of 160 clients", "Reptile", data_dir=folder)
    changed = harness.replace(trial.settings, clients=3, held_out=1)
    data = harness.replace(trial, settings=changed).task.data
    assert data.names == tuple(f"f{i:04}_{i}" for i in range(4))
    assert data.sizes.tolist() == [16] * 4
    assert data.clients == 3
    assert [len(rows) for rows in data.test] == [4] * 4


FIRST = next(iter(STUDIES["metavd", "table1"].cases))
SECOND = 0.01  # of a row, in the tests of the cost


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every row of a client that trains take 0.01 seconds; return the rows of each round."""
    rows_of_rounds, time_round = list[int](), cost.time_round

    def steady(trial: harness.Trial, data: harness.Federation) -> tuple[float, int]:
        rows = time_round(trial, data)[1]
        rows_of_rounds.append(rows)
        return SECOND * rows, rows

    monkeypatch.setattr(cost, "time_round", steady)
    return rows_of_rounds


def test_the_cost_of_a_short_round_is_that_of_all_rows(folder: Path, timed: list[int]):
    trial = STUDIES["pfedvem", "table2"].trial("smoke", "hetero", "pFedVEM", data_dir=folder)
    total = int(trial.task.data.sizes.sum())  # all clients train, though 30% report
    found = cost.estimate(trial, seconds=1000)
    assert found == cost.Cost(pytest.approx(SECOND * total), 1.0)
    assert timed[-1] == total > timed[0]
    assert found.hours(100, 5) == pytest.approx(SECOND * total * 500 / 3600)


def test_a_long_round_is_timed_with_few_rows_of_each_client(folder: Path, timed: list[int]):
    """The mean of a round has half of the clients; a minibatch of 4 rows of each is timed."""
    trial = STUDIES["metavd", "table1"].trial("smoke", FIRST, "FedProx", data_dir=folder)
    trial = harness.replace(trial, words=(*trial.words, "batch=4"))
    sizes = trial.task.data.sizes[: trial.task.data.clients]
    assert trial.settings.participation == "0.5"
    expected = len(sizes) / 2 * float(sizes.double().mean())
    assert min(sizes) > 4
    found = cost.estimate(trial, seconds=0)
    assert found.round_seconds == pytest.approx(SECOND * expected)
    assert timed == [4 * len(sizes) // 2]
    assert found.part == pytest.approx(timed[0] / expected)


def test_rows_of_the_server_are_reduced_as_those_of_clients(folder: Path):
    study = STUDIES["fedbe", "table1"]
    data = study.trial("smoke", "Step, ConvNet", "FedBE", data_dir=folder).task.data
    average = float(data.sizes.double().mean())
    few = cost.first_rows(data, 5, average)
    assert few.sizes.tolist() == [min(5, n) for n in data.sizes.tolist()]
    assert len(few.server_data) == -(-len(data.server_data) * 5 // average)
    assert len(cost.first_rows(data, 10**6, average).server_data) == len(data.server_data)


def test_expected_hours_are_written_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = ["pfedmb", "table3", "--estimate", "--rows", "2 branches", "4 branches"]
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *words, "--out", str(tmp_path)])
    monkeypatch.setattr(files, "command", lambda: "")
    assert reproduce.main() == 0
    lines = harness.read(tmp_path / "table3.csv")
    assert [line["row"] for line in lines] == ["2 branches", "4 branches"]
    for line in lines:  # 2 rounds, 1 seed, 5 settings of the grid
        hours = float(line["round_seconds"]) * 2 * 1 * 5 / 3600
        assert float(line["hours"]) == pytest.approx(hours, rel=1e-4)
        assert line["settings"].endswith("seeds=1")
    total = sum(float(line["hours"]) for line in lines)
    assert f"all 2 rows: {total:.3g} hours" in capsys.readouterr().out


NUMBERS = {"pfedvem": (7, 12), "pfedmb": (3, 5), "metavd": (17, 5), "fedbe": (9, 13)}
NUMBERS["fedabml"] = (2, 6)
ROMAN = {"I": "1", "II": "2", "III": "3"}


@pytest.mark.parametrize("paper", NUMBERS)
def test_a_page_lists_every_table_and_figure_of_its_paper_once(paper: str):
    page = (PAPERS / paper / "README.md").read_text()
    section = page.partition("## Tables and figures of the paper")[2].partition("## ")[0]
    listed = {"table": list[int](), "figure": list[int]()}
    for kind, words in re.findall(r"(?m)^\| (table|figure)s? ([^|]+) \|", section):
        words = re.sub(r"\bI+\b", lambda found: ROMAN[found[0]], words)
        for part in words.split(", "):
            first, _, last = part.partition(" to ")
            listed[kind] += range(int(first), int(last or first) + 1)
    tables_, figures_ = NUMBERS[paper]
    assert sorted(listed["table"]) == [*range(1, tables_ + 1)]
    assert sorted(listed["figure"]) == [*range(1, figures_ + 1)]


@pytest.mark.parametrize("paper", NUMBERS)
def test_studies_that_a_list_names_are_there(paper: str):
    page = (PAPERS / paper / "README.md").read_text()
    section = page.partition("## Tables and figures of the paper")[2].partition("## ")[0]
    names = set(re.findall(r"`([a-z0-9_]+)`", section)) - {"smallest"}
    assert names
    assert names <= {name for of, name in STUDIES if of == paper}
    scripts = re.findall(r"`(\w+\.py)\b", section)
    for script in scripts:
        folders = (PAPERS / paper, PAPERS, PAPERS.parent)
        assert any((at / script).is_file() for at in folders), f"{script} is not there"


def test_ten_clients_are_in_five_pairs(folder: Path):
    study = STUDIES["pfedmb", "figure4"]
    whole = study.trial("smoke", "", "pFedMB", data_dir=folder).task.data
    data = import_module("pfedmb.studies").in_pairs(whole, seed=0)
    for j, (rows, test) in enumerate(zip(data.train, data.test, strict=True)):
        assert set(data.y[rows].tolist()) == {2 * (j // 2), 2 * (j // 2) + 1}
        assert set(test.tolist()) == set(data.test[2 * (j // 2)].tolist())
    together = torch.cat([*data.train])
    assert together.sort().values.equal(torch.cat([*whole.train]).sort().values)


def test_parts_of_a_run_are_those_of_a_whole_run(folder: Path):
    study = STUDIES["pfedvem", "figure12"]
    trial = study.trial("smoke", "50 clients", "FedPer", data_dir=folder)
    parts = dict(harness.in_parts(trial))
    assert [*parts] == [*harness.PARTS]
    assert [run.state.number for run in parts.values()] == [1] * 5 + [2] * 2
    whole = trial.fit().state.server
    assert all(value.equal(whole[name]) for name, value in parts[100].state.server.items())


def test_a_file_that_leaves_out_the_rounds_has_the_usual_number():
    rounds_of = import_module("plots").rounds_of
    assert rounds_of({"settings": "data=digits"}) == harness.Settings().rounds
    assert rounds_of({"settings": "data=digits rounds=15"}) == 15
