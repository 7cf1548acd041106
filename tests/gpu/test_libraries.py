"""Tests the settings of cuDNN, cuBLAS and CPU threads for runs on a GPU."""

import pytest

from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@on_simulated_gpus()
def test_cuda_libraries_are_set_up_for_flags_and_task(tmp_path):
    import os

    import torch

    from trainer.api import process_restored
    from trainer.commands.build import set_up_torch, start_strategy
    from trainer.commands.parse import parse

    os.environ.pop(WORKSPACE, None)
    cudnn = torch.backends.cudnn

    def told(task, *more):
        flags, problems = parse(["--task", task, "--cache-dir", str(tmp_path), *more], False)
        assert not problems
        set_up_torch(flags, start_strategy(flags, None).group)
        return cudnn.benchmark, torch.backends.cuda.cudnn_sdp_enabled(), cudnn.allow_tf32, os.environ[WORKSPACE]

    for cudnn.benchmark in (False, True):
        with process_restored():
            # cuBLAS reads its setting once per process, so every run sets the value that deterministic runs need.
            assert told("har") == (True, True, False, ":4096:8")
            assert told("har", "--deterministic") == (False, True, False, ":4096:8")
            assert told("har", "--parts", "2") == (False, True, False, ":4096:8")
            assert torch.get_deterministic_debug_mode() == 1  # warns about nondeterministic operators
            # Shapes differ between batches, and cuDNN would prepare attention and convolutions for each shape.
            for task in ("speech", "tabular"):
                assert told(task) == (False, False, False, ":4096:8")
        assert cudnn.allow_tf32 and torch.backends.cuda.cudnn_sdp_enabled() and WORKSPACE not in os.environ
    assert cudnn.benchmark


@pytest.mark.parametrize(("variable", "num_threads"), [(None, 1), ("3", 3)])
@on_simulated_gpus()
def test_a_process_with_a_gpu_uses_one_cpu_thread_by_default(variable, num_threads, tmp_path):
    import os

    import torch

    from tests.conftest import WEIGHTED
    from trainer.cli import main

    torch.set_num_threads(num_threads if variable else 4)  # as torch reads the variable when it is imported
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ |= {"OMP_NUM_THREADS": variable} if variable else {}
    argv = ["--task", WEIGHTED, "--num-train", "8", "--max-steps", "1", "--save-dir", str(tmp_path / "run")]
    assert main([*argv, "--device", "cuda"], several_devices=False) == 0
    assert f"Threads: {num_threads} per rank." in GPUS.printed()
