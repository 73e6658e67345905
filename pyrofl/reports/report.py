"""Report of a run in a script: one HTML page with the result in words."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from pyrofl import figures
from pyrofl.arguments import Count, checked
from pyrofl.data.tables.wording import number_of
from pyrofl.experiments import rows
from pyrofl.files.run_folder import refuse_no_output
from pyrofl.inference.definition.programs import Supervised
from pyrofl.inference.evaluation.specification import default_evaluation
from pyrofl.inference.fitted_run.run import Run
from pyrofl.nouns import nouns
from pyrofl.reports import first_page as words
from pyrofl.reports import model_report
from pyrofl.reports.page import Section, page, write

MIN_DRAWS = 100  # draws


@checked
def report(
    run: Run,
    path: str | Path,
    *,
    question: str = "",
    data: str = "",
    var_names: Sequence[str] | None = None,
    draws: Count = 4000,
    overwrite: bool = False,
) -> Path:
    """Write a report of a run: an HTML page that needs no other file and no network.

    The first page has the question, the data, the results with their intervals in words, a figure,
    how certain the results are, and warnings; tables and further figures follow. Of a regression
    or a program, results are its parameters; of a network, the scores of the clients' test rows.
    `pyrofl report` writes such a page about saved runs.

    Args:
        run: a fitted run.
        path: name of the HTML file.
        question: the title; default a question that the model states.
        data: name of the data set.
        var_names: variables of a program to report, the most important first; default all.
        draws: posterior draws of a program.
        overwrite: replace the file if it exists.

    Returns:
        The path.

    Raises:
        ValueError: if the file exists or its name does not end in .html, a variable is unknown,
            var_names is given for a regression or a network, draws is below 100, or jinja2 is not
            installed.

    Examples:
        >>> from tempfile import mkdtemp
        >>> import pyrofl
        >>> from pyrofl import datasets, federations, nets
        >>> from pyrofl.models import fedavg
        >>> data = federations.split(datasets.load("digits"), "slices:5", clients=4)
        >>> method = fedavg.build(nets.build("softmax", (64,), 10))
        >>> run = pyrofl.fit(method, data, rounds=1, progress=False)
        >>> report(run, f"{mkdtemp()}/digits.html", data="digits").name
        'digits.html'
    """
    path = Path(path)
    refuse_no_output(path, (".html",), overwrite)
    if draws < MIN_DRAWS:
        raise ValueError(f"draws is {draws}; expected at least {MIN_DRAWS}, for intervals of 95%")
    _check_var_names(run, var_names)
    page("", [])
    problems = run.warnings
    if isinstance(run.method.model, Supervised):
        title, sections = _of_network(run, data, problems)
    else:
        parameter_tables = None
        if run.status.kind != "diverged":
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                posterior = run.to_arviz(draws, progress=False)
                parameter_tables = model_report.estimates(run, posterior, var_names)
            problems += [str(one.message) for one in caught if one.category is UserWarning]
        drawings = model_report.drawings(run, parameter_tables) if parameter_tables else ()
        drawn = [(name, text, make()) for name, text, make in drawings]
        title = model_report.question(run)
        sections = model_report.sections(run, parameter_tables, drawn, problems, data)
    write(path, page(question or title, sections))
    return path


def _check_var_names(run: Run, var_names: Sequence[str] | None) -> None:
    """Raise ValueError if variables of the report are no sites of a program."""
    if var_names is None:
        return
    if model_report.is_regression(run) or isinstance(run.method.model, Supervised):
        raise ValueError("var_names is for programs; omit it for a regression or a network")
    if not var_names or not all(isinstance(name, str) for name in var_names):
        raise ValueError(f"var_names is {var_names!r}; expected names of variables, or None")


def _of_network(run: Run, data: str, problems: Sequence[str]) -> tuple[str, list[Section]]:
    """Return the title and the sections of the page of a network."""
    scores = run.evaluate_all()
    main, names = default_evaluation(run.method), run.data.names[: run.data.clients]
    sizes = dict(zip(names, run.data.sizes[: run.data.clients].tolist(), strict=True))
    method = run.method.name or "the method"
    table = rows.rows_of_model(rows.rows_of_run(run.data, scores), (method, *main))
    sentences = words.score_sentences(
        table, sizes, f"the {main[0]} model of {method}", scores[0].part
    )
    statuses = [(method, run.status.kind, run.status.why)]
    certain = words.score_certainty({method: table})
    about = [
        ("Data", words.size_of(names, [*sizes.values()], data, "training rows")),
        ("Method", f"{method}, {number_of(run.state.number, 'round')}, seed {run.seed}"),
    ]
    if run.privacy:
        about.append(("Privacy", str(run.privacy)))
    if len(sizes) > 1 or "accuracy" not in scores[0].values:
        drawn = words.score_figure(table, sizes)
    else:
        bins = {f"{main[0]} model": run.calibration(model=main[0], part=scores[0].part)}
        drawn = figures.reliability(bins), "Fraction of correct predictions by stated probability."
    first = words.first_page(about, sentences, drawn, statuses, certain, problems)
    clients = Section(nouns().client.title).table(*words.score_table(table, sizes))
    every = Section("Scores").table(
        ("model", "adaptation", "population", "score", f"mean of {nouns().client.many}"),
        [
            (s.model, s.adaptation, s.population, name, s.mean(name))
            for s in scores
            for name in s.values
        ],
    )
    return words.how_well([method], data or "new rows", len(sizes)), [
        first,
        clients,
        every,
        model_report.costs(run),
    ]
