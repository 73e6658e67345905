"""Command and running time of every CSV file: the second table of the first page."""

from files import HERE, markdown, read

FULL = "`[--full]`"
STUDENTS = "examples/papers/fedbe/students.py"
REGIMES = "examples/papers/metavd/regimes.py"
COMMANDS = (
    (
        "pfedvem/table.csv",
        "tables 1 and 5, ablations",
        "examples/pfedvem_table.py --data npz:fashion_mnist.npz",
        FULL,
    ),
    (
        "pfedvem/chosen.csv",
        "table 1, chosen settings",
        "examples/pfedvem_table.py --data npz:fashion_mnist.npz --chosen "
        "--methods FedRep FedPer pFedVEM FedProx Local",
        "",
    ),
    (
        "pfedvem/rounding.csv",
        "table 1, rounding errors",
        "examples/papers/pfedvem/rounding.py --data npz:fashion_mnist.npz",
        "",
    ),
    (
        "pfedvem/clients.csv",
        "figures 2, 10 and 11",
        "examples/papers/pfedvem/clients.py --data-dir DIR",
        "",
    ),
    (
        "pfedmb/pairs.csv",
        "table I, figure 3",
        "examples/pfedmb_pairs.py --data npz:fashion_mnist.npz",
        FULL,
    ),
    (
        "pfedmb/others.csv",
        "table II",
        "examples/papers/pfedmb/others.py --data npz:fashion_mnist.npz",
        FULL,
    ),
    ("metavd/pull.csv", "dropout rates without data", "examples/papers/metavd/pull.py", ""),
    (
        "metavd/overfit.csv",
        "scores by round, held-out clients",
        f"{REGIMES} --data cifar10",
        FULL,
    ),
    (
        "metavd/underfit.csv",
        "scores by round, small network",
        f"{REGIMES} --data cifar10 --net mlp:16,16 --lr 0.01",
        "",
    ),
    ("fedbe/students.csv", "students, teachers", STUDENTS, ""),
    ("fedbe/one_round.csv", "one round", f"{STUDENTS} --rounds 1 --epochs 20", ""),
    (
        "fedbe/cifar10.csv",
        "table 1",
        f"{STUDENTS} --data cifar10 --net mlp:128,64 --per-class 300 --rounds 8",
        FULL,
    ),
    (
        "fedbe/convnet.csv",
        "table 1, ConvNet",
        f"{STUDENTS} --data cifar10 --net cnn-fedbe --per-class 300 --rounds 3",
        FULL,
    ),
    (
        "fedbe/convnet_longer.csv",
        "table 1, ConvNet, more rounds",
        f"{STUDENTS} --data cifar10 --net cnn-fedbe --per-class 300 --rounds 8",
        "",
    ),
    (
        "fedbe/convnet_more.csv",
        "table 1, ConvNet, more unlabeled rows",
        f"{STUDENTS} --data cifar10 --net cnn-fedbe --per-class 480 --server 0.5 --rounds 3",
        "",
    ),
    ("fedbe/swiss_roll.csv", "figure 1", "examples/fedbe_swiss_roll.py --lr 0.001 0.002 0.003", ""),
    (
        "fedabml/new_clients.csv",
        "table 2",
        "examples/fedabml_new_clients.py --data npz:fashion_mnist.npz",
        FULL,
    ),
    (
        "fedabml/entropy.csv",
        "figure 5",
        "examples/fedabml_entropy.py --data npz:fashion_mnist.npz --ood npz:mnist.npz",
        "",
    ),
)
NAMES = {"pfedvem": "pFedVEM", "pfedmb": "pFedMB", "metavd": "MetaVD", "fedbe": "FedBE"}
NAMES["fedabml"] = "FedABML"


def commands() -> str:
    """Return the command, number of runs and minutes of each file."""
    rows = []
    for path, what, script, full in COMMANDS:
        seconds: dict[tuple[str, ...], float] = {}
        for line in read(HERE / path):
            run = tuple(line.values())[: [*line].index("seed") + 1]
            seconds[run] = max(seconds.get(run, 0), float(line["seconds"]))
        folder = path.partition("/")[0]
        page = f"[{NAMES[folder]}]({folder}/README.md)"
        minutes = f"{sum(seconds.values()) / 60:.0f}"
        call = f"`python {script}` {full}".strip()
        rows.append([page, what, call, f"`{path}`", str(len(seconds)), minutes])
    return markdown(["paper", "table or figure", "command", "file", "runs", "minutes"], rows)
