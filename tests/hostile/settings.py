"""Hostile settings: what each setting of each method may be is said here once more, by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from hostile.case import ENDED, NOBODY, OUT, Case, shown
from hostile.flags import DIGITS, EITHER, GAP, MOST, TEXTS, fill
from hypothesis import strategies as st

# What settings are called, and what they may be. A new setting needs a place here.
COUNTS = (
    "batch num_particles steps tune_steps distil_batch cycle samples clusters adapt_steps branches "
)
COUNTS += "m_step_iters embedding width components downloads least rows thin keep ensemble "
COUNTS += "rank passes hidden encoder_batch particles"
WHOLE = "epochs own_epochs fine_tune head_epochs base_epochs burn_in distil_epochs depth centers "
WHOLE += "warm_start encoder_epochs"
POSITIVE = "tau noise concentration clip hyper_step sigma length count df spread "
POSITIVE += "robustness renyi_order prior_scale bandwidth"
NOT_NEGATIVE = "lr init_scale lr_alpha lr_prior lr_head lr_base lr_correction lr_center inner_lr "
NOT_NEGATIVE += "server_lr client_lr lr_encoder "
NOT_NEGATIVE += "hyper_lr distil_lr distil_lr_end weight_decay mu rho strength kl temperature "
NOT_NEGATIVE += "std_scale distil_weight_decay chain_lr"
SHARE = "prune_from prune drop damping explore self_weight"
BELOW_ONE = "momentum server_momentum beta1 beta2 memory distil_momentum sparsity swa_start "
BELOW_ONE += "held_back discard"
YES_OR_NO = "remember decay confidence_after_training personal_base natural logit_average "
YES_OR_NO += "sharpen shared weighted stateless multiply newton local_prior"
WORDS = "average confidence coords covariance distil dropout meta_grad on optimizer option order "
WORDS += "loss divergence optimizer "
WORDS += "posterior precision sampling tune attention kernel moments surrogates"
PATTERNS = "head private corrected aggregation bayesian branched teachers strata"
NO_WORDS = "augment tuning"  # of the signature, but nothing that words can say
PROGRAMS = "prior guide"
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
        "program": PROGRAMS,
        "both": " ".join(BOTH),
    }.items()
    for name in names.split()
}
# Names that mean something else in one method.
OTHERS = {("metavd", "head"): "word", ("fedbe", "samples"): "whole"}

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
    "word": (*ANY, "true", "FULL", "full,full", "0", "*"),
    "program": (*ANY, "true", "full", "0", "*", "Normal(", "student_t", "Normal(0, -1)", "f()"),
    "pattern": (" ", "zzz", "[", "a\0b", "\x1b[0m", "x" * 3000, "1e999", "none "),
}
# Values that a machine can hold but nobody can want: refused, or something that is told.
ODD: dict[str, tuple[str, ...]] = {
    "count": (MOST, "9" * 4400, "٣"),
    "whole": (MOST, "9" * 4400, "٣", "0"),
    "positive": ("1e308", "3e38", "1e30", "1e-300", "1e-45", "1e-30"),
    "not negative": ("1e308", "3e38", "1e30", "1e-300", "1e-45", "1e-30", "0"),
    "both": ("1e308",),
    "share": ("1e-300", "0"),
    "below one": ("1e-300", "0"),
}
UNCHANGED = "UserWarning: after round 1: "  # nothing moves at such a rate
SERVER = dict.fromkeys(("fedbe", "predbayes"), "--server-data 20")
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


@st.composite
def settings(draw: Callable[..., Any]) -> Case:
    """Draw a setting of a method, and a value that is out of its range, odd, or any text."""
    method, name = draw(st.sampled_from([k for k in known() if kind_of(*k) != "nothing"]))
    kind = kind_of(method, name)
    net = "--net mlp:2" if method in DEEP else ""
    line = f"run {method} {DIGITS} {net} {SERVER.get(method, '')} --out {OUT}"
    line = f"{line} --set {method}.{name}={GAP}"
    bad, odd = BAD[kind], ODD.get(kind, ())
    value = draw(st.sampled_from((*bad, *bad, *bad, *odd)) | TEXTS)
    if value in bad:
        told = (name, *shown(value)[: "e" not in value and "." not in value])
        return fill(line, value).telling(*(told if kind != "pattern" else ()))
    if value in odd:
        return fill(line, value, (*EITHER, NOBODY, ENDED), warned=UNCHANGED)
    return fill(line, value, EITHER)
