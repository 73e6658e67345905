"""Exit codes are kept whatever goes wrong, and everything is said in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyrofl import figures
from pyrofl.cli import parser
from pyrofl.cli.commands import fitting
from pyrofl.cli.parser import main
from pyrofl.experiments import console
from pyrofl.experiments.options import expand_home
from pyrofl.files.run_folder import read_csv
from pyrofl.inference.posteriors import export

SMALL = ["--per-class", "6", "--clients", "2", "--net", "softmax", "--rounds", "1", "--quiet"]
SMALL += ["--posterior-draws", "2"]
RUN = ["run", "local", *SMALL]
BARE = [*RUN, "--posterior-draws", "0"]
HUGE = "1" + "0" * 30

NETWORKS = """
from torch import nn
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(64, 10)
class Key(Odd):
    def forward(self, x):
        return {}["a"]
class Assertion(Odd):
    def forward(self, x):
        assert False, "never"
class Recursion(Odd):
    def forward(self, x):
        return self.forward(x)
class Exit(Odd):
    def forward(self, x):
        raise SystemExit(0)
class Mixing(Odd):
    def forward(self, x):
        return self.inside(x - x.mean(0))
good = lambda: nn.Linear(64, 10)
"""
REFUSED = {
    "--net mlp:99999999999": "not enough memory: ",
    f"--net mlp:{HUGE}": "expected positive integers below 1e18",
    "--net nets.py:Mixing": "local: the likelihood of 'y' in one row depends on other rows",
    "--net nets.py:Key": "KeyError: 'a' (unexpected; PYROFL_TRACEBACK=1 shows where)",
    "--net nets.py:Assertion": "AssertionError: never (unexpected",
    "--net nets.py:Recursion": "maximum recursion depth exceeded",
    "--net nets.py:Exit": "SystemExit: 0 (unexpected",
    "--draws 2000000000": "--draws is 2000000000, with local 1,300,000,000,000 numbers, for which",
    "--posterior-draws 2000000000": "numbers, for which there is no memory; expected fewer",
    f"--set epochs={HUGE}": f"epochs of local is '{HUGE}'; expected at most 2147483647",
    f"--set epochs=uneven:{HUGE}": "expected at most 2147483647",
    "--set lr=1e308": "lr of local is '1e308'; expected at most 9.223372037e+18",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_fails_before_any_work_is_refused_in_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fitting, "fit", lambda *_: pytest.fail("trained"))
    Path("nets.py").write_text(NETWORKS)
    assert main([*RUN, *("" if w == "''" else w for w in words.split())]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pyrofl: error: ")
    assert error.count("\n") == 1
    assert REFUSED[words] in error
    assert os.listdir() == ["nets.py"]


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_comparison_that_is_refused_leaves_no_folder(more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETWORKS)
    words = ["compare", "local", "fedavg", *SMALL, "--seeds", "1", "--out", "below/out", *more]
    assert main([*words, "--net", "nets.py:Mixing"]) == 2
    assert os.listdir() == ["nets.py"]
    assert main([*words, "--net", "softmax"]) == 0
    (tmp_path / "below/out/local-0/run.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    odd = [*words[:1], "local", "ditto", *words[3:], "--net", "softmax", "--resume"]
    assert main(odd) == 2
    assert "run.json cannot be read" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_traceback_is_shown_if_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("PYROFL_TRACEBACK", "1")
    assert main([*RUN, "--net", "mpl"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.splitlines()[-1].endswith("did you mean mlp?")


def started(words: list[str], **how: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pyrofl", *words]
    return subprocess.run(command, text=True, stderr=subprocess.PIPE, **how)  # type: ignore[call-overload]


def test_results_are_kept_where_nothing_can_be_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(BARE) == 3
    told = "cannot print: No space left on device; runs/local-0 holds all results"
    assert capsys.readouterr().err.splitlines()[-1] == f"pyrofl: error: {told}"


@pytest.mark.slow
@pytest.mark.parametrize("words", [["list"], ["run", "--help"], BARE])
def test_a_full_output_is_no_refusal(words, tmp_path):
    with open("/dev/full", "w") as full:
        done = started(words, stdout=full, cwd=tmp_path)
    assert done.returncode == 3
    kept = "; runs/local-0 holds all results" if words is BARE else ""
    assert done.stderr.splitlines()[-1] == (
        f"pyrofl: error: cannot print: No space left on device{kept}"
    )
    assert (tmp_path / "runs/local-0/run.json").exists() == (words is BARE)


@pytest.mark.slow
def test_no_output_and_no_errors_are_no_matter(tmp_path):
    words = [w for w in BARE if w != "--quiet"]
    script = f"exec {sys.executable} -m pyrofl {' '.join(words)} >&- 2>&-"
    assert subprocess.run(script, shell=True, cwd=tmp_path).returncode == 0
    assert (tmp_path / "runs/local-0/run.json").exists()


@pytest.mark.slow
def test_a_terminal_without_signs_is_no_matter(tmp_path):
    words = ["compare", *BARE[1:], "--seeds", "2", "--out", "o"]
    done = started(words, env=os.environ | {"PYTHONIOENCODING": "ascii"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_home_that_cannot_be_written_is_no_matter(tmp_path):
    env = {n: v for n, v in os.environ.items() if n != "MPLCONFIGDIR" and n[:3] != "XDG"}
    done = started([*RUN, "--out", "o"], env=env | {"HOME": "/proc"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o/posterior.nc").exists()


@pytest.mark.parametrize("broken", [(figures, "try_out"), (export, "import_arviz")])
def test_what_the_end_needs_is_tried_before_round_one(broken, tmp_path, monkeypatch, capsys):
    def fail() -> None:
        raise OSError(30, "Read-only file system", "/home/cache")

    monkeypatch.setattr(*broken, fail)
    monkeypatch.setattr(fitting, "fit", lambda *_: pytest.fail("trained"))
    assert main([*RUN, "--out", str(tmp_path / "o")]) == 2
    assert capsys.readouterr().err == ("pyrofl: error: Read-only file system: /home/cache\n")
    assert not list(tmp_path.iterdir())


def test_home_is_written_out_where_a_path_begins(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    for text, expected in {
        "~/x": "/home/ada/x",
        "~": "/home/ada",
        "csv:~/a.csv": "csv:/home/ada/a.csv",
        "csv:~/a.csv,~/b.csv": "csv:/home/ada/a.csv,/home/ada/b.csv",
        "runs,~x": "runs,~x",
        "npz:~/a.npz+npz:~/b.npz": "npz:/home/ada/a.npz+npz:/home/ada/b.npz",
        "~/nets.py:NAME": "/home/ada/nets.py:NAME",
        "a~/b": "a~/b",
        "runs/~x": "runs/~x",
        "digits": "digits",
    }.items():
        assert expand_home(text) == expected


def test_home_is_found_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETWORKS)
    net = ["--net", "~/nets.py:good"]
    assert main([*RUN, *net, "--out", "~/deep/run", "--data-dir", "~/data"]) == 0
    assert (tmp_path / "deep/run/posterior.nc").exists()
    facts = json.loads((tmp_path / "deep/run/run.json").read_text())["experiment"]
    assert facts["net"] == f"{tmp_path}/nets.py:good"
    assert not (tmp_path / "~").exists()


ODD = ["a$b", "$x_1$", r"$\frac{", "A^2_", "{q}", "smile \N{SLIGHTLY SMILING FACE}", "back\\slash"]


def test_names_of_all_kinds_are_drawn_as_they_are(tmp_path, capsys):
    kinds = ["$c$", "d_$e", "{$"]
    lines = [f"{ODD[i % 7]},{kinds[i // 7 % 3]},{i * 0.1},{i % 5}" for i in range(84)]
    (tmp_path / "odd.csv").write_text("\n".join(["who,class,$x_1$,x^2", *lines]), "utf-8")
    words = ["--data", f"csv:{tmp_path}/odd.csv", "--target", "class", "--client-column", "who"]
    out = str(tmp_path / "o")
    run = ["run", "local", *words, "--rounds", "1", "--quiet", "--posterior-draws", "2"]
    assert main([*run, "--out", out]) == 0
    assert capsys.readouterr().err == ""
    assert {r["client"] for r in read_csv(tmp_path / "o/clients.csv")} == set(ODD)
    drawn = figures.partition([[1, 2], [3, 4]], ODD[:2], ODD[1:3])
    drawn.canvas.draw()
    shown = drawn.axes[1].get_xticklabels()
    assert [t._preprocess_math(t.get_text()) for t in shown] == [(n, False) for n in ODD[:2]]


@pytest.mark.draws
def test_a_figure_that_fails_loses_no_result(tmp_path, monkeypatch, capsys):
    def broken(*_: object) -> None:
        raise ValueError("no such\ncolor")

    monkeypatch.setattr(figures, "curves", broken)
    out = tmp_path / "o"
    assert main([*RUN, "--out", str(out)]) == 3
    printed = capsys.readouterr()
    assert printed.out.startswith("model")
    assert printed.err.strip() == (
        f"pyrofl: error: {out} holds all results, but no {out}/figures/curves.png: no such color"
    )
    whole = {"checkpoint.safetensors", "clients.csv", "figures", "metrics.csv", "posterior.nc"}
    whole |= {"rows.csv", "run.json"}
    assert {p.name for p in out.iterdir()} == whole
    assert (out / "figures/reliability.png").exists()


@pytest.mark.draws
def test_a_figure_that_fails_loses_no_comparison(tmp_path, monkeypatch, capsys):
    def broken(*_: object) -> None:
        raise KeyError("color")

    monkeypatch.setattr(figures, "curves", broken)
    out = tmp_path / "o"
    assert main(["compare", "local", *SMALL, "--seeds", "1", "--out", str(out)]) == 3
    printed = capsys.readouterr()
    assert printed.out.startswith("method")
    assert printed.err.count("curves.png: KeyError: 'color' (unexpected;") == 2
    assert len(read_csv(out / "compare.csv")) > 3
    assert not (out / "local-0/checkpoint.safetensors").exists()


def test_arviz_is_imported_without_a_home(tmp_path, monkeypatch):
    seen = []

    def load(name: str) -> str:
        seen.append(os.environ.get("XDG_CACHE_HOME"))
        if len(seen) == 1:
            raise PermissionError(13, "Permission denied")
        return name

    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    monkeypatch.setattr(export, "import_module", load)
    assert export.import_arviz() == "arviz"
    assert seen[0] == os.environ["XDG_CACHE_HOME"] == "/proc"
    assert seen[1] != "/proc"


def test_errors_are_told_in_words():
    told = {
        OSError(28, "No space left on device", "a.csv"): "No space left on device: a.csv",
        MemoryError(): "not enough memory",
        KeyboardInterrupt(): "interrupted",
        ValueError("x is 3"): "x is 3",
        TypeError("x"): "TypeError: x (unexpected; PYROFL_TRACEBACK=1 shows where)",
    }
    assert {e: console.what(e) for e in told} == told


def test_the_numbers_of_all_flags_have_an_end():
    for rows in parser.COMMANDS.values():
        for row in rows[2]:
            read = row.kind.get("type")
            if read and read.__name__ == "read" and "seed" not in row.flag:
                with pytest.raises(Exception, match="expected a "):
                    read(HUGE)
