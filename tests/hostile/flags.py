"""Hostile flags: what each flag of the command line may be is said here once more, by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hostile.case import DONE, LIKE, NOBODY, OUT, REFUSED, Case, named, shown

SMALL = ("--clients", "2", "--rounds", "1", "--posterior-draws", "0", "--quiet")
SCHOOLS = ("--data", "eight_schools", "--partition", "iid", *SMALL)
DIGITS = ("--per-class", "6", "--net", "softmax", *SMALL)
TRIED = tuple(word for word in DIGITS if word not in ("--posterior-draws", "0"))
TUNE = ("tune", "fedavg", *TRIED)
LITTLE = ("--set", "epochs=1", "draws=1")
RUN = ("run", "fedavg")
EITHER = (DONE, REFUSED)
MOST = "1" + 30 * "0"  # no machine has that many of anything
LONG = 5000 * "x"

# How small the numbers of a flag may be, and what may become of one that is beyond all bounds: what
# only cuts at the end of something may be as large as it likes.
WHOLE: dict[str, tuple[int, tuple[str, ...]]] = {
    "--per-class": (1, EITHER),
    "--clients": (1, (REFUSED,)),
    "--held-out": (0, (REFUSED,)),
    "--seed": (0, EITHER),
    "--split-seed": (0, EITHER),
    "--init-seed": (0, EITHER),
    "--participation-seed": (0, EITHER),
    "--noise-seed": (0, EITHER),
    "--rounds": (1, (REFUSED,)),
    "--every": (1, EITHER),
    "--draws": (1, (REFUSED,)),
    "--posterior-draws": (0, (REFUSED,)),
    "--chunk": (1, EITHER),
    "--state-memory": (0, EITHER),
    "--threads": (1, (REFUSED,)),
    "--workers": (1, (REFUSED,)),
    "--checkpoint-every": (1, EITHER),
}
SHARES = {"--fail": 0.0, "--partial": 1e-30}  # from here to 1
OF_DATA = ("--per-class", "--clients", "--held-out", "--seed", "--split-seed")
NEITHER = ("nan", "inf", "-inf", "1e308", "2.5", "", " ", "ten", "0x10", "1,000", "1 000", "½", "²")
NEITHER += ("None", "true", "-1", "1/2", "3%", "1e-3", "--", "1\n2", "1\0", "\x1b[31m1", LONG)
ODD_ONES = ("+1", " 1", "1 ", "\uff11", "\u0661", "01", "1_0")  # as Python reads numbers
NO_SHARES = ("nan", "inf", "-inf", "-0.1", "1.1", "1e308", "1e999", "ten", "", " ", "50%", "0,5")
NO_SHARES += ("1/2", "0x1p-1", "½", "None", "--", "-1e-300", "1.0000001", LONG)
OTHERS = (
    "--seeds",
    "--turns",
    "--out",
    "--data-dir",
    "--quick",
    "--settings",
    "--tune-seeds",
    "--hold-back",
    "--tune",
    "--config",
)
TOGGLES = ("--overwrite", "--resume", "--fold-messages", "--rows", "--quiet")


def given(flag: str, value: str) -> tuple[str, ...]:
    """Give a flag its value, so that it is not taken for a flag itself."""
    return (f"{flag}={value}",) if value.startswith("-") or value == "" else (flag, value)


def of_numbers() -> Iterator[Case]:
    """Yield odd values of every flag that is a number, for `pyrofl run`."""
    for flag, (least, beyond) in WHOLE.items():
        base = (*RUN, *(DIGITS if flag == "--per-class" else SCHOOLS), "--out", OUT)
        like = (*base[:-1], LIKE)
        case = partial(_case, base, flag)
        for value in NEITHER:
            yield case(value, told=(flag, *shown(value)))
        yield case("0", (DONE,) if least == 0 else (REFUSED,), () if least == 0 else (flag, "0"))
        yield case(MOST, beyond)
        yield case(4400 * "9", beyond)  # Python reads no longer ones
        for value in ODD_ONES:
            # Of workers there may be none in one process, however their number is written.
            if flag not in ("--per-class", "--clients", "--workers") and value != "1_0":
                yield case(value, EITHER, like=(*like, flag, "1"))
        yield Case(f"run {flag}", "flag", (*base, flag), told=(flag,))
    for flag, least in SHARES.items():
        base = (*RUN, *SCHOOLS, "--out", OUT)
        for value in NO_SHARES:
            yield _case(base, flag, value, told=(flag, *shown(value)))
        yield _case(base, flag, "0", (DONE,) if least == 0 else (REFUSED,))
        yield _case(base, flag, "0.5", (DONE, NOBODY))
        yield _case(base, flag, "1", (DONE,) if flag == "--partial" else (NOBODY,))
        yield _case(base, flag, "1e-999", (DONE,) if least == 0 else (REFUSED,))
        yield Case(f"run {flag}", "flag", (*base, flag), told=(flag,))


def _case(
    base: tuple[str, ...],
    flag: str,
    value: str,
    wanted: tuple[str, ...] = (REFUSED,),
    told: tuple[str, ...] = (),
    like: tuple[str, ...] = (),
) -> Case:
    name = f"{base[0]} {flag}={named(value)}"
    return Case(name, "flag", (*base, *given(flag, value)), wanted, told, like=like)


def of_numbers_elsewhere() -> Iterator[Case]:
    """Yield some odd values of the flags of other commands."""
    compare = ("compare", "local", "fedavg", *SCHOOLS, "--seeds", "1", "--out", OUT)
    for i, flag in enumerate(WHOLE):
        for value in (*NEITHER, *NEITHER)[3 * i % len(NEITHER) :][:3]:
            if flag != "--per-class":
                yield _case(compare, flag, value, told=(flag, *shown(value)))
    for value in (*NEITHER, "0", "-2", MOST):
        yield _case(compare, "--seeds", value, told=("--seeds", *shown(value)))
    for value in (*NEITHER, "0", "-2", MOST):
        for flag in ("--settings", "--tune-seeds"):
            yield _case((*TUNE, "--out", OUT), flag, value, told=(flag, *shown(value)))
    for value in (*NO_SHARES, "0", "1"):
        yield _case(
            (*TUNE, "--out", OUT), "--hold-back", value, told=("--hold-back", *shown(value))
        )
    for flag, value in (("--settings", "2"), ("--metric", "nll")):
        yield _case(compare, flag, value, told=(flag, "--tune"))
    yield _case((*compare, "--tune"), "--privacy", "clip=1,noise=1", told=("--privacy",))
    draw = ("partition", "--data", "digits", "--clients", "2", "--out", f"{OUT}.png")
    for flag in OF_DATA:
        for value in ("nan", "-1", "2.5", "ten", ""):
            yield _case(draw, flag, value, told=(flag, *shown(value)))
    for value in ("0", MOST):
        yield _case(draw, "--clients", value, told=("lients",))


def places(folder: Path) -> None:
    """Make what is no ordinary file."""
    os.mkfifo(folder / "fifo")
    (folder / "file").write_text("there\n")
    (folder / "full" / "inner").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "null").symlink_to("/dev/null")


# Texts that name nothing: no data set, column, policy or method is called so.
ODD = ("", " ", ".", "..", "/", "~", "-", "--", "*", "?", "%s", "{0}", "$(touch x)", "; ls", "a\0b")
ODD += ("a\nb", "é", "名", "\x1b[2J", "\udcff", "None", "nan", "0", "-1", "fifo", "/dev/zero", LONG)
BOUNDS = ("clip=1", "noise=1", "clip=1,noise=1,", "clip=1,clip=1,noise=1", "clip=1, noise=1")
BOUNDS += tuple(f"clip={v},noise=1" for v in ("0", "-1", "nan", "inf", "1e999", "ten", "", "1e308"))
BOUNDS += tuple(
    f"clip=1,noise=1,{word}" for word in ("delta=0", "delta=1", "where=home", "seed=-1")
)
CLASSES = ("even", "Balanced", "balanced,", "0=", "=1", "0=x", "0=-1", "0=nan", "0=1,0=2", "z=1")
NO_GRID = ("lr", "lr=", "=0.1", "lr=0.1,", "lr=0.1,0.1", "lr=-1", "lr=nan", "lr=ten", "LR=0.1")
NO_GRID += ("epochs=2.5", "fedavg.lr=0.1", "likelihood=normal", "lr=1e999", "done=1", "mu=0.1")
# A flag of text, what goes before it, and of which texts it knows nothing.
TEXT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "--data": ((*RUN, *SCHOOLS), ODD),
    "--target": ((*RUN, *SCHOOLS), ODD),
    "--group": ((*RUN, *SCHOOLS), ODD),
    "--features": ((*RUN, *SCHOOLS), ODD),
    "--likelihood": ((*RUN, *SCHOOLS), ODD),
    "--missing": ((*RUN, *SCHOOLS), ODD),
    "--categories": ((*RUN, *SCHOOLS), ODD),
    "--prepare": ((*RUN, *SCHOOLS), ODD),
    "--test-share": ((*RUN, *SCHOOLS), (*NO_SHARES, "0", "0.5", "1")),  # of tables alone
    "--test-column": ((*RUN, *SCHOOLS), ODD),
    "--test-last": ((*RUN, *SCHOOLS), ODD),
    "--row-weights": ((*RUN, *SCHOOLS), ODD),
    "--class-weights": ((*RUN, *DIGITS), (*ODD, *CLASSES)),
    "--partition": ((*RUN, *DIGITS), ODD),
    "--test": ((*RUN, *DIGITS), ODD),
    "--net": ((*RUN, *DIGITS), ODD),
    "--participation": ((*RUN, *SCHOOLS), ODD),
    "--server-data": ((*RUN, *SCHOOLS), ODD),
    "--on-bad-message": ((*RUN, *SCHOOLS), ODD),
    "--until": ((*RUN, *SCHOOLS), ODD),
    "--engine": ((*RUN, *SCHOOLS), ODD),
    "--log": ((*RUN, *SCHOOLS), ODD),
    "--device": ((*RUN, *SCHOOLS), tuple(set(ODD) - {""})),
    "--groups": ((*RUN, *SCHOOLS), (*ODD, "posterior,", "posterior, prior", "ALL", "all,prior")),
    "--privacy": ((*RUN, *SCHOOLS), (*ODD, *BOUNDS)),
    "--set": ((*RUN, *SCHOOLS), ODD),
    "--over": (TUNE, (*ODD, *NO_GRID)),
    "--metric": (TUNE, ODD),
    "--by": (("answer", "."), ODD),
}


def of_texts() -> Iterator[Case]:
    """Yield odd texts for every flag that is a text."""
    for flag, (base, odd) in TEXT.items():
        for value in sorted(odd):
            untold = flag in ("--set", "--server-data", "--over")
            told = () if untold else shown(value) or (flag.split("-")[-1],)
            words = (*base, "--out", OUT, *given(flag, value))
            yield Case(f"{base[0]} {flag}={named(value)}", "flag", words, told=told, make=places)
    for value in ODD:
        words = ("run", *SCHOOLS, "--out", OUT, *(("--", value) if value[:1] == "-" else (value,)))
        yield Case(f"run {named(value)}", "flag", words, told=shown(value), make=places)
    for value in ODD[::3]:
        words = ("compare", "local", *(() if value[:1] == "-" else (value,)), "-x")
        yield Case(f"compare local {named(value)}", "flag", words, make=places)


def of_places() -> Iterator[Case]:
    """Yield odd places for --out and for files that are read."""
    taken = (".", "..", "/", "~", "full", "file", "fifo", "loop", "null", "/dev/full", "/dev/null")
    taken += ("file/below", "fifo/below", "/proc/x", "/dev/full/x", "a\0b", 300 * "x", LONG)
    taken += ("dangling/../file", "loop/x", "")
    free = (
        "empty",
        "new",
        "new/deep/er",
        "é",
        "名 字",
        "a\nb",
        "$(touch x)",
        "; ls",
        "*",
        "-",
        "~x",
    )
    free += ("full/inner", "empty/../other", "./new/.", "\udcff", "\x1b[31m", "%s", 255 * "x")
    for command, base in (
        ("run", (*RUN, *SCHOOLS, *LITTLE)),
        ("compare", ("compare", "local", *SCHOOLS, "--seeds", "1", *LITTLE)),
    ):
        for value in taken:
            about = f"{command} into {named(value)}"
            yield Case(about, "flag", (*base, *given("--out", value)), make=places)
    for command in ("answer", "report"):
        for value in (*taken, *free):
            words = (command, *(("--", value) if value.startswith("-") else (value,)))
            about = f"{command} of {named(value)}"
            yield Case(about, "flag", words, make=places, writes=False)
    for value in free:
        words = (*RUN, *SCHOOLS, *LITTLE, *given("--out", value))
        yield Case(f"run into {named(value)}", "flag", words, (DONE,), make=places, writes=False)
    for value in (*taken, "no-suffix", "x.gif", "x.png/y", ".png", "file/z.png"):
        words = ("partition", "--per-class", "6", "--clients", "2", *given("--out", value))
        wanted = EITHER if value == ".png" else (REFUSED,)
        about = f"partition into {named(value)}"
        yield Case(about, "flag", words, wanted, make=places, writes=False)
    for kind in ("csv", "npz"):
        for value in (
            "",
            *taken[:-1],
            "full/inner",
            "dangling",
            "missing",
            "/dev/zero",
            "http://x/y",
        ):
            words = (*RUN, *SCHOOLS, "--data", f"{kind}:{value}", "--target", "y", "--out", OUT)
            about = f"run --data={kind}:{named(value)}"
            yield Case(about, "flag", words, told=(kind,) if not value else (), make=places)
    for value in ("missing.py:x", "full.py:x", "fifo.py", "file.py:", ":x", ".py:x", "~/no.py:x"):
        words = (*RUN, *DIGITS, "--net", value, "--out", OUT)
        yield Case(f"run --net={named(value)}", "flag", words, make=places)
        words = (*RUN, *DIGITS, "--partition", value, "--out", OUT)
        yield Case(f"run --partition={named(value)}", "flag", words, make=places)


def cases() -> Iterator[Case]:
    """Yield all that is about single flags."""
    for part in (of_numbers, of_numbers_elsewhere, of_texts, of_places):
        yield from part()
