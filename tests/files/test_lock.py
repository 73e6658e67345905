"""A folder has one writer at a time, whatever becomes of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from pyrofl.files.lock import LOCK_FILE, lock_folder

HOLD = """
import sys, time
from pyrofl.files.lock import lock_folder
with lock_folder(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_names_its_holder_and_goes_with_it(tmp_path):
    with lock_folder(tmp_path) as told:
        assert told == ""
        mine = json.loads((tmp_path / LOCK_FILE).read_text())
        assert (mine["host"], mine["pid"]) == (socket.gethostname(), os.getpid())
        holder = rf"process {os.getpid()} on {mine['host']} since {mine['since'][:4]}"
        with pytest.raises(ValueError, match=f"is in use by {holder}.*; expected another folder"):
            lock_folder(tmp_path).__enter__()
        assert (tmp_path / LOCK_FILE).exists()
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError), lock_folder(tmp_path):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_lock_of_a_dead_process_is_taken_over(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"in use by process {process.pid} on "):
            lock_folder(tmp_path).__enter__()
        process.kill()
    assert (tmp_path / LOCK_FILE).exists()
    with lock_folder(tmp_path) as told:
        assert told.startswith(f"{tmp_path} was left by process {process.pid} on ")
        assert told.endswith(", which is dead")
    assert not list(tmp_path.iterdir())


def test_a_lock_of_another_host_stays(tmp_path):
    other = {"host": "elsewhere", "pid": 7, "since": "2026-01-01T00:00:00+00:00"}
    (tmp_path / LOCK_FILE).write_text(json.dumps(other))
    told = r"process 7 on elsewhere since 2026.*, or .*\.lock removed if that process is over"
    with pytest.raises(ValueError, match=told):
        lock_folder(tmp_path).__enter__()
    assert json.loads((tmp_path / LOCK_FILE).read_text()) == other


@pytest.mark.parametrize("content", ["", "[]", "{}", "what", '{"host": 1}'])
def test_a_lock_that_no_run_wrote_is_no_matter(tmp_path, content):
    (tmp_path / LOCK_FILE).write_text(content)
    with lock_folder(tmp_path) as told:
        assert told == ""


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / LOCK_FILE)
    with pytest.raises(
        ValueError, match="is no file; expected a file or folder of a run, or nothing"
    ):
        lock_folder(tmp_path).__enter__()
    (tmp_path / LOCK_FILE).unlink()
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(ValueError, match="cannot be made: Is a directory"):
        lock_folder(tmp_path).__enter__()


def test_systems_without_locks_go_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with lock_folder(tmp_path), lock_folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
