"""A run that is killed, interrupted or out of disk: what is left of it, and how it goes on."""

from __future__ import annotations

import itertools
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
from torch import Tensor

from pyrofl import extensions
from pyrofl.cli.commands import fitting
from pyrofl.cli.parser import main
from pyrofl.experiments import jobs
from pyrofl.files import run_folder
from pyrofl.inference.engine.messages import BadMessage
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.validation import validate as mistakes
from pyrofl.tensors import Tensors

WORDS = ["run", "pfedvem", "--per-class", "12", "--clients", "4", "--net", "mlp:6", "--rounds"]
MORE = [
    "--quiet",
    "--eval-every",
    "1",
    "--posterior-draws",
    "3",
    "--participation",
    "bernoulli:0.7",
]
MORE += ["--drop-rate", "0.2", "--min-work", "0.4", "--seed", "5", "--set", "head_epochs=3"]
COMMAND = [*WORDS, "6", *MORE]
RESULTS = ("metrics.csv", "clients.csv", "posterior.nc")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing stops."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main([*COMMAND, "--out", str(out)]) == 0
    return out


def begin(out: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pyrofl", *COMMAND, "--out", str(out), *words]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        stdout=subprocess.DEVNULL,
        # A shell's background jobs ignore Ctrl-C, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(out: Path, process: subprocess.Popen[str], rounds: int = 1) -> None:
    """Wait until a checkpoint has been written so many times, or the process has ended."""
    seen = set()
    while len(seen) < rounds and process.poll() is None:
        if (out / "checkpoint.safetensors").exists():
            seen.add((out / "checkpoint.safetensors").stat().st_ino)
        time.sleep(0.002)


def resume(out: Path, whole: Path, *words: str) -> None:
    """Run the same command again and compare all it leaves, byte by byte."""
    assert main([*COMMAND, "--out", str(out), "--checkpoint-every", "1", "--resume", *words]) == 0
    for name in RESULTS:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    facts, expected = (json.loads((at / "run.json").read_text()) for at in (out, whole))
    for name in ("bytes_up", "bytes_down", "trained", "reported", "rejected", "rounds"):
        assert facts[name] == expected[name], name
    assert len(facts["seconds"]) == 6
    assert not [p for p in out.iterdir() if p.name.startswith(".")]


def test_results_that_are_there_may_be_written_again_or_continued(tmp_path, whole, capsys):
    out, short = tmp_path / "run", [*WORDS, "3", *MORE, "--out", str(tmp_path / "run")]
    assert main([*short, "--checkpoint-every", "2"]) == 0
    assert main([*short, "--checkpoint-every", "2"]) == 2
    assert main([*short, "--resume"]) == 0
    resume(out, whole)
    capsys.readouterr()
    assert main([*short, "--resume"]) == 2
    assert "--rounds is 3; expected at least 6, which" in capsys.readouterr().err
    assert main([*short, "--overwrite"]) == 0
    (out / "checkpoint.safetensors").unlink()
    capsys.readouterr()
    for words, told in (
        (["--rounds", "2"], "--rounds is 2; expected at least 3, which"),
        (["--init-seed", "6"], "run.json is of another run; now seeds is {'split': 5, 'init': 6"),
        (["--drop-rate", "0.3"], "now drop_rate is 0.3 and was 0.2"),
    ):
        assert main([*short, "--resume", *words]) == 2
        assert told in capsys.readouterr().err
    (out / "run.json").write_text("[]")
    assert main([*short, "--resume"]) == 2
    assert "run.json cannot be read: TypeError" in capsys.readouterr().err


def test_rounds_of_a_schedule_are_among_what_must_be_the_same(tmp_path, capsys):
    words = ["run", "fedavg", *WORDS[2:-1], "--quiet", "--posterior-draws", "0"]
    words += ["--set", "decay=true", "--checkpoint-every", "1", "--out", str(tmp_path), "--rounds"]
    assert main([*words, "1"]) == 0
    assert main([*words, "2", "--resume"]) == 2
    assert (
        "checkpoint.safetensors is of another run; now rounds is 2 and was 1"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_an_interrupted_run_says_where_it_stopped_and_goes_on(tmp_path, whole):
    out = tmp_path / "run"
    with begin(out, "--checkpoint-every", "1") as process:
        wait_for(out, process, 2)
        process.send_signal(signal.SIGINT)
        told = process.communicate()[1].strip().splitlines()
        assert process.returncode == 130, told
    assert told[-1].startswith("pyrofl: error: ")
    assert "interrupted" in told[-1]
    assert f"{out}/checkpoint.safetensors holds round " in told[-1]
    assert told[-1].endswith("continue with --resume")
    assert not any("Traceback" in line for line in told)
    resume(out, whole)


def test_an_interrupt_leaves_a_checkpoint_that_nobody_asked_for(
    tmp_path, whole, monkeypatch, capsys
):
    def stop(method, *args, callback, **options):
        def then(run):
            callback(run)
            if run.state.number == 4:
                raise KeyboardInterrupt

        return fit(method, *args, callback=then, **options)

    from pyrofl.inference.fit import fit

    monkeypatch.setattr("pyrofl.cli.commands.fitting.fit", stop)
    assert main([*COMMAND, "--out", str(tmp_path / "run")]) == 130
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("pyrofl: error: after round 4 of 6: interrupted; ")
    assert told.endswith("checkpoint.safetensors holds round 4, continue with --resume")
    monkeypatch.undo()
    resume(tmp_path / "run", whole)


def test_an_interrupt_in_a_test_loses_no_round(tmp_path, whole, monkeypatch, capsys):
    real = Run.record_scores

    def stop(run: Run) -> object:
        if run.state.number == 4:
            raise KeyboardInterrupt
        return real(run)

    monkeypatch.setattr(Run, "record_scores", stop)
    assert main([*COMMAND, "--out", str(tmp_path / "run")]) == 130
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.endswith("checkpoint.safetensors holds round 4, continue with --resume")
    monkeypatch.undo()
    resume(tmp_path / "run", whole)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("weights are all 0"), "weights are all 0"),
        (BadMessage("client 3: w is nan; expected a finite number"), "client 3: w is nan"),
        (MemoryError(), "not enough memory; "),
        (OSError(30, "Read-only file system", "a.csv"), "Read-only file system: a.csv"),
    ],
)
def test_a_failure_on_the_way_is_no_refusal(tmp_path, monkeypatch, capsys, error, told):
    monkeypatch.setattr("pyrofl.experiments.results.save", lambda *_: (_ for _ in ()).throw(error))
    assert main([*WORDS, "1", *MORE, "--out", str(tmp_path / "run")]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"pyrofl: error: after round 1 of 1: {told}")
    assert last.endswith("checkpoint.safetensors holds round 1, continue with --resume")


