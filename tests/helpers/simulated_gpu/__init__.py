"""Tests of GPU code on a machine without a GPU.

    @on_simulated_gpus(2)
    def test_trains_on_the_second_gpu(tmp_path):
        assert main(["--task", "har", "--device", "cuda:1", ...], several_devices=False) == 0

The body of such a test runs in its own process, which has the GPUs `cuda:0`, `cuda:1`, .... CPU kernels compute on
their tensors, so results can be compared with the CPU to the last digits. The body gets the fixtures and parameters of
the test, which must be picklable (`tmp_path` is, `capsys` is not). pytest shows the output of the body if the test
fails, and `GPUS.printed()` returns the output so far.

The test fails automatically if

- an operator gets tensors on two devices (torch's own error);
- the host accesses memory that a copy from a GPU fills, before it has waited for this GPU. The memory then contains
  NaN, True or 77;
- the host changes pinned memory that an operator or a replay copies to a GPU, before it has waited for this GPU;
- the process forks after it has initialised CUDA;
- the host waits for a GPU within an optimizer step, outside logging and saving (`may_wait=True` allows this).

`GPUS` also returns memory in use, sets a limit beyond which operators raise `torch.OutOfMemoryError`, lists waits with
their places, and counts captured and replayed CUDA graphs. `ranks.run_ranks` starts several processes, which exchange
GPU tensors by gloo.

**CUDA graphs** (`torch.cuda.CUDAGraph`, `torch.cuda.graph`) capture the operators of a stream, and run them
again on the same memory. As on a real GPU,

- a capture does not change tensors and generators. It freezes Python numbers and tensor shapes. Python state changes as
  without a capture;
- a replay draws from the state object that the generator had at the capture, with the seed at the time of the replay. A
  capture cannot seed the generator, but can restore an earlier state of the capture (as since torch 2.10);
- forbidden operations, and all later operations until `capture_end`, raise an error. Forbidden are waits of the host,
  copies of memory that is not pinned, waits of the default stream for a captured stream, and waits of a captured stream
  for work outside the capture;
- after a failed capture, drawing from the generator's state object raises an error, and so does the replay of a graph
  that was captured with this object, until `graphsafe_set_state` gives the generator another state object (a clone).
  Graphs captured with the old object remain unusable;
- after a failed capture, torch's cache returns no memory to the GPU, and no capture can begin in the same pool, until
  `torch._C._cuda_endAllocateToPool` is called;
- no capture can begin in a pool whose graphs have all been deleted;
- a replay fails if a graph of the same stream has been freed since the capture, because freeing a graph also frees the
  cuBLAS workspaces of its stream (https://github.com/pytorch/pytorch/issues/193402);
- memory of a pool is in use while a graph or a tensor uses it, and a capture reuses memory that another capture freed.

Unlike on a real GPU, a replay fails if memory that it needs has been freed since the capture, and all memory of a pool
is filled with NaN, 77 or True after each capture in the pool and before each replay of its graphs. Results that must
outlive the next replay must therefore be copied.

Simulated GPUs cannot show speed, NCCL, kernels that only a GPU has, or kernels that `--compile` generates for a GPU.
Outside captures, a GPU has a single stream, so a missing wait between streams goes unnoticed. The tests need g++ and a
CPU build of torch, and are skipped without them. The first use compiles a library in about ten seconds.
"""

import functools
from collections.abc import Callable
from typing import Any

from tests.helpers.simulated_gpu.machine import GPUS
from tests.helpers.simulated_gpu.server import Settings, run_elsewhere

__all__ = ["GPUS", "on_simulated_gpus"]


def on_simulated_gpus(
    num_gpus: int = 1, capability: tuple[int, int] = (9, 0), may_wait: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test that runs with `num_gpus` GPUs. capability: 9.0 supports bf16, 7.5 does not."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            run_elsewhere(test.__module__, test.__qualname__, arguments, Settings(num_gpus, capability, may_wait))

        return run

    return decorate
