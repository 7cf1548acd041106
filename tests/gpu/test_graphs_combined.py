"""Tests CUDA graphs together with several seeds, time limits, signals and SyncBatchNorm."""

import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest
from torch import nn

from tests.conftest import TINY, assert_same_bits, load
from tests.gpu.runs import run
from tests.gpu.test_graphs import GRAPHS, LONGER, told
from tests.gpu.test_ranks import run_on_ranks
from tests.gpu.test_training import POISONED
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus
from trainer.loop import captured_steps, progress
from trainer.loop.capture import GraphPool
from trainer.loop.progress import Progress

CUDA = ["--device", "cuda", "--deterministic", "--ema-decay", 0.9]


@on_simulated_gpus()
def test_graphs_of_several_seeds_train_bit_identically(tmp_path, cache_dir):
    """Each seed has its own process, which is forked here so that it has simulated GPUs."""
    capture, get_context, note = GraphPool.capture, multiprocessing.get_context, tmp_path / "note"

    def noted(self, *arguments):
        with note.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return capture(self, *arguments)

    GraphPool.capture = noted
    multiprocessing.get_context = lambda method=None: get_context("fork")
    run(cache_dir, *LONGER, *CUDA, *GRAPHS, "--seeds", 2, "--save-dir", tmp_path / "graphed")
    assert len(set(note.read_text().split()) - {str(os.getpid())}) == 2
    for seed in (0, 1):
        run(cache_dir, *LONGER, *CUDA, "--seed", seed, "--save-dir", tmp_path / f"{seed}")
        assert_same_bits(load(tmp_path / f"{seed}" / "last.pth"), load(tmp_path / f"graphed/seed-{seed}/last.pth"))


@on_simulated_gpus()
def test_a_run_pauses_at_its_time_limit_and_resumes(tmp_path, cache_dir):
    """Each step takes a minute of a simulated clock, so the run pauses in the middle of epochs of three steps."""
    clock, advance = SimpleNamespace(now=0.0), Progress.advance

    def advance_and_tick(self, *step):
        advance(self, *step)
        clock.now += 60

    Progress.advance, progress.time = advance_and_tick, SimpleNamespace(monotonic=lambda: clock.now)
    run(cache_dir, *LONGER, *CUDA, "--save-dir", tmp_path / "eager")
    steps = []
    for minutes in (4, 7, 20):
        run(cache_dir, *LONGER, *CUDA, *GRAPHS, "--max-minutes", minutes, "--save-dir", tmp_path / "graphed")
        steps.append(load(tmp_path / "graphed" / "last.pth")["step"])
    assert steps == [5, 8, 9]
    assert GPUS.num_replays > 5
    states = [load(tmp_path / name / "last.pth") for name in ("eager", "graphed")]
    assert_same_bits(*({name: state[name] for name in ("model", "training_model", "optimizers")} for state in states))


@pytest.mark.parametrize("number", [1, 2, 3])
@on_simulated_gpus()
def test_a_signal_during_a_capture_stops_the_run_after_the_step(number, tmp_path, cache_dir):
    """The captures are, in order: forward and backward, the update, and the forward pass of an evaluation."""
    capture, num_captures = GraphPool.capture, []

    def interrupted(self, function, *tensors):
        def work():
            num_captures.append(number)
            if len(num_captures) == number:
                os.kill(os.getpid(), signal.SIGTERM)
            return function()

        return capture(self, work, *tensors)

    GraphPool.capture = interrupted
    run(cache_dir, *LONGER, *CUDA, "--save-dir", tmp_path / "eager")
    more = [*LONGER, *CUDA, *GRAPHS, "--save-dir", tmp_path / "graphed"]
    run(cache_dir, *more, status=128 + signal.SIGTERM)
    assert "Stopped as asked" in GPUS.printed() and load(tmp_path / "graphed" / "last.pth")["step"] < 9
    run(cache_dir, *more)
    assert "without a graph" not in GPUS.printed()
    states = [load(tmp_path / name / "last.pth") for name in ("eager", "graphed")]
    assert_same_bits(*({name: state[name] for name in ("model", "training_model", "optimizers")} for state in states))


@on_simulated_gpus(2)
def test_synchronised_batch_norm_runs_eagerly(tmp_path, cache_dir):
    """SyncBatchNorm has kernels only for real GPUs, so each rank computes its own statistics here."""
    nn.SyncBatchNorm.forward = nn.BatchNorm1d.forward
    run_on_ranks(tmp_path, cache_dir, *TINY, *POISONED, "--on-nonfinite", "skip", "--batch-norm", "--sync-bn", *GRAPHS)
    assert told() == ["CUDA graphs: steps run without a graph: --sync-bn exchanges statistics in the forward pass."]


@on_simulated_gpus()
def test_graphs_that_save_no_time_are_dropped(tmp_path, cache_dir):
    timed = captured_steps.timed
    captured_steps.timed = lambda function, device: (timed(function, device)[0], 1e-3)
    run(cache_dir, *LONGER, *CUDA, "--cuda-graphs", "auto", "--save-dir", tmp_path / "slow")
    (line,) = told()
    assert line.endswith("without a graph: the speed-up of graphs is below 1.1.")
