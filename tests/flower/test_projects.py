"""A project's settings, its rows, what will leave a site, and the commands' refusals."""

from __future__ import annotations

import re
import sys

import hospitals
import pytest
import torch
from hospitals import changed

from pyrofl.cli.parser import main
from pyrofl.flower.disclosure import leaving
from pyrofl.flower.project import Project
from pyrofl.flower.rows import rows_of

OWN = """
import pyro
import pyro.distributions as dist

from pyrofl.models import pvi


def program(received, local, batch):
    with batch.clients():
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        effect = pyro.sample("effect", dist.Normal(mean, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(effect + batch.x[..., 0], 1.0), obs=batch.x[..., 1])


def effects(data):
    return pvi.hierarchical(program, data, shared="mean", num_particles=8, steps=2)
"""
LEAKS = """

def leaks(data):
    from dataclasses import replace

    from pyrofl import Phase
    from pyrofl.models import fedavg
    from pyrofl.nets import build

    method = fedavg.build(build("softmax", (3,), 2), epochs=1)
    look = Phase((lambda received, local, batch: {"seen": batch.x[..., 0].clone()},))

    def upload(received, local):
        return method.upload(received, local) | {"seen": local["seen"]}

    return replace(method, phases=(*method.phases, look), upload=upload)
"""


@pytest.fixture
def project(tmp_path):
    return hospitals.project(tmp_path / "p")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"color": "red"},
            "study.yaml: unknown entry 'color'; expected one of methods",
        ),
        ({"rounds": 0}, "rounds is 0; expected a whole number of at least 1"),
        ({"rounds": "ten"}, "rounds is 'ten'; expected a whole number"),
        ({"dtype": "float16"}, "dtype is 'float16'; expected one of float32, float64"),
        ({"classes": ()}, r"classes is \(\); expected two names or more for categorical"),
        ({"classes": ("no", "no")}, "expected distinct names, found 'no' twice"),
        ({"likelihood": "cauchy"}, "likelihood is 'cauchy'; expected one of categorical"),
        ({"methods": ()}, "methods is missing; expected it, or a formula"),
        ({"methods": ("fedavg", "f.py:fedavg")}, "names of methods: expected distinct names"),
        ({"features": ("age", "recovered")}, "expected no target and no client column among them"),
        ({"test_fraction": 1.0}, "test_fraction is 1.0; expected a number from 0 to below 1"),
    ],
)
def test_settings_that_are_wrong_are_refused(project, change, told):
    with pytest.raises(ValueError, match=told):
        changed(project.folder, **change)


def test_a_folder_that_is_no_project_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected a study file, as `pyrofl study new`"):
        Project.read(tmp_path)
    (tmp_path / "study.yaml").write_text("")
    with pytest.raises(ValueError, match="has no entries; expected lines such as `rounds: 10`"):
        Project.read(tmp_path)
    (tmp_path / "study.yaml").write_text("rounds: [1\n")
    with pytest.raises(ValueError, match="cannot be read: while parsing a flow sequence"):
        Project.read(tmp_path)
    (tmp_path / "study.yaml").write_text("rounds: 1\nrounds: 2\n")
    with pytest.raises(ValueError, match="'rounds' is given more than once"):
        Project.read(tmp_path)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("1,2,3,maybe", "holds 'maybe' in line 42; expected one of the project's classes: no, yes"),
        ("1,x,3,yes", "column dose"),
        ("1,,3,yes", "lacks 1 of 41 values"),
    ],
)
def test_rows_that_do_not_suit_the_project_are_refused(project, row, told):
    file = project.folder / "sites/hospital_1.csv"
    file.write_text(file.read_text() + row + "\n")
    with pytest.raises(ValueError, match=told):
        rows_of(project, str(file), "h")


def test_a_site_may_lack_a_class_and_knows_its_code(project):
    file = project.folder / "one.csv"
    file.write_text("pressure,more,recovered,age,dose\n" + "3,x,yes,1,2\n" * 5)
    data = rows_of(project, str(file), "h")
    assert data.y.tolist() == [1] * 5
    assert data.x.dtype == torch.float64
    assert data.x[0].tolist() == [1, 2, 3]
    assert (data.names, data.classes) == (("h",), ("no", "yes"))
    file.write_text("age,dose,recovered\n1,2,yes\n")
    with pytest.raises(ValueError, match=r"unknown column in .+one\.csv: 'pressure'"):
        rows_of(project, str(file), "h")


def test_a_site_of_wards_has_a_client_for_each(project):
    hospitals.wards(project.folder, 3)
    data = rows_of(
        changed(project.folder, client_column="ward"),
        str(project.folder / "sites/hospital_2.csv"),
        "h",
    )
    assert data.names == ("h/ward 0", "h/ward 1", "h/ward 2")
    assert sum(map(len, (*data.train, *data.test))) == 65


def test_numbers_are_predicted_too(project):
    made = changed(
        project.folder,
        likelihood="normal",
        target="dose",
        features=("age",),
        classes=(),
        methods=("fedavg",),
    )
    data = rows_of(made, str(project.folder / "sites/hospital_1.csv"), "h")
    assert data.classes == ()
    assert "up/w/head.weight" in leaving(made, data)


def test_classes_under_a_bernoulli_model_are_refused_before_anything_leaves(project):
    code = "from pyrofl import likelihoods, nets\nfrom pyrofl.models import fedavg\n"
    code += "def made(data):\n    net = nets.build('softmax', tuple(data.x.shape[1:]), 1)\n"
    code += "    return fedavg.build(net, likelihood=likelihoods.bernoulli)\n"
    (project.folder / "own.py").write_text(code)
    made = changed(project.folder, methods=("own.py:made",))
    data = rows_of(made, str(project.folder / "sites/hospital_1.csv"), "h")
    line = r"site .y.: its values are int64, and its Bernoulli needs numbers; use obs=batch\.y\.to"
    with pytest.raises(ValueError, match=line):
        leaving(made, data)


