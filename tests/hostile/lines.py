"""Hostile command lines, whole ones."""

from __future__ import annotations

from collections.abc import Iterator

from hostile.case import DONE, LIKE, OUT, Case, named
from hostile.flags import EITHER, LITTLE, RUN, SCHOOLS, TOGGLES

WHOLE_LINES: dict[str, tuple[str, ...]] = {  # command lines, and words that must be told
    "runn": ("runn",),
    "list nothing": ("nothing",),
    "explain fedavgg": ("fedavgg", "fedavg"),
    "explain": ("METHOD",),
    "RUN fedavg": ("RUN",),
    "run": ("METHOD",),
    "run fedavgg": ("fedavgg", "fedavg"),
    "run FEDAVG": ("FEDAVG",),
    "run fedavg local": ("local",),
    "run fedavg --nonsense": ("--nonsense",),
    "run fedavg --nonsense=3": ("--nonsense",),
    "run fedavg -r 3": ("-r",),
    "run fedavg --se 3": ("--se",),
    "run fedavg --part 0.5": ("--part",),
    "run fedavg --seeds 3": ("--seeds",),
    "run fedavg --turns 3": ("--turns",),
    "run --rounds fedavg": ("--rounds",),
    "run fedavg --overwrite=yes": ("--overwrite",),
    "run fedavg --quiet=0": ("--quiet",),
    "run fedavg --resume 3": ("3",),
    "run guides": ("guides",),
    "run shared": ("shared",),
    "run __init__": ("__init__",),
    "run priors.flat": ("priors.flat",),
    "compare": ("METHOD",),
    "compare fedavg fedavg": ("fedavg",),
    "compare fedavg local fedavg": ("fedavg",),
    "compare fedavg nothing": ("nothing",),
    "compare fedavg --seed 3 --split-seed 1 --init-seed 1 --participation-seed 1 --noise-seed 1": (
        "--seeds",
    ),
    "compare fedavg --method local": ("--method",),
    "partition": ("--out",),
    "partition fedavg --out x.png": ("fedavg",),
    "partition --out": ("--out",),
    "partition --rounds 3 --out x.png": ("--rounds",),
    "partition --data eight_schools --out x.png": ("classes",),
    "list all": ("all",),
    "list --data digits": ("digits",),
    "--version": (),
    "--rounds 3 run fedavg": (),
    "@words": ("@words",),
    "help": ("help",),
    "run fedavg --data digits+digits": ("digits",),
    "run fedavg --data digits+": ("digits+",),
    "run fedavg --data +digits": (),
    "run fedavg --data digits+nothing": ("nothing",),
    "run fedavg --data digits+eight_schools": ("eight_schools",),
    "run fedavg --data digits+csv:x.csv": (),
    "run fedavg --data eight_schools --per-class 3": ("classes",),
    "run fedavg --data eight_schools --test independent": ("independent",),
    "run fedavg --data eight_schools --clients 3": ("8",),
    "run fedavg --data eight_schools --held-out 8": ("8",),
    "run fedavg --data eight_schools --partition iid --clients 9": ("9",),
    "run fedavg --data eight_schools --partition slices:5": ("classes",),
    "run fedavg --data eight_schools --net softmax --likelihood categorical": ("likelihood",),
    "run fedavg --per-class 6 --clients 61": ("6",),
    "run fedavg --per-class 6 --clients 20 --partition dirichlet:0.1,min=50": (),
    "run fedbe --per-class 6 --clients 2": ("unlabelled",),
    "run fedbe --per-class 6 --clients 2 --server-data 10 --fold-messages": ("--fold-messages",),
    "run pvi --per-class 6 --clients 2 --fold-messages": ("--fold-messages",),
    "run fedrep --per-class 6 --clients 2 --net softmax": (),
    "run metavd --data eight_schools": (),
    "run fedavg --set": ("--set",),
    "run fedavg --set lr": ("lr",),
    "run fedavg --set =1": ("=1",),
    "run fedavg --set lr=": ("lr",),
    "run fedavg --set lr==1": ("lr",),
    "run fedavg --set lr=0.1=2": ("lr",),
    "run fedavg --set .lr=1": (".lr",),
    "run fedavg --set fedavg.=1": ("setting",),
    "run fedavg --set fedavg.lr": ("lr",),
    "run fedavg --set fedprox.lr=1": ("fedprox",),
    "run fedavg --set FEDAVG.lr=1": ("FEDAVG",),
    "run fedavg --set LR=1": ("LR",),
    "run fedavg --set lr:1": ("lr:1",),
    "run fedavg --set --lr=1": ("--set",),
    "run fedavg --set a.b.lr=1": ("a.b",),
    "run fedavg --set mu=1": ("mu",),
    "run fedavg --set done=0.5": ("done",),
    "run fedavg --set net=3": ("net",),
    "run fedavg --set unlabelled=3": ("unlabelled",),
    "run fedavg --set likelihood=normal": ("likelihood",),
    "run fedavg --set prior=flat": ("prior",),
    "run fedavg --set guide=delta": ("guide",),
    "run fedavg --set aggregation=nothing": ("nothing",),
    "run fedavg --set epochs=uneven": ("epochs",),
    "run fedavg --set epochs=uneven:0": ("0",),
    "run fedavg --set epochs=uneven:-3": ("-3",),
    "run fedavg --set epochs=uneven:ten": ("epochs",),
    "run fedavg --set epochs=uneven:": ("epochs",),
    "compare local fedavg --set mu=1": ("mu",),
    "compare local fedavg --set ditto.lr=1": ("ditto",),
}
HELPFUL = ("-h", "--help", "run --help", "compare -h", "partition -h")
HELPFUL += ("list", "list methods", "explain fedavg", "explain -h")


def cases() -> Iterator[Case]:
    """Yield whole command lines."""
    for line, told in WHOLE_LINES.items():
        yield Case(f"pyrofl {named(line)}", "flag", tuple(line.split()), told=told)
    for line in HELPFUL:
        yield Case(f"pyrofl {line}", "flag", tuple(line.split()), (DONE,), writes=False)
    for flag in TOGGLES:
        words = (*RUN, *SCHOOLS, *LITTLE, flag, flag, "--out", OUT)
        yield Case(f"run {flag} {flag}", "flag", words, (DONE,))
    base = (*RUN, *SCHOOLS, *LITTLE, "--out")
    for more in ("--rounds 9 --rounds 1", "--round 1", "--data digits --data eight_schools"):
        words = (*base, OUT, *more.split())
        yield Case(f"run {more}", "flag", words, EITHER, like=(*base, LIKE))
    for last, first in (("lr=0.02", "lr=0.01"), ("fedavg.lr=0.02", "lr=0.01")):
        words = (*base, OUT, "--set", first, last)
        like = (*base, LIKE, "--set", "lr=0.02")
        yield Case(f"run --set {first} {last}", "flag", words, EITHER, like=like)
