"""The run directory's checkpoints: atomic, verified, and never fewer than one good one."""

import errno
import json
import os
import random
import re
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from examples.own_task import SpiralData
from tests.conftest import ROOT, WEIGHTED, assert_same_bits, load
from trainer.checkpoint.directory import RunDirectory
from trainer.checkpoint.file import read_checkpoint, size_and_sum, write_checkpoint
from trainer.checkpoint.records import write_json
from trainer.checkpoint.recovery import find_checkpoints
from trainer.checkpoint.weights import load_best_weights
from trainer.cli import main
from trainer.loading.errors import BadInput


@pytest.fixture
def opened(tmp_path):
    """Opens the run directory as a new start does, with what it says as a list; releases it at the end."""
    directories = []

    def open_directory(keep=3):
        said = []
        directory = RunDirectory(tmp_path / "run", keep, said.append)
        directory.acquire()
        directories.append(directory)
        return directory, said

    yield open_directory
    for directory in directories:
        directory.release()


def save(directory, epoch, best_epoch=1):
    """A small checkpoint at the end of an epoch; `best_epoch` is the best one so far."""
    is_best = epoch == best_epoch
    state = {
        "model": {"weight": torch.full((50,), float(epoch))},
        "optimizers": {},
        "totals": {},
        "environment": {},
        "position": {"epoch": epoch, "phase": 0, "samples": 0},
        "step": 10 * epoch,
        "best": {"epoch": best_epoch, "value": 0.5},
        "config": {"--resume-from": None},
    }
    return directory.save(state, 0.5 if is_best else 0.25, is_best)


def names(path, pattern="*.pth"):
    return {file.name for file in path.glob(pattern)}


def checkpoints(path):
    return names(path, "checkpoint_*.pth")


# --- what a checkpoint holds -------------------------------------------------------------------------------------


def test_model_entry_loads_into_the_bare_model(tmp_path, signals_restored):
    """Plain PyTorch, without the trainer, reaches the score that the run reports."""
    task = f"{ROOT}/examples/own_task.py:Spirals"
    argv = ["--task", task, "--epochs", "2", "--num-points", "500", "--hidden-units", "8", "--num-threads", "1"]
    assert main([*argv, "--save-dir", str(tmp_path)], several_devices=False) == 0
    model = nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    model.load_state_dict(torch.load(tmp_path / "best.pth", weights_only=True)["model"])
    test = SpiralData(500, noise=0.1, seed=2)
    accuracy = float((model(torch.from_numpy(test.points)).argmax(1).numpy() == test.arms).mean())
    reported = json.loads((tmp_path / "results.json").read_text())["metrics"]["test/accuracy"]
    assert accuracy == pytest.approx(reported)


def test_weights_that_are_not_finite_are_never_saved(tmp_path, capsys, signals_restored):
    argv = ["--task", WEIGHTED, "--epochs", "3", "--lr", "1e30", "--num-threads", "1", "--save-dir", str(tmp_path)]
    assert main(argv, several_devices=False) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("error: training diverged: ")
    assert "--lr 1e+30" in message
    for name in names(tmp_path):
        assert all(bool(value.isfinite().all()) for value in load(tmp_path / name)["model"].values())
    assert not names(tmp_path, "*.tmp")
    assert not (tmp_path / "results.json").exists()


def test_divergence_names_the_epoch_in_which_it_happened(tmp_path, capsys, signals_restored):
    """101 samples are one step here: step N is epoch N."""
    argv = ["--task", WEIGHTED, "--epochs", "3", "--lr", "1e30", "--num-threads", "1", "--batch-size", "101"]
    assert main([*argv, "--save-dir", str(tmp_path)], several_devices=False) == 2
    message = capsys.readouterr().err
    step = int(message.split("optimizer step ")[1].split()[0])
    assert f"(epoch {step})" in message


# --- which ones are kept, and under which names ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "kept"), [(1, {2, 6}), (2, {2, 5, 6}), (9, {1, 2, 3, 4, 5, 6}), (0, set(range(1, 7)))]
)
def test_best_and_newest_are_kept(keep, kept, opened):
    directory, _ = opened(keep)
    for epoch in range(1, 7):
        save(directory, epoch, best_epoch=min(epoch, 2))
    assert checkpoints(directory.path) == {f"checkpoint_{epoch}.pth" for epoch in kept}
    again, said = opened(keep)
    assert again.load_newest()["step"] == 60
    assert again.load_best()["step"] == 20
    assert said == []


