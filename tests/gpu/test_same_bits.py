"""Tests that `--parts` trains bit-identically on one and two simulated GPUs."""

import pytest

from tests.conftest import TINY
from tests.gpu.runs import run
from tests.gpu.test_memory import ROOM, WIDE
from tests.gpu.test_ranks import run_on_ranks
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus
from tests.helpers.simulated_gpu.ranks import run_ranks
from tests.parallel.test_parts import FILE, digests

FLAGS = ["--epochs", 1, "--batch-size", 3, "--parts", 8, "--lr", 0.02, "--log-interval", 2]


IN_TURNS = ["InTurns", "--ema-decay", 0.9, "--epochs", 2]
TASKS = [["Parted", "--amp", "fp16"], pytest.param(IN_TURNS, marks=pytest.mark.slow)]
WAYS = [pytest.param([], marks=pytest.mark.slow), ["--cuda-graphs", "on", "--epochs", 2]]


@pytest.mark.parametrize("more", TASKS, ids=["one phase", "two phases"])
@on_simulated_gpus(2, may_wait=True)
def test_two_gpus_match_one_bit_identically(more, tmp_path, cache_dir):
    """`may_wait` is set because the task itself waits for the GPU to look at sample indices."""
    argv = ["--task", f"{FILE}:{more[0]}", *more[1:], *FLAGS, "--cache-dir", cache_dir / "lockstep"]
    on_two = ["--multi-gpu", "ddp", "--backend", "gloo", "--num-threads", 1, "--save-dir", tmp_path / "two"]
    assert run_ranks([*argv, *on_two], 2, tmp_path / "meeting") == [0, 0]
    assert "cuda:1" in GPUS.printed()
    run(cache_dir, *argv, "--save-dir", tmp_path / "one")
    assert digests(tmp_path / "two") == digests(tmp_path / "one")


@pytest.mark.parametrize("more", WAYS, ids=["eager", "graphed"])
@on_simulated_gpus(2)
def test_no_step_waits_for_a_gpu(more, tmp_path, cache_dir):
    argv = [*TINY, "--batch-size", 2, "--parts", 4, "--dropout", 0.3, "--log-interval", 2, *more]
    run_on_ranks(tmp_path, cache_dir, *argv)
    GPUS.printed()
    run(cache_dir, *argv, "--save-dir", tmp_path / "one")
    assert digests(tmp_path / "ranks") == digests(tmp_path / "one")
    assert not more or GPUS.num_replays > 5


@on_simulated_gpus()
def test_a_part_that_does_not_fit_in_memory_is_refused(tmp_path, cache_dir):
    GPUS.limit_memory(ROOM)
    argv = [*TINY, *WIDE, "--parts", 2, "--global-batch-size", 96, "--eval-batch-size", 8, "--save-dir", tmp_path]
    run(cache_dir, *argv, "--device", "cuda", status=2)
    assert "with parts of 48 samples: --parts 2 fixes the size of parts; use a lower" in GPUS.printed()
