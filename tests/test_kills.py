"""The command line, killed at every place: the same command with --resume leaves the same bytes."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import test_contract as contract
from dying import Nursery
from promises import others_slow

from pyrofl.files import lock

MORE = ["--per-class", "6", "--clients", "4", "--net", "softmax", "--quiet", "--eval-every", "1"]
MORE += [
    "--participation",
    "bernoulli:0.7",
    "--drop-rate",
    "0.2",
    "--min-work",
    "0.4",
    "--seed",
    "5",
]
MORE += ["--checkpoint-every", "1"]
RESULTS = ("metrics.csv", "clients.csv", "rows.csv", "posterior.nc")
FACTS = ("bytes_up", "bytes_down", "trained", "reported", "rejected", "rounds")
KILLED = [-9]


def command(method: str, out: Path, rounds: int = 2, draws: int = 2) -> list[str]:
    net = ["--server-data", "10"] if method in ("fedbe", "predbayes") else []
    if method in ("fedper", "fedrep", "fedbabu", "lgfedavg", "virtual"):  # need a base
        net += ["--net", "mlp:3"]
    words = ["run", method, "--rounds", str(rounds), "--posterior-draws", str(draws)]
    return [*words, *MORE, *net, "--out", str(out)]


def temporary(out: Path) -> list[str]:
    return [p.name for p in out.rglob(".*") if p.name != lock.LOCK_FILE]


def assert_same_folder(out: Path, whole: Path) -> None:
    """Compare all that a run leaves, byte by byte, but for the seconds that it took."""
    for name in RESULTS:
        assert (out / name).exists() == (whole / name).exists(), name
        if (out / name).exists():
            assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    facts, expected = (json.loads((at / "run.json").read_text()) for at in (out, whole))
    assert [facts[n] for n in FACTS] == [expected[n] for n in FACTS]
    assert not list(out.rglob(".*"))  # nor a lock


def go_on(forked: Nursery, words: Sequence[str], whole: Path) -> None:
    ended = forked([*words, "--resume"])
    assert ended.codes == [0], ended
    assert_same_folder(Path(words[words.index("--out") + 1]), whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, forked: Nursery) -> Path:
    """A run that nothing has stopped; tests read it only."""
    out: Path = tmp_path_factory.mktemp("whole") / "run"
    assert forked(command("fedavg", out)).codes == [0]
    return out


# Of seven files: two checkpoints, four results, run.json; a kill before and after each.
STEPS = range(1, 1 + 2 * 7)
LEFT = {1: set(), 2: {"checkpoint.safetensors"}, 3: {"checkpoint.safetensors"}}
LEFT[14] = {"checkpoint.safetensors", "figures", "run.json", *RESULTS}


@pytest.mark.parametrize("step", others_slow(STEPS, LEFT))
def test_a_kill_before_or_after_any_file_takes_its_place_loses_nothing(
    tmp_path, forked, whole, step
):
    out = tmp_path / "run"
    assert forked(command("fedavg", out), step=step).codes == KILLED
    # A file is there, and whole, once it has taken its place; until then there is another.
    assert len(temporary(out)) == step % 2
    left = {p.name for p in out.iterdir() if p.name[0] != "."}
    assert left == LEFT.get(step, left)
    go_on(forked, command("fedavg", out), whole)


def test_there_are_no_more_files(tmp_path, forked):
    assert forked(command("fedavg", tmp_path / "run"), step=1 + len(STEPS)).codes == [0]


def test_a_kill_inside_a_write_leaves_the_old_file(tmp_path, forked):
    whole, out = tmp_path / "whole", tmp_path / "run"
    words = command("fedavg", out, draws=400)
    assert forked(command("fedavg", whole, draws=400)).codes == [0]
    assert forked(words, step=3).codes == KILLED
    first = (out / "checkpoint.safetensors").read_bytes()
    full = (whole / "checkpoint.safetensors").stat().st_size
    most = (whole / "posterior.nc").stat().st_size - 1000
    assert max(full, (whole / "rows.csv").stat().st_size) < most
    for size, at in ((full // 2, "checkpoint.safetensors"), (most, "posterior.nc")):
        assert forked([*words, "--resume"], write=size).codes == [-25]
        (half,) = temporary(out)
        assert half.endswith(at[-3:]) or half.startswith(".tmp")
        assert not (out / "posterior.nc").exists()
        if at == "checkpoint.safetensors":
            assert (out / at).read_bytes() == first
    go_on(forked, words, whole)


def killed_in_training(tmp_path: Path, forked: Nursery, method: str) -> None:
    """Kill in a round that is drawn; the first leaves no checkpoint."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    number = random.Random(method).randint(1, 4)
    assert forked(command(method, whole, 4)).codes == [0]
    assert forked(command(method, out, 4), training=number).codes == KILLED
    assert (out / "checkpoint.safetensors").exists() == (number > 1)
    assert not temporary(out)
    go_on(forked, command(method, out, 4), whole)


@pytest.mark.parametrize("method", ["metavd", "pvi"])
def test_a_kill_in_training_loses_nothing(tmp_path, forked, method):
    killed_in_training(tmp_path, forked, method)


@pytest.mark.slow
@contract.everywhere
def test_a_kill_in_training_loses_nothing_with_any_method(tmp_path, forked, name):
    killed_in_training(tmp_path, forked, name)


