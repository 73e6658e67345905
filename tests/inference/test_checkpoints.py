"""Every method goes on from a file to the last bit; other files are refused in one clear line."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
import test_contract as contract
import torch
import toys
from safetensors import safe_open
from safetensors.torch import save_file

from pyrofl.data import Federation
from pyrofl.data.fingerprint import fingerprint
from pyrofl.files import checkpoint_file as container
from pyrofl.files.run_folder import compared_versions, versions
from pyrofl.inference.definition.description import described
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seeds
from pyrofl.inference.engine.participation import Stragglers, bernoulli
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.checkpoints import Keeper, load, save
from pyrofl.inference.fitted_run.records import RoundRecord
from pyrofl.inference.fitted_run.run import Run
from pyrofl.models import fedavg, guides, pfedvem
from pyrofl.models.priors import student_t
from pyrofl.tensors import client_bytes

OPTIONS = {
    "participation": bernoulli(0.5),
    "stragglers": Stragglers(0.2, 0.4),
    "eval_every": 1,
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
    for name in ("history", "seed", "draws"):
        assert getattr(a, name) == getattr(b, name), name
    for x, y in zip(a.records, b.records, strict=True):
        no_time = {"seconds": 0, "loss": {}, "first_loss": {}}
        assert replace(x, **no_time) == replace(y, **no_time)
        toys.assert_same(x.loss, y.loss)
        toys.assert_same(x.first_loss, y.first_loss)
    assert a.status == b.status


@contract.on_archetypes
def test_every_method_goes_on_to_the_last_bit(name, tmp_path):
    method, path = contract.built(name), tmp_path / "run.ckpt"
    whole = fit(method, data(), 3, seed=4, **OPTIONS)
    fit(method, data(), 1, seed=4, callback=Keeper(path, 1), **OPTIONS)
    for rounds in (2, 3):
        start = load(path, method, data(), seed=4)
        again = fit(
            method, data(), rounds, seed=4, resume_from=start, callback=Keeper(path, 1), **OPTIONS
        )
    assert_same_run(again, whole)
    last = load(path, method, data(), seed=4)
    assert last.history == [row for row in again.history if row["round"] < 3]  # not tested yet
    assert_same_run(fit(method, data(), 3, resume_from=last, **OPTIONS), again)
    toys.assert_same(again.posterior(2), whole.posterior(2))


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "run.ckpt"
    save(fit(plain(), data(), 2, progress=False), path, ABOUT)
    return path


def test_a_checkpoint_holds_every_field(file):
    content = container.read(file, _about(file))
    known = {f.name for f in fields(Run)} - {"method", "data", "state", "seed", "custom_metrics"}
    assert known == {"draws", "ending", "records", "history", "switched"}
    of_rounds = {f.name for f in fields(RoundRecord)} - {"number"}
    assert content["method"] == described(plain())
    assert content["records"].keys() == {"draws", "ending", "metrics", "switched"} | of_rounds
    assert content["state"].keys() >= {
        "number",
        "server",
        "client_states",
        "seen",
        "message",
        "loss",
    }


def _about(file: Path) -> dict[str, object]:
    return container.read_any(file)[0]


def test_it_weighs_little_more_than_the_state(file):
    run = load(file, plain(), data(), ABOUT)
    state = (run.state.server, run.state.client_states, run.state.message)
    rows = sum(len(next(iter(part.values()), [])) * client_bytes(part) for part in state)
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
    for name in ("python", "numpy"):  # a file of one version of Python opens under others
        other = versions() | {name: "0.9"}
        monkeypatch.setattr("pyrofl.files.run_folder.versions", lambda other=other: other)
        assert load(file, plain(), data(), ABOUT).state.number == 2
    for name in ("pyrofl", "torch", "pyro"):
        other = compared_versions() | {f"version of {name}": "0.9"}
        monkeypatch.setattr(
            "pyrofl.inference.fitted_run.saving.compared_versions", lambda other=other: other
        )
        with pytest.raises(ValueError, match=f"now version of {name} is '0.9' and was '[^,]*$"):
            load(file, plain(), data(), ABOUT)


@pytest.mark.parametrize("keep", [0, 10, 19, 25, 90, 400, -1])
def test_a_file_that_was_cut_off_is_refused(file, keep):
    file.write_bytes(file.read_bytes()[:keep])
    told = "is cut off or of another kind; expected" if keep >= 0 else "is damaged: its hash is"
    with pytest.raises(ValueError, match=told):
        load(file, plain(), data(), ABOUT)


def test_a_single_bit_is_missed(file):
    content = bytearray(file.read_bytes())
    at_hash = content.index(container.HASH) + len(container.HASH)
    edges = (at_hash - 1, at_hash, at_hash + 63, at_hash + 64, len(content) - 1)
    for at in (*range(0, len(content), len(content) // 40), *edges):
        content[at] ^= 4
        file.write_bytes(bytes(content))
        told = r"is (damaged: its hash is \w{12}; expected .{12}$|cut off or of another kind)"
        with pytest.raises(ValueError, match=told):
            load(file, plain(), data(), ABOUT)
        content[at] ^= 4
    file.write_bytes(bytes(content))
    assert load(file, plain(), data(), ABOUT).state.number == 2


def test_files_of_others_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "run.ckpt"
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load(path, plain(), data())
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        load(tmp_path, plain(), data())
    for write in (torch.save, save_file):
        write({"a": torch.ones(2)}, path)
        told = "is cut off or of another kind; expected format 5 of pyrofl"
        with pytest.raises(ValueError, match=told):
            load(path, plain(), data())
    monkeypatch.setattr(container, "FORMAT", 4)
    container.write(path, {}, {})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="cannot be read: it has format 4; expected 5"):
        load(path, plain(), data())


class Code:
    ran = False

    def __reduce__(self):
        return setattr, (Code, "ran", True)


def test_no_code_in_a_file_is_run(tmp_path):
    path = tmp_path / "run.ckpt"
    pickle.loads(pickle.dumps(Code()))
    assert Code.ran
    Code.ran = False
    with pytest.raises(TypeError, match="Code is not JSON serializable"):
        container.write(path, {}, {"state": Code()})
    assert not path.exists()
    torch.save({"state": Code()}, path)
    with pytest.raises(ValueError, match="is cut off or of another kind"):
        container.read(path, {})
    assert not Code.ran


def test_rows_are_hashed_once_however_many_checkpoints_there_are(tmp_path, monkeypatch):
    hashed, real = [], container.hashlib.sha256
    monkeypatch.setattr(container.hashlib, "sha256", lambda *new: hashed.append(1) or real(*new))
    federation = toys.blobs((3, 5))
    fit(plain(), federation, 3, callback=Keeper(tmp_path / "a", 1), progress=False)
    assert len(hashed) == 4  # the rows, and three files
    assert fingerprint(toys.blobs((3, 5))) == fingerprint(federation)
    assert len(hashed) == 5


def test_what_was_read_outlives_the_file_and_is_not_the_file(file):
    run = load(file, plain(), data(), ABOUT)
    before, server = file.read_bytes(), run.state.server["w/fc1.weight"].clone()
    run.state.server["w/fc1.weight"].zero_()
    next(iter(run.records[0].loss.values())).zero_()
    assert file.read_bytes() == before
    again = load(file, plain(), data(), ABOUT)
    file.unlink()
    assert torch.equal(again.state.server["w/fc1.weight"], server)


@pytest.mark.parametrize("size", [0, 30, 500, 2000, 2200])
def test_what_goes_wrong_in_a_write_is_not_hidden(tmp_path, size):
    """The system refuses longer files, as it does on a full disk."""
    path, content = tmp_path / "a", {"a": torch.arange(500.0), "b": torch.ones(3)}
    container.write(path, {}, content)
    before = path.read_bytes()
    assert len(before) > 2200
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            container.write(path, {}, content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    container.write(path, {}, {"a": torch.ones(3)})
    before = path.read_bytes()

    def interrupted(tensors, to, metadata):
        Path(to).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(container, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        container.write(path, {}, {"a": torch.zeros(3)})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


def test_content_is_read_as_it_was_written(tmp_path):
    base = torch.randn(4, 3, dtype=torch.float64)
    content = {
        "a": {"b": base, "b/c": base.mT, "@tensor": base[1:3], "@@": base[:, 1]},
        "a/b": base[0],
        "expanded": torch.tensor(2.0).expand(3, 2),
        "complex": torch.randn(3, dtype=torch.complex128).conj(),
        "kinds": [torch.tensor(True), torch.zeros(0, 4), torch.arange(3), torch.randn(2).half()],
        "numbers": (1, 2.5, None, "x", float("inf"), [True, (3,)]),
        "long": list(range(-50, 150)),
        "empty": [{}, [], ()],
    }
    container.write(tmp_path / "a", {"lr": 0.1}, content)
    about, found = container.read_any(tmp_path / "a")
    assert about == {"lr": 0.1}
    assert_equal(found, content)
    assert found["a"]["b/c"].stride() == base.mT.stride()
    with safe_open(tmp_path / "a", "pt") as file:
        assert torch.equal(file.get_tensor("a/b"), base)


def assert_equal(a: object, b: object) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for name in a:
            assert_equal(a[name], b[name])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def test_the_old_file_stays_if_the_new_one_cannot_be_written(file, monkeypatch):
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyrofl.files.run_folder.os.fsync", full)
    run = load(file, plain(), data(), ABOUT)
    with pytest.raises(OSError, match="No space left"):
        fit(
            plain(),
            data(),
            4,
            resume_from=run,
            callback=Keeper(file, 1, about=ABOUT),
            progress=False,
        )
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == ["run.ckpt"]


def test_checkpoints_are_written_when_asked_and_after_the_last_round(tmp_path):
    path, held = tmp_path / "run.ckpt", []
    keeper = Keeper(path, 2, 5)

    def after(run: Run) -> None:
        keeper(run)
        held.append(keeper.written)

    fit(plain(), data(), 5, callback=after, progress=False)
    assert held == [None, 2, 2, 4, 5]
    keeper = Keeper(path)
    fit(plain(), data(), 3, callback=keeper, progress=False)
    assert load(path, plain(), data()).state.number == 5
    keeper.rescue()
    assert load(path, plain(), data()).state.number == 3


class Interrupted(Exception):
    pass


def test_what_stops_a_test_loses_no_round(tmp_path, monkeypatch):
    method, path, real = contract.built("pfedvem"), tmp_path / "run.ckpt", Run.record_scores
    whole = fit(method, data(), 5, **OPTIONS)

    def stop(run: Run) -> object:
        if run.state.number == 4:
            raise Interrupted
        return real(run)

    keeper = Keeper(path)
    monkeypatch.setattr(Run, "record_scores", stop)
    with pytest.raises(Interrupted):
        fit(method, data(), 5, callback=keeper, **OPTIONS)
    monkeypatch.setattr(Run, "record_scores", real)
    keeper.rescue()
    kept = load(path, method, data())
    assert kept.state.number == 4
    assert {row["round"] for row in kept.history} == {1, 2, 3}
    assert_same_run(fit(method, data(), 5, resume_from=kept, **OPTIONS), whole)


def test_a_run_goes_on_with_its_own_seed_and_draws(tmp_path):
    path, settings = tmp_path / "run.ckpt", {"eval_every": 1, "progress": False}
    whole = fit(plain(), data(), 2, seed=Seeds(noise=3), draws=2, **settings)
    fit(plain(), data(), 1, seed=Seeds(noise=3), draws=2, callback=Keeper(path, 1), **settings)
    start = load(path, plain(), data(), seed=Seeds(noise=3))
    assert start.draws == 2
    assert_same_run(fit(plain(), data(), 2, resume_from=start, **settings), whole)
    again = fit(plain(), data(), 2, resume_from=start, seed=Seeds(noise=3), draws=5, **settings)
    assert (again.draws, again.seed) == (5, start.seed)
    with pytest.raises(
        ValueError, match=r"seed is 0, but the resumed run has seed .*noise=3.*; pass"
    ):
        fit(plain(), data(), 2, resume_from=start, seed=0, **settings)


def test_what_is_kept_does_not_change_afterwards(tmp_path):
    keeper = Keeper(tmp_path / "run.ckpt")
    fit(plain(), data(), 1, callback=keeper, progress=False)
    kept = keeper.last
    fit(plain(), data(), 2, resume_from=kept, progress=False)
    assert kept is not None
    assert [record.number for record in kept.records] == [1]
    assert kept.state.number == 1


def test_a_scheduled_method_goes_on_at_its_place(tmp_path):
    def at(number: int) -> Method:
        return fedavg.build(toys.net(), epochs=1, decay=True, elapsed=number / 4)

    path = tmp_path / "run.ckpt"
    fit(at, data(), 2, callback=Keeper(path, 1), progress=False)
    again = fit(at, data(), 4, resume_from=load(path, at, data()), progress=False)
    toys.assert_same_round(again.state, fit(at, data(), 4, progress=False).state)


def pfedvem_with(prior=None, guide=None, **more) -> Method:
    own = {"prior": prior} if prior else {}
    own |= {"guide": guide} if guide else {}
    return pfedvem.build(toys.net(), head_epochs=1, base_epochs=1, **own, **more)


OTHERS = {
    "another prior": (pfedvem_with(student_t(3)), "prior"),
    "another scale of it": (pfedvem_with(student_t(4)), "df"),
    "another guide": (pfedvem_with(guide=guides.delta), "guide"),
    "another step": (pfedvem_with(momentum=0.5), "momentum is '0.5' and was '0.9'"),
    "another setting": (pfedvem_with(confidence="deviation"), "'deviation'\" and was \"'full'"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_method_is_refused_by_what_differs(what, tmp_path):
    path = tmp_path / "run.ckpt"
    had = pfedvem_with(student_t(3)) if "scale" in what else pfedvem_with()
    save(fit(had, data(), 1, progress=False), path)
    assert load(path, had, data()).state.number == 1
    other, told = OTHERS[what]
    with pytest.raises(ValueError, match=r"run\.ckpt is of another run; now ") as caught:
        load(path, other, data())
    assert told in str(caught.value)
    assert str(caught.value).count(" and was ") <= 3


def test_functions_are_told_by_what_they_do_and_hold():
    def prior(scale: float, shift: int):
        def inner(x: float) -> float:
            """Say something."""
            return x * scale + shift

        return inner

    def again(scale: float, shift: int):
        def inner(x: float) -> float:
            """Say something else."""
            return x * scale - shift

        return inner

    def with_model(model: object) -> dict[str, str]:
        return described(replace(plain(), views={"own": model}))

    one = with_model(prior(1.0, 2))
    assert one == with_model(prior(1.0, 2))
    differ = {n for n, v in with_model(prior(1.5, 2)).items() if one[n] != v}
    assert differ == {"views.own.scale"}
    assert with_model(again(1.0, 2)) != one  # - instead of +


@contract.on_archetypes
def test_every_method_is_told_alike_whenever_it_is_built(name):
    method = contract.built(name)
    before = described(method)
    fit(method, data(), 1, progress=False)
    assert described(method) == before
    assert described(contract.make(name)) == before
    assert not [v for v in before.values() if " at 0x" in v]


def incomplete(content: dict) -> dict[str, dict]:
    state, records = content["state"], content["records"]
    less = {n: v for n, v in state.items() if n != "server"}
    return {
        "no state": {"records": records},
        "no records": {"state": state},
        "no server": content | {"state": less},
        "an empty server": content | {"state": state | {"server": {}}},
        "another shape": content
        | {"state": state | {"server": {n: v[..., :1] for n, v in state["server"].items()}}},
        "a number that is a text": content | {"state": state | {"number": "2"}},
        "a number below the records": content | {"state": state | {"number": 1}},
        "seen by fewer": content | {"state": state | {"seen": state["seen"][:1]}},
        "a list as state": content | {"state": [1]},
        "a field more": content | {"state": state | {"more": 1}},
        "records of other lengths": content | {"records": records | {"seconds": [0.1]}},
        "metrics of another kind": content | {"records": records | {"metrics": [{"a": 1}]}},
        "metrics that are none": content | {"records": records | {"metrics": 3}},
    }


@pytest.mark.parametrize("what", incomplete({"state": {"server": {}, "seen": []}, "records": {}}))
def test_a_right_hash_of_something_incomplete_is_refused(what, file):
    about = _about(file)
    content = container.read(file, about)
    container.write(file, about, incomplete(content)[what])
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"run\.ckpt is incomplete") as caught:
        load(file, plain(), data(), ABOUT)
    assert "\n" not in str(caught.value)
    assert file.read_bytes() == before


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to("nothing")
    for name, told in (("pipe", "is a pipe or a device"), ("nowhere", "No such file")):
        with pytest.raises(ValueError, match=told):
            load(tmp_path / name, plain(), data())
    with pytest.raises(ValueError, match="is a pipe or a device"):
        load("/dev/zero", plain(), data())


def test_a_file_without_names_of_clients_is_read(file):
    about = _about(file)
    content = container.read(file, about)
    content["state"].pop("names")
    content["state"].pop("rows")
    container.write(file, about, content)
    start = load(file, plain(), data(), ABOUT)
    assert fit(plain(), data(), 3, resume_from=start, progress=False).state.number == 3
