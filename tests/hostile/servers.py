"""Hostile flags of `pyrofl flower`: what is wrong is told before anything of Flower's starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hostile.case import DONE, REFUSED, Case, named, shown
from hostile.flags import LONG, MOST, NEITHER, ODD, given, places

from pyrofl.flower.template import new

NUMBERS = {"--sites": "1 000", "--min-sites": "0", "--port": "65536", "--timeout": "-1"}
FILES = ("--cert", "--cert-key", "--ca", "--nodes", "--data", "--project", "--key", "--state")
OTHERS = ("--host", "--name", "--out", "--rejoin", "--show", "--quiet")
OTHERS += ("--min-scored-rows", "--no-scores")
PREDICT = ("--rows", "--method", "--client", "--model", "--draws", "--overwrite")
FLAGS = {*NUMBERS, *FILES, *OTHERS, *PREDICT}

PLACES = ("missing", "full", "fifo", "loop", "dangling", "null", "", "a\0b", "/dev/full", LONG)
NO_ADDRESSES = ("host", "host:", ":80", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:-1", "a:1.5")
NO_ADDRESSES += ("127.0.0.1:ten", "127.0.0.1: 80", "http://127.0.0.1", "", " ", ":", "é:\n", LONG)
NAMES = ('a "b"', "a'b", "a\\b", "a\nb", "", "a\0b")  # Flower's settings are lines of TOML
ROWS, UP, SERVE = "p/sites/hospital_1.csv", ("flower", "up", "p"), ("flower", "serve", "p")


def folder(path: Path) -> None:
    """Make a project and what is no ordinary file."""
    places(path)
    new(path / "p")
    (path / "nodes").mkdir()
    (path / "nodes/site.pub").write_text("ecdsa\n")


def joined(server: str = "127.0.0.1:1", **changes: str) -> tuple[str, ...]:
    """Return the words of a site that says what will leave, and no more."""
    flags = {"--data": ROWS, "--name": "hospital_1", "--state": "state", "--project": "p"} | changes
    words = (word for flag, value in flags.items() for word in given(flag, value))
    return ("flower", "join", *(("--", server) if server[:1] == "-" else (server,)), *words)


def case(name: str, words: tuple[str, ...], *told: str, done: bool = False) -> Case:
    """Return a case in a folder with a project."""
    wanted = (DONE,) if done else (REFUSED,)
    return Case(f"flower {name}", "flag", words, wanted, told, make=folder)


def of_numbers() -> Iterator[Case]:
    """Yield odd numbers of servers."""
    for flag, beyond in NUMBERS.items():
        some = (*NEITHER[:: 2 if flag == "--port" else 3], "0", MOST, beyond)
        for value in dict.fromkeys(some):
            if flag == "--timeout" and value in ("2.5", "1e-3"):
                continue
            if flag == "--min-sites" and value == "1e-3":
                continue
            about = f"serve {flag}={named(value)}"
            yield case(about, (*SERVE, *given(flag, value)), flag, *shown(value))
    yield case("up --sites of more", (*UP, "--sites", "4"), "--sites 4", "3 CSV files")
    yield case("up of fewer than --min-sites", (*UP, "--min-sites", "4"), "--min-sites is 4")


def of_servers() -> Iterator[Case]:
    """Yield servers that would not be safe, and files that are no certificates."""
    yield case("serve to others without proof", (*SERVE, "--host", "0.0.0.0"), "--cert is None")
    for flag in ("--cert", "--cert-key", "--ca"):
        for value in PLACES:
            files = {"--cert": "p/LICENSE", "--cert-key": "p/LICENSE", "--ca": "p/LICENSE"}
            files |= {"--nodes": "nodes", flag: value}
            words = (word for name, file in files.items() for word in given(name, file))
            yield case(f"serve {flag}={named(value)}", (*SERVE, *words), flag)
    words = (*SERVE, "--cert", "p/LICENSE", "--cert-key", "p/LICENSE", "--ca", "p/LICENSE")
    yield case("serve without any key", words, "--nodes has no NAME.pub")
    for value in PLACES:
        yield case(f"serve --nodes={named(value)}", (*words, *given("--nodes", value)), "--nodes")
    yield case("serve with what is no certificate", (*words, "--nodes", "nodes"), "--ca p/LICENSE")
    for value in ("", "a\0b"):
        yield case(f"serve --host={named(value)}", (*SERVE, *given("--host", value)), "--host")
    for value in (".", "missing", "full", "file", "fifo", "p/sites", "", "a\0b", LONG):
        for command in ("up", "serve"):
            yield case(f"{command} {named(value)}", ("flower", command, value))
    for value in ("full", "file", "fifo", "null", "file/below", "", "a\0b", "/proc/x"):
        yield case(f"new {named(value)}", ("flower", "new", value))
    for value in ("new", "empty", "new/deep/er", "名 字"):
        yield case(f"new {named(value)}", ("flower", "new", value), done=True)


def of_sites() -> Iterator[Case]:
    """Yield sites that cannot join."""
    yield case("join --show", (*joined(), "--show"), done=True)
    for value in NO_ADDRESSES:
        yield case(f"join {named(value)}", (*joined(value), "--show"), *shown(value))
    for value in PLACES:
        for flag in ("--data", "--project"):
            words = (*joined(**{flag: value}), "--show")
            yield case(f"join {flag}={named(value)}", words)
        for flag, other in (("--key", "--ca"), ("--ca", "--key")):
            words = joined("10.0.0.1:1", **{flag: value, other: "p/LICENSE"})
            yield case(f"join {flag}={named(value)}", words, flag)
    for value in NAMES:
        yield case(f"join --name={named(value)}", (*joined(**{"--name": value}), "--show"), "name")
    for value in (*NEITHER[::3], "0", MOST):
        words = joined(**{"--min-scored-rows": value})
        yield case(f"join --min-scored-rows={named(value)}", words, "--min-scored-rows")
    yield case("join --no-scores", (*joined(), "--no-scores", "--show"), done=True)
    for value in ("", "a\0b"):
        yield case(f"join --state={named(value)}", joined(**{"--state": value}), "--state")
    yield case("join without proof", joined("10.0.0.1:1"), "--key is None")
    for word in ODD[::3]:
        yield case(f"word {named(word)}", ("flower", *(() if word[:1] == "-" else (word,)), "-x"))


def of_predictions() -> Iterator[Case]:
    """Yield predictions at a site that cannot be made."""
    words = ("flower", "predict", "full", "--rows", ROWS, "--out", "o.csv")
    for value in (*NEITHER[::3], "0", MOST):
        yield case(f"predict --draws={named(value)}", (*words, *given("--draws", value)), "--draws")
    for value in PLACES:
        place = ("--", value) if value[:1] == "-" else (value,)
        about = f"predict {named(value)}"
        yield case(about, ("flower", "predict", *words[3:], *place))
        yield case(f"{about} as rows", (*words[:3], *given("--rows", value), *words[5:]))
        yield case(f"{about} as out", (*words[:5], *given("--out", value)))
    for flag in ("--method", "--client", "--model"):
        for value in ("", "zzz", "a\0b", LONG):
            yield case(f"predict {flag}={named(value)}", (*words, *given(flag, value)))
    yield case("predict without a state", (*words, "--overwrite"))


def cases() -> Iterator[Case]:
    """Yield all that is about servers and sites."""
    for part in (of_numbers, of_servers, of_sites, of_predictions):
        yield from part()
