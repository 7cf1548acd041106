"""An objective with `same_masks` has one dropout mask per step, and `start_evaluation` runs once per evaluation."""

import json

import numpy as np
import pytest
import torch

from tests.helpers.tabled_task import Rows

RUN = ["--task", "tests/helpers/tabled_task.py:Tabled", "--dtype", "float64", "--epochs", 2, "--num-threads", 1]
RUN += ["--global-batch-size", 8]
TWO = ["--multi-gpu", "ddp", "--nproc", 2, "--device", "cpu"]


def weights(directory):
    return torch.load(directory / "final.pth", weights_only=True)["model"]["rows.weight"]


def test_micro_batches_share_the_mask_of_their_step(run_here, tmp_path):
    run_here(*RUN, "--save-dir", tmp_path / "whole")
    run_here(*RUN, "--batch-size", 3, "--save-dir", tmp_path / "parts")
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=1e-12, atol=1e-14)
    for name, size in {"own-whole": 8, "own-parts": 3}.items():
        run_here(*RUN, "--own-masks", "--batch-size", size, "--save-dir", tmp_path / name)
    assert not torch.allclose(weights(tmp_path / "own-whole"), weights(tmp_path / "own-parts"), rtol=1e-3)


@pytest.mark.slow
def test_processes_share_the_mask_of_their_step(run_here, command, tmp_path):
    run_here(*RUN, "--save-dir", tmp_path / "one")
    command("main_multi_gpu.py", *RUN, *TWO, "--save-dir", tmp_path / "two")
    torch.testing.assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"), rtol=1e-12, atol=1e-14)


def test_each_evaluation_starts_once(run_here, tmp_path):
    run_here(*RUN, "--eval-batch-size", 2, "--save-dir", tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["val/starts"] for line in lines if line["event"] == "epoch"] == [1, 2]
    assert json.loads((tmp_path / "results.json").read_text())["metrics"]["test/starts"] == 3


def test_predict_starts_like_an_evaluation_and_accepts_some_new_flags(run_here, tmp_path):
    run_here(*RUN, "--save-dir", tmp_path)
    for place in (0, 5):
        moved = ["--delay", place] if place else []
        out, _ = run_here(*RUN[:4], "--predict", tmp_path, "--save-dir", tmp_path, *moved)
        rows = np.array([line.split(",") for line in out.split()[1:]], dtype=float)
        np.testing.assert_array_equal(rows[:, 0], weights(tmp_path)[:4, 0])
        np.testing.assert_array_equal(rows[:, 1], Rows(4, place).target[:, 0])


def test_predict_refuses_other_changed_flags(run_here, tmp_path):
    run_here(*RUN, "--save-dir", tmp_path)
    _, err = run_here("--task", RUN[1], "--predict", tmp_path, "--save-dir", tmp_path, "--own-masks", status=2)
    assert "--own-masks True: the weights of epoch 2" in err and "trained with False" in err
