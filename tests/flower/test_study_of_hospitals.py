"""A study of seven hospitals with messy files: in process, by files and by Flower, beside NUTS."""

from __future__ import annotations

import re
import signal
import subprocess
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import arviz
import messy_files
import numpy as np
import pytest
from certificates import authority, node_key
from deployed import end_started, left, started, until
from hospitals import lenient, written
from messy_files import COLUMNS, PROBLEMS, REGIONS, correct_tables, write_correct, write_messy

import pyrofl
from pyrofl import federations, reference
from pyrofl.cli.parser import main
from pyrofl.flower.processes import free_port

STUDIES = {
    "logistic": {
        "formula": "died ~ center(age) + log(creatinine) + center(admitted) + sex + (1 | hospital)",
        "family": "bernoulli",
        "columns": COLUMNS,
    },
    "weibull": {
        "formula": "censored(days, died) ~ center(age) + log(creatinine) + sex + (1 | hospital)",
        "family": "weibull",
        "columns": {n: COLUMNS[n] for n in ("age", "creatinine", "sex")},
    },
}
QUESTION = {"question": "Who dies in seven hospitals?", "unit": "region"}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    end_started()


def study_of(folder, kind, **more):
    folder.mkdir()
    entries = STUDIES[kind] | QUESTION | {"client-column": "hospital", "rounds": 8} | more
    return written(folder, entries)


def test_the_check_names_every_problem_and_its_fix(tmp_path, capsys):
    """One hospital is one file here; regions with corrected files pass."""
    entries = STUDIES["logistic"] | {"unit": "hospital"}
    (tmp_path / "one").mkdir()
    study = written(tmp_path / "one", entries)
    files = write_messy(tmp_path / "messy")
    assert main(["study", "check", str(study.file), *files]) == 2
    printed = capsys.readouterr()
    lines = [" ".join(line.split()) for line in printed.out.splitlines()]
    for name, problems in PROBLEMS.items():
        for column, text in problems.items():
            start = f"{name}.csv {column}".strip()
            assert any(line.startswith(start) and text in line for line in lines), (name, text)
    assert "convert it from mg/dL to umol/L, and rename it creatinine" in printed.out
    assert "write 'f'" in printed.out
    assert "would make the study wrong" in printed.err
    assert not any(line.startswith(("bern.csv", "chur.csv")) for line in lines)
    regions = study_of(tmp_path / "regions", "logistic")
    words = ["study", "check", str(regions.file), *write_correct(tmp_path / "right")]
    assert main(words) == 2
    assert re.search("south.csv +south/chur: rule min-rows: 3 rows are", capsys.readouterr().out)
    assert main([*words, "--rules", lenient(tmp_path)]) == 0
    assert "no problem in 3 files that would make the study wrong" in capsys.readouterr().out


def test_the_corrected_rows_are_those_before_they_became_messy():
    """What the check proposes gives the rows back, here by hand for creatinine and dates."""
    frame = correct_tables()["luzern"]
    messy = messy_files._messy("luzern", frame)
    again = messy["creatinine (mg/dL)"] * messy_files.MILLIGRAMS
    np.testing.assert_allclose(again, frame["creatinine"], rtol=2e-3)


def by_files(folder, study, keys, server_key) -> None:
    """Run a study by files to its end."""
    nodes, out = str(folder / "nodes"), str(folder / "by-files")
    rules = lenient(folder)
    for _ in range(40):
        words = ["--nodes", nodes, "--key", server_key, "--out", out]
        words += ["--messages", str(folder / "mail"), "--quiet"]
        assert main(["study", "exchange", str(study.file), *words]) == 0
        if (folder / "by-files/regression/report.html").exists():
            return
        for name in REGIONS:
            for request in (folder / "mail").glob(f"{name}-request-*.json"):
                words = ["--data", str(study.folder / f"sites/{name}.csv"), "--name", name]
                words += ["--state", str(folder / f"files-{name}"), "--study", str(study.file)]
                words += ["--key", keys[name], "--server-key", f"{server_key[:-4]}.pub", "--yes"]
                assert main(["study", "answer", str(request), *words, "--rules", rules]) == 0
    pytest.fail("the study by files has no end")


def by_flower(folder, study, keys) -> None:
    """Run a study by Flower with TLS and keys; a site and the server are killed on the way."""
    proof, port = authority(folder / "proof"), free_port()
    rules = lenient(folder)

    def serve(log: str) -> subprocess.Popen[bytes]:
        words = ["serve", str(study.file), "--sites", "3", "--port", str(port)]
        words += ["--cert", proof["cert"], "--cert-key", proof["key"], "--ca", proof["ca"]]
        words += ["--nodes", str(folder / "nodes"), "--out", str(folder / "by-flower")]
        return started(folder / f"{log}.log", *words, "--timeout", "600")

    def join(name: str, log: str) -> subprocess.Popen[bytes]:
        words = ["join", f"127.0.0.1:{port}", "--name", name, "--study", str(study.file)]
        words += ["--data", str(study.folder / f"sites/{name}.csv"), "--rules", rules]
        words += ["--state", str(folder / f"flower-{name}"), "--key", keys[name]]
        return started(folder / f"{log}.log", *words, "--ca", proof["ca"])

    log = folder / "by-flower/server.log"

    def says(text: str) -> bool:
        return log.exists() and text in log.read_text()

    server = serve("server")
    sites = {name: join(name, name) for name in REGIONS}
    until(lambda: says("round 1 of at most"), 1200)
    sites["west"].kill()  # in mid-round
    sites["west"].wait()
    sites["west"] = join("west", "west-again")
    until(lambda: says("round 2 of at most"), 1200)
    server.send_signal(signal.SIGTERM)
    assert server.wait(120) == 130
    server = serve("server-again")
    assert server.wait(2400) == 0, (folder / "server-again.log").read_text()
    for process in sites.values():
        assert process.wait(300) == 0
    assert not left(folder)


