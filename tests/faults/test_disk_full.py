"""Training continues while the disk is full; the run fails only if it cannot save its last checkpoint."""

import json
import resource
import subprocess
import sys

import pytest

from tests.conftest import ROOT, WEIGHTED, assert_same_bits, launcher, load, read_metrics
from trainer.cli import main

ARGV = [
    "--task", WEIGHTED, "--num-train", "24", "--num-val", "4", "--num-test", "2", "--batch-size", "12", "--lr", "0.01",
    "--num-threads", "1", "--device", "cpu", "--save-every-steps", "1", "--epochs", "3", "--dropout", "0.1",
]  # fmt: skip
LIMIT_BYTES = 200_000
# The task lifts its limit on file sizes when an epoch begins, as if somebody freed disk space.
FREED_AFTER = """
import resource, sys
from tests.helpers.weighted_task import *

class Freed(Weighted):
    def on_epoch_start(self, objective, epoch, progress):
        if epoch == {epoch}:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


@pytest.fixture
def limited(environment):
    """Returns a function that runs a command with a limit on file sizes, above the logs and below a checkpoint."""

    def run(*args, world_size=1):
        return subprocess.run(
            [sys.executable, *launcher(world_size), *ARGV, *map(str, args)],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.RLIM_INFINITY)),
        )

    return run


WIDE = ["--width", 4000]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_last_save_must_succeed_and_the_others_need_not(world_size, limited, tmp_path):
    done = limited(*WIDE, "--save-dir", tmp_path, world_size=world_size)
    assert done.returncode == 2, done.stdout + done.stderr
    (message,) = done.stderr.splitlines()
    assert message.startswith(f"error: --save-dir {tmp_path}: cannot write checkpoint_")
    assert ": File too large; it needs about " in message
    assert "MiB are free" in message
    assert [row["epoch"] for row in read_metrics(tmp_path, "epoch")] == [1, 2, 3]
    refusals = [line for line in done.stdout.splitlines() if "and the next save tries again" in line]
    assert f"checkpoint_0_0_{12 * world_size}.pth: File too large; it needs about" in refusals[0]
    assert not list(tmp_path.glob("*.pth"))
    assert not list(tmp_path.glob("*.tmp"))
    assert not (tmp_path / "results.json").exists()


def test_freeing_disk_space_in_time_loses_nothing(limited, tmp_path, signals_restored):
    """The run also saves the best weights, which it found while the disk was full."""
    (tmp_path / "freed.py").write_text(FREED_AFTER.format(epoch=2))
    done = limited("--task", f"{tmp_path}/freed.py:Freed", *WIDE, "--save-dir", tmp_path / "full")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checkpoint_1.pth: File too large" in done.stdout
    assert main([*ARGV, *map(str, WIDE), "--save-dir", str(tmp_path / "roomy")], several_devices=False) == 0
    full, roomy = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("full", "roomy"))
    assert roomy["best"]["epoch"] == 1
    assert full["metrics"] == roomy["metrics"]
    for name in ("final.pth", "best.pth"):
        assert_same_bits(load(tmp_path / "full" / name)["model"], load(tmp_path / "roomy" / name)["model"])
