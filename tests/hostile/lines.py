"""Hostile command lines: whole ones, names with numbers in them, networks of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.case import DONE, NOBODY, Case, shown
from hostile.flags import (
    DIGITS,
    EITHER,
    GAP,
    LITTLE,
    MOST,
    RUN,
    SCHOOLS,
    fill,
    places,
    project,
    twin,
)
from hypothesis import strategies as st

# The beginning of a line, and its ends, each after ">" with what must be told of it.
LINES: dict[str, str] = {
    "": "runn>runn RUN~fedavg>RUN run>METHOD compare>METHOD partition>--out explain>METHOD "
    "@words>@words help>help explain~fedavgg>fedavg list~nothing>nothing list~all>all "
    "--version> list~--data~digits>digits --rounds~3~run~fedavg>",
    "run ": "fedavgg>fedavgg FEDAVG>FEDAVG fedavg~local>local --rounds~fedavg>--rounds "
    "guides>guides shared>shared __init__>__init__ priors.flat>priors.flat "
    "fedrep~--per-class~6~--net~softmax> fedbe~--per-class~6~--clients~2>server_data "
    "metavd~--data~eight_schools> "
    "pvi~--per-class~6~--clients~2~--discard-messages>--discard-messages "
    "fedbe~--per-class~6~--clients~2~--server-data~10~--discard-messages>--discard-messages",
    "run fedavg ": "--nonsense>--nonsense --nonsense=3>--nonsense -r~3>-r --se~3>--se "
    "--part~0.5>--part --seeds~3>--seeds --turns~3>--turns --overwrite=yes>--overwrite "
    "--quiet=0>--quiet --resume~3>3 --set>--set --set~--lr=1>--set "
    "--per-class~6~--clients~61>6 "
    "--per-class~6~--clients~20~--partition~dirichlet:0.1,min=50> --rounds>--rounds "
    "--drop-rate>--drop-rate",
    "compare ": "fedavg~fedavg>fedavg fedavg~local~fedavg>fedavg fedavg~nothing>nothing "
    "fedavg~--method~local>--method local~fedavg~--set~mu=1>mu "
    "local~fedavg~--set~ditto.lr=1>ditto local~--clients~2~--trials~2>--trials "
    "local~--metric~nll>--metric local~--tune~--privacy~clip=1,noise_multiplier=1>--privacy "
    "fedavg~--seed~3~--split-seed~1~--init-seed~1~--participation-seed~1~--noise-seed~1>--seeds "
    "local~-x>",
    "partition ": "fedavg~--out~x.png>fedavg --out>--out --rounds~3~--out~x.png>--rounds "
    "--data~eight_schools~--out~x.png>classes",
    "run fedavg --data ": "digits+digits>digits digits+>digits+ +digits> "
    "digits+nothing>nothing digits+eight_schools>eight_schools digits+csv:x.csv>",
    "run fedavg --data eight_schools --": "per-class~3>classes test~independent>independent "
    "clients~3>8 held-out~8>8 partition~iid~--clients~9>9 partition~slices:5>classes "
    "net~softmax~--likelihood~categorical>likelihood",
    "run fedavg --set ": "lr>lr =1>=1 lr=>lr lr==1>lr lr=0.1=2>lr .lr=1>.lr "
    "fedavg.=1>setting fedavg.lr>lr fedprox.lr=1>fedprox FEDAVG.lr=1>FEDAVG LR=1>LR lr:1>lr:1 "
    "a.b.lr=1>a.b mu=1>mu elapsed=0.5>elapsed net=3>net server_data=3>server_data "
    "likelihood=normal>likelihood prior=flat>prior guide=delta>guide "
    "aggregation=nothing>nothing epochs=uneven>epochs epochs=uneven:0>0 epochs=uneven:-3>-3 "
    "epochs=uneven:ten>epochs epochs=uneven:>epochs",
    f"predict run --data new.csv --out out.csv{GAP} ": "> --client~A~--new-client> "
    "--client-column~site~--new-client> --client~A~--own-rows~own.csv> --client-column~age>",
    "regress x --data csv:nothing.csv ": "--family>--family --link>--link --prior>--prior "
    "--levels>--levels --levels~zzz>zzz "
    "--family~gaussian>nothing.csv --nonsense~3>--nonsense",
    "study ": "up~p~--sites~4>--sites~4 up~p~--min-sites~4>--min-sites~is~4 "
    "serve~p~--host~0.0.0.0>--cert~is~None up> serve> join> join~10.0.0.1:1> zzz>zzz >COMMAND "
    "predict>",
}
HELPFUL = "-h --help run~--help compare~-h partition~-h list list~methods explain~fedavg explain~-h"
TOGGLES = (
    "--overwrite",
    "--resume",
    "--discard-messages",
    "--save-predictions",
    "--record",
    "--quiet",
)
TWICE = ("--rounds 9 --rounds 1", "--round 1", "--data digits --data eight_schools")


@st.composite
def lines(draw: Callable[..., Any]) -> Case:
    """Draw a line that is refused, one that helps, or one that says something twice."""
    kind = draw(st.sampled_from(["refused"] * 7 + ["helpful", "flag twice", "last wins", "set"]))
    base, plain = f"{RUN} {SCHOOLS} {LITTLE}", twin(f"{RUN} {SCHOOLS} {LITTLE}")
    if kind == "refused":
        begin = draw(st.sampled_from(sorted(LINES)))
        end, _, told = draw(st.sampled_from(LINES[begin].split())).partition(">")
        line = f"{begin}{end}".replace("~", " ")
        return fill(line, make=project if begin == "study " else places).telling(
            told.replace("~", " ")
        )
    if kind == "helpful":
        line = draw(st.sampled_from(HELPFUL.split())).replace("~", " ")
        return fill(line, "", (DONE,), writes=False)
    if kind == "flag twice":
        flag = draw(st.sampled_from(TOGGLES))
        return fill(f"{base} {flag} {flag}", "", (DONE,))
    if kind == "last wins":
        return fill(f"{base} {draw(st.sampled_from(TWICE))}", "", EITHER, like=plain)
    first = draw(st.sampled_from(["lr=0.02", "fedavg.lr=0.02"]))
    like = (*plain, "--set", "lr=0.02")
    return fill(f"{base} --set lr=0.01 {first}", "", EITHER, like=like)


SPECS: dict[str, str] = {  # names that are nearly right
    f"{RUN} {DIGITS} --partition": "dirichlet dirichlet: dirichlet:0 dirichlet:-1 "
    "dirichlet:nan dirichlet:inf dirichlet:ten dirichlet:0.5,min=-1 dirichlet:0.5,min=2.5 "
    f"dirichlet:0.5,min= dirichlet:0.5,min=nan dirichlet:0.5,min={MOST} "
    "dirichlet:0.5,balance=1 dirichlet:0.5,,balance dirichlet:0.5, dirichlet:0.5;min=3 "
    f"labels:0 labels:-1 labels:11 labels:2.5 labels:nan labels: labels labels:{MOST} slices:0 "
    "slices:11 slices:-5 slices:5,odd slices:5,independent=1 slices:٪ label-groups:0 "
    "label-groups:11 label-groups:2.5 step:0 step:11 step:2,minor=-1 step step:2,minor=nan "
    f"step:2,minor={MOST} shares:0 shares:11 shares:-1 shares:nan groups drift groups:county "
    "domains domains: domains:iid domains:groups domains:domains:iid drift:3 iid:3 iid,x IID "
    "Dirichlet:0.5 iid:",
    f"{RUN} {SCHOOLS} --participation": f"0.0 -0.5 1.5 inf -inf 3 {MOST} bernoulli bernoulli: "
    "bernoulli:0 bernoulli:2 bernoulli:nan bernoulli:-1 bernoulli:inf bernoulli:ten "
    "everyone:1 Everyone half 50% 1/2 0,5 1e400 fixed:2 :2 :0.5x 1.0.0",
    f"{RUN} {DIGITS} --test uniform --server-data": f"1.0 -5 -0.1 inf -inf 1e309 {MOST} half "
    "50% npz: digits+digits npz:missing.npz csv: eight_schools gaussian 0.0 1e-30 60 61 1.5",
    f"{RUN} {DIGITS} --net": "mlp:0 mlp:-1 mlp:2.5 mlp: mlp:1,,2 mlp:1, mlp:nan mlp:ten "
    "mlp:² mlp:1;2 softmax:3 mean linear mean:2 cnn-metavd:0 cnn-pfedvem cnn-pfedmb resnet20 "
    f"resnet20:3 resnet21 MLP mlp:{MOST} mlp:1000000000000 mlp:3000000,3000000",
    f"{RUN} {SCHOOLS} --device": "meta tpu gpu cpu:x cpu:-1 cuda:-1 cuda:999 mps:7 CPU cpu,cuda",
    f"{RUN} {DIGITS} --test": "Uniform same-shares uniform,uniform same_classes:2 pooled none",
}
ODD_SPECS: dict[str, str] = {  # and some that may be right
    f"{RUN} {DIGITS} --partition": "dirichlet:1e308 dirichlet:1e-308 dirichlet:0.5,min=1,min=2 "
    "slices:5,shared,independent",
    f"{RUN} {SCHOOLS} --participation": "1e-9 1e0 bernoulli:1e-9",
    f"{RUN} {SCHOOLS} --device": "cpu:0",
    f"{RUN} {SCHOOLS} --data-dir": "missing fifo",
}


@st.composite
def specs(draw: Callable[..., Any]) -> Case:
    """Draw names with numbers in them."""
    odd = draw(st.integers(0, 9)) == 0
    table = ODD_SPECS if odd else SPECS
    line = draw(st.sampled_from(sorted(table)))
    value = draw(st.sampled_from(table[line].split()))
    if odd:
        return fill(f"{line}={GAP}", value, (*EITHER, NOBODY), make=places)
    flag = line.split()[-1]
    told = {"--device": ("expected",), "--test": shown(value[-9:])}.get(flag, ())
    told = shown(value.rpartition("=")[2][-9:]) if flag == "--net" and value[:4] != "mlp:" else told
    return fill(f"{line}={GAP}", value).telling(*told)


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
lstm, lazy = nn.LSTM(64, 10), nn.LazyLinear(10)
def broken(): return 1 / 0
def leaves(): sys.exit(0)
def needs(width): return nn.Linear(width, 10)
def huge(): return nn.Linear(64, 10**15)
def frozen(): return nn.Linear(64, 10).requires_grad_(False)
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
OWN = [f"nets.py:{name}" for name in BAD_NETS.split()] + [f"{name}.py:net" for name in BAD_FILES]


def written(folder: Path) -> None:
    """Make files with networks."""
    (folder / "nets.py").write_text(NETS)
    for name, text in BAD_FILES.items():
        (folder / f"{name}.py").write_bytes(text.encode("utf-8", "surrogateescape"))


@st.composite
def networks(draw: Callable[..., Any]) -> Case:
    """Draw a network of the user's own."""
    value = draw(st.sampled_from(["nets.py:plain", *OWN]))
    wanted = EITHER[:1] if value == "nets.py:plain" else EITHER[1:]
    return fill(f"{RUN} {DIGITS} {LITTLE} --net={GAP}", value, wanted, make=written)
