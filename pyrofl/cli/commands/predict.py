"""The command `pyrofl predict`: predict new rows of a table with a saved run."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

import numpy as np

from pyrofl.arguments import check_name
from pyrofl.cli.commands.input_files import refuse_replaced_input
from pyrofl.data import Federation
from pyrofl.data.outlines import outline_federation
from pyrofl.data.tables.columns import Column, complete
from pyrofl.data.tables.owners import owners_of
from pyrofl.data.tables.table_files import SITE, load_table
from pyrofl.data.tables.wording import listed
from pyrofl.experiments.console import show, tell
from pyrofl.experiments.experiment import Experiment
from pyrofl.experiments.jobs import privacy
from pyrofl.experiments.methods import Scheduled, methods
from pyrofl.experiments.results import save_predictions
from pyrofl.experiments.tasks import Task, network_for, participation, resolve, split, threads
from pyrofl.files import checkpoint_file, run_folder, run_json
from pyrofl.inference.conformal.conformal import conformal
from pyrofl.inference.conformal.sets import PredictionSets
from pyrofl.inference.definition.seeds import Seeds
from pyrofl.inference.evaluation.predictions import Predictions, refuse_trained_clients
from pyrofl.inference.evaluation.specification import default_evaluation
from pyrofl.inference.fitted_run.loading import load
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.privacy.differential_privacy import with_privacy

WHOSE = ("client", "client_column", "new_client")


def predict(args: Namespace) -> None:
    """Predict the rows of a table with a saved run, and write the predictions to a table."""
    whose = [name for name in WHOSE if getattr(args, name)]
    if len(whose) != 1:
        text = " and ".join(f"--{name.replace('_', '-')}" for name in whose) or "none of them"
        raise ValueError(
            f"found {text}; expected --client NAME, --client-column COLUMN or --new-client"
        )
    if args.own_rows and not args.new_client:
        raise ValueError("--own-rows is for a client that was never seen; expected --new-client")
    path = Path(args.out)
    run_folder.refuse_no_output(path, (".csv",), args.overwrite)
    refuse_replaced_input(args, path, args.folder)
    refuse_no_run(Path(args.folder))
    refuse_own_program(Path(args.folder))
    with threads(1):
        method = method_of(Path(args.folder), args.net)
        run = load(args.folder, method=method)
        if args.alpha:
            run = load(args.folder, method=method, data=test_rows_of(Path(args.folder)))
        elif adapts(run, args):
            run = load(args.folder, method=method, data=rows_of(Path(args.folder)))
        table = table_of(args.data)
        owners = whose_rows(table, run, args)
        predictions = ask(run, table, owners, args)
    save_predictions(path, owners, predictions)
    text = "\n".join(dict.fromkeys(one.about for one in predictions.values()))
    show(f"{columns_told(table, run, args)}\n{text}\n{path} holds {len(owners)} predictions")


def refuse_no_run(folder: Path) -> None:
    """Raise ValueError if a run's folder has no checkpoint; the message explains how to get one."""
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; expected the folder of a run, of pyrofl run")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected the folder of a run, of pyrofl run")
    if os.path.lexists(folder / run_folder.CHECKPOINT):
        return  # `load` reports what is wrong
    has = f"{folder} holds no {run_folder.CHECKPOINT}"
    if (folder / "run.json").is_file():
        raise ValueError(
            f"{has}: pyrofl compare removes it once all its runs are done; expected a folder of "
            "pyrofl run, or of pyrofl compare with --checkpoint-every N"
        )
    names = sorted(path.parent.name for path in folder.glob(f"*/{run_folder.CHECKPOINT}"))
    cure = f", such as {folder / names[0]}" if names else " (pyrofl run METHOD --out DIR)"
    raise ValueError(f"{has}; expected the folder of one run{cure}")


