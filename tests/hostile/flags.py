"""Hostile command lines: what the flags of each command may be is stated here by hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from certificates import node_key
from hostile.case import DONE, LIKE, NOBODY, OUT, REFUSED, Case, shown
from hypothesis import strategies as st

from pyrofl.flower.template import new

SMALL = "--rounds 1 --posterior-draws 0 --quiet"
SCHOOLS = f"--data eight_schools --partition iid --clients 2 {SMALL}"
DIGITS = f"--per-class 6 --net softmax --clients 2 {SMALL}"
LITTLE = "--set epochs=1 num_particles=1"
RUN = f"run fedavg --out {OUT}"
COMPARE = f"compare local fedavg --seeds 1 --out {OUT} {SCHOOLS}"
TUNE = f"tune fedavg --out {OUT} {DIGITS.replace('--posterior-draws 0', '')}"
SERVE, CERT = "study serve p", "p/study.yaml"
CERTIFIED = f"--cert={CERT} --cert-key={CERT} --ca={CERT}"
ROWS = "p/sites/hospital_1.csv"
JOIN = f"study join --name=hospital_1 --data={ROWS} --state=state --study=p"
EXCHANGE = "study exchange p --nodes=keys/nodes"
ANSWER = f"study answer --name=hospital_1 --data={ROWS} --state=state --study=p --yes"
AT_SITE = f"study predict full --rows {ROWS} --out o.csv"
EITHER = (DONE, REFUSED)
MOST = "1" + 30 * "0"  # no machine has that many of anything
LONG = 5000 * "x"
GAP = "§"


def fill(
    line: str, value: str = "", wanted: tuple[str, ...] = (REFUSED,), *told: str, **more: Any
) -> Case:
    """Put a value into the gap of a line."""
    return Case(tuple(word.replace(GAP, value) for word in line.split()), wanted, told, **more)


def twin(line: str) -> tuple[str, ...]:
    """Return the words of a plain command that writes beside another."""
    return tuple(line.replace(f"--out {OUT}", f"--out {LIKE}").split())


# Numbers: the command, least, and what may become of one that is beyond all bounds.
WHOLE: dict[str, tuple[int, tuple[str, ...]]] = {
    "--per-class": (1, EITHER),
    "--clients": (1, (REFUSED,)),
    "--held-out": (0, (REFUSED,)),
    **dict.fromkeys(("--seed", "--split-seed", "--init-seed"), (0, EITHER)),
    **dict.fromkeys(("--participation-seed", "--noise-seed"), (0, EITHER)),
    **dict.fromkeys(("--rounds", "--draws", "--threads", "--workers"), (1, (REFUSED,))),
    "--posterior-draws": (0, (REFUSED,)),
    **dict.fromkeys(("--eval-every", "--chunk-size", "--checkpoint-every"), (1, EITHER)),
}
Rule = tuple[str, str, int, tuple[str, ...]]
NUMBERS: list[Rule] = [
    *(
        (f"{RUN} {DIGITS if f == '--per-class' else SCHOOLS}", f, *rule)
        for f, rule in WHOLE.items()
    ),
    *((COMPARE, flag, *rule) for flag, rule in WHOLE.items() if flag != "--per-class"),
    (COMPARE, "--seeds", 1, (REFUSED,)),
    *((TUNE, flag, 1, (REFUSED,)) for flag in ("--trials", "--tune-seeds")),
    *((f"{SERVE} --cert x", flag, 1, (REFUSED,)) for flag in ("--sites", "--min-sites", "--port")),
    ("study join 127.0.0.1:1 --show", "--min-scored-rows", 1, (REFUSED,)),
    (AT_SITE, "--draws", 1, (REFUSED,)),
    ("predict run --data new.csv --out out.csv", "--draws", 1, (REFUSED,)),
    *(
        (f"partition --data digits --out {OUT}.png", flag, *WHOLE[flag])
        for flag in ("--per-class", "--clients", "--held-out", "--seed", "--split-seed")
    ),
]
SHARES = {
    f"{RUN} {SCHOOLS} --drop-rate": 0.0,
    f"{RUN} {SCHOOLS} --min-work": 1e-30,
}  # from here to 1
SHARES |= {
    f"{TUNE} --validation-fraction": 1.0,
    "predict run --data new.csv --out out.csv --alpha": 1.0,
    "conformal run --alpha": 1.0,
    "conformal run --calibration-fraction": 1.0,
}  # of which only what is out of range is tried
NEITHER = ("nan", "inf", "-inf", "1e308", "2.5", "", " ", "ten", "0x10", "1,000", "1 000", "½", "²")
NEITHER += ("None", "true", "-1", "1/2", "3%", "1e-3", "--", "1\n2", "1\0", "\x1b[31m1", LONG)
ODD_ONES = ("+1", " 1", "1 ", "\uff11", "\u0661", "01")  # as Python reads numbers
NO_SHARES = ("1.1", "1e999", "50%", "0,5", "0x1p-1", "-1e-300", "1.0000001", *NEITHER[4:])
TEXTS = st.text(max_size=30).map(lambda text: text.replace("\0", "0"))  # that nobody wrote down


@st.composite
def whole(draw: Callable[..., Any]) -> Case:
    """Draw a value of a flag that is a whole number."""
    base, flag, least, beyond = draw(st.sampled_from(NUMBERS))
    some = st.sampled_from(NEITHER) | TEXTS | st.floats().map(repr)
    some |= st.integers(-(10**9), least).map(str) | st.sampled_from((MOST, 4400 * "9", *ODD_ONES))
    value = draw(some)
    line = f"{base} {flag}={GAP}"
    if value == MOST or value[:9] == 9 * "9":
        return fill(line, value, beyond)
    try:
        good = int(value) >= least
    except ValueError:
        good = False
    if not good:
        return fill(line, value, (REFUSED,), flag, *shown(value), make=project)
    if base not in (f"{RUN} {SCHOOLS}", f"{RUN} {DIGITS}"):
        return fill(f"{base} {flag}").telling(flag)  # it is right, and the command too dear
    if value not in ODD_ONES or flag in ("--per-class", "--clients", "--workers"):
        return fill(line, value, (DONE,) if value == "0" else EITHER)
    return fill(line, value, EITHER, like=(*twin(base), flag, "1"))


@st.composite
def shares(draw: Callable[..., Any]) -> Case:
    """Draw a value of a flag that is a share."""
    line, least = draw(st.sampled_from(sorted(SHARES.items())))
    value = draw(st.sampled_from(NO_SHARES) | TEXTS | (st.floats() | st.floats(0, 1)).map(repr))
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1 or found == 0 < least:
        return fill(f"{line}={GAP}", value, (REFUSED,), line.split()[-1], *shown(value))
    if "--validation-fraction" in line:
        return fill(f"{line}=1")
    return fill(f"{line}={GAP}", value, (DONE, NOBODY, *(REFUSED,) * (found < least)))


# Texts that name nothing: no data set, column, policy or method is called so.
ODD = ("", " ", ".", "..", "/", "~", "-", "--", "*", "?", "%s", "{0}", "$(touch x)", "; ls", "a\0b")
ODD += ("a\nb", "é", "名", "\x1b[2J", "\udcff", "None", "nan", "0", "-1", "fifo", "/dev/zero", LONG)
BOUNDS = (
    "clip=1",
    "noise_multiplier=1",
    "clip=1,noise_multiplier=1,",
    "clip=1,clip=1,noise_multiplier=1",
    "clip=1, noise_multiplier=1",
)
BOUNDS += tuple(
    f"clip={v},noise_multiplier=1" for v in ("0", "-1", "nan", "inf", "1e999", "ten", "", "1e308")
)
BOUNDS += tuple(
    f"clip=1,noise_multiplier=1,{word}" for word in ("delta=0", "delta=1", "where=home", "seed=-1")
)
CLASSES = ("even", "Balanced", "balanced,", "0=", "=1", "0=x", "0=-1", "0=nan", "0=1,0=2", "z=1")
NO_GRID = ("lr", "lr=", "=0.1", "lr=0.1,", "lr=0.1,0.1", "lr=-1", "lr=nan", "lr=ten", "LR=0.1")
NO_GRID += ("epochs=2.5", "fedavg.lr=0.1", "likelihood=normal", "lr=1e999", "elapsed=1", "mu=0.1")
SITE = "predict run --data new.csv --out out.csv --client=A"
ONLY = "--target --client-column --features --likelihood --missing --categories --scaling "
ONLY += "--test-column --test-last --row-weights --participation --server-data --on-bad-message "
ONLY += "--engine --log --device --set --stop-when"
# A line, and texts of which it knows nothing beside the odd ones.
TEXT: dict[str, tuple[str, ...]] = {
    **{f"{RUN} {SCHOOLS} {flag}": () for flag in ("--data", *ONLY.split())},
    f"{RUN} {SCHOOLS} --test-fraction": ("0.5", "1", *NO_SHARES),  # of tables alone
    f"{RUN} {SCHOOLS} --arviz-groups": ("posterior,", "posterior, prior", "ALL", "all,prior"),
    f"{RUN} {SCHOOLS} --privacy": BOUNDS,
    **{f"{RUN} {DIGITS} {flag}": () for flag in ("--partition", "--test", "--net")},
    **{f"{RUN} {DIGITS} {flag}": ("f()", "Normal(", "x(1)") for flag in ("--prior", "--guide")},
    f"{RUN} {DIGITS} --class-weights": CLASSES,
    f"{TUNE} --over": NO_GRID,
    f"{TUNE} --metric": (),
    "benefit . --by": (),
    "predict run --data new.csv --out out.csv --client": (),
    "predict run --data new.csv --out out.csv --client-column": (),
    f"{SITE} --model": (),
    f"{SITE} --net": (),
    "predict run --data new.csv --out out.csv --new-client --own-rows": (),
}
UNTOLD = ("--set", "--server-data", "--over", "--net", "--own-rows")
HEEDED = ("--data", "--case", "--by", "--stop-when")  # they may take a text of a few letters


@st.composite
def texts(draw: Callable[..., Any]) -> Case:
    """Draw a text for a flag: an odd one, or one that is refused or happens to be right."""
    line = draw(st.sampled_from(sorted(TEXT)))
    flag = line.split()[-1]
    odd = sorted({*ODD, *TEXT[line]} - {"" if flag == "--device" else None})
    value = draw(st.sampled_from(odd) | (st.nothing() if flag in HEEDED else TEXTS))
    if value not in odd:
        return fill(f"{line}={GAP}", value, EITHER, make=places)
    told = () if flag in UNTOLD else shown(value) or (flag.split("-")[-1],)
    if line.startswith("predict"):
        told = ()
    return fill(f"{line}={GAP}", value, (REFUSED,), *told, make=fitted_places)


def places(folder: Path) -> None:
    """Make what is no ordinary file."""
    os.mkfifo(folder / "fifo")
    (folder / "file").write_text("there\n")
    (folder / "full" / "inner").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "null").symlink_to("/dev/null")


def project(folder: Path) -> None:
    """Make a project of Flower and what is no ordinary file."""
    places(folder)
    new(folder / "p")
    (folder / "nodes").mkdir()
    (folder / "nodes/site.pub").write_text("ecdsa\n")
    for number in (1, 2, 3):
        node_key(folder / "keys/nodes", f"hospital_{number}")
    node_key(folder / "keys", "server")


def fitted_places(folder: Path) -> None:
    """Make the folder of a run and what is no ordinary file."""
    from hostile.files import run_folder

    run_folder(folder)


TAKEN = (".", "..", "/", "~", "full", "file", "fifo", "loop", "null", "/dev/full", "/dev/null")
TAKEN += ("file/below", "fifo/below", "/proc/x", "/dev/full/x", "a\0b", 300 * "x", LONG)
TAKEN += ("dangling/../file", "loop/x", "")
FREE = ("empty", "new", "new/deep/er", "é", "名 字", "a\nb", "$(touch x)", "; ls", "*", "-", "~x")
FREE += ("full/inner", "empty/../other", "./new/.", "\udcff", "\x1b[31m", "%s", 255 * "x")
NO_FILE = ("missing", "full", "fifo", "loop", "dangling", "null", "", "a\0b", "/dev/full", LONG)
FILES = ("missing.py:x", "full.py:x", "fifo.py", "file.py:", ":x", ".py:x", "~/no.py:x")
NO_ADDRESSES = ("host", "host:", ":80", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:-1", "a:1.5")
NO_ADDRESSES += ("127.0.0.1:ten", "127.0.0.1: 80", "http://127.0.0.1", "", " ", ":", "é:\n", LONG)
NAMES = ('a "b"', "a'b", "a\\b", "a\nb", "", "a\0b")  # Flower's settings are lines of TOML
JOINING = JOIN.replace(f"--data={ROWS}", "")
# Lines with a gap, and places, files or addresses that are refused there.
REFUSING: dict[str, tuple[str, ...]] = {
    f"run fedavg {SCHOOLS} {LITTLE} --out={GAP}": TAKEN,
    f"compare local --seeds 1 {SCHOOLS} {LITTLE} --out={GAP}": TAKEN,
    f"answer -- {GAP}": (*TAKEN, *FREE),
    f"report -- {GAP}": (*TAKEN, *FREE),
    f"partition --per-class 6 --clients 2 --out={GAP}": (*TAKEN, "no-suffix", "x.gif", "x.png/y"),
    f"{RUN} {SCHOOLS} --target y --data=csv:{GAP}": (*TAKEN[:-1], "full/inner", "missing"),
    f"{RUN} {SCHOOLS} --target y --data=npz:{GAP}": (*TAKEN[:-1], "http://x/y", "/dev/zero"),
    f"{RUN} {DIGITS} --net={GAP}": FILES,
    f"{RUN} {DIGITS} --partition={GAP}": FILES,
    f"{RUN} {SCHOOLS} -- {GAP}": ODD[3:],
    f"predict --data new.csv --out out.csv --client=A -- {GAP}": (
        "missing",
        "full",
        "a\0b",
        "fifo",
    ),
    f"predict run --out out.csv --client=A --data={GAP}": (
        "missing",
        "fifo",
        "/dev/zero",
        "",
        "loop",
    ),
    f"predict run --data new.csv --client=A --out={GAP}": (
        "file",
        "full",
        "fifo",
        "x.csv/y",
        "run",
    ),
    **{
        f"{SERVE} --nodes=nodes {CERTIFIED.replace(f'{flag}={CERT}', f'{flag}={GAP}')}": NO_FILE
        for flag in ("--cert", "--cert-key", "--ca")
    },
    f"{SERVE} {CERTIFIED} --nodes={GAP}": NO_FILE,
    f"{SERVE} --host={GAP}": ("", "a\0b", "0.0.0.0"),
    f"study up -- {GAP}": (".", "missing", "full", "file", "fifo", "p/sites", "", "a\0b", LONG),
    f"study serve -- {GAP}": (".", "missing", "full", "file", "fifo", "p/sites", "", "a\0b", LONG),
    f"study new -- {GAP}": ("full", "file", "fifo", "null", "file/below", "", "a\0b", "/proc/x"),
    f"{JOIN} --show -- {GAP}": NO_ADDRESSES,
    f"{JOINING} 127.0.0.1:1 --show --data={GAP}": NO_FILE,
    f"{JOIN} --show --study={GAP} 127.0.0.1:1": NO_FILE,
    f"{JOIN} --show --rules={GAP} 127.0.0.1:1": NO_FILE,
    f"check {ROWS} --encoding={GAP}": ("", "zzz", "a\0b", "zlib_codec", LONG),
    f"check {ROWS} --formula={GAP}": ("", "y", "y ~ ~ x", "a\0b", LONG),
    f"check {ROWS} --columns={GAP}": ("", "a\0b", "nowhere"),
    f"check {ROWS} --separator={GAP}": ("", "xx", "a\0b"),
    f"check {ROWS} --decimal={GAP}": ("", ";", "a\0b"),
    f"check {ROWS} --columns zzz --na={GAP}": ("", "a\0b", "NA"),
    f"check -- {GAP}": NO_FILE,
    f"describe -- {GAP}": NO_FILE,
    f"describe {ROWS} --study={GAP}": NO_FILE,
    f"describe {ROWS} --rules={GAP}": NO_FILE,
    f"describe {ROWS} --encoding={GAP}": ("", "zzz", "a\0b", "zlib_codec", LONG),
    f"describe {ROWS} --columns={GAP}": ("", "a\0b", "nowhere"),
    f"describe {ROWS} --cross={GAP}": ("", "nowhere", "a,b,c", "sex,sex", "a\0b,", LONG),
    f"{JOIN} --ca=p/study.yaml --key={GAP} 10.0.0.1:1": NO_FILE,
    f"{JOIN} --key=p/study.yaml --ca={GAP} 10.0.0.1:1": NO_FILE,
    f"{JOIN} --show --name={GAP} 127.0.0.1:1": NAMES,
    f"{JOIN} --state={GAP} 127.0.0.1:1": ("", "a\0b"),
    f"{SERVE} --timeout={GAP}": ("-1", "nan", "ten", "", "inf", "0", LONG),
    f"{SERVE} --cert x --port={GAP}": ("65536",),
    "study -x": ("",),
    f"study run -- {GAP}": (".", "missing", "file", "fifo", "p/sites", "", "a\0b", LONG),
    f"study run p --data={GAP}": ("missing", "full", "file", "fifo", "", "a\0b", LONG),
    f"study check p -- {GAP}": NO_FILE,
    f"study check --  {GAP} {ROWS}": ("missing", "full", "file", "fifo"),
    f"study rehearse p --data={GAP}": NO_FILE,
    f"{EXCHANGE} --key={GAP}": NO_FILE,
    f"study exchange p --key=keys/server.key --nodes={GAP}": NO_FILE,
    f"{EXCHANGE} --key=keys/server.key --without={GAP}": ("", "zzz", "a\0b", "hospital_1,zzz"),
    f"{EXCHANGE} --key=keys/server.key --ask-again={GAP}": ("", "zzz", "a\0b", "hospital_1,zzz"),
    f"{EXCHANGE} --key=keys/server.key --messages={GAP}": ("", "file", "fifo", "null", "a\0b"),
    f"{ANSWER} --key=keys/server.key --server-key=keys/server.pub -- {GAP}": NO_FILE,
    f"{ANSWER} --key=keys/server.key request.json --server-key={GAP}": NO_FILE,
    f"{ANSWER} --server-key=keys/server.pub request.json --key={GAP}": NO_FILE,
    **{
        f"{AT_SITE} {f}={GAP}": ("", "zzz", "a\0b", LONG)
        for f in ("--method", "--client", "--model")
    },
    f"study predict --rows {ROWS} --out o.csv -- {GAP}": NO_FILE,
    f"study predict full --out o.csv --rows={GAP}": NO_FILE,
    f"study predict full --rows {ROWS} --out={GAP}": NO_FILE,
}
TAKING: dict[str, tuple[str, ...]] = {
    f"run fedavg {SCHOOLS} {LITTLE} --out={GAP}": FREE,
    f"study new -- {GAP}": ("new", "empty", "new/deep/er", "名 字"),
    f"{JOIN} --show --no-scores 127.0.0.1:1": ("",),
}


@st.composite
def paths(draw: Callable[..., Any]) -> Case:
    """Draw a place for what is written and for what is read."""
    if draw(st.integers(0, 9)) == 0:
        line = draw(st.sampled_from(sorted(TAKING)))
        value = draw(st.sampled_from(TAKING[line]))
        return fill(line, value, (DONE,), make=project, writes=False)
    line = draw(st.sampled_from(sorted(REFUSING)))
    value = draw(st.sampled_from(REFUSING[line]))
    return fill(line, value, make=fitted_places if line.startswith("predict") else project)
