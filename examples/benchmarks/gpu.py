"""Compare the library on a GPU with the CPU, and with loops over clients on the same GPU.

Three parts: every method, with its defaults, gives on the GPU what it gives on the CPU; a round of
five methods and three networks for 20, 100 and 1,000 clients, against a loop that trains one client
after another; the first rounds of two or three rows of a table of each of five papers, at the size
of the paper and by the code of papers/reproduce.py, and the hours of all rounds and seeds. A row is
written as soon as it is measured, and what does not fit into --seconds is listed as left out.

Run: sh examples/benchmarks/gpu.sh [--seconds 420] [--data-dir DIR] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import csv
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import good_loop
import torch
from clients import LABELS, sized
from good_loop import BATCH

import pyrofl.models
from pyrofl import datasets, federations, nets
from pyrofl.data import Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import everyone
from pyrofl.tensors import Tensors, generator

sys.path.append(str(Path(__file__).parent.parent / "papers"))

import cost  #
import reproduce
import simulated_files
from harness import Trial

PAPERS = {  # paper -> study, column, rows
    "pfedvem": ("table1_cifar100", "50 clients", ("FedAvg", "pFedMe", "pFedVEM")),
    "pfedmb": ("table2", "CIFAR-100, 15", ("FedAvg", "pFedMB")),
    "metavd": ("table1", "CIFAR-10, Dirichlet(0.5)", ("Reptile", "Reptile + MetaVD")),
    "fedbe": ("table1", "Step, ConvNet", ("FedAvg", "FedBE")),
    "fedabml": ("table1", "CIFAR-10, 2 classes", ("FedAvg + FT", "FedABML")),
}
TABLE = ("paper", "study", "column", "row", "rounds", "first_s", "round_s", "hours")
TABLE += ("personal", "global", "note")
MANY = 1_000_000  # rounds; only those that are timed are run
TOLERANCE = 1e-4  # of a state, relative to its largest number
SEQUENTIAL = 20  # clients of a loop that are timed; its time for all is proportional
ROWS = 50  # of each client
SPEED = ("network", "clients", "method", "other", "precision", "ours_s", "low_s", "high_s")
SPEED += ("other_s", "ratio", "first_s", "peak_mib", "note")
EQUALITY = ("method", "difference", "cpu_s", "device_s", "note")
SHAPES = {"mlp:100": (784,), "lenet": (1, 28, 28), "resnet20": (3, 32, 32)}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"epochs": 1, "batch": BATCH},
    "pfedvem": {},
    "metavd": {},
    "pvi": {"epochs": 2},
    "fedbe": {},
}

Write = Callable[..., None]


def main() -> None:
    """Run the parts in turn, each in an equal part of the time that is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=420.0, help="Time for all parts.")
    parser.add_argument("--device", default="cuda", help="PyTorch device (default: cuda).")
    parser.add_argument("--data-dir", type=Path, help="As of papers/reproduce.py.")
    parser.add_argument("--size", choices=["paper", "smoke"], default="paper")
    parser.add_argument("--parts", nargs="+", default=["equality", "speed", "table"])
    parser.add_argument("--methods", nargs="+", help="Methods to compare with the CPU.")
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100, 1000])
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    args = parser.parse_args()
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    end = perf_counter() + args.seconds
    print(torch.__version__, torch.cuda.get_device_name() if device.type == "cuda" else "CPU")
    for place, part in enumerate(args.parts):
        now = perf_counter()
        until = now + (end - now) / (len(args.parts) - place)
        work = {"equality": compare_methods, "speed": time_methods, "table": run_tables}[part]
        work(args, device, until)


def rows_of(path: Path, head: tuple[str, ...]) -> Write:
    """Return a function that appends a row to a table, prints it, and keeps nothing back."""

    def append(row: Iterable[object], mode: str = "a") -> None:
        with path.open(mode, newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)

    def write(**values: object) -> None:
        row = [values.get(name, "") for name in head]
        row = [f"{v:.4g}" if isinstance(v, float) else v for v in row]
        append(row)
        print(*row, sep=" | ", flush=True)

    append(head, "w")
    return write


# Part 1: the same numbers as on the CPU.


