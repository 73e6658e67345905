"""Draw mutations of the source, and count how many of them the tests notice.

Run: python tests/mutations.py OUT [--seed 0] [--number 60] [--processes 2]

A mutation changes one operator, constant, axis or condition of a copy of the package. The ordinary
suite runs once on a copy that records which tests execute each place. Then each mutation runs with
these tests, nearest first, until one fails. OUT/mutations.csv has a row for each mutation; the
command resumes where it ends, if the checkout is the same.
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = {
    "engine": ("inference/engine", "inference/training"),
    "aggregation": (
        "inference/definition/averages.py",
        "inference/definition/aggregator.py",
        "inference/definition/rejection.py",
    ),
    "correction": ("inference/posteriors", "inference/transport/correction.py"),
    "data": ("pyrofl/data", "pyrofl/partitions"),
    "saving": ("pyrofl/files", "pyrofl/experiments/saved_runs.py", "inference/fitted_run"),
    "regression": ("models/regression",),
}
"""Part -> its folders and files."""
OPERATORS = {
    **{
        "Add": "-",
        "Sub": "+",
        "Mult": "/",
        "Div": "*",
        "FloorDiv": "/",
        "Pow": "*",
        "BitAnd": "|",
        "BitOr": "&",
    },
    **{
        "Lt": "<=",
        "LtE": "<",
        "Gt": ">=",
        "GtE": ">",
        "Eq": "!=",
        "NotEq": "==",
        "In": "not in",
        "NotIn": "in",
    },
    **{"Is": "is not", "IsNot": "is", "And": "or", "Or": "and"},
}
"""Class of an operator -> the text that replaces it."""
AXIS_METHODS = set(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "squeeze",
        "unsqueeze",
        "softmax",
        "log_softmax",
        "logsumexp",
        "cumsum",
        "sort",
        "size",
        "movedim",
    ]
)
PROBE = """
import builtins, os
seen, folder = set(), os.environ.get("MUTATION_PROBES")
def executed(number):
    key = (os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0], number)
    if folder and key not in seen:
        seen.add(key)
        with open(os.path.join(folder, str(os.getpid())), "a") as file:
            file.write(f"{number} {key[0]}\\n")
builtins._executed = executed
"""
"""sitecustomize.py of the copy that records: `_executed(number)` writes the test that runs."""
MOST = 300  # tests that a mutation runs with, the nearest to its file and then the quickest
TIMER = """
import os
def pytest_runtest_logreport(report):
    if report.when == "call" or report.failed:
        with open(os.environ["MUTATION_TIMES"], "a") as file:
            file.write(f"{report.outcome} {report.duration:.3f} {report.nodeid}\\n")
"""


@dataclass(frozen=True, order=True)
class Mutation:
    """A text of one file, and the text that replaces it; `start` and `end` are bytes."""

    part: str
    file: str
    line: int
    start: int
    end: int
    kind: str
    before: str
    after: str


def mutations_of(part: str, path: Path) -> Iterator[Mutation]:
    """Yield all mutations of a file, except in annotations, decorators, defaults and texts."""
    source = path.read_bytes()
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def mutation(node: ast.expr, kind: str, after: str) -> Mutation:
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[node.end_lineno - 1] + node.end_col_offset  # type: ignore[operator]
        return Mutation(
            part,
            str(path.relative_to(ROOT)),
            node.lineno,
            start,
            end,
            kind,
            source[start:end].decode(),
            after,
        )

    for node in inside_functions(ast.parse(source)):
        if (
            isinstance(node, ast.BinOp)
            and type(node.op).__name__ in OPERATORS
            and not any(map(is_text, (node.left, node.right)))
        ):
            left, right = ast.unparse(node.left), ast.unparse(node.right)
            yield mutation(
                node, "operator", f"({left}) {OPERATORS[type(node.op).__name__]} ({right})"
            )
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield mutation(
                node, "operator", f"({left}) {OPERATORS[type(node.ops[0]).__name__]} ({right})"
            )
        if isinstance(node, ast.BoolOp):
            joined = f" {OPERATORS[type(node.op).__name__]} "
            yield mutation(
                node, "operator", joined.join(f"({ast.unparse(value)})" for value in node.values)
            )
        if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            yield mutation(node, "constant", another_constant(node.value))
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield mutation(node.test, "condition", f"not ({ast.unparse(node.test)})")
        if isinstance(node, ast.Call):
            yield from (mutation(value, "axis", another_axis(value)) for value in axes(node))


def inside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in the bodies of functions, without annotations and f-strings."""
    functions = [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    nested = {
        inner
        for node in functions
        for inner in ast.walk(node)
        if inner is not node and inner in functions
    }
    waiting: list[ast.AST] = [
        statement for node in functions if node not in nested for statement in node.body
    ]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting.extend(node.body)
        elif isinstance(node, ast.AnnAssign):
            waiting.extend([node.value] if node.value else [])
        elif not isinstance(node, ast.JoinedStr):
            waiting.extend(ast.iter_child_nodes(node))


def is_text(node: ast.expr) -> bool:
    """Return whether an operand is a text, whose + and * have no other operator."""
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )


