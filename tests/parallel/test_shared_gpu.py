"""NCCL does not support two processes on one GPU, so such a run is refused."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.conftest import TINY, contents
from tests.helpers import forks
from trainer.flags import MultiDeviceFlags
from trainer.parallel.process_group import first_sharing_ranks


def test_ranks_that_share_a_gpu_are_detected():
    assert first_sharing_ranks([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1"), ("b", "GPU-2")]) == []
    assert first_sharing_ranks([("a", "GPU-1"), ("b", "GPU-7"), ("b", "GPU-1"), ("b", "GPU-7")]) == [1, 3]


def show_one_gpu():
    """Simulates a machine with one GPU. The ranks join by gloo, because a build of torch for CPUs lacks NCCL."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    torch.cuda.init = lambda: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="GPU-1")
    join = dist.init_process_group

    def join_by_gloo(backend, timeout, **how):
        assert backend == "cpu:gloo,cuda:nccl"
        # After its timeout NCCL ends a process without a message, so other timeouts must come first.
        assert timeout.total_seconds() > MultiDeviceFlags().dist_timeout_s
        join("gloo", timeout=timeout, **how)

    dist.init_process_group = join_by_gloo
    return lambda: None


def test_nccl_on_a_shared_gpu_is_refused_before_the_start(environment, tmp_path):
    output = tmp_path / "out"
    argv = ["--multi-gpu", "ddp", *TINY, "--save-dir", tmp_path / "run"]
    assert forks.run_group(argv, 2, environment, output, prepare=show_one_gpu) == [2, 2]
    (error,) = [line for line in output.read_text().splitlines() if line.startswith("error")]
    assert error.startswith("error: --backend nccl: needs one process per GPU, but ranks 0 and 1 share a GPU on ")
    assert error.endswith("; start fewer processes there (--nproc, --nproc_per_node), or use --backend gloo")
    assert contents(tmp_path / "run") == {}
