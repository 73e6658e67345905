"""Who may import whom, what an import costs, and that every folder is packaged."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import pyrofl

PACKAGE = Path(pyrofl.__file__).parent
FILES = sorted(
    f
    for top in (PACKAGE, PACKAGE / "models", PACKAGE / "inference")
    for f in top.rglob("*.py")
    if "models" not in f.relative_to(top).parts and "inference" not in f.relative_to(top).parts
)

# The arrows: what each part of the house may import, besides itself. Nouns know no verbs, verbs no
# methods; only the command line and the benchmarks know everything.
NOUNS = ("tensors", "turns", "arguments", "plates", "metrics", "paired", "summaries", "recipes")
NOUNS += ("docstrings", "data", "partitions", "nets", "figures", "files")
VERBS = (
    "method",
    "elbo",
    "losses",
    "programs",
    "facts",
    "seeds",
    "optim",
    "fit",
    "look",
    "mistakes",
    "mixing",
    "gradients",
    "reruns",
    "checkpoints",
)
VERBS += ("loop", "halves", "servers", "fast", "evaluation", "posteriors", "checks", "reference")
VERBS += ("chains", "description", "movement", "records", "verdict", "saving", "loading", "loggers")
VERBS += (
    "budget",
    "progress",
    "relations",
    "engines",
    "privacy",
    "run",
    "tune",
    "tuned",
    "optimum",
)


def part(file: Path) -> str:
    """Return the file's module, "pyrofl.inference.loop.rounds"."""
    names = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("pyrofl", *names)).removesuffix(".__init__")


