"""Hostile settings: what each setting of each method may be is said here once more, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from zlib import crc32

from hostile.case import ENDED, NOBODY, OUT, REFUSED, Case, named, shown
from hostile.flags import DIGITS, EITHER, MOST

# What settings are called, and what they may be. A new setting needs a place here.
COUNTS = "batch draws steps tune_steps distil_batch cycle samples clusters adapt_steps branches "
COUNTS += "m_step_iters embedding width components downloads least rows thin keep ensemble"
WHOLE = "epochs own_epochs fine_tune head_epochs base_epochs burn_in distil_epochs depth centres"
POSITIVE = "tau noise concentration clip hyper_step sigma length count df spread"
NOT_NEGATIVE = "lr scale lr_alpha lr_prior lr_head lr_base lr_centre inner_lr server_lr client_lr "
NOT_NEGATIVE += "hyper_lr distil_lr distil_lr_end weight_decay mu rho strength kl temperature "
NOT_NEGATIVE += "std_scale distil_weight_decay chain_lr"
SHARE = "prune_from prune drop damping explore self_weight"
BELOW_ONE = "momentum server_momentum beta1 beta2 memory distil_momentum sparsity swa_start "
BELOW_ONE += "held_back discard"
YES_OR_NO = "remember decay fresh_tau own_base natural logit_average sharpen shared weighted "
YES_OR_NO += "stateless together"
WORDS = "average confidence coords covariance distil dropout meta_grad on optimiser option order "
WORDS += "posterior precision sampling tune guide attention kernel moments surrogates"
PATTERNS = "head private aggregation bayesian branched teachers"
NO_WORDS = "prior augment tuning"  # of the signature, but nothing that words can say
BOTH = {"alpha": "a share of apfl, a positive number of others", "beta": "a share or a factor"}
KINDS: dict[str, str] = {
    name: kind
    for kind, names in {
        "count": COUNTS,
        "whole": WHOLE,
        "positive": POSITIVE,
        "not negative": NOT_NEGATIVE,
        "share": SHARE,
        "below one": BELOW_ONE,
        "yes or no": YES_OR_NO,
        "word": WORDS,
        "pattern": PATTERNS,
        "nothing": NO_WORDS,
        "both": " ".join(BOTH),
    }.items()
    for name in names.split()
}
OTHERS = {
    ("metavd", "head"): "word",
    ("fedbe", "samples"): "whole",
}  # names that mean something else in one method

ANY = (
    "",
    " ",
    "ten",
    "0x10",
    "1,5",
    "nan",
    "-nan",
    "inf",
    "-inf",
    "1e999",
    "½",
    "None",
    "[1]",
    "1e",
)
ANY += ("a\0b", "\x1b[0m", "--", "-", "1;2", "$(ls)", "é", "x" * 3000)
BELOW = ("-1", "-1000000")
FRACTIONS = ("2.5", "1e-3", "0.999", "-0.5")
NO_WORDS_EITHER = ("true", "FULL", "full,full", "0", "*")
# Of the values that are refused by all settings of a kind.
BAD: dict[str, tuple[str, ...]] = {
    "count": (*ANY, *BELOW, *FRACTIONS, "0", "true", "1e3x", "none "),
    "whole": (*ANY, *BELOW, *FRACTIONS, "true", "none "),
    "positive": (*ANY, *BELOW, "0", "-0.0", "-1e-30", "1e-400", "true"),
    "not negative": (*ANY, *BELOW, "-1e-30", "true", "-0.01"),
    "share": (*ANY, *BELOW, "1.5", "-0.01", "1e30", "1.0000001", "2"),
    "below one": (*ANY, *BELOW, "1", "1.0", "1.5", "-0.01", "1e30"),
    "both": (*ANY, *BELOW, "-0.01"),
    "yes or no": (*ANY, "0.5", "2", "yes", "no", "on", "t", "truefalse"),
    "word": (*ANY, *NO_WORDS_EITHER),
    "pattern": (" ", "zzz", "[", "a\0b", "\x1b[0m", "x" * 3000, "1e999", "none "),
    "nothing": (),
}
# Values that a machine can hold but nobody can want: refused, or something that is told.
HUGE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("count", "whole"), (MOST, "9" * 4400)),
    **dict.fromkeys(("positive", "not negative"), ("1e308", "3e38", "1e30")),
    **dict.fromkeys(("both",), ("1e308",)),
}
TINY = {
    **dict.fromkeys(("positive", "not negative"), ("1e-300", "1e-45", "1e-30")),
    **dict.fromkeys(("share", "below one"), ("1e-300",)),
}
UNCHANGED = "UserWarning: after round 1: "
ENDLESS = "epochs own_epochs head_epochs base_epochs burn_in steps m_step_iters tune_steps draws "
ENDLESS += "fine_tune adapt_steps samples distil_epochs branches clusters width depth components "
ENDLESS += "rows thin"
FIRST, WORDY, EACH = 8, 6, 1  # values for the first method of a setting, and for every method
SERVER = dict.fromkeys(("fedbe", "predbayes"), ("--server-data", "20"))
DEEP = ("fedper", "fedrep", "fedbabu", "fedpop", "lgfedavg", "pfedvem", "metavd", "fedbe")
DEEP += ("virtual",)


@cache
def known() -> tuple[tuple[str, str], ...]:
    """Return every method and setting of the library."""
    from pyrofl.experiments.methods import builds
    from pyrofl.experiments.settings import arguments

    return tuple((m, n) for m, build in builds().items() for n in arguments(build))


def kind_of(method: str, name: str) -> str:
    """Return what a setting may be."""
    return OTHERS.get((method, name)) or KINDS[name]


def of(method: str, name: str, value: str, wanted: tuple[str, ...], told: bool = True) -> Case:
    """Give a method a setting."""
    net = ("--net", "mlp:2") if method in DEEP else ()
    base = ("run", method, *DIGITS, *net, *SERVER.get(method, ()), "--out", OUT)
    words = (*base, "--set", f"{method}.{name}={value}")
    told_words = (name, *shown(value)[: "e" not in value and "." not in value])
    told_words = told_words if told and kind_of(method, name) != "pattern" else ()
    return Case(f"{method}.{name}={named(value)}", "setting", words, wanted, told_words)


def rotated(values: tuple[str, ...], key: str, count: int) -> tuple[str, ...]:
    """Choose some values, others for every key, always the same."""
    at = crc32(key.encode()) % max(1, len(values))
    return (values * 2)[at : at + min(count, len(values))]


def cases() -> Iterator[Case]:
    """Yield every value for the first method of a setting, some for the others."""
    met: set[tuple[str, str]] = set()
    for method, name in known():
        kind = kind_of(method, name)
        first = (name, kind) not in met
        met.add((name, kind))
        wordy = kind in ("word", "pattern", "yes or no")
        count = (WORDY if wordy else FIRST) if first else EACH
        for value in rotated(BAD[kind], f"{method}.{name}", count):
            yield of(method, name, value, (REFUSED,))
        for value in HUGE.get(kind, ()) if first else ():
            ends = (REFUSED,) if name in ENDLESS.split() else (*EITHER, NOBODY, ENDED)
            yield of(method, name, value, ends, told=False)
        for value in TINY.get(kind, ()) if first else ():
            case = of(method, name, value, (*EITHER, NOBODY, ENDED), told=False)
            yield replace(case, warned=UNCHANGED)  # nothing moves at such a rate
        if first and kind in ("whole", "not negative", "share", "below one"):
            yield replace(of(method, name, "0", EITHER, told=False), warned=UNCHANGED)
        if first and kind in ("count", "whole"):
            yield of(method, name, "٣", EITHER, told=False)
