"""Tests the choice of GPUs and batch sizes, and the limit on sequences in fused attention kernels."""

import pytest
import torch

from models.tabular import attention
from profiler import main as profile
from tests.conftest import TINY, WEIGHTED
from tests.gpu.runs import EXACT, run
from tests.gpu.test_training import HELPERS
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus
from tests.helpers.simulated_gpu.ranks import run_ranks
from trainer.commands.build import build_task
from trainer.commands.evaluate import ensemble_metrics
from trainer.commands.parse import parse
from trainer.commands.several import choose_slots
from trainer.failure.signals import StopRequest
from trainer.flags import DeviceFlags

SCORED = ["--task", f"{HELPERS / 'scored_task.py'}:Scored", "--epochs", 1, *EXACT]
SHORT = ["--task", WEIGHTED, "--num-train", 96, "--steps", 1, "--settling-steps", 1, "--num-threads", 1]


@pytest.mark.slow
@on_simulated_gpus()
def test_fused_kernels_of_attention_get_as_many_sequences_as_they_take():
    attention._MAX_SEQUENCES = 2
    query, key, value = (torch.randn(5, num, 2, 4, dtype=torch.float64) for num in (3, 6, 6))
    mask = torch.ones(5, 1, 1, 6, dtype=torch.bool)
    mask[1:, ..., 4:] = False
    for some in (None, mask):
        there = [None if x is None else x.to("cuda") for x in (query, key, value, some)]
        found = attention.attend(*there)
        torch.testing.assert_close(found.cpu(), attention.attend(query, key, value, some))


@pytest.mark.slow
@on_simulated_gpus(2)
def test_several_runs_get_a_gpu_each():
    shown = choose_slots(DeviceFlags(), None)
    assert shown.variables == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert shown.description == "one at a time on each of 2 GPUs"
    assert choose_slots(DeviceFlags(device="cuda:1"), None).variables == [{}]


@pytest.mark.slow
@on_simulated_gpus(2)
def test_an_ensemble_is_scored_on_the_first_of_the_chosen_gpus(tmp_path, cache_dir):
    directories = [tmp_path / str(seed) for seed in (0, 1)]
    for seed, directory in enumerate(directories):
        run(cache_dir, *SCORED, "--device", "cpu", "--seed", seed, "--save-dir", directory)
    found = []
    for devices, several in ((["--device", "cpu"], False), (["--multi-gpu", "dp", "--gpu-ids", "1"], True)):
        flags, problems = parse([*map(str, SCORED), "--save-dir", str(tmp_path / "all"), *devices], several)
        assert not problems
        found.append(ensemble_metrics(flags, build_task(flags), directories, StopRequest()))
    assert found[0] == pytest.approx(found[1])
    assert torch.cuda.current_device() == 1


@pytest.mark.slow
@on_simulated_gpus(may_wait=True)
def test_the_largest_batch_is_found(tmp_path, cache_dir):
    GPUS.limit_memory(500 * 2**10)
    more = ["--width", 64, "--min-batch-size", 8, "--max-batch-size", 96, "--cache-dir", cache_dir / "lockstep"]
    assert profile([*map(str, ["batch-size", *SHORT, *more, *EXACT])]) == 0
    assert "(the largest that fits)" in GPUS.printed()


@pytest.mark.slow
@on_simulated_gpus(2)
def test_unusable_gpu_ids_are_refused(tmp_path, cache_dir):
    more = ["--save-dir", tmp_path / "run"]
    run(cache_dir, *TINY, "--multi-gpu", "dp", "--gpu-ids", "1,1", *more, status=2, several=True)
    assert "--gpu-ids 1,1: names a GPU twice" in GPUS.printed()
    run(cache_dir, *TINY, "--multi-gpu", "dp", "--gpu-ids", "0,2", *more, status=2, several=True)
    assert "--gpu-ids 0,2: there is no GPU 2" in GPUS.printed()
    assert profile([*map(str, ["scaling", *SHORT[:2], "--world-sizes", "1,3"])]) == 2
    assert "--world-sizes 3: only 2 GPUs can be used; choose fewer" in GPUS.printed()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@on_simulated_gpus(2)
def test_more_processes_than_gpus_are_refused(tmp_path, cache_dir):
    argv = [*TINY, "--multi-gpu", "ddp", "--backend", "gloo", "--save-dir", tmp_path / "run"]
    statuses = run_ranks([*argv, "--cache-dir", cache_dir / "lockstep"], 3, tmp_path / "meeting")
    assert 2 in statuses and 0 not in statuses
    assert "local rank 2 has no GPU: this machine has 2 usable GPUs ([0, 1])" in GPUS.printed()
    assert not (tmp_path / "run").exists()
