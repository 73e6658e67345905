"""One page of HTML: it needs no network, and nothing in it is taken for HTML."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from handmade import run
from PIL import Image
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

from pyrofl.cli import main, parser

HOSTILE = (
    "<script src=http://evil.test/x.js></script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }} {% raise %} & 'ü名'\n$x$",
)
VOID = {"meta", "img", "br", "hr", "link", "input"}
ATTRIBUTES = {"lang", "charset", "name", "content", "id", "class", "alt", "src", "href"}
ATTRIBUTES |= {"http-equiv"}


class Reader(HTMLParser):
    """Collects tags, what they point to and texts; every tag has to be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.names: set[str] = set()
        self.targets: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}
        self.targets += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read(folder: Path) -> Reader:
    reader = Reader()
    reader.feed((folder / "report.html").read_text("utf-8"))
    reader.close()
    assert not reader.open
    return reader


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A comparison of sites with names that are HTML, templates and maths."""
    path = tmp_path_factory.mktemp("page") / "<i>o"
    rng = np.random.default_rng(0)
    for method in ("local", "fedavg"):
        right = {name: rng.integers(0, 2, 12) for name in HOSTILE}
        run(path, method, 0, right)
    (path / "fedavg-0/figures").mkdir()
    Image.new("RGB", (8, 8)).save(path / "fedavg-0/figures/reliability.png")
    assert main(["report", str(path)]) == 0
    return path


def test_no_name_becomes_html(folder):
    page = read(folder)
    assert not page.tags & {"script", "i", "iframe", "object", "link"}
    assert page.names <= ATTRIBUTES
    for name in HOSTILE:
        assert name in page.texts
    assert "49" not in page.texts


def test_nothing_is_fetched(folder):
    page = read(folder)
    assert sum(target.startswith("data:image/png;base64,") for target in page.targets) == 2
    assert all(target.startswith(("data:", "#part")) for target in page.targets)
    text = (folder / "report.html").read_text("utf-8")
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert "url(" not in text


def test_it_says_what_there_is_and_what_is_not(folder):
    told = "\n".join(read(folder).texts)
    for words in (
        "clients the global model of fedavg predicts better than their own",
        "not converged: w changed by 1 % in the last round",
        "fedavg-0 has no posterior.nc.",
        "No figure curves.png",
        "1 messages were rejected (a finite number 1)",
        "local-0: trained, but dropped out:",
        "0.75",
        "192",
        "144",
    ):
        assert words in told, words


def test_the_command_is_one_that_is_understood(folder):
    (line,) = [text for text in read(folder).texts if text.startswith("pyrofl compare")]
    args = parser.parser().parse_args(shlex.split(line)[1:])
    assert (args.methods, args.seeds, args.seed) == (["fedavg", "local"], 1, 0)
    assert (args.data, args.target, args.settings) == ("csv:sites.csv", "sick", ["lr=0.1"])


def test_one_run_without_rows(tmp_path):
    notes = ["rates_above_0.9 is 0.7 in round 2: too many"]
    path = run(tmp_path, "fedavg", 3, {"a": [1, 0, 1], "b": [0, 1]}, warnings=notes)
    assert main(["report", str(path)]) == 0
    told = "\n".join(read(path).texts)
    assert f"fedavg-3: {notes[0]}." in told
    assert "What did federation buy?" not in told
    assert "0.2307 to 0.8824" in told  # Wilson's interval of 3 of 5
    # Rows 0, 2, 4 are of class no and right, rows 1 and 3 of class yes and wrong.
    table = pd.read_csv(path / "rows.csv")
    is_yes, p_yes = table["y"] == "yes", table["p(yes)"]
    assert f"{balanced_accuracy_score(is_yes, p_yes > 0.5):.4g}" == "0.5"
    parts = told[told.index("\nClasses\n") :].split()
    assert parts[parts.index("yes") + 1 :][:2] == ["2", "0"]
    scores = (roc_auc_score(is_yes, p_yes), average_precision_score(is_yes, p_yes))
    assert parts[parts.index("yes") + 4 :][:2] == [f"{score:.4g}" for score in scores]
    assert parts[parts.index("all") + 1 :][:2] == ["5", "0.5"]
    (path / "rows.csv").unlink()
    assert main(["report", str(path)]) == 0
    told = "\n".join(read(path).texts)
    assert "No intervals: " in told
    assert "mean of clients" in told
    assert "pyrofl run fedavg --data" in told


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("run.json", lambda t: t.replace('"silent"', '"quiet"'), "run.json lacks the list silent"),
        ("run.json", lambda t: "[1]", "it holds no names and values"),
        ("clients.csv", lambda t: t.replace("client", "site"), "clients.csv lacks column client"),
        ("clients.csv", lambda t: t.rstrip().rsplit(",", 1)[0], "clients.csv: line"),
    ],
)
def test_edited_files_are_refused_in_a_line(tmp_path, capsys, name, change, told):
    path = run(tmp_path, "fedavg", 3, {"a": [1, 0, 1], "b": [0, 1]})
    (path / name).write_text(change((path / name).read_text("utf-8")), "utf-8")
    assert main(["report", str(path)]) == 2
    assert told in capsys.readouterr().err


def test_scores_that_a_comparison_lacks_are_named(tmp_path):
    for method in ("local", "fedavg"):
        (run(tmp_path, method, 0, {"a": [1, 0, 1], "b": [0, 1]}) / "metrics.csv").unlink()
    head = "method,seed,model,adaptation,metric,value,tuned"
    (tmp_path / "compare.csv").write_text(f"{head}\nlocal,0,personal,none,accuracy,0.5,\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "compare.csv lacks the scores of fedavg-0." in read(tmp_path).texts


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """Return a folder of two runs and their compare.csv."""
    lines = ["method,seed,model,adaptation,metric,value,tuned"]
    for method in ("local", "fedavg"):
        path = run(tmp_path, method, 0, {"a": [1, 0, 1], "b": [0, 1]})
        (path / "metrics.csv").write_text(METRICS)
        lines.append(f"{method},0,personal,none,accuracy,0.75,")
        lines.append(f"{method},0,personal,none,smallest_accuracy,0.5,")
    (tmp_path / "compare.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


METRICS = """round,model,adaptation,population,metric,value
1,personal,none,training,accuracy,0.5
2,personal,none,training,accuracy,0.75
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            ("0.75", "0.99"),
            "accuracy of local-0 is 0.99, and 0.75 in its metrics.csv; run the same",
        ),
        (("accuracy,0.75", "nll,0.75"), "accuracy of local-0 is nan, and 0.75 in its metrics.csv"),
        (
            ("local,0,personal,none,s", "local,1,personal,none,s"),
            "compare.csv has local of seed 1, whose run is not there",
        ),
        (("0.75", "high"), "could not convert string to float: 'high'"),
        ((",value,", ",score,"), "lacks a column; expected method, seed, model"),
    ],
)
def test_a_table_of_other_scores_is_refused(compared, capsys, change, told):
    assert main(["report", str(compared)]) == 0
    path = compared / "compare.csv"
    path.write_text(path.read_text().replace(*change, 1))
    assert main(["report", str(compared)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert told in last
    assert "run the same pyrofl compare with --resume, or remove the file" in last


def test_a_report_reads_nothing_through_links(compared, tmp_path_factory, capsys):
    other = tmp_path_factory.mktemp("other")
    for name in ("compare.csv", "fedavg-0"):
        path = compared / name
        path.rename(other / name)
        path.symlink_to(other / name)
        assert main(["report", str(compared)]) == 2
        assert f"{path} is a link to " in capsys.readouterr().err
        path.unlink()
        (other / name).rename(path)
    assert main(["report", str(compared)]) == 0


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"chosen": {}}', "null", '{"hash": "0"}', "[" * 100_000]
)
def test_a_damaged_search_is_refused_in_a_line(compared, capsys, text):
    (compared / "local-tune").mkdir()
    (compared / "local-tune" / "tune.json").write_text(text)
    assert main(["report", str(compared)]) == 2
    told = "tune.json cannot be read: "
    assert told in capsys.readouterr().err


def test_without_jinja2_it_says_what_to_install(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["report", str(folder)]) == 2
    assert "jinja2; expected pip install -e '.[report]' in the clone" in capsys.readouterr().err


def test_no_folder_of_a_run(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "none holds no run.json; expected a folder of pyrofl run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs the browser chromium")
@pytest.mark.parametrize("width", [400, 1100])
def test_a_browser_shows_all_of_it(folder, tmp_path, width):
    picture = tmp_path / "page.png"
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += [f"--window-size={width},1500", f"--screenshot={picture}", "--dump-dom"]
    page = (folder / "report.html").as_uri()
    subprocess.run([*words, page], check=True, capture_output=True, timeout=120)
    shown = np.asarray(Image.open(picture).convert("L"))
    assert shown.shape[1] == width
    assert shown[:1000].std() > 5  # there is something on it