def test_last_best_and_final_are_links(opened):
    directory, _ = opened()
    first, second = save(directory, 1), save(directory, 2)
    directory.mark_final()
    for name, target in {"last": second, "best": first, "final": second}.items():
        assert (directory.path / f"{name}.pth").samefile(target)


def test_links_are_repaired_at_start(opened):
    """One deleted, one pointing to the wrong checkpoint, as after a kill between two operations."""
    directory, _ = opened()
    first, second = save(directory, 1), save(directory, 2)
    (directory.path / "best.pth").unlink()
    (directory.path / "last.pth").unlink()
    os.link(first, directory.path / "last.pth")
    opened()
    assert (directory.path / "best.pth").samefile(first)
    assert (directory.path / "last.pth").samefile(second)


def test_links_are_copies_where_the_file_system_has_none(opened, monkeypatch):
    def refuse(*args):
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    directory, _ = opened()
    path = save(directory, 1)
    for name in ("last", "best"):
        copy = directory.path / f"{name}.pth"
        assert not copy.samefile(path)
        assert copy.read_bytes() == path.read_bytes()


def test_a_name_is_never_overwritten(opened):
    """A run that went back to epoch 1 saves epoch 2 again."""
    directory, _ = opened(keep=0)
    paths = [save(directory, epoch) for epoch in (1, 2)]
    before = [path.read_bytes() for path in paths]
    again = [save(directory, 2), save(directory, 2)]
    assert len({*paths, *again}) == 4
    assert [path.read_bytes() for path in paths] == before


def test_files_honour_the_umask(opened):
    old = os.umask(0o027)
    try:
        directory, _ = opened()
        save(directory, 1)
        write_json(directory.path / "config.json", {})
    finally:
        os.umask(old)
    for path in directory.path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o640, path


# --- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"null", b'{"checkpoints": [1]}', b"\xff\xfe\x00"])
def test_manifest_lost_or_damaged_is_rebuilt_from_the_files(content, opened):
    directory, _ = opened(keep=2)
    for epoch in (1, 2, 3):
        save(directory, epoch)
    manifest = directory.path / "manifest.json"
    manifest.unlink()
    if content is not None:
        manifest.write_bytes(content)
    again, said = opened(keep=2)
    assert any("rebuilt from 3 checkpoint files" in line for line in said)
    assert (again.path / "best.pth").samefile(again.path / "checkpoint_1.pth")
    save(again, 4)
    assert checkpoints(again.path) == {"checkpoint_1.pth", "checkpoint_3.pth", "checkpoint_4.pth"}
    assert again.load_newest()["step"] == 40


def test_rebuilding_leaves_out_a_damaged_file(opened):
    directory, _ = opened()
    save(directory, 1)
    newest = save(directory, 2)
    (directory.path / "manifest.json").unlink()
    newest.write_bytes(newest.read_bytes()[:-100])
    again, said = opened()
    assert any(str(newest) in line for line in said)
    assert again.load_newest()["step"] == 10


def test_manifest_entry_without_a_file_is_ignored(opened):
    directory, _ = opened()
    save(directory, 1)
    save(directory, 2).unlink()
    (directory.path / "last.pth").unlink()
    again, _ = opened()
    assert again.load_newest()["step"] == 10
    assert (again.path / "last.pth").samefile(again.path / "checkpoint_1.pth")


def test_leftover_temporary_files_are_removed(opened):
    directory, _ = opened()
    save(directory, 1)
    for name in ("checkpoint_2.tmp", "manifest.tmp", "last.tmp"):
        (directory.path / name).write_text("half")
    opened()
    assert not names(directory.path, "*.tmp")


