"""Damaged run directories resume from an intact checkpoint, or are refused with one message.

They never cause a traceback, resume with wrong weights, or start over without a message.
"""

import errno
import json
import os
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import WEIGHTED, assert_same_bits, cut_back, load, results_of
from tests.faults.damage import spoil
from tests.faults.lives import FIRST_SEED
from trainer.cli import main
from trainer.common import files

EPOCHS, STEPS_PER_EPOCH = 3, 2
NUM_STEPS = EPOCHS * STEPS_PER_EPOCH
ARGV = [
    "--task", WEIGHTED, "--num-train", "24", "--num-val", "4", "--num-test", "2", "--width", "4", "--batch-size", "12",
    "--num-threads", "1", "--keep-checkpoints", "0", "--save-every-steps", "1", "--log-interval", "1", "--lr", "0.01",
    "--device", "cpu", "--epochs", str(EPOCHS), "--ema-decay", "0.9",
]  # fmt: skip


@pytest.fixture
def run_in(capsys, monkeypatch, tmp_path, signals_restored):
    """Returns a function that runs the command in a directory: (status, output, number of training forward passes)."""
    monkeypatch.setenv("LOCKSTEP_RECORD", str(tmp_path))
    record = tmp_path / f"{os.getpid()}.jsonl"

    def run(directory):
        record.unlink(missing_ok=True)
        capsys.readouterr()
        status = main([*ARGV, "--save-dir", str(directory)], several_devices=False)
        # The first forward pass is on a placeholder batch.
        forwards = len(record.read_text().splitlines()[1:]) if record.exists() else 0
        return status, capsys.readouterr(), forwards

    return run


@pytest.fixture
def originals(run_in, tmp_path):
    """Returns the directory of a finished run, and a copy as if it was killed before its last step."""
    finished, killed = tmp_path / "finished", tmp_path / "killed"
    status, _, forwards = run_in(finished)
    assert (status, forwards) == (0, NUM_STEPS)
    entries = json.loads((finished / "manifest.json").read_text())["checkpoints"][:-2]  # the last step has two
    cut_back(finished, entries, killed)
    for name in ("config.json", "train.log", "val.log"):
        shutil.copy(finished / name, killed)
    os.link(killed / entries[-1]["file"], killed / "last.pth")
    os.link(killed / next(entry["file"] for entry in reversed(entries) if entry["best"]), killed / "best.pth")
    (killed / "lock").write_text("process 1 on " + os.uname().nodename)
    return finished, killed


def copy_run(directory, copy):
    """Copies a run with its hard links, which shutil.copytree would turn into separate files."""
    copy.mkdir()
    names = {}
    for path in sorted(directory.iterdir()):
        inode = path.stat().st_ino
        if path.is_dir():
            shutil.copytree(path, copy / path.name)
        elif inode in names:
            os.link(copy / names[inode], copy / path.name)
        else:
            shutil.copy(path, copy)
            names[inode] = path.name


def outcome_of(seed, originals, run_in, folder):
    """Damages a copy and starts it; returns the number of trained steps, or None if the run was refused."""
    draw = random.Random(seed)
    broken = folder / f"seed{seed}"
    copy_run(draw.choice(originals), broken)
    what = f"seed {seed}: {spoil(draw, broken)}"
    try:
        status, output, forwards = run_in(broken)
    except Exception as error:
        raise AssertionError(what) from error
    errors = output.err.splitlines()
    if status == 2:
        assert len(errors) == 1, (what, errors)
        assert errors[0].startswith(f"error: --save-dir {broken}"), (what, errors)
        assert forwards == 0, what
    else:
        assert (status, errors) == (0, []), what
        assert forwards < NUM_STEPS, f"{what}: started over without a message"
        # Wrong weights, moments or averages at the start would change the final state.
        assert_same_bits(load(originals[0] / "final.pth"), load(broken / "final.pth"))
    shutil.rmtree(broken)
    return forwards if status == 0 else None


def test_undamaged_directories_resume_from_the_newest_checkpoint(originals, run_in):
    finished, killed = originals
    assert run_in(finished)[::2] == (0, 0)
    status, output, forwards = run_in(killed)
    assert (status, forwards) == (0, 1)
    assert "is damaged" not in output.out
    assert_same_bits(load(finished / "final.pth"), load(killed / "final.pth"))


def test_25_damaged_directories_resume_or_are_refused(originals, run_in, tmp_path):
    for seed in range(FIRST_SEED, FIRST_SEED + 25):
        outcome_of(seed, originals, run_in, tmp_path)