def same_posterior(out, other) -> None:
    """Compare the stored draws of a regression of two folders."""
    one, two = (arviz.from_netcdf(path / "regression/posterior.nc") for path in (out, other))
    assert set(one["posterior"]) == set(two["posterior"])
    for name, value in one["posterior"].items():
        np.testing.assert_allclose(value, two["posterior"][name], rtol=1e-10, atol=1e-10)
    pages = [(path / "regression/report.html").read_text() for path in (out, other)]
    for page in pages:
        assert "<h1>Who dies in seven hospitals?</h1>" in page
        assert "the rows stayed at the hospitals" in page
        body = page.partition("<body")[2].partition("<h2>Model</h2>")[0]  # a program follows
        assert "Hospitals and rows" in body
        assert not re.search(r"\bclients?\b", re.sub('data:image[^"]+', "", body))


@pytest.mark.slow
@pytest.mark.parametrize("kind", STUDIES)
def test_a_study_in_process_by_files_and_by_flower_has_one_posterior(kind, tmp_path):
    pytest.importorskip("flwr")
    study = study_of(tmp_path / "study", kind)
    write_correct(study.folder / "sites")
    keys = {name: node_key(tmp_path / "nodes", name) for name in REGIONS}
    server_key = node_key(tmp_path / "server", "server")
    words = ["--rules", lenient(tmp_path), "--quiet", "--out", str(tmp_path / "here")]
    assert main(["study", "run", str(study.file), *words]) == 0
    by_files(tmp_path, study, keys, server_key)
    same_posterior(tmp_path / "here", tmp_path / "by-files")
    by_flower(tmp_path, study, keys)
    same_posterior(tmp_path / "here", tmp_path / "by-flower")


@pytest.mark.slow
@pytest.mark.parametrize("kind", STUDIES)
def test_a_study_has_the_posterior_of_fit_and_of_pooled_rows(kind, tmp_path):
    """Means within four Monte Carlo errors of `fit`; means and sds within .1 sd of pooled HMC.

    The reference samples the joint posterior of the corrected, complete rows of all hospitals.
    """
    study = study_of(tmp_path / "study", kind)
    write_correct(study.folder / "sites")
    words = ["--rules", lenient(tmp_path), "--quiet", "--out", str(tmp_path / "here")]
    assert main(["study", "run", str(study.file), *words]) == 0
    found = arviz.from_netcdf(tmp_path / "here/regression/posterior.nc")["posterior"]
    tables = correct_tables()
    frames = {f"{site}/{n}": tables[n] for site, names in REGIONS.items() for n in names}
    how = {"family": STUDIES[kind]["family"], "client": "hospital"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # thun has no complete row, and chur few
        clients = federations.from_frames(dict(sorted(frames.items())))
        method = pyrofl.regression(STUDIES[kind]["formula"], clients, **how)
        run = pyrofl.fit(method, clients, 8, stop_when="converged", progress=False, chunk_size=1)
        fitted = run.to_arviz(4000, progress=False)["posterior"]
        exact = reference.hmc(method, run.data, shared=method.shared)["posterior"]
    compared = [name for name in found if name in exact and name in fitted]
    assert {"b", "sd_hospital"} <= set(compared)
    for name in compared:
        own, other, pooled = (moments(idata[name]) for idata in (found, fitted, exact))
        error = own.sd * np.sqrt(1 / own.ess + 1 / other.ess)
        assert (abs(own.mean - other.mean) < 4 * error).all(), name
        slack = 4 * pooled.sd * np.sqrt(1 / own.ess + 1 / pooled.ess)
        assert (abs(own.mean - pooled.mean) < 0.1 * pooled.sd + slack).all(), name
        assert (abs(own.sd / pooled.sd - 1) < 0.1 + slack / pooled.sd).all(), name
        print(name, (own.mean - pooled.mean) / pooled.sd, own.sd / pooled.sd)


class Moments(NamedTuple):
    """Means, standard deviations and effective sample sizes of a variable's entries."""

    mean: np.ndarray
    sd: np.ndarray
    ess: np.ndarray


def moments(value) -> Moments:
    """Return the moments of draws of a variable."""
    axes = ("chain", "draw")
    ess = arviz.ess(value.to_dataset(name="x"))["x"]
    return Moments(value.mean(axes).values, value.std(axes).values, ess.values)
