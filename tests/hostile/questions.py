"""Hostile questions to tables: what a table cannot answer."""

from __future__ import annotations

from collections.abc import Iterator

from hostile.case import DONE, ENDED, NOBODY, REFUSED, Case
from hostile.flags import EITHER, given
from hostile.sheets import BASE, DEALT, asked, making

LIKELIHOODS = "normal:nan normal:0 normal:-1 normal:inf normal: normal:x normal:1:2 normal:1,5 "
LIKELIHOODS += "binomial:0 binomial:-1 binomial:2.5 binomial: binomial:x binomial:nan binomial:inf "
LIKELIHOODS += "poisson:3 bernoulli:1 categorical:3 measured:1 Normal gaussian norml : :3 "
LIKELIHOODS += "binomial:5 poisson bernoulli binomial measured categorical"  # y has decimals
QUESTIONS: dict[str, tuple[str, ...]] = {  # what is asked of the table, and what must be told
    "--target y --features a,,b": ("column",),
    "--target y --features a,": ("column",),
    "--target y --features ,a": ("column",),
    "--target y --features ,": ("column",),
    "--target y --features a,a": ("a, a",),
    "--target y --features y": ("y",),
    "--target y --features a,y": ("y",),
    "--target y --features zzz": ("zzz",),
    "--target y --features A": ("'A'",),
    "--target y --features a;b": ("a;b",),
    "--target y --features 2": ("'2'",),
    "--target y --features a --features zzz": ("zzz",),
    "--target y --features g --group g": ("g",),
    "--target y --group y": ("y",),
    "--target y --group zzz": ("zzz",),
    "--target y --group G": ("'G'",),
    "--target Y": ("'Y'",),
    "--target 0": ("'0'",),
    "--target y,c": ("y,c",),
    "--target zzz": ("zzz",),
    "--features a,b": ("target",),
    "--target c --likelihood normal --features a,b": ("c",),
    "--target c --likelihood poisson --features a,b": ("c",),
    "--target y --likelihood categorical --features a,b": ("y",),
    "--target a --features b --likelihood categorical": ("a",),
    "--target y --missing mode": ("mode",),
    "--target y --prepare scale": ("scale",),
    "--target y --categories zzz": ("zzz",),
    "--target y --categories y": ("y",),
    "--target y --categories a,,b": ("column",),
    "--target y --features a --categories b": ("b",),
    "--target y --test-column c": ("'u'",),
    "--target y --test-column y": ("y",),
    "--target y --test-column zzz": ("zzz",),
    "--target y --test-last c": ("'u'",),
    "--target y --test-last zzz": ("zzz",),
    "--target y --test-last a --test-column b": ("test_last",),
    "--target y --test-share 1": ("--test-share",),
    "--target y --missing Drop": ("Drop",),
    "--target y --missing": ("--missing",),
    "--target y --features a,b --group g --partition groups:c": ("c",),
    "--target y --features a,b --partition groups": ("groups",),
    "--target y --features a,b --partition slices:2": ("slices",),
    "--target y --features a,b --partition dirichlet:0.5": ("dirichlet",),
    "--target c --features a,b --partition slices:3": ("3",),
    "--target c --features a,b --partition domains:iid": ("domains",),
    "--target y --features a,b --per-class 2": ("class",),
    "--target y --features a,b --clients 13": ("13",),
    "--target y --features a,b --held-out 12": (),
    "--target y --features a,b --net mean:3": ("mean:3",),
    "--target y --features a,b --net cnn-pfedmb": ("cnn-pfedmb",),
    "--target y --features a,b --server-data 12": ("12",),
    "--target c --features a,b --net mean": ("mean",),
}
COUNTS = "n,k,x,g\n5,{},1.5,p\n5,2,2.5,q\n5,3,0.5,p\n5,1,2.0,q\n5,4,1.0,p\n5,0,3.0,q\n"
BAD_COUNTS = ("-1", "1.5", "6", "1e30", "-0.001")
MIXED: dict[str, tuple[str, str, tuple[str, ...]]] = {  # tables of another kind
    "twelve classes": (
        "y,a\n" + "".join(f"name{i},{i}\n" for i in range(12)),
        "--target y",
        (REFUSED,),
    ),
    "one class": ("y,a\nu,1\nu,2\nu,3\nu,4\n", "--target y", (REFUSED,)),
    "numbers written in two ways as groups": (
        "y,a,g\n1,2,1\n2,3,1.0\n3,4,2\n4,5,2\n",
        "--target y --group g --partition groups --clients 2",
        (REFUSED,),
    ),
    "numbers written in two ways as classes": (
        "y,a\n1,2\n1.0,3\n2,4\n2,5\n1,3\n",
        "--target y --likelihood categorical",
        (REFUSED,),
    ),
    "classes that differ by a blank": (
        "y,a\nu,1\nu ,2\nv,3\n v,4\nu,5\nv,6\n",
        "--target y --likelihood categorical",
        EITHER,
    ),
    "numbers that become equal": (
        "y,a\n1700000001,1\n1700000002,2\n1700000003,3\n1700000001,4\n",
        "--target y",
        (REFUSED,),
    ),
    "groups of one row": (
        "y,a,g\n" + "".join(f"{i}.5,{i % 4},g{i}\n" for i in range(6)),
        "--target y --group g --partition groups --clients 6",
        (DONE,),
    ),
    "one group": (
        "y,a,g\n1,2,p\n2,3,p\n3,4,p\n4,5,p\n",
        "--target y --group g --partition groups --clients 1",
        (DONE,),
    ),
    "a class with an escape": (
        "y,a\n\x1b[2J,1\nv,2\n\x1b[2J,3\nv,4\nv,5\n\x1b[2J,6\n",
        "--target y",
        EITHER,
    ),
    "a group with a slash": (
        "y,a,g\n1,2,../p\n2,3,../p\n3,4,/q\n4,5,/q\n",
        "--target y --group g --partition groups",
        (DONE,),
    ),
    "a group with a line's end": (
        'y,a,g\n1,2,"p\nq"\n2,3,"p\nq"\n3,4,r\n4,5,r\n',
        "--target y --group g --partition groups",
        EITHER,
    ),
    "wide": (
        ",".join(["y", *(f"x{i}" for i in range(3000))])
        + "\n"
        + "\n".join(",".join(str((i * j) % 7) for j in range(1, 3002)) for i in range(1, 9))
        + "\n",
        "--target y",
        (DONE,),
    ),
    "giants": (
        "y,a\n" + "".join(f"{i % 3},{i}e30\n" for i in range(1, 9)),
        "--target y",
        (*EITHER, NOBODY, ENDED),
    ),
    "a constant feature": (
        "y,a,b\n1,2,7\n2,3,7\n3,4,7\n4,1,7\n",
        "--target y",
        EITHER,
    ),
}