@pytest.mark.slow
def test_500_damaged_directories_resume_or_are_refused(originals, run_in, tmp_path, capsys):
    seeds = range(FIRST_SEED, FIRST_SEED + 500)
    outcomes = [outcome_of(seed, originals, run_in, tmp_path) for seed in seeds]
    goes_on = [forwards for forwards in outcomes if forwards is not None]
    with capsys.disabled():
        print(
            f"\nseeds {seeds[0]} to {seeds[-1]}: {sum(forwards < 2 for forwards in goes_on)} went on from the newest "
            f"checkpoint, {sum(forwards >= 2 for forwards in goes_on)} from an older one, {outcomes.count(None)} "
            "stopped with one message"
        )
    assert 0 < outcomes.count(None) < len(seeds) / 2


@pytest.mark.parametrize("name", ["the newest checkpoint", "manifest.json", "state.json", "config.json", "memory.json"])
def test_a_file_that_cannot_be_read_is_not_taken_for_damaged(name, originals, run_in, monkeypatch, tmp_path):
    """A link to /proc/self/mem stands for the file, because reading its first page fails with EIO."""
    monkeypatch.setattr("trainer.common.files.READ_AGAIN_AFTER_S", (0, 0))
    finished, killed = originals
    newest = next(path for path in killed.glob("checkpoint_*") if path.samefile(killed / "last.pth"))
    path = newest if name == "the newest checkpoint" else killed / name
    names = [other for other in killed.iterdir() if path.exists() and other.samefile(path)]
    for link in names:
        link.rename(tmp_path / link.name)
    path.symlink_to("/proc/self/mem")
    status, output, forwards = run_in(killed)
    if name == "state.json":  # nothing depends on it
        assert (status, output.err, forwards) == (0, "", 1)
    else:
        (error,) = output.err.splitlines()
        assert f"--save-dir {killed}: cannot read {path.name}: Input/output error; " in error
        assert (status, forwards) == (2, 0)
        path.unlink()
        for link in names:
            (tmp_path / link.name).rename(link)
        status, output, forwards = run_in(killed)
        assert (status, forwards) == (0, 1), output
        assert "is damaged" not in output.out
    assert_same_bits(load(finished / "final.pth"), load(killed / "final.pth"))


@pytest.fixture
def failing_reads(monkeypatch):
    """Returns an object whose attributes make the next `left` reads of the file `path` fail with EIO."""
    control = SimpleNamespace(left=0, path=None)
    really = files._NotedFile._noting

    def read(file, *arguments):
        def fails(*arguments):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        is_meant = control.left > 0 and Path(file.name).samefile(control.path)
        control.left -= is_meant
        return really(file, fails, *arguments[1:]) if is_meant else really(file, *arguments)

    monkeypatch.setattr(files._NotedFile, "_noting", read)
    monkeypatch.setattr(files, "READ_AGAIN_AFTER_S", (0, 0))
    return control


@pytest.mark.parametrize(("num_failures", "status"), [(1, 0), (1000, 2)])
def test_no_other_weights_are_scored_if_the_best_are_unreadable(num_failures, status, originals, run_in, failing_reads):
    """A failed read is repeated. If all reads fail, the run is refused; a later start scores the best weights."""
    finished, killed = originals
    (killed / "last.pth").unlink()  # may be a hard link to the best checkpoint
    failing_reads.path, failing_reads.left = killed / "best.pth", num_failures
    found, output, _ = run_in(killed)
    assert found == status and failing_reads.left in (0, *range(900, 1000))
    if status == 2:
        assert re.fullmatch(f"error: .*{killed}.*: Input/output error.*\n", output.err)
        assert not (killed / "results.json").exists()
        failing_reads.left = 0
        assert run_in(killed)[0] == 0
    for name in ("metrics", "weights", "best"):
        assert results_of(killed)[name] == results_of(finished)[name]


def test_results_say_if_other_weights_than_the_best_were_scored(originals, run_in, monkeypatch):
    """Repeating the command scores the best weights once their file is intact again."""
    finished, _ = originals
    before = results_of(finished)
    entries = json.loads((finished / "manifest.json").read_text())["checkpoints"]
    best = next(entry for entry in reversed(entries) if entry["best"])
    assert before["weights"] == {"epoch": best["epoch"], "step": best["step"], "is_best": True}
    path = finished / best["file"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    (finished / "results.json").unlink()
    assert "is damaged" in run_in(finished)[1].out
    assert results_of(finished)["weights"] == {"epoch": EPOCHS, "step": NUM_STEPS, "is_best": False}
    assert "This run is finished" in run_in(finished)[1].out
    path.write_bytes(whole)
    assert run_in(finished)[::2] == (0, 0)
    assert {**results_of(finished), "train_seconds": 0} == {**before, "train_seconds": 0}
