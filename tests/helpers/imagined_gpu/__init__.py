"""Tests of GPU branches on a machine without a GPU.

    @on_imagined_gpus(2)
    def test_learns_on_the_second_gpu(tmp_path):
        assert main(["--task", "har", "--device", "cuda:1", ...], several_devices=False) == 0

The body of such a test runs in a process of its own, in which there are `cuda:0` to `cuda:N`. Their tensors are real:
the CPU's kernels compute on them, so what is learnt can be compared with the CPU to the last digits. It gets the
test's fixtures and parameters, which have to be picklable (`tmp_path` is, `capsys` is not). What it prints is shown if
it fails, and `GPUS.printed()` returns it so far.

The test fails by itself if

- an operator gets tensors of two devices: torch's own error;
- memory of the host is touched that a copy from a GPU fills, before the right GPU has been waited for. Whoever looks
  too early finds NaN there, or True, or 77;
- pinned memory is changed that is copied to a GPU, by a replay too, before that GPU has been waited for;
- the process forks after it has initialised CUDA;
- the host waits for a GPU within an optimizer step (`may_wait=True` allows it), outside of logging and saving.

`GPUS` knows more: memory in use, a limit beyond which there is `torch.OutOfMemoryError`, every wait with its place, and
how many CUDA graphs were captured and replayed. `ranks.run_ranks` starts several processes, whose tensors on GPUs
travel by gloo.

**CUDA graphs** (`torch.cuda.CUDAGraph`, `torch.cuda.graph`) record the operators that a captured stream is asked for,
and run them again on the same memory. As on a real GPU

- a capture leaves tensors and generators as they were. Numbers of the host are frozen, and every tensor keeps the shape
  that it had; Python's own state changes as it would without a capture;
- a replay draws from what was the generator's state object at the capture, seeded as it is at the replay. Within a
  capture it cannot be seeded, but put back where it was in the capture (as since torch 2.10);
- what a capture does not allow raises, and everything after it up to `capture_end`: the host waits, memory that is not
  pinned is copied, the default stream waits for a captured one, a captured one for what is not captured;
- a capture that failed leaves the generator's state object in its mode: drawing from it raises, and so does the replay
  of any graph that was captured with it, until `graphsafe_set_state` gives the generator another one (a clone). Graphs
  that were captured with the old one stay useless;
- nor does memory of torch's cache go back to the GPU then, or another capture begin in the same pool, until
  `torch._C._cuda_endAllocateToPool` ends the use of it;
- no capture can begin in a pool whose graphs are all gone;
- a replay fails if memory that it needs has been freed since the capture, which a real GPU would not notice;
- memory of a pool is in use while a graph or a tensor has it, and what one capture has freed, another one takes.

More strictly than on a real GPU, all memory of a pool holds NaN, 77 or True after each of its captures, and before each
replay of any of its graphs: what is to outlast the next replay has to be copied.

What it cannot tell: how long anything takes, NCCL, kernels that only a GPU has or that `--compile` would write for it.
Outside of captures, every stream of a GPU is its only one: a stream that does not wait for another one is not noticed.
It needs g++ and a CPU build of torch: without them these tests are skipped. The first use compiles for some ten
seconds.
"""

import functools
from collections.abc import Callable
from typing import Any

from tests.helpers.imagined_gpu.machine import GPUS
from tests.helpers.imagined_gpu.server import Settings, run_elsewhere

__all__ = ["GPUS", "on_imagined_gpus"]


def on_imagined_gpus(
    num_gpus: int = 1, capability: tuple[int, int] = (9, 0), may_wait: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test that runs where there are so many GPUs. capability: 9.0 computes in bf16, 7.5 does not."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            run_elsewhere(test.__module__, test.__qualname__, arguments, Settings(num_gpus, capability, may_wait))

        return run

    return decorate