def refuse_own_program(folder: Path) -> None:
    """Raise ValueError if a run is of a regression, or of a program of a Flower study."""
    path = folder / "run.json"
    facts = run_json.read(path) if os.path.lexists(path) else {}
    experiment = facts.get("experiment")
    project = facts.get("project")
    if isinstance(experiment, dict) and "formula" in experiment:
        cure = "`predict` of the Run that pyrofl.fit returns, in a script"
        if project:
            cure = "`pyrofl study predict STATE` at a site, which has the effects of its clients"
        raise ValueError(f"{folder} holds a regression; expected {cure}")
    specs = project.get("methods", []) if isinstance(project, dict) else []
    if any(".py:" in str(spec) for spec in specs):
        raise ValueError(
            f"{folder} holds a program of a study, whose effects of clients are at the sites; "
            "expected `pyrofl study predict STATE` at a site"
        )


def table_of(path: str) -> dict[str, Column]:
    """Read a table's columns by name; with several files, add a column of file names."""
    table = load_table(path)
    return table.columns | ({SITE: table.site} if table.site else {})


def method_of(folder: Path, spec: str | None) -> Scheduled | None:
    """Rebuild the method of a run with a user-defined network; return None for other runs.

    The user's file is run only if it is named again: a folder may come from another person.
    """
    path = folder / "run.json"
    was, facts = "none", run_json.read(path) if os.path.lexists(path) else {}
    with suppress(KeyError, TypeError):  # the checkpoint says what is wrong
        was = str(facts["experiment"]["net"])
    own = was.rpartition(":")[0].endswith(".py")
    if not own and not spec:
        return None
    if not own or not spec:
        network_text = f"--net is {spec!r}" if spec else f"{folder} has a network of your own"
        needed = f"--net {was}, which is code and is run" if own else "no --net"
        raise ValueError(f"{network_text}, and the run was of --net {was}; expected {needed}")
    try:
        experiment, about = Experiment.of(facts["experiment"]), facts["data"]
        data = outline_federation(
            checkpoint_file.read_any(folder / run_folder.CHECKPOINT, "cpu")[1]["data"]
        )
        net = network_for(spec, data, about["likelihood"])
        seeds = Seeds(**{name: facts["seeds"][name] for name in vars(Seeds())})
        split_seed, likelihood = facts["seeds"]["split"], about["likelihood"]
        task = Task(facts["seed"], split_seed, seeds, data, net, likelihood)
        (name,) = experiment.methods
        method = methods([name], experiment.settings, task, experiment.rounds)[name]
        draw = participation(experiment.participation, data.clients)
        return with_privacy(method, privacy(experiment.privacy), data.clients, draw)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of a run: {error!r}; expected its folder") from error


def adapts(run: Run, args: Namespace) -> bool:
    """Return whether predictions need the client's training rows, because its model is adapted."""
    view, adaptation = default_evaluation(run.method)
    is_requested = args.model in (None, view) and not args.unadapted
    return is_requested and adaptation != "none" and not args.new_client


ADAPTS = "holds a method that adapts to training rows"


def rows_of(
    folder: Path,
    needed: str = ADAPTS,
    cure: str = "expected its data where they were, or --unadapted",
) -> Federation:
    """Rebuild the federation that a saved command-line run was fitted to, from its run.json."""
    path = folder / "run.json"
    facts = run_json.read(path) if os.path.lexists(path) else {}
    try:
        experiment, seed = Experiment.of(facts["experiment"]), int(facts["seed"])
        if ".py:" in str(experiment.partition):
            raise ValueError(f"its partition is code, {experiment.partition}")
        return split(resolve(experiment), seed)[1]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder} {needed}, and {path} does not lead to them ({error}); {cure}"
        ) from error


def test_rows_of(folder: Path) -> Federation:
    """Rebuild the federation of a saved run, for its test rows, which calibration needs."""
    return rows_of(
        folder,
        "is calibrated on its test rows",
        "expected its data where they were, or conformal(run) in a script",
    )


