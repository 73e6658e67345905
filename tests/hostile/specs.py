"""Hostile names with numbers in them, networks of the user's own, and whole command lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hostile.case import DONE, NOBODY, OUT, Case, named, shown
from hostile.flags import DIGITS, EITHER, LITTLE, MOST, RUN, SCHOOLS, given, places

ODD_SPECS: dict[str, tuple[tuple[str, ...], str]] = {
    "--partition": (
        DIGITS,
        "dirichlet dirichlet: dirichlet:0 dirichlet:-1 dirichlet:nan dirichlet:inf dirichlet:ten "
        "dirichlet:0.5,min=-1 dirichlet:0.5,min=2.5 dirichlet:0.5,min= dirichlet:0.5,min=nan "
        f"dirichlet:0.5,min={MOST} dirichlet:0.5,balance=1 dirichlet:0.5,,balance dirichlet:0.5, "
        "dirichlet:0.5;min=3 labels:0 labels:-1 labels:11 labels:2.5 labels:nan labels: labels "
        f"labels:{MOST} slices:0 slices:11 slices:-5 slices:5,odd slices:5,independent=1 slices:٪ "
        "label-groups:0 label-groups:11 label-groups:2.5 step:0 step:11 step:2,minor=-1 step "
        f"step:2,minor=nan step:2,minor={MOST} shares:0 shares:11 shares:-1 shares:nan groups "
        "groups:county domains domains: domains:iid domains:groups domains:domains:iid drift "
        "drift:3 iid:3 iid,x IID Dirichlet:0.5 iid:",
    ),
    "--participation": (
        SCHOOLS,
        f"0.0 -0.5 1.5 inf -inf 3 {MOST} bernoulli bernoulli: bernoulli:0 bernoulli:2 "
        "bernoulli:nan bernoulli:-1 bernoulli:inf bernoulli:ten everyone:1 Everyone half 50% 1/2 "
        "0,5 1e400 fixed:2 :2 :0.5x 1.0.0",
    ),
    "--server-data": (
        (*DIGITS, "--test", "uniform"),
        f"1.0 -5 -0.1 inf -inf 1e309 {MOST} half 50% digits+digits npz: npz:missing.npz "
        "csv: eight_schools gaussian 0.0 1e-30 60 61 1.5",
    ),
    "--net": (
        DIGITS,
        "mlp:0 mlp:-1 mlp:2.5 mlp: mlp:1,,2 mlp:1, mlp:nan mlp:ten mlp:² mlp:1;2 softmax:3 mean "
        f"linear mean:2 cnn-metavd:0 cnn-pfedvem cnn-pfedmb resnet20 resnet20:3 resnet21 MLP "
        f"mlp:{MOST} mlp:1000000000000 mlp:3000000,3000000",
    ),
    "--device": (SCHOOLS, "meta tpu gpu cpu:x cpu:-1 cuda:-1 cuda:999 mps:7 CPU cpu,cuda"),
    "--test": (DIGITS, "Uniform same-shares uniform,uniform labels_global:2 pooled none"),
}


def of_specs() -> Iterator[Case]:
    """Yield names with numbers in them that are nearly right."""
    for flag, (base, values) in ODD_SPECS.items():
        for value in values.split():
            words = (*RUN, *base, "--out", OUT, *given(flag, value))
            told = ("expected",) if flag == "--device" else shown(value.rpartition("=")[2][-9:])
            told = () if value.startswith("mlp:") or value in ("1e-30", "60", "61", "1.5") else told
            told = () if flag in ("--participation", "--server-data", "--partition") else told
            yield Case(f"run {flag}={named(value)}", "flag", words, told=told)
    for flag, value, base in (
        ("--partition", "dirichlet:1e308", DIGITS),
        ("--partition", "dirichlet:1e-308", DIGITS),
        ("--partition", "dirichlet:0.5,min=1,min=2", DIGITS),
        ("--partition", "slices:5,shared,independent", DIGITS),
        ("--participation", "1e-9", SCHOOLS),
        ("--participation", "1e0", SCHOOLS),
        ("--participation", "bernoulli:1e-9", SCHOOLS),
        ("--device", "cpu:0", SCHOOLS),
        ("--device", "", SCHOOLS),
        ("--data-dir", "missing", SCHOOLS),
        ("--data-dir", "fifo", SCHOOLS),
        ("--data-dir", "", SCHOOLS),
    ):
        words = (*RUN, *base, "--out", OUT, *given(flag, value))
        ends = (*EITHER, NOBODY) if "1e-9" in value else EITHER
        yield Case(f"run {flag}={named(value)}", "flag", words, ends, make=places)


NETS = """
import os, sys, torch
from torch import nn
plain = nn.Linear(64, 10)
class Nan(nn.Linear):
    def forward(self, x): return super().forward(x) * float("nan")
class Pair(nn.Linear):
    def forward(self, x): return super().forward(x), x
class Breaks(nn.Linear):
    def forward(self, x): raise RuntimeError("broken\\nin two lines")
class Rows(nn.Linear):
    def forward(self, x): return super().forward(x).sum(0)
pair, breaks, rows = Pair(64, 10), Breaks(64, 10), Rows(64, 10)
narrow, text, number, none, kind = nn.Linear(64, 3), "net", 3, None, nn.Linear
empty, flat, listed = nn.Sequential(), nn.Flatten(), nn.ModuleList([plain])
norm = nn.Sequential(nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, 10))
drop = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 10))
lstm = nn.LSTM(64, 10)
lazy = nn.LazyLinear(10)
def broken(): return 1 / 0
def leaves(): sys.exit(0)
def needs(width): return nn.Linear(width, 10)
def interrupts(): raise KeyboardInterrupt
def huge(): return nn.Linear(64, 10**15)
def frozen():
    made = nn.Linear(64, 10)
    return made.requires_grad_(False)
"""
BAD_NETS = "pair breaks rows narrow text number none kind empty flat listed norm drop lstm lazy "
BAD_NETS += "broken leaves needs huge frozen missing __name__ os"
BAD_FILES = {
    "syntax": "def (",
    "nul": "x = 1\0",
    "raises": "raise ValueError('no')",
    "exits": "import sys; sys.exit(0)",
    "imports": "import no_such_module",
    "latin": "# \udcff\nnet = 3",
    "blank": "",
}


def nets(folder: Path) -> None:
    """Make files with networks."""
    (folder / "nets.py").write_text(NETS)
    for name, text in BAD_FILES.items():
        (folder / f"{name}.py").write_bytes(text.encode("utf-8", "surrogateescape"))


def of_networks() -> Iterator[Case]:
    """Yield files of networks that do not work."""
    base = (*RUN, *DIGITS, *LITTLE, "--out", OUT)
    specs = [f"nets.py:{name}" for name in BAD_NETS.split()]
    specs += [f"{name}.py:net" for name in BAD_FILES]
    for spec in specs:
        words = (*base, "--net", spec)
        yield Case(f"run --net={spec}", "flag", words, make=nets)
    words = (*base, "--net", "nets.py:plain")
    yield Case("run --net=nets.py:plain", "flag", words, (DONE,), make=nets)


def cases() -> Iterator[Case]:
    """Yield all that is about names and networks."""
    yield from of_specs()
    yield from of_networks()
