"""What goes wrong on one GPU of nn.DataParallel is told like anything else."""

import pytest

from tests.conftest import ROOT
from tests.helpers.imagined_gpu import GPUS, on_imagined_gpus

FAULTY = f"{ROOT / 'tests' / 'helpers' / 'faulty_task.py'}:Faulty"


@pytest.mark.parametrize(
    ("what", "status", "error"),
    [
        ("refuse", 2, "the data ran away"),
        ("raise", 1, "failed in the rehearsal of the largest batch: ValueError: the sky fell"),
    ],
)
@on_imagined_gpus(2)
def test_an_error_of_a_replica_is_told_in_one_line(what, status, error, tmp_path):
    import os

    from trainer.cli import main

    os.environ["LOCKSTEP_FAULT"] = f"{what} forward 0"
    argv = ["--multi-gpu", "dp", "--task", FAULTY, "--num-train", "24", "--batch-size", "4", "--num-threads", "1"]
    places = ["--save-dir", str(tmp_path / "run"), "--cache-dir", str(tmp_path)]
    assert main([*argv, *places], several_devices=True) == status
    printed = GPUS.printed().splitlines()
    assert [line for line in printed if line.startswith("error")] == [f"error: {error}"]
    assert sum(line.startswith("Traceback") for line in printed) == (what == "raise")
