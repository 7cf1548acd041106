"""Tests that an error in a replica of nn.DataParallel is reported like any other error."""

from tests.conftest import ROOT
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus

FAULTY = f"{ROOT / 'tests' / 'helpers' / 'faulty_task.py'}:Faulty"


@on_simulated_gpus(2)
def test_an_error_of_a_replica_is_reported_in_one_line(tmp_path):
    import os

    from trainer.cli import main

    os.environ["LOCKSTEP_FAULT"] = "refuse forward 0"
    argv = ["--multi-gpu", "dp", "--task", FAULTY, "--num-train", "24", "--batch-size", "4", "--num-threads", "1"]
    places = ["--save-dir", str(tmp_path / "run"), "--cache-dir", str(tmp_path)]
    assert main([*argv, *places], several_devices=True) == 2
    printed = GPUS.printed().splitlines()
    assert [line for line in printed if line.startswith("error")] == ["error: the data ran away"]
    assert not [line for line in printed if line.startswith("Traceback")]