def test_what_nobody_expects_is_not_hidden_but_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pyrofl.experiments.results.save", lambda *_: {}["a mistake of ours"])
    assert main([*WORDS, "1", *MORE, "--out", str(tmp_path / "run")]) == 3
    error = capsys.readouterr().err
    told = "KeyError: 'a mistake of ours' (unexpected; PYROFL_TRACEBACK=1 shows where); "
    assert told in error.splitlines()[-1]
    assert "Traceback" not in error
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()
    monkeypatch.setenv("PYROFL_TRACEBACK", "1")
    assert main([*WORDS, "1", *MORE, "--out", str(tmp_path / "run"), "--resume"]) == 3
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert told in error.splitlines()[-1]


def limited(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("extra", [0, 40_000])
def test_a_full_disk_ends_the_run_in_one_line(tmp_path, whole, capsys, extra):
    out, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    short = [*WORDS, "2", *MORE, "--out", str(out), "--checkpoint-every", "1"]
    assert main(short) == 0
    kept = (out / "checkpoint.safetensors").read_bytes()
    (out / "posterior.nc").unlink()
    try:
        limited(1000 if not extra else len(kept) + 3000)
        code = main([*COMMAND, "--out", str(out), "--checkpoint-every", "1", "--resume"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    last = capsys.readouterr().err.splitlines()[-1]
    assert code == 3, last
    assert last.startswith("pyrofl: error: ")
    assert "continue with --resume" in last
    if not extra:
        assert "after round 3 of 6: File too large" in last
        assert (out / "checkpoint.safetensors").read_bytes() == kept
        resume(out, whole)


def test_figures_that_cannot_be_written_are_refused_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fitting, "fit", lambda *_: pytest.fail("trained"))
    (tmp_path / "figures").touch()
    assert main([*COMMAND, "--overwrite", "--out", str(tmp_path)]) == 2
    assert "figures is a file; expected a directory" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(capsys):
    assert main([*COMMAND, "--out", "/proc/self/run"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_checkpoint_of_another_run_is_refused(tmp_path, capsys):
    out = tmp_path / "run"
    short = [
        "run",
        "fedavg",
        *WORDS[2:],
        "1",
        "--quiet",
        "--posterior-draws",
        "0",
        "--out",
        str(out),
    ]
    assert main([*short, "--checkpoint-every", "1"]) == 0
    for words, told in (
        (["--set", "lr=0.5"], "set is ['lr=0.5'] and was []"),
        (["--participation", "0.5"], "participation is '0.5' and was 'everyone'"),
        (["--seed", "3"], "seed of init is 3 and was 0"),
        (["--clients", "6"], "clients is 6 and was 4"),
        (["--drop-rate", "0.1"], "drop_rate is 0.1 and was 0.0"),
        (["--net", "mlp:7"], "net is 'mlp:7' and was 'mlp:6'"),
    ):
        assert main([*short, "--resume", *words]) == 2
        told_ = capsys.readouterr().err
        assert "checkpoint.safetensors is of another run; now " in told_
        assert told in told_
    (out / "checkpoint.safetensors").write_bytes(b"")
    assert main([*short, "--resume"]) == 2
    assert "expected format 5 of pyrofl" in capsys.readouterr().err


def poisoned(monkeypatch: pytest.MonkeyPatch, first: int, counted: int = 1) -> None:
    """Let two clients send NaN from round `first` on, if the next one is round `counted`."""
    real, rounds, looks = jobs.methods, itertools.count(counted), list[int]()

    def look(*given: Any, **how: Any) -> None:  # its clients upload, too
        looks.append(1)
        mistakes.validate_method(*given, **how)
        looks.pop()

    monkeypatch.setitem(extensions._functions, "validation", look)
    monkeypatch.setattr("pyrofl.cli.commands.preflight.validate_method", look)
    poison = faults.entry(torch.nan)

    def late(message: Tensors, bad: Tensor) -> Tensors:
        return message if looks else poison(message, bad & (next(rounds) >= first))

    monkeypatch.setattr(
        jobs,
        "methods",
        lambda *given: {n: faults.corrupted(m, late, 1, 3) for n, m in real(*given).items()},
    )


def test_bad_messages_are_counted_and_told(tmp_path, monkeypatch, capsys):
    words = [*WORDS, "3", "--out", str(tmp_path)]
    poisoned(monkeypatch, 2)
    assert main(words) == 0
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["rejected_by_kind"] == {"a finite number": 4}
    assert [len(reasons) for reasons in facts["rejected"]] == [0, 2, 2]
    assert facts["reported"] == [4, 2, 2]
    assert sorted(facts["rejected"][1]) == [
        f"client {j}: tau is nan; expected a finite number" for j in (1, 3)
    ]
    told = capsys.readouterr().err
    for client in (1, 3):
        assert f"client {client}: rejected in 2 of 3 rounds; expected a finite number" in told


def test_a_bad_message_ends_the_run_if_that_is_asked(tmp_path, monkeypatch, capsys):
    words = [*WORDS, "3", "--quiet", "--out"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    out = tmp_path / "run"
    poisoned(monkeypatch, 2)
    assert main([*words, str(out), "--on-bad-message", "raise"]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("pyrofl: error: after round 1 of 3: client ")
    assert all(f"client {j}: tau is nan; expected a finite number; " in last for j in (1, 3))
    assert last.endswith("checkpoint.safetensors holds round 1, continue with --resume")
    monkeypatch.undo()
    assert main([*words, str(out), "--resume"]) == 2
    text = capsys.readouterr().err
    assert "is of another run; now init_client is 'pyrofl.models.pfedvem.build" in text
    poisoned(monkeypatch, 2, counted=-1)  # the two that are left are good
    assert main([*words, str(out), "--resume"]) == 0
    for name in RESULTS:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_disk_that_is_full_after_all_runs_is_no_refusal(tmp_path, monkeypatch, capsys):
    out = tmp_path / "both"
    words = ["compare", "fedavg", *WORDS[2:], "1", "--quiet", "--seeds", "1", "--out", str(out)]

    real = run_folder.write_csv

    def full(path: Path, *table: Any, **options: Any) -> None:
        if path.name == "compare.csv":
            raise OSError(28, "No space left on device", path.name)
        real(path, *table, **options)

    monkeypatch.setattr(run_folder, "write_csv", full)
    assert main(words) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    told = "No space left on device: compare.csv"
    kept = f"{out} holds their checkpoints, continue with --resume"
    assert last == f"pyrofl: error: after all runs: {told}; {kept}"
    monkeypatch.undo()
    assert main([*words, "--resume"]) == 0
    assert (out / "compare.csv").exists()


def test_a_comparison_looks_at_all_its_folders_before_any_work(tmp_path, monkeypatch, capsys):
    (tmp_path / "local-0").mkdir()
    (tmp_path / "local-0" / "mine.txt").touch()
    monkeypatch.setattr(fitting, "fit", lambda *_: pytest.fail("trained"))
    words = ["compare", "fedavg", "local", *WORDS[2:], "1", "--quiet", "--seeds", "1"]
    words += ["--out", str(tmp_path)]
    assert main([*words, "--resume"]) == 2
    assert "local-0 is not empty, it holds mine.txt" in capsys.readouterr().err
    (tmp_path / "fedavg-0").mkdir()
    (tmp_path / "fedavg-0" / "checkpoint.safetensors").touch()
    (tmp_path / "local-0" / "figures").touch()
    assert main([*words, "--overwrite"]) == 2
    assert "local-0/figures is a file; expected a directory" in capsys.readouterr().err
    assert (tmp_path / "fedavg-0" / "checkpoint.safetensors").exists()
    (tmp_path / "mine.txt").touch()
    assert main([*words, "--resume"]) == 2
    assert f"{tmp_path} is not empty, it holds mine.txt" in capsys.readouterr().err