def whose_rows(table: Mapping[str, Column], run: Run, args: Namespace) -> list[str | None]:
    """Return the name of the client that each row belongs to; None for rows of a new client."""
    count = len(next(iter(table.values())).words)
    if args.client:
        check_name(args.client, run.data.names, "client")
    if not args.client_column:
        refuse_other_owners(table, run, args.client)
        return [args.client or None] * count
    check_name(args.client_column, list(table), f"column in {args.data}:")
    column = table[args.client_column]
    if (bad := np.array([word not in run.data.names for word in column.words])).any():
        raise ValueError(
            f"{column.first(bad)}; expected one of {listed(run.data.names)}, or other rows with "
            "--new-client"
        )
    return [str(word) for word in column.words]


def refuse_other_owners(table: Mapping[str, Column], run: Run, client: str | None) -> None:
    """Raise ValueError if rows name another client than --client, or a known one of --new-client.

    The names of files are names of clients only if they are known.
    """
    column = run.data.source.client_column if run.data.source else ""
    cells = table.get(column)
    if cells is None or (column == SITE and not {*cells.words} & {*run.data.names}):
        return
    cure = f"expected --client-column {column}, or a table without column {column}"
    try:
        owners = owners_of(cells, run.data.names, client)
    except ValueError as error:
        raise ValueError(f"{str(error).partition(';')[0]}; {cure}") from error
    refuse_trained_clients(
        [] if client else owners, run.data.names, f"and --new-client is given; {cure}"
    )


def ask(
    run: Run, table: Mapping[str, Column], owners: Sequence[str | None], args: Namespace
) -> Mapping[str | None, Predictions | PredictionSets]:
    """Return each client's predictions for its rows of a table; with --alpha, prediction sets."""
    x = inputs(run, table, args.data)
    how: dict[str, Any] = {"model": args.model, "draws": args.draws or run.draws}
    if args.unadapted:
        how["adaptation"] = "none"
    own = None
    if args.own_rows:
        rows = table_of(args.own_rows)
        own = (inputs(run, rows, args.own_rows), answers(run, rows, args.own_rows))
    each = {n: np.array([name == n for name in owners]) for n in dict.fromkeys(owners)}
    with catch_warnings():
        # `inputs` has warned of them already.
        filterwarnings("ignore", ".* standard deviations from its mean", UserWarning)
        if args.alpha:
            conformal_sets = conformal(run, args.alpha, share=1.0, **how)
            return {
                owner: conformal_sets.predict(x[client_rows], owner, own)
                for owner, client_rows in each.items()
            }
        return {
            owner: run.predict(x[client_rows], owner, own, **how)
            for owner, client_rows in each.items()
        }


def inputs(run: Run, table: Mapping[str, Column], path: str) -> Any:
    """Return a table's feature columns, selected and preprocessed as in training: [N, C]."""
    source = run.data.source
    if source is None or source.preparation is None:
        raise ValueError(
            "the columns of x have no names in this run, which was not of a table; expected "
            "run.predict(x, client) in a script"
        )
    rows = source.preparation.apply(table)
    if far := source.preparation.find_outlier(rows):
        row, column, off = far
        cell = table[column.name]
        tell(
            f"pyrofl: warning: {path}: column {column.name} holds {cell.words[row]} in "
            f"{cell.places[row]}, {abs(off):.3g} standard deviations from its mean in training; "
            "what is predicted so far from all training rows is a guess\n"
        )
    return rows.numpy()


def answers(run: Run, table: Mapping[str, Column], path: str) -> Any:
    """Return the target column of a table of labeled rows: class names, or numbers."""
    target = run.data.source.target if run.data.source else "y"
    check_name(target, list(table), f"column in {path}: this run predicts")
    column = table[target]
    complete([column], "error")
    if run.data.classes:
        return np.array([str(word) for word in column.words], dtype=object)
    column.refuse_odd("leave such rows out")
    return column.numbers


def columns_told(table: Mapping[str, Column], run: Run, args: Namespace) -> str:
    """Return a note on the columns of the input table that were reordered or are not used."""
    columns = run.data.source.columns if run.data.source else ()
    there = [name for name in table if name in columns]
    message = f"{args.data}: {len(columns)} columns as in training"
    if there != list(columns):
        message += ", brought into their order by name"
    other = [name for name in table if name not in (*columns, args.client_column)]
    return message + (f"; not used: {listed(other)}" if other else "")