def damages(size):
    """Ways to spoil a file of so many bytes, by name."""
    draw = random.Random(0)
    found = {"first bit": 0, "last bit": 8 * size - 1}
    flips = found | {f"bit {i}": i for i in (draw.randrange(8 * size) for _ in range(20))}
    lengths = [0, 1, size // 2, size - 1, *(draw.randrange(size) for _ in range(10))]

    def flip(data, bit):
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        return bytes(spoiled)

    return [(name, lambda data, bit=bit: flip(data, bit)) for name, bit in flips.items()] + [
        (f"cut at {length}", lambda data, length=length: data[:length]) for length in lengths
    ]


def test_any_damage_is_found_and_the_older_checkpoint_taken(opened):
    directory, _ = opened()
    save(directory, 1)
    newest = save(directory, 2)
    good = newest.read_bytes()
    for name, damage in damages(len(good)):
        newest.write_bytes(damage(good))
        again, said = opened()
        assert again.load_newest()["step"] == 10, name
        assert any(str(newest) in line and "damaged" in line for line in said), name
        assert not newest.exists()
        newest.with_suffix(".damaged").rename(newest)


def test_damaged_best_is_not_used(opened):
    directory, _ = opened()
    best = save(directory, 1)
    save(directory, 2)
    best.write_bytes(best.read_bytes()[:-1])
    again, said = opened()
    assert again.load_best() is None
    assert any(str(best) in line for line in said)


def test_no_intact_checkpoint_left_is_said_each_time(opened):
    """Asking twice must not turn a damaged run into a fresh one."""
    directory, _ = opened()
    for epoch in (1, 2):
        path = save(directory, epoch)
        path.write_bytes(b"")
    for _ in range(2):
        again, _ = opened()
        assert again.has_checkpoint
        with pytest.raises(BadInput, match="no checkpoint in it is intact"):
            again.load_newest()


@pytest.mark.parametrize("names_gone", [["checkpoint_2.pth"], ["checkpoint_2.pth", "manifest.json"]])
def test_a_checkpoint_that_is_gone_is_restored_from_its_link(names_gone, opened):
    directory, _ = opened()
    save(directory, 1)
    content = save(directory, 2).read_bytes()
    for name in names_gone:
        (directory.path / name).unlink()
    before = {path.name for path in directory.path.iterdir()}
    assert load_best_weights(directory.path, lambda line: None)["step"] == 10
    assert find_checkpoints(directory.path, lambda line: None)[0][-1].step == 20
    assert {path.name for path in directory.path.iterdir()} == before
    again, said = opened()
    assert any("restored from last.pth" in line for line in said)
    assert again.load_newest()["step"] == 20
    assert (again.path / "checkpoint_2.pth").read_bytes() == content


@pytest.mark.parametrize("left", [{"manifest.json"}, {"results.json"}, {"checkpoint_1.pth"}])
def test_the_traces_of_lost_checkpoints_are_no_fresh_start(left, opened):
    directory, _ = opened()
    save(directory, 1).write_bytes(b"damaged")
    write_json(directory.path / "results.json", {"step": 10})
    for path in directory.path.iterdir():
        if path.name not in left:
            path.unlink()
    again, _ = opened()
    assert again.has_checkpoint
    with pytest.raises(BadInput, match=r"no checkpoint in it is intact \(.*(missing|had some|damaged)\); start over"):
        again.load_newest()
    again.start_over()
    assert not again.has_checkpoint


def test_a_kill_before_the_first_checkpoint_is_a_fresh_start(opened):
    directory, _ = opened()
    (directory.path / "checkpoint_1.tmp").write_bytes(b"half")
    write_json(directory.path / "config.json", {})
    assert not opened()[0].has_checkpoint


@pytest.mark.parametrize("manifest", ["its own", "none"])
def test_changed_bits_do_not_become_weights(manifest, opened):
    """In the middle of the tensor, where torch.load sees nothing wrong."""
    directory, _ = opened()
    save(directory, 1)
    path = save(directory, 2)
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((50,), 2.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    assert load(path)["model"]["weight"][0] != 2
    if manifest == "none":
        (directory.path / "manifest.json").unlink()
    again, said = opened()
    assert again.load_newest()["step"] == 10
    assert any(f"{path}" in line and "damaged" in line for line in said)
    with pytest.raises(BadInput, match="is damaged: the checksum of its part"):
        read_checkpoint(path.with_suffix(".damaged") if manifest == "its own" else path, "x.pth")


def test_without_a_manifest_any_changed_bit_is_found_or_changes_nothing(opened):
    """Some bits of an archive say nothing, such as its padding."""
    directory, _ = opened()
    path = save(directory, 1)
    intact, data = load(path), path.read_bytes()
    draw = random.Random(0)
    attributes = [match.start() + 38 for match in re.finditer(b"PK\x01\x02", data)]
    bits = [8 * byte + 4 for byte in attributes] + [draw.randrange(8 * len(data)) for _ in range(500)]
    num_found = 0
    for bit in bits:
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoiled)
        try:
            assert_same_bits(intact, read_checkpoint(path, "x.pth"))
        except BadInput as error:
            assert "damaged" in str(error), bit
            num_found += 1
    assert num_found > len(bits) / 2


def test_a_file_without_checksums_is_read(tmp_path):
    """torch can be told to leave them out."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"model": {"weight": torch.full((50,), 2.0)}}, tmp_path / "x.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_checkpoint(tmp_path / "x.pth", "x.pth", only_weights=True)["model"]["weight"].sum() == 100


def test_a_tensor_that_looks_like_the_end_of_an_archive_is_none(tmp_path):
    looks = torch.frombuffer(bytearray(b"PK\x05\x06" + bytes(18)), dtype=torch.uint8)
    state = {"model": {"weight": looks}, **{name: {} for name in ("optimizers", "position", "step", "best", "totals")},
             "config": {}, "environment": {}}  # fmt: skip
    assert write_checkpoint(state, tmp_path / "x.pth") == size_and_sum(tmp_path / "x.pth")
    assert torch.equal(read_checkpoint(tmp_path / "x.pth", "x.pth")["model"]["weight"], looks)


@pytest.mark.parametrize("file", ["../outside.pth", "/etc/hostname", "config.json", "checkpoint_1.pth/x", 3])
def test_a_manifest_names_checkpoints_of_its_directory_only(file, opened):
    directory, _ = opened()
    path = save(directory, 1)
    outside = directory.path.parent / "outside.pth"
    outside.write_bytes(b"precious")
    manifest = json.loads((directory.path / "manifest.json").read_text())
    manifest["checkpoints"].append({**manifest["checkpoints"][0], "file": file, "step": 99})
    (directory.path / "manifest.json").write_text(json.dumps(manifest))
    again, said = opened()
    assert any("manifest.json is damaged" in line for line in said)
    assert again.load_newest()["step"] == 10
    assert outside.read_bytes() == b"precious"
    assert path.exists()


def test_retention_counts_intact_checkpoints_only(opened):
    """Damaged behind the run's back, while it goes on."""
    directory, _ = opened(keep=2)
    for epoch in (1, 2, 3):
        save(directory, epoch, best_epoch=1)
    (directory.path / "checkpoint_3.pth").write_bytes(b"damaged")
    save(directory, 4)
    assert checkpoints(directory.path) == {f"checkpoint_{epoch}.pth" for epoch in (1, 2, 3, 4)}
    save(directory, 5)
    assert checkpoints(directory.path) == {f"checkpoint_{epoch}.pth" for epoch in (1, 4, 5)}


def test_retention_keeps_the_last_best_one_that_is_intact(opened):
    """Beyond the newest two: 2 was the best when it was damaged, 1 the best before it."""
    directory, _ = opened(keep=2)
    save(directory, 1, best_epoch=1)
    save(directory, 2, best_epoch=2).write_bytes(b"damaged")
    for epoch in (3, 4, 5):
        save(directory, epoch, best_epoch=2)
    assert checkpoints(directory.path) == {f"checkpoint_{epoch}.pth" for epoch in (1, 2, 4, 5)}


def test_for_use_the_next_best_intact_one_is_taken(opened):
    directory, _ = opened()
    for epoch in (1, 2, 3):
        save(directory, epoch, best_epoch=min(epoch, 2))
    (directory.path / "checkpoint_2.pth").write_bytes(b"damaged")
    assert load_best_weights(directory.path, lambda line: None)["step"] == 10


def test_code_in_a_checkpoint_is_refused(tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "created"),)

    torch.save({"model": Malicious()}, tmp_path / "x.pth")
    with pytest.raises(BadInput, match=r"--init-from x.pth: refused"):
        read_checkpoint(tmp_path / "x.pth", "--init-from x.pth")
    assert not (tmp_path / "created").exists()