def cases() -> Iterator[Case]:
    """Yield what a table cannot answer."""
    for question, told in QUESTIONS.items():
        more = tuple(question.split())
        how = (*DEALT, *more)
        yield Case(f"csv asked {question}", "csv", asked(how), told=told, make=making(BASE))
    for likelihood in LIKELIHOODS.split():
        how = ("--target", "y", "--features", "a,b", *DEALT, *given("--likelihood", likelihood))
        if likelihood != "measured":
            name = f"csv likelihood {likelihood}"
            yield Case(name, "csv", asked(how), make=making(BASE))
    for cell in BAD_COUNTS:
        for likelihood in ("poisson", "binomial", "binomial:5", "bernoulli"):
            fine = likelihood == "poisson" and cell in ("6", "1e30")
            how = ("--target", "k", "--features", "n,x", "--likelihood", likelihood, *DEALT)
            wanted = (*EITHER, NOBODY, ENDED) if fine else (REFUSED,)
            make = making(COUNTS.format(cell))
            name = f"csv {likelihood} of {cell}"
            yield Case(name, "csv", asked(how), wanted, () if fine else ("target",), make)
    for cell in ("0", "-1", "0.0"):
        make = making(COUNTS.replace("5,{}", f"{cell},1"))
        how = ("--target", "k", "--features", "n,x", "--likelihood", "measured", *DEALT)
        yield Case(f"csv measured with {cell}", "csv", asked(how), make=make)
    for about, (content, question, wanted) in MIXED.items():
        how = (*DEALT, *question.split())
        if "--clients" not in question and "groups" in question:
            how = (*how, "--clients", "2")
        yield Case(f"csv {about}", "csv", asked(how), wanted, make=making(content))
