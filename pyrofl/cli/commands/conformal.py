"""The command `pyrofl conformal`: coverage of a run's prediction sets for each client."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from pyrofl import figures
from pyrofl.cli.commands.predict import method_of, refuse_no_run, test_rows_of
from pyrofl.experiments.console import ending, show
from pyrofl.experiments.tasks import threads
from pyrofl.files import run_folder
from pyrofl.files.link_safe_files import subfolder
from pyrofl.files.lock import lock_folder
from pyrofl.inference.conformal.conformal import conformal
from pyrofl.inference.fitted_run.loading import load

CONFORMAL_FILE, CONFORMAL_FIGURE = "conformal.csv", "figures/conformal.png"


def measure(args: Namespace) -> None:
    """Calibrate a saved run's prediction sets; write a table and a figure of their coverage."""
    folder = Path(args.folder)
    refuse_no_run(folder)
    with threads(1), lock_folder(folder):
        subfolder((folder / CONFORMAL_FIGURE).parent)
        run = load(folder, method=method_of(folder, args.net), data=test_rows_of(folder))
        sets = conformal(
            run,
            args.alpha,
            share=args.calibration_fraction,
            randomized=not args.deterministic,
            model=args.model,
            draws=args.draws,
        )
        with ending(lambda what: f"the result cannot be written to {folder}: {what}"):
            columns = tuple(sets.rows[0])
            run_folder.write_csv(
                folder / CONFORMAL_FILE, columns, [tuple(r.values()) for r in sets.rows]
            )
            figures.save(figures.coverage_by_client(sets.frame()), folder / CONFORMAL_FIGURE)
    show(f"{sets}\n\n{folder} holds {CONFORMAL_FILE} and {CONFORMAL_FIGURE}")
