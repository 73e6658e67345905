"""Who may import whom, what an import costs, and that every folder is packaged."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from module_imports import FILES, PACKAGE, PACKAGES, folder, imported, part, reached, read

import pyrofl

# The parts that know everything below them; every other file of pyrofl/ knows data alone.
OUTSIDE = ("pyrofl.experiments", "pyrofl.reports", "pyrofl.cli", "pyrofl.flower")
MAY_NOT_IMPORT: dict[str, tuple[str, ...]] = {
    "pyrofl.models": OUTSIDE,
    "pyrofl.inference": ("pyrofl.models", *OUTSIDE),
    # What the command line and Flower share.
    "pyrofl.experiments": ("pyrofl.reports", "pyrofl.cli", "pyrofl.flower"),
    "pyrofl.reports": ("pyrofl.cli", "pyrofl.flower"),
    "pyrofl.flower": ("pyrofl.cli",),
    **dict.fromkeys(("pyrofl.cli", "pyrofl.starting", "pyrofl.__init__", "pyrofl.__main__"), ()),
    "pyrofl": ("pyrofl.models", "pyrofl.inference", *OUTSIDE),
}
BARE = ("models", "inference", "tests", "examples")  # would be second module objects


def inside(names: set[str], *packages: str) -> set[str]:
    return {n for n in names for p in packages if f"{n}.".startswith(f"{p}.")}


IMPORTS = {part(f): imported(f) for f in FILES}
# Their folders are told apart, and so are the files beside these.
TOPS = ("pyrofl", "pyrofl.models", "pyrofl.inference")


def test_imports_run_one_way():
    guilty = {}
    for name, found in IMPORTS.items():
        full = "pyrofl.__init__" if name == "pyrofl" else name
        rule = next(p for p in MAY_NOT_IMPORT if f"{full}.".startswith(f"{p}."))
        guilty[name] = inside(found, *MAY_NOT_IMPORT[rule], *BARE)
    assert not {name: wrong for name, wrong in guilty.items() if wrong}
    assert {"pyrofl.models.pfedvem", "pyrofl.inference.engine.round"} <= IMPORTS.keys()


def test_no_folder_imports_itself_by_others():
    arrows: dict[str, set[str]] = {}
    for name, modules in read(types=False).items():
        targets = {folder(m) for m in modules} - {folder(name), "pyrofl"}
        arrows.setdefault(folder(name), set()).update(targets)
    del arrows["pyrofl"]
    assert [name for name in arrows if name in reached(arrows, name)] == []


OPTIONAL = ("inference.validation", "inference.acceleration", "figures", "cli")
OPTIONAL += ("inference.transport", "inference.privacy", "inference.posteriors", "data.loaders")
OPTIONAL += ("inference.evaluation", "models", "flower", "reports", "experiments", "inference.fit")


def test_a_round_needs_none_of_the_parts_around_it():
    arrows = read(types=False) | {"pyrofl": set()}  # which registers them by name
    modules = reached(arrows, "pyrofl.inference.engine.federate")
    assert not inside(modules, *(f"pyrofl.{name}" for name in OPTIONAL))
    assert "pyrofl.inference.training.phases" in modules


def test_no_module_imports_one_that_imports_it():
    known = {
        name: {n for i in found for n in (i, i.rpartition(".")[0]) if n in IMPORTS} - {name}
        for name, found in IMPORTS.items()
        if name not in PACKAGES or name.count(".") > 2
    }
    left = {n: v & known.keys() for n, v in known.items()}
    while free := {n for n, v in left.items() if not v}:
        left = {n: v - free for n, v in left.items() if n not in free}
    assert not left


def test_the_rules_see_every_form_of_import(tmp_path):
    file = tmp_path / "guilty.py"
    file.write_text("def f():\n    import pyrofl.models.x\nfrom pyrofl import inference\n")
    assert len(inside(imported(file), "pyrofl.models", "pyrofl.inference")) == 2
    file.write_text("from pyrofl.models import fedavg\nimport pyrofl.modelsomething\n")
    assert inside(imported(file), "pyrofl.models") == {"pyrofl.models.fedavg"}


HEAVY = ("torchvision", "sklearn", "matplotlib", "arviz", "xarray", "pandas", "scipy.stats", "ray")


@cache
def afresh() -> dict[str, list[str]]:
    """Run Python in a process where nothing is imported yet; return what each step finds."""
    code = f"""
