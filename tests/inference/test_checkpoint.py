"""Every method goes on from a file to the last bit; other files are refused in one clear line."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
import test_contract as contract
import torch
import toys

from pyrofl import checkpoints
from pyrofl.data import Federation
from pyrofl.inference.checkpoint import Keeper, load, save
from pyrofl.inference.fit import Run, fit
from pyrofl.inference.method import Method
from pyrofl.inference.participation import bernoulli
from pyrofl.inference.seeds import Seeds
from pyrofl.inference.stragglers import Stragglers
from pyrofl.models import fedavg
from pyrofl.tensors import size_in_bytes

OPTIONS = {
    "participation": bernoulli(0.5),
    "stragglers": Stragglers(0.2, 0.4),
    "every": 1,
    "progress": False,
}
ABOUT = {"lr": 0.1, "settings": ["epochs=2"]}


@cache
def data() -> Federation:
    return toys.blobs((3, 9, 7, 12), held_out=1)


@cache
def plain() -> Method:
    return fedavg.build(toys.net(), epochs=1)


def assert_same_run(a: Run, b: Run) -> None:
    toys.assert_same_round(a.state, b.state)
    assert a.method is b.method
    for name in ("metrics", "down", "up", "rejected", "trained", "reported", "seed"):
        assert getattr(a, name) == getattr(b, name), name
    assert len(a.seconds) == len(b.seconds)
    for x, y in zip(a.loss, b.loss, strict=True):
        toys.assert_same(x, y)


@contract.everywhere
def test_every_method_goes_on_to_the_last_bit(name, tmp_path):
    method, path = contract.built(name), tmp_path / "run.ckpt"
    whole = fit(method, data(), 3, seed=4, **OPTIONS)
    fit(method, data(), 1, seed=4, after=Keeper(path, 1), **OPTIONS)
    for rounds in (2, 3):
        start = load(path, method, data(), seed=4)
        again = fit(method, data(), rounds, seed=4, start=start, after=Keeper(path, 1), **OPTIONS)
    assert_same_run(again, whole)
    assert_same_run(load(path, method, data(), seed=4), again)
    toys.assert_same(again.posterior(2), whole.posterior(2))


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "run.ckpt"
    save(fit(plain(), data(), 2, progress=False), path, ABOUT)
    return path


def test_a_checkpoint_holds_every_field(file):
    content = checkpoints.read(file, _about(file))
    known = {f.name for f in fields(Run)} - {"method", "data", "state", "seed", "draws"}
    assert content["records"].keys() == known
    assert content["state"].keys() >= {"number", "server", "private", "seen", "message", "loss"}


def _about(file: Path) -> dict[str, object]:
    import json

    found: dict[str, object] = json.loads(file.read_bytes().split(b"\n")[2])
    return found


def test_it_weighs_little_more_than_the_state(file):
    run = load(file, plain(), data(), ABOUT)
    state = (run.state.server, run.state.private, run.state.message)
    rows = sum(len(next(iter(part.values()), [])) * size_in_bytes(part) for part in state)
    assert file.stat().st_size < rows + 50_000


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"lr": 0.2}, "now lr is 0.2 and was 0.1"),
        ({"settings": ["epochs=3"]}, r"now settings is \['epochs=3'\] and was \['epochs=2'\]"),
        ({"momentum": 0.9}, "now momentum is 0.9 and was None"),
        ({"lr": 1, "batch": 3}, "now batch is 3 and was None, lr is 1 and was 0.1"),
    ],
)
def test_another_setting_is_refused_by_name(file, changed, told):
    with pytest.raises(ValueError, match=f"run.ckpt is of another run; {told}"):
        load(file, plain(), data(), ABOUT | changed)


def test_another_seed_other_data_and_another_version_are_refused(file, monkeypatch):
    with pytest.raises(ValueError, match="now seed of init is 1 and was 0, seed of noise is 1 "):
        load(file, plain(), data(), ABOUT, seed=1)
    with pytest.raises(ValueError, match="now seed of participation is 2 and was 0"):
        load(file, plain(), data(), ABOUT, seed=Seeds(participation=2))
    assert load(file, plain(), data(), ABOUT, seed=Seeds()).state.number
    x = data().x.clone()
    x[0, 0] += 1e-9
    names = tuple(reversed(data().names))
    for other in (replace(data(), x=x), replace(data(), names=names), toys.blobs((3, 9, 7, 12))):
        with pytest.raises(ValueError, match="now hash of the data is"):
            load(file, plain(), other, ABOUT)
    monkeypatch.setattr(
        "pyrofl.inference.checkpoint.versions", lambda: {"pyrofl": "9", "torch": "9"}
    )
    with pytest.raises(ValueError, match=r"version of pyrofl is '9' and was .*, version of torch"):
        load(file, plain(), data(), ABOUT)


@pytest.mark.parametrize("keep", [0, 10, 19, 25, 90, 400, -1])
def test_a_file_that_was_cut_off_is_refused(file, keep):
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"is damaged or cut off|begins with"):
        load(file, plain(), data(), ABOUT)


def test_a_single_bit_is_missed(file):
    content = bytearray(file.read_bytes())
    for at in range(30, len(content), len(content) // 40):
        content[at] ^= 4
        file.write_bytes(bytes(content))
        with pytest.raises(ValueError, match=r"run.ckpt is damaged or cut off: its hash is \w{12}"):
            load(file, plain(), data(), ABOUT)
        content[at] ^= 4
    file.write_bytes(bytes(content))
    assert load(file, plain(), data(), ABOUT).state.number == 2


def test_files_of_others_are_refused(tmp_path):
    path = tmp_path / "run.ckpt"
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load(path, plain(), data())
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        load(tmp_path, plain(), data())
    torch.save({"a": 1}, path)
    with pytest.raises(ValueError, match=r"begins with .*; expected b'pyrofl checkpoint 1'"):
        load(path, plain(), data())
    path.write_bytes(b"pyrofl checkpoint 2\n" + b"0" * 99)
    with pytest.raises(ValueError, match="begins with b'pyrofl checkpoint 2'"):
        load(path, plain(), data())


class Code:
    ran = False

    def __reduce__(self):
        return setattr, (Code, "ran", True)


def test_no_code_in_a_file_is_run(tmp_path, monkeypatch):
    path = tmp_path / "run.ckpt"
    pickle.loads(pickle.dumps(Code()))
    assert Code.ran
    Code.ran = False
    checkpoints.write(path, {}, {"state": Code()})
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoints.read(path, {})
    assert not Code.ran


def test_the_old_file_stays_if_the_new_one_cannot_be_written(file, monkeypatch):
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyrofl.records.os.fsync", full)
    run = load(file, plain(), data(), ABOUT)
    with pytest.raises(OSError, match="No space left"):
        fit(plain(), data(), 4, start=run, after=Keeper(file, 1, about=ABOUT), progress=False)
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == ["run.ckpt"]


def test_checkpoints_are_written_when_asked_and_after_the_last_round(tmp_path):
    path, held = tmp_path / "run.ckpt", []
    keeper = Keeper(path, 2, 5)

    def after(run: Run) -> None:
        keeper(run)
        held.append(keeper.written)

    fit(plain(), data(), 5, after=after, progress=False)
    assert held == [None, 2, 2, 4, 5]
    keeper = Keeper(path)
    fit(plain(), data(), 3, after=keeper, progress=False)
    assert load(path, plain(), data()).state.number == 5
    keeper.rescue()
    assert load(path, plain(), data()).state.number == 3


def test_what_is_kept_does_not_change_afterwards(tmp_path):
    keeper = Keeper(tmp_path / "run.ckpt")
    fit(plain(), data(), 1, after=keeper, progress=False)
    kept = keeper.last
    fit(plain(), data(), 2, start=kept, progress=False)
    assert kept is not None
    assert len(kept.seconds) == len(kept.loss) == 1
    assert kept.state.number == 1


def test_a_scheduled_method_goes_on_at_its_place(tmp_path):
    def at(number: int) -> Method:
        return fedavg.build(toys.net(), epochs=1, decay=True, done=number / 4)

    path = tmp_path / "run.ckpt"
    fit(at, data(), 2, after=Keeper(path, 1), progress=False)
    again = fit(at, data(), 4, start=load(path, at, data()), progress=False)
    toys.assert_same_round(again.state, fit(at, data(), 4, progress=False).state)
