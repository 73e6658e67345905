"""The command `pyrofl study predict`: predictions at a site from its saved state."""

from __future__ import annotations

import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from pyrofl.arguments import check_name
from pyrofl.experiments.console import show, tell
from pyrofl.experiments.results import save_predictions
from pyrofl.experiments.tasks import threads
from pyrofl.files import run_folder
from pyrofl.flower.rows import features_of
from pyrofl.flower.site import Site
from pyrofl.flower.site_results import predict_table
from pyrofl.inference.evaluation.predictions import Predictions
from pyrofl.nouns import nouns, use


def predict(args: Namespace) -> None:
    """Predict rows of a site's clients from saved states, and write predictions to a table."""
    path = Path(args.out)
    run_folder.refuse_no_output(path, (".csv",), args.overwrite)
    site = Site.read(args.folder)
    labels = site.project.labels
    if not args.method and len(labels) > 1:
        raise ValueError(f"the study has several methods; expected --method {' or '.join(labels)}")
    method = args.method or labels[0]
    check_name(method, labels, "method")
    with use(site.project.nouns):
        if site.project.formula:
            _predict_regression(site, args)
        else:
            _predict_method(site, method, args)


def _predict_method(site: Site, method: str, args: Namespace) -> None:
    """Predict rows by the client states of a method."""
    path = Path(args.out)
    x, groups = features_of(site.project, args.rows)
    owners = owners_of(site, len(x), groups, args)
    how: dict[str, Any] = {"model": args.model, "draws": args.draws}
    with threads(1):
        predictions: dict[str | None, Predictions] = {
            owner: site.predict(method, x[np.array(owners) == owner], owner, **how)
            for owner in dict.fromkeys(owners)
        }
    save_predictions(path, owners, predictions)
    text = "\n".join(one.about for one in predictions.values())
    show(f"{text}\n{path} holds {len(owners)} predictions")


def _predict_regression(site: Site, args: Namespace) -> None:
    """Predict rows by the regression of a study, for a client of the site."""
    names = list(site.sizes)
    if args.model or args.draws:
        flag = "--model" if args.model else "--draws"
        raise ValueError(f"{flag} is given for a regression; expected neither --model nor --draws")
    if not args.client and len(names) > 1:
        many = nouns().client.count(len(names))
        raise ValueError(f"{site.name} has {many}; expected --client {' or '.join(names)}")
    owner = args.client or names[0]
    check_name(owner, names, str(nouns().client))
    folder = site.state / site.project.labels[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        predictions = predict_table(folder, site.project, site.regression, args.rows, owner)
    for one in caught:
        tell(f"warning: {one.message}\n")
    count = len(predictions.mean)
    save_predictions(Path(args.out), [owner] * count, {owner: predictions})
    show(f"{predictions.about}\n{args.out} holds {count} predictions")


def owners_of(site: Site, count: int, groups: list[str], args: Namespace) -> list[str]:
    """Return each row's client: given by --client, the only client, or in the client column."""
    names = site.data.names
    owners = [f"{site.name}/{group}" for group in groups]
    if args.client:
        check_name(args.client, names, str(nouns().client))
        if others := [owner for owner in owners if owner != args.client]:
            raise ValueError(
                f"{args.rows} has rows of {nouns().client} {others[0]}, and --client is "
                f"{args.client}; leave out --client, to predict each row for its own "
                f"{nouns().client}"
            )
        return [str(args.client)] * count
    if len(names) == 1 and not groups:
        return [names[0]] * count
    if not groups:
        raise ValueError(
            f"{site.name} has {nouns().client.count(len(names))}, and {args.rows} has no column "
            f"{site.project.client_column!r}; expected that column, or --client NAME"
        )
    for owner in owners:
        check_name(owner, names, "client")
    return owners
