"""A damaged run resumes from its newest intact checkpoint, and does not start over if there is none."""

import errno
import random
from pathlib import Path

import pytest

from tests.checkpoint.conftest import Crash, names, save
from tests.conftest import STEPS_PER_EPOCH, TINY, assert_same_bits, contents, load, read_metrics
from trainer.checkpoint.directory import find_checkpoints
from trainer.checkpoint.weights import load_best_weights
from trainer.common.errors import UserError

# --- damaged files -----------------------------------------------------------------------------------------------


def damages(size):
    """Returns ways to damage a file of a number of bytes, by name."""
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


def test_damage_is_detected_and_the_older_checkpoint_used(opened):
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


def test_a_damaged_best_checkpoint_is_not_used(opened):
    directory, _ = opened()
    best = save(directory, 1)
    save(directory, 2)
    best.write_bytes(best.read_bytes()[:-1])
    again, said = opened()
    assert again.load_best() is None
    assert any(str(best) in line for line in said)


def test_the_next_best_intact_checkpoint_is_used(opened):
    directory, _ = opened()
    for epoch in (1, 2, 3):
        save(directory, epoch, best_epoch=min(epoch, 2))
    (directory.path / "checkpoint_2.pth").write_bytes(b"damaged")
    assert load_best_weights(directory.path, lambda line: None)["step"] == 10


# --- lost files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names_gone", [["checkpoint_2.pth"], ["checkpoint_2.pth", "manifest.json"]])
def test_a_missing_checkpoint_is_restored_from_its_link(names_gone, opened):
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


def test_leftover_temporary_files_are_removed(opened):
    directory, _ = opened()
    save(directory, 1)
    for name in ("checkpoint_2.tmp", "manifest.tmp", "last.tmp"):
        (directory.path / name).write_text("half")
    opened()
    assert not names(directory.path, "*.tmp")


def test_after_a_kill_before_the_first_checkpoint_the_run_starts_over(opened):
    directory, _ = opened()
    (directory.path / "checkpoint_1.tmp").write_bytes(b"half")
    directory.write_json("config.json", {})
    assert not opened()[0].has_checkpoint


# --- no intact checkpoint ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [{"manifest.json"}, {"results.json"}, {"checkpoint_1.pth"}])
def test_traces_of_lost_checkpoints_prevent_a_fresh_start(left, opened):
    directory, _ = opened()
    save(directory, 1).write_bytes(b"damaged")
    directory.write_json("results.json", {"step": 10})
    for path in directory.path.iterdir():
        if path.name not in left:
            path.unlink()
    again, _ = opened()
    assert again.has_checkpoint
    with pytest.raises(
        UserError, match=r"contains no intact checkpoint \(.*(missing|had checkpoints|damaged)\); start over"
    ):
        again.load_newest()
    again.start_over()
    assert not again.has_checkpoint


@pytest.mark.parametrize("failure", [Crash(), PermissionError(errno.EACCES, "Permission denied")])
def test_a_run_that_is_only_partly_moved_aside_is_moved_back(failure, opened, monkeypatch):
    directory, _ = opened()
    save(directory, 1)
    before, rename, countdown = contents(directory.path), Path.rename, iter(())

    def fails_once(path, target):
        if next(countdown, 1) == 0:
            raise failure
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails_once)
    for number in range(len(before)):
        countdown = iter(range(number, -1, -1))
        with pytest.raises((Crash, UserError), match=r"^$|: cannot move \S+: Permission denied; choose another folder"):
            directory.start_over()
        directory, said = opened() if isinstance(failure, Crash) else (directory, [])
        assert contents(directory.path) == before and directory.load_newest()["step"] == 10 and said == []
    directory.start_over()
    assert contents(directory.path / "previous-1") == before


# --- the command line --------------------------------------------------------------------------------------------


def newest_checkpoint(directory):
    return max(directory.glob("checkpoint_*.pth"), key=lambda path: load(path)["step"])


def test_a_truncated_checkpoint_is_set_aside_and_the_run_ends_equally(train, tmp_path):
    """A run is killed after epoch 3 of 4, and its newest checkpoint is then truncated."""
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    for directory in (broken, unbroken):
        train(directory, "--epochs", 4)
    for name in ("checkpoint_4.pth", "best.pth", "last.pth", "final.pth", "results.json"):
        (broken / name).unlink()
    newest = newest_checkpoint(broken)
    newest.write_bytes(newest.read_bytes()[:-1000])
    out = train(broken, "--epochs", 4)
    assert f"{newest} is damaged" in out
    assert newest.with_suffix(".damaged").exists()
    assert f"Resuming after optimizer step {2 * STEPS_PER_EPOCH}" in out
    for name in ("final.pth", "best.pth"):
        assert_same_bits(load(broken / name), load(unbroken / name))
    assert read_metrics(broken, "epoch") == read_metrics(unbroken, "epoch")


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(train, refused, tmp_path):
    """The second try must not start over silently either."""
    train(tmp_path, "--epochs", 2)
    for path in tmp_path.glob("checkpoint_*.pth"):
        path.write_bytes(path.read_bytes()[:-100])
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    for _ in range(2):
        refused([f"--save-dir {tmp_path}: contains no intact checkpoint"], *TINY, "--epochs", 2, "--save-dir", tmp_path)
        assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
    train(tmp_path, "--epochs", 2, "--fresh")