def test_a_run_may_go_on_to_more_rounds_if_it_was_tested_when_it_would_have_been(tmp_path, forked):
    whole, out = tmp_path / "whole", tmp_path / "run"

    def words(at: Path, rounds: int, every: int) -> list[str]:
        return [*command("local", at, rounds), "--eval-every", str(every)]

    assert forked(words(whole, 8, 4)).codes == [0]
    assert forked(words(out, 5, 2)).codes == [0]  # the file has the tests of rounds 2 and 4
    for rounds, every, lacking in ((8, 3, 3), (8, 1, 1), (5, 4, None)):
        ended = forked([*words(out, rounds, every), "--resume"])
        assert ended.codes == [2 if lacking else 0]
        assert not lacking or ended.told == [
            f"pyrofl: error: {out}/checkpoint.safetensors was tested after rounds [2, 4]; expected "
            "--rounds and --eval-every that ask for no others up to round 5; "
            f"{rounds} and {every} ask for round {lacking}"
        ]
    go_on(forked, words(out, 8, 4), whole)


@pytest.mark.slow
def test_a_comparison_goes_on_with_the_run_that_it_was_at(tmp_path, forked):
    whole, out = tmp_path / "whole", tmp_path / "both"

    def words(at: Path) -> list[str]:
        plain = [w for w in command("fedavg", at)[4:-2] if w != "--checkpoint-every"]
        both = ["compare", "local", "fedavg", "--rounds", "2", "--seeds", "2", *plain[:-1]]
        return [*both, "--out", str(at)]

    assert forked(words(whole)).codes == [0]
    inner = ["local-5", "local-6", "fedavg-5", "fedavg-6"]
    assert not list(whole.glob("*/checkpoint.safetensors"))  # nobody asked for them
    # In the first round of the second run; in the second of the third; then in the last files.
    done: list[list[str]] = []
    files = 5 * len(inner) + 2  # results, and checkpoints that are not there yet
    dooms = {"training": 3}, {"training": 4}, {"step": 2 * files + 1}
    for resume, doom in zip(([], ["--resume"], ["--resume"]), dooms, strict=True):
        assert forked([*words(out), *resume], **doom).codes == KILLED
        done.append([name for name in inner if (out / name / "run.json").exists()])
        assert not (out / "compare.csv").exists()
    assert done == [inner[:1], inner[:2], inner]
    assert forked([*words(out), "--resume"]).codes == [0]
    for name in inner:
        assert_same_folder(out / name, whole / name)
    assert (out / "compare.csv").read_bytes() == (whole / "compare.csv").read_bytes()
    assert not list(out.glob("*/checkpoint.safetensors"))
    assert not temporary(out)
    # What is done may be made again, to the last byte, but no other run in its place.
    (out / "compare.csv").unlink()
    refused = forked([*words(out), "--resume", "--set", "fedavg.epochs=3"])
    assert refused.codes == [2]
    (told,) = refused.told
    assert "fedavg-5/run.json is of another run; now set is ['epochs=3'] and was []" in told
    shutil.rmtree(out / "local-6")
    assert forked([*words(out), "--resume"]).codes == [0]
    for name in inner:
        assert_same_folder(out / name, whole / name)
    assert (out / "compare.csv").read_bytes() == (whole / "compare.csv").read_bytes()


@pytest.fixture(scope="module")
def begun(tmp_path_factory, forked: Nursery) -> Path:
    """A run that was killed in its second round; tests copy it."""
    out: Path = tmp_path_factory.mktemp("begun") / "run"
    assert forked(command("fedavg", out), training=2).codes == KILLED
    return out


def filled(forked: Nursery, begun: Path, whole: Path, out: Path, step: int) -> bool:
    """Go on with a disk that is full from a step on; return whether it was."""
    shutil.copytree(begun, out)
    ended = forked([*command("fedavg", out), "--resume"], full=step)
    if ended.codes == [0]:
        return False
    assert ended.codes == [3]
    last = ended.told[-1]
    assert last.startswith("pyrofl: error: after round 2 of 2: No space left on device"), last
    assert "continue with --resume" in last
    assert not temporary(out)
    first, now = ((at / "checkpoint.safetensors").read_bytes() for at in (begun, out))
    assert f"checkpoint.safetensors holds round {1 if now == first else 2}" in last
    go_on(forked, command("fedavg", out), whole)
    return True


@pytest.mark.parametrize("step", [1, 6, 15])
def test_a_disk_that_is_full_from_a_step_on_ends_the_run_in_one_line(
    tmp_path, forked, begun, whole, step
):
    assert filled(forked, begun, whole, tmp_path / "run", step)


@pytest.mark.slow
def test_a_disk_that_is_full_from_any_step_on_ends_the_run_in_one_line(
    tmp_path, forked, begun, whole
):
    step = 1
    while filled(forked, begun, whole, tmp_path / f"run{step}", step):
        step += 1
    assert step > 15


@pytest.mark.parametrize(("share", "kept"), [(0.5, 0), (1.5, 1), (3.0, 2)])
def test_a_run_on_a_disk_that_is_full_goes_on_once_there_is_room(tmp_path, forked, share, kept):
    whole, disk, copy = tmp_path / "whole", tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    assert forked(command("fedavg", whole, draws=999)).codes == [0]
    size = int(share * (whole / "checkpoint.safetensors").stat().st_size)
    words = command("fedavg", disk / "run", draws=999)
    ended = forked(words, [*words, "--resume"], disk=(str(disk), size, str(copy)))
    assert ended.codes == [3, 0], ended

    assert_same_folder(copy / "run", whole)


def test_a_disk_that_cannot_be_written_is_refused_before_any_work(tmp_path, forked):
    ended = forked(command("fedavg", tmp_path / "run"), read_only=str(tmp_path), training=1)
    assert ended.codes == [2]
    assert not list(tmp_path.iterdir())
    (told,) = ended.told
    assert told.startswith(f"pyrofl: error: {tmp_path}/run: cannot write to {tmp_path}; expected")