def another_constant(value: bool | float) -> str:
    """Return a constant that differs in its value, not in its type."""
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + 1)
    return repr(2 * value if value else 1.0)


def axes(call: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call that are an axis."""
    values = [keyword.value for keyword in call.keywords if keyword.arg in ("dim", "axis")]
    if isinstance(call.func, ast.Attribute) and call.func.attr in AXIS_METHODS:
        values += call.args
    return [value for value in values if another_axis(value)]


def another_axis(node: ast.expr) -> str:
    """Return the neighbor of a literal axis, or an empty text."""
    text = ast.unparse(node)
    return str(int(text) + (1 if int(text) >= 0 else -1)) if text.lstrip("-").isdigit() else ""


def draw(seed: int, number: int) -> list[Mutation]:
    """Return mutations: equally many of each part, of kinds in turn, at random places."""
    generator = random.Random(seed)
    result = []
    for part, places in PARTS.items():
        files = sorted(
            file
            for place in places
            for file in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
        )
        kinds: dict[str, list[Mutation]] = defaultdict(list)
        for mutation in sorted(mutation for file in files for mutation in mutations_of(part, file)):
            kinds[mutation.kind].append(mutation)
        for n in range(number // len(PARTS)):
            order = sorted(kind for kind, rest in kinds.items() if rest)
            candidates = kinds[order[n % len(order)]]
            result.append(candidates.pop(generator.randrange(len(candidates))))
    return result


def copy_package(to: Path) -> Path:
    """Copy the tracked files of the checkout and return the folder."""
    shutil.rmtree(to, ignore_errors=True)
    names = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
        .stdout.decode()
        .split("\0")
    )
    for name in filter(None, names):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    return to


def run_tests(
    folder: Path, arguments: list[str], seconds: float | None = None, **variables: str
) -> int:
    """Run pytest in a copy and return its exit status; -1 if it did not end in time."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **variables,
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "mutation_timer",
        *arguments,
    ]
    try:
        return subprocess.run(
            command, cwd=folder, env=environment, timeout=seconds, stdout=subprocess.DEVNULL
        ).returncode
    except subprocess.TimeoutExpired:
        return -1


def record_tests(mutations: list[Mutation], out: Path, processes: int) -> dict[int, list[str]]:
    """Run the suite once; return the tests that execute each mutation's place, nearest first."""
    folder, probes, times = out / "copy", out / "probes", out / "times.txt"
    if not (out / "recorded").exists():
        shutil.rmtree(probes, ignore_errors=True)
        times.unlink(missing_ok=True)
        probes.mkdir(parents=True)
        copy_package(folder)
        (folder / "sitecustomize.py").write_text(PROBE)
        (folder / "mutation_timer.py").write_text(TIMER)
        by_file = defaultdict(list)
        for number, mutation in enumerate(mutations):
            by_file[mutation.file].append((mutation.start, mutation.end, number))
        for file, places in by_file.items():
            (folder / file).write_bytes(with_probes((folder / file).read_bytes(), places))
        run_tests(
            folder,
            ["-n", str(processes), "tests"],
            MUTATION_PROBES=str(probes),
            MUTATION_TIMES=str(times),
        )
        (out / "recorded").touch()
    outcome: dict[str, tuple[str, float]] = {}
    for line in times.read_text().splitlines():
        result, seconds, test = line.split(" ", 2)
        outcome[test] = (result, float(seconds))
    executed: dict[int, set[str]] = defaultdict(set)
    for file_of_process in probes.iterdir():
        for line in file_of_process.read_text().splitlines():
            number, test = line.split(" ", 1)
            if outcome.get(test, ("", 0.0))[0] == "passed":
                executed[int(number)].add(test)
    result = {}
    for number, mutation in enumerate(mutations):
        path = Path(mutation.file)

        def nearness(test: str, path: Path = path) -> tuple[bool, bool, float]:
            return (path.stem not in test, f"/{path.parent.name}/" not in test, outcome[test][1])

        result[number] = sorted(executed[number], key=nearness)
    return result