def test_what_leaves_has_no_axis_of_rows(project):
    (project.folder / "own.py").write_text(OWN)
    names = ("fedavg", "pfedvem", "metavd", "fedbe", "own.py:effects")
    made = changed(project.folder, methods=names, settings=("fedbe.distil=none",))
    data = rows_of(made, str(project.folder / "sites/hospital_1.csv"), "hospital_1")
    told = leaving(made, data)
    for name in made.labels:
        assert re.search(rf"{name} +reply +up/", told)
    assert "(hospital_1)" in told


def test_a_message_that_grows_with_the_rows_is_refused(project, monkeypatch):
    (project.folder / "own.py").write_text(OWN + LEAKS)
    made = changed(project.folder, methods=("own.py:leaks",))
    data = rows_of(made, str(project.folder / "sites/hospital_1.csv"), "hospital_1")
    told = r"leaks: of 2 rows leaves up/seen \[1, 2\] 16 bytes, and of 3 rows up/seen \[1, 3\] 24"
    with pytest.raises(ValueError, match=told):
        leaving(made, data)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["up", "{p}", "--sites", "9"], "holds 3 CSV files; expected one for each of --sites 9"),
        (["up", "{p}/sites"], "expected a study file"),
        (["up", "{p}", "--timeout", "0"], "--timeout: found '0'; expected a number above 0"),
        (["up", "{p}", "--set"], "unrecognized arguments: --set"),
        (["new", "{p}"], "is not empty, it holds s"),
        (["serve", "{p}", "--host", "0.0.0.0"], "--cert is None; expected a file, as others reach"),
        (["serve", "{p}", "--port", "70000"], "expected a whole number of at most 65535"),
        (["join", "nowhere"], "the following arguments are required: --data, --name, --state"),
        (
            [
                "join",
                "nowhere",
                *(
                    J := [
                        "--data",
                        "{p}/sites/hospital_1.csv",
                        "--name",
                        "h",
                        "--state",
                        "{p}/s",
                        "--study",
                        "{p}",
                    ]
                ),
            ],
            "server is 'nowhere'; expected HOST:PORT",
        ),
        (["join", "10.0.0.1:80", *J], "--key is None; expected a file, as 10.0.0.1 is another"),
        (["join", "127.0.0.1:80", *J, "--ca", "{p}/no"], "--key is None; expected a file"),
    ],
)
def test_commands_refuse_in_one_line(project, words, told, capsys, monkeypatch):
    monkeypatch.setattr("pyrofl.flower.commands.program", lambda name: name)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("started"))
    assert main(["study", *(word.replace("{p}", str(project.folder)) for word in words)]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    assert not (project.folder / "run").exists()


def test_up_refuses_rows_and_methods_before_anything_starts(project, capsys, monkeypatch):
    monkeypatch.setattr("pyrofl.flower.commands.program", lambda name: name)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("started"))
    changed(project.folder, methods=("fedbabu",))
    assert main(["study", "up", str(project.folder)]) == 2
    assert "fedbabu: head is 'head.*'; expected patterns of some" in capsys.readouterr().err
    changed(project.folder, methods=("fedavg",))
    file = project.folder / "sites/hospital_3.csv"
    file.write_text(file.read_text() + "1,2,x,yes\n")
    assert main(["study", "up", str(project.folder)]) == 2
    assert "hospital_3.csv  pressure  has 'x' in line 92" in capsys.readouterr().out


def test_join_shows_what_will_leave_before_anything_starts(project, capsys, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("started"))
    rows = str(project.folder / "sites/hospital_1.csv")
    words = [
        "join",
        "127.0.0.1:1",
        "--data",
        rows,
        "--name",
        "h",
        "--state",
        str(project.folder / "s"),
    ]
    assert main(["study", *words, "--study", str(project.folder), "--show"]) == 0
    said = capsys.readouterr().out
    assert "What leaves this site, and no row of it:" in said
    assert re.search(r"pfedvem  reply  +up/mean/head.weight  +\[1, 2, 3\] +48 bytes\n", said)
    assert re.search(r"scores, personal  score/accuracy, nll, .+  +\[1\]  +8 bytes\n", said)


def test_without_flower_one_line_says_what_to_install(project, capsys, monkeypatch):
    from pyrofl.flower import apps

    for name in [n for n in sys.modules if n.split(".")[0] == "flwr"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(ValueError, match=r"expected pip install -e '\.\[flower\]'"):
        apps.flower()
    assert main(["study", "up", str(project.folder)]) == 2
    assert "expected pip install -e '.[flower]' in the clone\n" in capsys.readouterr().err
    assert not (project.folder / "run").exists()


@pytest.mark.parametrize(
    "name",
    ["LocalDpMod", "fixedclipping_mod", "adaptiveclipping_mod", "secaggplus_mod", "secagg_mod"],
)
def test_mods_that_would_ruin_the_messages_are_refused_by_name(name):
    from pyrofl.flower import apps

    def mod(message, context, call):
        return call(message, context)

    mod.__name__ = name
    with pytest.raises(ValueError, match=f"mod {name}: .+; expected none of LocalDpMod"):
        apps.client_app([mod])
    with pytest.raises(ValueError, match="mod LocalDpMod"):
        apps.client_app([type("LocalDpMod", (), {})()])
