"""What ends the command before it has begun is one line: interrupts, a folder that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from promises import others_slow
from scipy import sparse

import pyrofl
from pyrofl import Federation, likelihoods, nets
from pyrofl.cli import main
from pyrofl.models import fedavg

SCRIPT = "import sys\nfrom pyrofl.cli import main\nsys.exit(main())\n"
INTERRUPTS = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('went on')\n"


@pytest.fixture
def command(tmp_path):
    """Return a way to run the command whose first library interrupts it as it is loaded."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pyrofl").write_text(SCRIPT)
    (tmp_path / "torch.py").write_text(INTERRUPTS)

    def run(*words, cwd=tmp_path, interrupts=True):
        path = [str(tmp_path)] * interrupts + [str(Path(pyrofl.__file__).parent.parent)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        words = [str(tmp_path / "bin" / "pyrofl"), *words[1:]] if words[0] == "pyrofl" else words
        # A background job of a shell ignores interrupts, and its children inherit that.
        usual = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        how = {"cwd": cwd, "env": env, "capture_output": True, "preexec_fn": usual}
        done = subprocess.run([sys.executable, *words], **how)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return run


COMMANDS = [["pyrofl", "run", "local"], ["-m", "pyrofl", "run", "local"]]
WITHOUT_TORCH = {
    "pyrofl": 0,
    "pyrofl --help": 0,
    "pyrofl --version": 0,
    "pyrofl list": 0,
    "pyrofl list methods": 0,
    "pyrofl run --help": 0,
    "pyrofl study join --help": 0,
    "pyrofl regress --help": 0,
    "pyrofl run fedavg --rouds 3": 2,
    "pyrofl run fedavg --rounds 0": 2,
    "pyrofl run fedavgg": 2,
    "pyrofl rnu": 2,
}


@pytest.mark.long  # starts a process
@pytest.mark.parametrize("words", others_slow(WITHOUT_TORCH, [*WITHOUT_TORCH][1:4]))
def test_help_lists_and_refusals_load_no_library(command, words):
    """Loading torch takes seconds; here it would interrupt the command."""
    code, out, told = command(*words.split())
    assert code == WITHOUT_TORCH[words]
    assert out if code == 0 else told.startswith("pyrofl: error: ")
    assert (told if code == 0 else out) == ""


@pytest.mark.long  # starts a process
@pytest.mark.parametrize("words", others_slow(COMMANDS, COMMANDS[:1]))
def test_an_interrupt_while_libraries_are_loaded_is_one_line(command, words):
    assert command(*words) == (130, "", "pyrofl: interrupted\n")


@pytest.mark.long  # starts a process
def test_a_script_that_imports_pyrofl_keeps_its_interrupts(command):
    code, _, told = command("-c", "import pyrofl.tensors")
    assert code != 130 or "KeyboardInterrupt" in told
    assert "KeyboardInterrupt" in told


@pytest.mark.long  # starts a process
@pytest.mark.parametrize("words", others_slow(COMMANDS, COMMANDS[:1]))
def test_a_working_directory_that_is_gone_is_one_line(command, tmp_path, words):
    gone = tmp_path / "gone"
    gone.mkdir()
    words = [str(tmp_path / "bin" / "pyrofl") if w == words[0] == "pyrofl" else w for w in words]
    inner = "import os, sys; os.rmdir(os.getcwd()); "
    inner += f"os.execv(sys.executable, [sys.executable, *{words!r}])"
    code, out, told = command("-c", inner, cwd=gone)
    assert (code, out) == (2, "")
    assert told == (
        "pyrofl: error: the working directory does not exist any more; change to another one\n"
    )


def test_a_date_that_is_none_is_refused_before_any_work(monkeypatch, capsys, tmp_path):
    words = ["run", "local", "--per-class", "6", "--clients", "2", "--net", "softmax", "--quiet"]
    for value in ("abc", "-5", "1" * 30):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
        assert main([*words, "--rounds", "1", "--out", str(tmp_path / "o")]) == 2
        told = f"pyrofl: error: SOURCE_DATE_EPOCH is {value!r}; set it to whole seconds since 1970"
        assert capsys.readouterr().err.startswith(told)
        assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("spec", ["mlp:1000000000", "mlp:100000,100000000", "cnn-metavd:50000000"])
def test_a_network_without_room_is_refused_before_it_is_made(spec, monkeypatch):
    def draw(value, **how):
        assert value.is_meta, "weights were made"

    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", draw)
    with pytest.raises(MemoryError, match=rf"network '{spec}' has .* expected smaller widths"):
        nets.build(spec, (3, 32, 32), 10)


def test_clients_and_rows_that_cannot_be_are_refused():
    x = np.random.default_rng(0).normal(size=(8, 2))
    data = Federation.from_arrays({"a": (x, x[:, 0])})
    method = fedavg.build(nets.build("softmax", (2,), 1), likelihood=likelihoods.normal())
    run = pyrofl.fit(method, data, 1, progress=False)
    for client in (0, True, ["a"], b"a"):
        with pytest.raises(
            ValueError, match="expected None for a new client, or a name, such as a"
        ):
            run.predict(x, client)
    for rows in (sparse.csr_matrix(x), sparse.coo_array(x), torch.tensor(x).to_sparse()):
        with pytest.raises(ValueError, match="x is sparse; expected a dense array"):
            run.predict(rows, "a")
        with pytest.raises(ValueError, match="a: x is sparse; expected a dense array"):
            Federation.from_arrays({"a": (rows, x[:, 0])})


def test_text_classes_under_a_bernoulli_model_are_refused_in_a_line():
    x = np.random.default_rng(0).normal(size=(20, 2))
    sick = x[:, 0] > 0
    numbers = Federation.from_arrays({"a": (x, 1.0 * sick, x, 1.0 * sick)})
    texts = Federation.from_arrays(
        {"a": (x, np.where(sick, "yes", "no"), x, np.where(sick, "yes", "no"))}
    )
    method = fedavg.build(nets.build("softmax", (2,), 1), likelihood=likelihoods.bernoulli)
    run = pyrofl.fit(method, numbers, 1, progress=False)
    assert "accuracy" in pyrofl.evaluate(method, numbers, run.state).values
    with pytest.raises(ValueError, match="response of the method's model is Bernoulli; pass y as"):
        pyrofl.evaluate(method, texts, run.state)


@pytest.mark.parametrize("words", [[], ["--quiet"]])
def test_a_terminal_shows_at_once_that_libraries_are_loaded(words, capsys, monkeypatch):
    shown = []

    def load(place):
        return lambda experiment: shown.append(capsys.readouterr().err)

    monkeypatch.setattr("pyrofl.cli.parser.load", load)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delitem(sys.modules, "torch")
    assert main(["run", "local", *words]) == 0
    assert shown == ["" if words else "loading PyTorch\n"]