def with_probes(source: bytes, places: list[tuple[int, int, int]]) -> bytes:
    """Return a source in which each place also calls `_executed`; places may be nested."""
    texts: list[tuple[int, int, bytes]] = []
    for start, end, number in places:
        texts.append((start, 1 - end, b"(_executed(%d) or (" % number))
        texts.append((end, -start, b"))"))
    for at, _, text in sorted(
        texts, key=lambda item: (item[0], item[2] != b"))", item[1]), reverse=True
    ):
        source = source[:at] + text + source[at:]
    return source


def judge(mutation: Mutation, tests: list[str], folder: Path, times: Path) -> tuple[str, float]:
    """Run the tests on a copy with the mutation; return the test that fails, and seconds."""
    source = (ROOT / mutation.file).read_bytes()
    (folder / mutation.file).write_bytes(
        source[: mutation.start] + b"(" + mutation.after.encode() + b")" + source[mutation.end :]
    )
    begin = time.perf_counter()
    times.unlink(missing_ok=True)
    listed = folder / "tests_to_run.txt"
    try:
        for some in (tests[:30], tests[30:MOST]):
            if some:
                listed.write_text("\n".join(some))
                status = run_tests(
                    folder, ["-x", "-n", "0", f"@{listed}"], 1800.0, MUTATION_TIMES=str(times)
                )
                if status not in (0, 1, 2, -1):
                    raise RuntimeError(f"pytest ends with status {status}, for {mutation}")
                if status:
                    lines = times.read_text().splitlines() if times.exists() else []
                    failed = [line.split(" ", 2)[2] for line in lines if line.startswith("failed")]
                    where = failed[0] if failed else "import" if status == 2 else "timeout"
                    return where, time.perf_counter() - begin
    finally:
        (folder / mutation.file).write_bytes(source)
    return "", time.perf_counter() - begin


def main() -> None:
    """Draw, record and judge the mutations, and print those that no test noticed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    mutations = draw(arguments.seed, arguments.number)
    tests = record_tests(mutations, out, arguments.processes)
    folder, results = out / "copy", out / "mutations.csv"
    rows = list(csv.reader(results.open())) if results.exists() else []
    copy_package(folder)
    (folder / "mutation_timer.py").write_text(TIMER)
    with results.open("a", newline="") as file:
        writer = csv.writer(file)
        if not rows:
            writer.writerow(
                (
                    "number",
                    "part",
                    "file",
                    "line",
                    "kind",
                    "before",
                    "after",
                    "tests",
                    "noticed_by",
                    "seconds",
                )
            )
        for number in range(max(len(rows) - 1, 0), len(mutations)):
            m = mutations[number]
            noticed_by, seconds = judge(m, tests[number], folder, out / "judged.txt")
            writer.writerow(
                (
                    number,
                    m.part,
                    m.file,
                    m.line,
                    m.kind,
                    m.before,
                    m.after,
                    len(tests[number]),
                    noticed_by,
                    f"{seconds:.0f}",
                )
            )
            file.flush()
    survivors = [row for row in csv.DictReader(results.open()) if not row["noticed_by"]]
    print(f"{len(mutations) - len(survivors)} of {len(mutations)} mutations were noticed; others:")
    print(dict(Counter(row["part"] for row in survivors)))
    for row in survivors:
        print(
            f"{row['file']}:{row['line']}  {row['before']}  ->  {row['after']}  "
            f"({row['tests']} tests)"
        )


if __name__ == "__main__":
    main()