def compare_methods(args: argparse.Namespace, device: torch.device, end: float) -> None:
    """Compare two rounds of every method with its defaults, and a table of scores, on digits."""
    write = rows_of(args.out / "gpu_equality.csv", EQUALITY)
    digits = datasets.per_class(datasets.load("digits"), 20)
    data = federations.split(digits, "dirichlet:0.5", clients=6, seed=0, server_data=30)
    net = nets.build("mlp:20", tuple(data.x.shape[1:]), len(data.classes))
    modules = [m.name for m in pkgutil.iter_modules(pyrofl.models.__path__)]
    for name in args.methods or modules:
        module = import_module(f"pyrofl.models.{name}")
        if not hasattr(module, "build"):
            continue
        if perf_counter() > end:
            write(method=name, note="left out: no time")
            continue
        try:
            rows = {"server_data": data.server_data} if name == "fedbe" else {}
            method = module.build(net, **rows)
            seconds, states = zip(
                *(final_state(method, d) for d in (data, data.to(device))), strict=True
            )
            difference = largest_difference(*states)
            note = "" if difference < TOLERANCE else "differs"
            write(
                method=name, difference=difference, cpu_s=seconds[0], device_s=seconds[1], note=note
            )
        except Exception as error:  # a method that fails on a device is a row of the table
            write(method=name, note=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")


def final_state(method: Method, data: Federation) -> tuple[float, Tensors]:
    """Return the seconds of two rounds, and the last states of server and clients."""
    begin = perf_counter()
    state = list(federate(method, data, 2))[-1]
    values = {f"server/{n}": v.cpu() for n, v in state.server.items()}
    values |= {f"clients/{n}": v.cpu() for n, v in state.client_states.items()}
    return perf_counter() - begin, values


def largest_difference(one: Tensors, other: Tensors) -> float:
    """Return the largest difference of two states, relative to the largest number of a tensor."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    relative = [0.0]
    for name, value in one.items():
        if value.is_floating_point() and value.numel():
            scale = float(value.abs().max()) or 1.0
            relative.append(float((value - other[name]).abs().max()) / scale)
    return max(relative)


# Part 2: rounds of the library, and loops over clients.


def time_methods(args: argparse.Namespace, device: torch.device, end: float) -> None:
    """Time a round of each method, network and number of clients, and of a loop over clients."""
    write = rows_of(args.out / "gpu_speed.csv", SPEED)
    for clients in args.clients:
        for spec in SHAPES:
            for name in SETTINGS:
                case = {"network": spec, "clients": clients, "method": name}
                if perf_counter() > end:
                    write(**case, note="left out: no time")
                    continue
                precisions = ["float32"]
                if name == "fedavg" and clients == 100 and spec != "mlp:100":
                    precisions.append("tf32")
                for precision in precisions:
                    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
                    torch.backends.cudnn.allow_tf32 = precision == "tf32"
                    try:
                        write(**case, precision=precision, **time_case(spec, clients, name, device))
                    except Exception as error:  # such as too little memory
                        note = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                        write(**case, precision=precision, note=note)
    refuse_bfloat16(write, device)


def time_case(spec: str, clients: int, name: str, device: torch.device) -> dict[str, object]:
    """Return the seconds of a round of both sides, their ratio and the peak memory of ours."""
    shape = SHAPES[spec]
    data = sized([ROWS] * clients, shape, table=1000)
    net = nets.build(spec, shape, len(LABELS))
    rows = {"server_data": data.x[:200]} if name == "fedbe" else {}
    method = import_module(f"pyrofl.models.{name}").build(net, **SETTINGS[name], **rows)
    few = sized([ROWS] * SEQUENTIAL, shape, table=1000)
    label, other = opponent(name, spec, net, method, few.to(device))
    theirs = timings(other, device, turns=2)[1]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    first, ours = timings(federate(method, data.to(device), MANY, chunk_size=clients), device, 4)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    scaled = median(theirs) * clients / SEQUENTIAL
    return {
        "other": label,
        "ours_s": median(ours),
        "low_s": min(ours),
        "high_s": max(ours),
        "other_s": scaled,
        "ratio": scaled / median(ours),
        "first_s": first,
        "peak_mib": peak,
    }


def opponent(
    name: str, spec: str, net: nets.Network, method: Method, data: Federation
) -> tuple[str, Iterator[object]]:
    """Return the best loop over clients that there is for a case, and what it is."""
    device = data.x.device
    # The loops index with tensors of the device, so that no row waits for the CPU.
    rows = [r.to(device) for r in data.train]
    plain = SimpleNamespace(x=data.x, y=data.y, train=rows, clients=data.clients)
    if name == "fedavg":
        module = net.init_module(generator(0)).to(device)
        return "good loop", good_loop.images(plain, module)  # type: ignore[arg-type]
    if name == "pfedvem" and spec.startswith("mlp"):
        start = [w.to(device) for w in net.init(generator(0)).values()]
        return "good loop", good_loop.pfedvem(plain, start, everyone)  # type: ignore[arg-type]
    return "library, one client at a time", federate(method, data, MANY, chunk_size=1)


def timings(
    rounds: Iterator[object], device: torch.device, turns: int
) -> tuple[float, list[float]]:
    """Return the seconds of the first round, and those of later ones."""
    seconds = []
    for _ in range(turns + 1):
        begin = perf_counter()
        next(rounds)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - begin)
    return seconds[0], seconds[1:]


def refuse_bfloat16(write: Write, device: torch.device) -> None:
    """Write down what the library makes of rows of bfloat16."""
    data = sized([ROWS] * 20).to(device, torch.bfloat16)
    method = pyrofl.models.fedavg.build(nets.build("mlp:100", (784,), 10), epochs=1)
    case = {"network": "mlp:100", "clients": 20, "method": "fedavg", "precision": "bfloat16"}
    try:
        first, ours = timings(federate(method, data, MANY), device, 4)
        write(**case, ours_s=median(ours), low_s=min(ours), high_s=max(ours), first_s=first)
    except Exception as error:
        write(**case, note=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")


# Part 3: a table of each paper.


def run_tables(args: argparse.Namespace, device: torch.device, end: float) -> None:
    """Run rounds of each row, in an equal part of the time that is left."""
    write = rows_of(args.out / "gpu_table.csv", TABLE)
    rows = [(paper, *of[:2], row) for paper, of in PAPERS.items() for row in of[2]]
    with tempfile.TemporaryDirectory() as folder:
        data_dir = args.data_dir
        if args.size == "smoke" and data_dir is None:
            data_dir = Path(folder)
            simulated_files.write_all(data_dir)
        for place, (paper, name, case, row) in enumerate(rows):
            study = reproduce.studies(paper)[name]
            case = case if args.size == "paper" else next(iter(study.cases))
            about = {"paper": paper, "study": name, "column": case, "row": row}
            if perf_counter() > end:
                write(**about, note="left out: no time")
                continue
            if reason := reproduce.missing(study, args.size, case, row, data_dir):
                write(**about, note=f"left out: {reason}")
                continue
            try:
                grid = next(iter(study.grid), "")
                trial = study.trial(args.size, case, row, grid, 0, data_dir, str(device))
                share = (end - perf_counter()) / (len(rows) - place)
                runs = len(reproduce.SEEDS["paper"]) * max(1, len(study.grid))
                write(**about, **run_row(trial, share, runs))
            except Exception as error:  # such as too little memory
                note = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                write(**about, note=note)


def run_row(trial: Trial, share: float, runs: int) -> dict[str, object]:
    """Run rounds until a time is used; return their number, seconds and the scores after them.

    `hours` are those of all rounds of all seeds and settings of the grid, which are `runs`.
    """
    rounds, how = trial.settings.rounds, {"eval_every": 0, "chunk_size": trial.task.data.clients}
    begin = perf_counter()
    run = trial.fit(rounds=1, **how)
    first = pace = perf_counter() - begin
    while run.state.number < rounds and perf_counter() - begin + pace < share:
        more = max(1, int((share - (perf_counter() - begin)) / pace / 2))
        run = trial.fit(rounds=min(rounds, run.state.number + more), resume_from=run, **how)
        pace = (perf_counter() - begin - first) / (run.state.number - 1)
    hours = cost.Cost(pace, 1.0).hours(rounds, runs)
    of = {"rounds": run.state.number, "first_s": first, "round_s": pace, "hours": hours}
    scores: dict[str, object] = {}
    if "personal" in run.method.views:
        scores["personal"] = run.evaluate(model="personal").mean("accuracy")
    if "global" in run.method.views:
        pooled = run.evaluate(model="global", population="pooled")
        scores["global"] = pooled.mean("accuracy")
    return of | scores


if __name__ == "__main__":
    main()
