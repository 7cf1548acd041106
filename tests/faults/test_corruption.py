"""Hundreds of damaged run directories: each goes on from a good checkpoint, or stops with one message.

Never a traceback, never weights other than those saved for that position, never fresh ones without a word.
"""

import json
import os
import random
import shutil

import pytest

from tests.conftest import WEIGHTED, assert_same_bits, cut_back, load
from tests.faults.damage import spoil
from tests.faults.lives import FIRST_SEED
from trainer.cli import main

EPOCHS, STEPS_PER_EPOCH = 3, 2
NUM_STEPS = EPOCHS * STEPS_PER_EPOCH
ARGV = [
    "--task", WEIGHTED, "--num-train", "24", "--num-val", "4", "--num-test", "2", "--width", "4", "--batch-size", "12",
    "--num-threads", "1", "--keep-checkpoints", "0", "--save-every-steps", "1", "--log-interval", "1", "--lr", "0.01",
    "--device", "cpu", "--epochs", str(EPOCHS), "--ema-decay", "0.9",
]  # fmt: skip


@pytest.fixture
def run_in(capsys, monkeypatch, tmp_path, signals_restored):
    """Runs the command line in a directory: (status, output, forwards of training)."""
    monkeypatch.setenv("LOCKSTEP_RECORD", str(tmp_path))
    record = tmp_path / f"{os.getpid()}.jsonl"

    def run(directory):
        record.unlink(missing_ok=True)
        capsys.readouterr()
        status = main([*ARGV, "--save-dir", str(directory)], several_devices=False)
        # The first one does not count.
        forwards = len(record.read_text().splitlines()[1:]) if record.exists() else 0
        return status, capsys.readouterr(), forwards

    return run


@pytest.fixture
def originals(run_in, tmp_path):
    """A finished run, and what it had left behind if killed before its last step."""
    finished, killed = tmp_path / "finished", tmp_path / "killed"
    status, _, forwards = run_in(finished)
    assert (status, forwards) == (0, NUM_STEPS)
    entries = json.loads((finished / "manifest.json").read_text())["checkpoints"][:-2]  # both of the last step
    cut_back(finished, entries, killed)
    for name in ("config.json", "train.log", "val.log"):
        shutil.copy(finished / name, killed)
    os.link(killed / entries[-1]["file"], killed / "last.pth")
    os.link(killed / next(entry["file"] for entry in reversed(entries) if entry["best"]), killed / "best.pth")
    (killed / "lock").write_text("process 1 on " + os.uname().nodename)
    return finished, killed


def copy_run(directory, copy):
    """With its hard links, which shutil.copytree would make into files of their own."""
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
    """Damages a copy and starts it: the number of steps that were trained again, or None if it was refused."""
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
        assert forwards < NUM_STEPS, f"{what}: began anew in silence"
        # Wrong weights, moments or averages at the start would be seen at the end.
        assert_same_bits(load(originals[0] / "final.pth"), load(broken / "final.pth"))
    shutil.rmtree(broken)
    return forwards if status == 0 else None


def test_undamaged_directories_go_on_from_the_newest(originals, run_in):
    """What the others rely on."""
    finished, killed = originals
    assert run_in(finished)[::2] == (0, 0)
    status, output, forwards = run_in(killed)
    assert (status, forwards) == (0, 1)
    assert "is damaged" not in output.out
    assert_same_bits(load(finished / "final.pth"), load(killed / "final.pth"))


def test_25_damaged_directories(originals, run_in, tmp_path):
    for seed in range(FIRST_SEED, FIRST_SEED + 25):
        outcome_of(seed, originals, run_in, tmp_path)


@pytest.mark.slow
def test_500_damaged_directories(originals, run_in, tmp_path, capsys):
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
def test_a_disk_that_does_not_give_a_file_back(name, originals, run_in):
    """EIO, for which the memory of this process stands, whose first page nobody may read."""
    finished, killed = originals
    entries = json.loads((killed / "manifest.json").read_text())["checkpoints"]
    path = killed / (entries[-1]["file"] if name == "the newest checkpoint" else name)
    for link in [other for other in killed.iterdir() if path.exists() and other.samefile(path)]:
        link.unlink()
    path.symlink_to("/proc/self/mem")
    status, output, forwards = run_in(killed)
    if status == 2:
        (error,) = output.err.splitlines()
        assert str(path) in error and "Input/output error" in error and forwards == 0
    else:
        assert (status, output.err) == (0, "") and forwards <= 2
        assert (f"{path} is damaged: Input/output error." in output.out) == (path.suffix == ".pth")
        assert_same_bits(load(finished / "final.pth"), load(killed / "final.pth"))