import json, sys
from operator import attrgetter
found = {{}}
import pyrofl
found["name"] = [m for m in ("torch", "numpy") if m in sys.modules]
import pyrofl.inference.fit
found["core"] = [m for m in {HEAVY} if m in sys.modules]
import torch
from pyrofl.models import fedavg, fedopt, pfedbayes, pfedvem
found["methods"] = [m for m in {HEAVY} if m in sys.modules]
x, y, rows = torch.randn(40, 3), torch.arange(40) % 2, (torch.arange(40),)
data = pyrofl.Federation(x, y, rows, rows, classes=('a', 'b'))
net = pyrofl.nets.build('softmax', (3,), 2)
for method in (fedavg.build(net, batch=2), pfedbayes.build(net), fedopt.build(net)):
    pyrofl.fit(method, data, rounds=1, progress=False)
found["compiler"] = [m for m in ("torch._dynamo",) if m in sys.modules]
modules = {ONE_DOT_AWAY}
names = [*pyrofl.__all__, *modules, *(f"{{m}}.{{n}}" for m in modules for n in modules[m].split())]
for name in names:
    attrgetter(name)(pyrofl)
found["names"] = [n for n in names if n.split(".")[0] not in {{*dir(pyrofl), "__version__"}}]
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    steps: dict[str, list[str]] = json.loads(done.stdout)
    return steps


@pytest.mark.parametrize("step", ["name", "core", "methods"])
def test_the_core_loads_nothing_heavy(step):
    assert afresh()[step] == []


def test_a_fit_does_not_load_the_compiler_of_torch():
    """It takes more than a second, and nothing here is compiled by it."""
    assert afresh()["compiler"] == []


# What is not on top is one dot away.
ONE_DOT_AWAY = {
    "checks": "calibration calibration_by_client classification_report compare_loo Conformal loo "
    "new_client_posterior pit predict predict_batch predictive_checks prior_predictive "
    "prior_sensitivity Ranks sbc Scores uncertainty",
    "data": "Cohort Dataset",
    "datasets": "load per_class",
    "effects": "conditional forest groups predict ratios",
    "federations": "split",
    "figures": "clients coverage curves forest posterior_differences ranks reliability "
    "reliability_by_client save shrinkage",
    "guides": "delta full_covariance mean_field",
    "likelihoods": "categorical normal",
    "loggers": "mlflow tensorboard",
    "meta_gradients": "make_descent maml",
    "metrics": "calibration_error",
    "models": "fedavg.build pfedvem.build pvi.hierarchical",
    "nets": "Network build",
    "participation": "bernoulli everyone fixed fraction",
    "priors": "fixed flat student_t",
    "privacy": "Masks Privacy PrivacySpent private summed unmask",
    "reference": "centralized compare_posteriors hmc nuts pooled",
    "aggregation": "average descend weighted_mean",
}


def test_every_public_name_is_reached_by_a_bare_import():
    assert pyrofl.MODULES.keys() == ONE_DOT_AWAY.keys()
    assert afresh()["names"] == []


def test_what_modules_offer_is_there():
    for name in pyrofl.MODULES:
        module = getattr(pyrofl, name)
        assert all(hasattr(module, offered) for offered in getattr(module, "__all__", ()))


def test_types_are_those_of_the_names_imported_when_used():
    types = imported(PACKAGE / "__init__.py") - imported(PACKAGE / "__init__.py", types=False)
    assert {
        f"{pyrofl.FUNCTIONS[n.rpartition('.')[2]]}.{n.rpartition('.')[2]}" for n in types
    } == types
    assert pyrofl.FUNCTIONS.keys() >= {*pyrofl.__all__}


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="'pyrofl' has no attribute 'comparison'"):
        pyrofl.comparison  # noqa: B018


def test_the_folders_are_packages():
    for name in ("pyrofl.models.pfedvem", "pyrofl.inference.engine.round"):
        assert import_module(name).__name__ == name
    assert (PACKAGE / "py.typed").is_file()
    for top in ("models", "inference"):
        path = Path(import_module(f"pyrofl.{top}").__file__ or "")
        assert path.resolve() == (PACKAGE / top / "__init__.py").resolve()


def test_every_folder_with_modules_is_packaged():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    scripts = {"pyrofl.lessons"}  # examples/tutorials: sources of `pyrofl course`, no modules
    assert sorted(listed) == sorted({part(f.parent / "__init__.py") for f in FILES} | scripts)


def test_no_module_is_loaded_twice():
    import_module("pyrofl.models.pfedvem")
    assert not {"models", "inference"} & sys.modules.keys()
    spec = importlib.util.find_spec("pyrofl.models")
    assert spec is not None