def imported(file: Path) -> set[str]:
    """Return the modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def inside(names: set[str], *packages: str) -> set[str]:
    return {n for n in names for p in packages if f"{n}.".startswith(f"{p}.")}


def files(*parts: str) -> list[Path]:
    return [f for f in FILES if inside({part(f)}, *parts)]


@pytest.mark.parametrize("file", files(*(f"pyrofl.{n}" for n in NOUNS)), ids=part)
def test_the_nouns_know_neither_verbs_nor_methods(file):
    verbs = ("pyrofl.models", "pyrofl.inference", "pyrofl.cli", "pyrofl.flower")
    assert not inside(imported(file), *verbs)


@pytest.mark.parametrize("file", files("pyrofl.inference"), ids=part)
def test_the_verbs_know_no_method(file):
    assert not inside(
        imported(file), "pyrofl.models", "pyrofl.cli", "pyrofl.bench", "pyrofl.flower"
    )


@pytest.mark.parametrize("file", files("pyrofl.models"), ids=part)
def test_methods_know_no_command(file):
    assert not inside(imported(file), "pyrofl.cli", "pyrofl.bench", "pyrofl.flower")


@pytest.mark.parametrize("file", FILES, ids=part)
def test_nobody_imports_the_bare_folders(file):
    assert not inside(imported(file), "models", "inference", "tests", "examples")


def test_every_part_is_looked_at():
    known = {part(f).split(".")[1] for f in FILES if part(f) != "pyrofl"}
    assert known <= {
        *NOUNS,
        "models",
        "inference",
        "cli",
        "bench",
        "flower",
        "starting",
        "__main__",
    }
    verbs = {part(f).split(".")[2] for f in files("pyrofl.inference") if part(f).count(".") > 1}
    assert verbs <= set(VERBS)
    assert {"pyrofl.models.pfedvem", "pyrofl.inference.loop.rounds"} <= set(map(part, FILES))


def test_the_rule_sees_every_form_of_import(tmp_path):
    file = tmp_path / "guilty.py"
    file.write_text("def f():\n    import pyrofl.models.x\nfrom pyrofl import inference\n")
    assert len(inside(imported(file), "pyrofl.models", "pyrofl.inference")) == 2
    file.write_text("from pyrofl.models import fedavg\nimport pyrofl.modelsomething\n")
    assert inside(imported(file), "pyrofl.models") == {"pyrofl.models.fedavg"}


def test_imports_run_in_no_circle():
    modules = {part(f): f for f in FILES}
    known = {
        name: {n for i in imported(f) for n in (i, i.rpartition(".")[0]) if n in modules} - {name}
        for name, f in modules.items()
        if f.name != "__init__.py" or name.count(".") > 2
    }
    left = {n: v & known.keys() for n, v in known.items()}
    while free := {n for n, v in left.items() if not v}:
        left = {n: v - free for n, v in left.items() if n not in free}
    assert not left


HEAVY = ("torchvision", "sklearn", "matplotlib", "arviz", "xarray", "pandas", "scipy.stats", "ray")


def afresh(*lines: str) -> str:
    """Run lines of Python in a process of their own, where nothing is imported yet."""
    command = [sys.executable, "-W", "error", "-c", "\n".join(lines)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("names", ["pyrofl", "pyrofl, pyrofl.models.pfedvem, pyrofl.models.fedavg"])
def test_the_core_loads_nothing_heavy(names):
    code = (f"import sys, {names}", f"print([m for m in {HEAVY} if m in sys.modules])")
    assert afresh(*code) == "[]"


def test_a_fit_does_not_load_the_compiler_of_torch():
    """It takes more than a second, and nothing here is compiled by it."""
    found = afresh(
        "import sys, torch, pyrofl",
        "from pyrofl.models import fedavg, fedopt, pfedbayes",
        "x, y = torch.randn(40, 3), torch.arange(40) % 2",
        "rows = (torch.arange(40),)",
        "data = pyrofl.Federation(x, y, rows, rows, classes=('a', 'b'))",
        "net = pyrofl.nets.build('softmax', (3,), 2)",
        "for method in (fedavg.build(net, batch=2), pfedbayes.build(net), fedopt.build(net)):",
        "    pyrofl.fit(method, data, rounds=1)",
        "print('torch._dynamo' in sys.modules)",
    )
    assert found == "False"


# What is not on top is one dot away.
ONE_DOT_AWAY = {
    "checks": "by_class calibration calibration_by_client compare_loo loo newcomer pit predict "
    "predict_batch predictive_checks Ranks sbc Scores uncertainty",
    "data": "Dataset Who",
    "datasets": "load per_class",
    "federations": "split",
    "figures": "alphas clients cost coverage curves forest ranks reliability reliability_by_client "
    "save shrinkage simplex",
    "guides": "delta full_covariance mean_field",
    "likelihoods": "categorical normal",
    "loggers": "mlflow tensorboard",
    "meta_gradients": "descended maml",
    "metrics": "calibration_error",
    "models": "fedavg.build pfedvem.build pvi.hierarchical",
    "nets": "Network build",
    "participation": "bernoulli everyone fixed fraction",
    "priors": "fixed flat student_t",
    "privacy": "Masks Privacy Spent private summed unmask",
    "reference": "centralised cost nuts pooled",
    "servers": "average descend weighted_mean",
}


def test_every_public_name_is_reached_by_a_bare_import():
    assert pyrofl.MODULES.keys() == ONE_DOT_AWAY.keys()
    asked = [*pyrofl.__all__]
    for module, names in ONE_DOT_AWAY.items():
        asked += [module, *(f"{module}.{name}" for name in names.split())]
    missing = afresh(
        "import pyrofl",
        "from operator import attrgetter",
        "known = {*dir(pyrofl), '__version__'}",
        f"for name in {asked}:",
        "    attrgetter(name)(pyrofl)",
        "    if name.split('.')[0] not in known: print(name)",
    )
    assert missing == ""


def test_what_modules_offer_is_there():
    for name in pyrofl.MODULES:
        module = getattr(pyrofl, name)
        assert all(hasattr(module, offered) for offered in getattr(module, "__all__", ()))


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="'pyrofl' has no attribute 'comparison'"):
        pyrofl.comparison  # noqa: B018
    assert not hasattr(pyrofl, "compare")  # which the command line has, of methods


def test_the_folders_are_packages():
    for name in ("pyrofl.models.pfedvem", "pyrofl.inference.loop.rounds"):
        assert import_module(name).__name__ == name
    assert (PACKAGE / "py.typed").is_file()
    for folder in ("models", "inference"):
        path = Path(import_module(f"pyrofl.{folder}").__file__ or "")
        assert path.resolve() == (PACKAGE / folder / "__init__.py").resolve()


def test_every_folder_with_modules_is_packaged():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted({part(f.parent / "__init__.py") for f in FILES})


def test_no_module_is_loaded_twice():
    import_module("pyrofl.models.pfedvem")
    assert not {"models", "inference"} & sys.modules.keys()
    spec = importlib.util.find_spec("pyrofl.models")
    assert spec is not None