@pytest.mark.parametrize("content", [{"position": {}}, [1, 2], {"model": 1}, {"model": {"weight": 1}}])
def test_other_content_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(BadInput, match=r"x.pth: is no checkpoint"):
        read_checkpoint(tmp_path / "x.pth", "x.pth")


def test_bare_weights_are_enough_to_start_with_but_not_to_go_on_from(tmp_path):
    torch.save({"model": {"weight": torch.zeros(3)}}, tmp_path / "x.pth")
    assert read_checkpoint(tmp_path / "x.pth", "x.pth", only_weights=True)["model"]["weight"].shape == (3,)
    with pytest.raises(BadInput, match=r"holds weights, but not the .* use --init-from"):
        read_checkpoint(tmp_path / "x.pth", "x.pth")


def test_arrays_of_numpy_are_refused_without_a_traceback(tmp_path):
    torch.save({"model": {"weight": np.zeros(3)}, "position": {}}, tmp_path / "x.pth")
    with pytest.raises(BadInput, match="refused"):
        read_checkpoint(tmp_path / "x.pth", "x.pth")


# --- order of writing --------------------------------------------------------------------------------------------


class Crash(BaseException):
    """What a kill looks like to the code: no `except OSError` sees it."""


@pytest.fixture
def disk_operations(monkeypatch):
    """Records the real os.fsync and os.rename; `failures[n]` is raised before the n-th.

    ("fsync", file name, its size) or ("rename", old name, new name).
    """
    operations = []
    failures = {}

    def wrap(name, describe):
        real = getattr(os, name)

        def call(*args, **kwargs):
            if len(operations) in failures:
                raise failures[len(operations)]
            operations.append(describe(*args))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    wrap("fsync", lambda fd: ("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), os.fstat(fd).st_size))
    wrap("rename", lambda source, target: ("rename", os.path.basename(source), os.path.basename(target)))
    return operations, failures


def test_a_checkpoint_is_on_disk_before_its_name(opened, disk_operations):
    directory, _ = opened()
    operations, _ = disk_operations
    path = save(directory, 1)
    size = path.stat().st_size
    order = [(kind, *rest) if kind == "rename" or rest[0] != "run" else (kind, "run") for kind, *rest in operations]
    assert order[0] == ("fsync", "checkpoint_1.tmp", size)
    assert order[1][:2] == ("fsync", "manifest.tmp")
    assert order[2:6] == [
        ("rename", "manifest.tmp", "manifest.json"),
        ("fsync", "run"),
        ("rename", "checkpoint_1.tmp", "checkpoint_1.pth"),
        ("fsync", "run"),
    ]
    assert order[6:] == [("rename", "last.link.tmp", "last.pth"), ("rename", "best.link.tmp", "best.pth")]


def test_killed_between_any_two_operations_the_old_or_the_new_state_is_there(tmp_path, opened, disk_operations):
    directory, _ = opened(keep=1)
    operations, failures = disk_operations
    save(directory, 1)
    directory.release()
    shutil.copytree(directory.path, tmp_path / "before")
    operations.clear()
    save(directory, 2, best_epoch=2)
    num_operations = len(operations)
    assert num_operations == 8
    for n in range(num_operations):
        shutil.rmtree(directory.path)
        shutil.copytree(tmp_path / "before", directory.path)
        broken, _ = opened(keep=1)
        operations.clear()
        failures[n] = Crash()
        with pytest.raises(Crash):
            save(broken, 2, best_epoch=2)
        failures.clear()
        again, said = opened(keep=1)
        assert said == [], n
        step = again.load_newest()["step"]
        assert step == (10 if n < 3 else 20), n  # the third puts the new file's checksum into the manifest
        assert again.load_best()["step"] == step
        assert not names(again.path, "*.tmp")
        assert load(again.path / "last.pth")["step"] == step
        save(again, 3, best_epoch=3)
        assert again.load_newest()["step"] == 30


def test_a_disk_that_refuses_leaves_what_was_there(opened, disk_operations):
    """At every operation before the new file has its name."""
    directory, _ = opened(keep=1)
    operations, failures = disk_operations
    save(directory, 1)
    good = (directory.path / "checkpoint_1.pth").read_bytes()
    for n in range(5):
        operations.clear()
        failures[n] = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with pytest.raises(BadInput, match=r"--save-dir .* No space left on device: .* earlier checkpoints are intact"):
            save(directory, 2, best_epoch=2)
        failures.clear()
        assert not names(directory.path, "*.tmp"), n
        assert (directory.path / "checkpoint_1.pth").read_bytes() == good
        again, said = opened(keep=1)
        assert said == []
        assert again.load_newest()["step"] == 10
    save(directory, 2, best_epoch=2)
    assert directory.load_newest()["step"] == 20
