"""Rules of a hospital: no disclosive study passes them, and harmless ones do."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import numpy as np
import pytest
from messy_hospitals import agreed
from site_studies import DISCLOSIVE, FULL, HARMLESS, NAME, hospitals

pytest.importorskip("formulae")

import pyrofl
from pyrofl import SiteRules, federations
from pyrofl.inference.transport.site_rules import BrokenRuleError


@pytest.mark.parametrize("study", DISCLOSIVE)
def test_a_disclosive_study_is_refused_before_its_reports_leave(study):
    formula, how, change, rule = DISCLOSIVE[study]
    frames = {NAME: change(hospitals()[NAME]).reset_index(drop=True)}
    with pytest.raises(BrokenRuleError) as caught:
        agreed(frames, formula, rules=SiteRules(), **how)
    assert caught.value.rule == rule
    assert str(caught.value) == "; ".join(map(str, caught.value.every))
    for one in caught.value.every:
        assert str(one).startswith(f"{NAME}: rule {one.rule}: ")
        assert "\n" not in str(one)
        assert str(one).count("; expected ") == 1
    rules = dict.fromkeys(one.rule for one in caught.value.every)
    expected = f"the rules of this site forbid the study ({', '.join(rules)})"
    assert caught.value.for_server == expected


def test_all_broken_rules_of_all_clients_are_named_at_once():
    """Two columns of one hospital, and the rows of another; then what a design adds."""
    frames = hospitals()
    frames["bern"].loc[6, "arm"], frames["bern"].loc[7, "dose"] = "z", 1e6
    frames["chur"] = frames["chur"][:4]
    formula = "score ~ dose + arm"
    client = pyrofl.RegressionClient(formula, federations.from_frames(frames))
    server = pyrofl.RegressionServer(formula, {"site": tuple(frames)})
    with pytest.raises(BrokenRuleError) as caught:
        client.describe(server.configure_describe()["site"])
    found = [(str(one).partition(":")[0], one.rule) for one in caught.value.every]
    assert found == [("bern", "min-level-rows"), ("bern", "max-share"), ("chur", "min-rows")]
    names = "min-level-rows, max-share, min-rows"
    assert caught.value.for_server == f"the rules of this site forbid the study ({names})"
    few = {"bern": hospitals()["bern"][:4].assign(died=[0, 0, 0, 1])}
    with pytest.raises(BrokenRuleError) as caught:
        agreed(few, "died ~ age", rules=SiteRules(), family="bernoulli")
    assert [one.rule for one in caught.value.every] == ["min-rows", "min-events"]
    frames = hospitals()
    frames["bern"] = frames["bern"][:14].assign(died=0, row=range(14))
    formula = "died ~ {row == 7} + {row == 8} + age + dose"
    with pytest.raises(BrokenRuleError) as caught:
        agreed(frames, formula, rules=SiteRules(min_events=0), family="bernoulli")
    assert [one.rule for one in caught.value.every] == ["rows-per-parameter", *["max-share"] * 2]


@pytest.mark.parametrize("study", HARMLESS)
def test_a_harmless_study_passes_and_its_columns_are_those_without_rules(study):
    formula, how = HARMLESS[study]
    server, clients = agreed(hospitals(), formula, rules=SiteRules(), **how)
    other, others = agreed(hospitals(), formula, rules=None, **how)
    assert server.method.program() == other.method.program()
    assert server.method.priors() == other.method.priors()
    for name, plan in server.configure_describe().items():
        _, data = clients[name].build(plan)
        _, expected = others[name].build(other.configure_describe()[name])
        assert (data.x == expected.x).all()


def test_no_report_has_the_smallest_or_largest_number_of_a_column():
    frames = hospitals()
    for name, frame in frames.items():
        frames[name] = frame.assign(age=frame["age"] + 0.137, score=frame["score"] + 0.000137)
    ends = {
        f"{extreme(frame[column]):.12g}"
        for frame in frames.values()
        for column in ("age", "score")
        for extreme in (min, max)
    }
    sent = []

    def spoil(label, name, reply):
        sent.append(reply["reports"])
        return reply

    formula = "score ~ poly(age, 2) + sex"
    agreed(frames, formula, spoil=spoil, rules=SiteRules())
    numbers = {f"{float(n):.12g}" for n in re.findall(r"-?\d+\.\d+", " ".join(sent))}
    assert not ends & numbers
    sent.clear()
    agreed(frames, formula, spoil=spoil, rules=SiteRules(exact_values=True))
    numbers = {f"{float(n):.12g}" for n in re.findall(r"-?\d+\.\d+", " ".join(sent))}
    assert ends <= numbers


def test_rounded_ranges_hold_all_numbers():
    server, _ = agreed(hospitals(), "score ~ age + dose", rules=SiteRules())
    for name, column in server.results["columns"]["columns"].items():
        for frame in hospitals().values() if column["numbers"] else ():
            low, high = column["numbers"]["low"], column["numbers"]["high"]
            width = np.ptp(np.concatenate([f[name] for f in hospitals().values()]))
            assert low <= frame[name].min() <= frame[name].max() <= high
            assert high - low <= 3 * width


def test_a_rule_is_the_hospitals_own():
    formula, how, change, _ = DISCLOSIVE["level of two rows"]
    frames = hospitals()
    frames[NAME] = change(frames[NAME].copy())
    agreed(frames, formula, rules=SiteRules(min_level_rows=2), **how)
    with pytest.raises(BrokenRuleError, match="min-rows: 45 rows are complete; expected at least"):
        agreed({"chur": hospitals()["chur"]}, formula, rules=SiteRules(min_rows=46), **how)


def test_rules_are_read_from_a_file_and_errors_name_it(tmp_path):
    file = tmp_path / "rules.toml"
    file.write_text("min-rows = 20\nexact-values = true\n")
    assert SiteRules.read(file) == SiteRules(min_rows=20, exact_values=True)
    for text, error in (
        ("min-row = 20", "rules.toml: no rule is called 'min-row'; expected some of min-rows, "),
        ("min-row = 1\nmax-shar = 2", "no rule is called 'max-shar' or 'min-row'; expected"),
        ("min-rows = -3", "rules.toml: min-rows is -3; expected"),
        ("min-rows = 0", "rules.toml: min-rows is 0; expected a whole number of at least 1"),
        ("min-rows: 3", r"rules.toml cannot be read: .*; expected TOML"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=error):
            SiteRules.read(file)
    with pytest.raises(ValueError, match=r"none.toml cannot be read: No such file"):
        SiteRules.read(tmp_path / "none.toml")


def test_every_rule_can_be_broken():
    rules = {field.name.replace("_", "-") for field in fields(SiteRules)}
    assert rules - {rule for *_, rule in DISCLOSIVE.values()} == {"max-rounds"}


def test_clients_have_rules_by_default():
    frames = hospitals()
    server = pyrofl.RegressionServer("score ~ age", list(FULL))
    client = pyrofl.RegressionClient(
        "score ~ age", federations.from_frames({NAME: frames[NAME][:2]})
    )
    with pytest.raises(BrokenRuleError, match="bern: rule min-rows: 2 rows are complete"):
        client.describe(server.configure_describe()[NAME] | {"names": (NAME,)})


def test_a_hospital_whose_rows_are_all_incomplete_reports_their_number():
    frames = hospitals()
    frames["chur"]["age"] = np.nan
    server, _ = agreed(frames, "score ~ age", rules=SiteRules())
    assert server.names == ("bern", "basel")


def test_rules_hold_when_the_method_is_built():
    formula = "score ~ scale({row == 7})"
    frames = hospitals()
    frames[NAME] = frames[NAME].assign(row=frames[NAME]["row"] + 100)
    server, clients = agreed(frames, formula, rules=None)
    plan = server.configure_describe()[NAME]
    client = pyrofl.RegressionClient(formula, federations.from_frames({NAME: hospitals()[NAME]}))
    with pytest.raises(BrokenRuleError, match="bern: rule max-share: "):
        client.build(plan)
    assert json.loads(plan["results"])
    assert clients
