"""Tests that simulated GPUs detect mistakes, record waits and limit memory."""

import os

import pytest

from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus


@on_simulated_gpus(2)
def test_devices_do_not_mix():
    import torch

    there, elsewhere, here = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"), torch.ones(3)
    for other in (elsewhere, here):
        for mix in (torch.add, torch.dot, lambda *both: torch.stack(both), lambda a, b: a[None] @ b):
            with pytest.raises(RuntimeError, match="same device"):
                mix(there, other)
    assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2]  # a CPU tensor with zero dimensions is allowed
    assert elsewhere.to("cuda:0").device == there.device


@on_simulated_gpus(2)
def test_a_copy_arrives_once_the_host_waits_for_the_gpu():
    import torch

    source, buffer = torch.arange(3.0, device="cuda:1"), torch.empty(3, pin_memory=True)
    buffer.copy_(source, non_blocking=True)
    source.zero_()  # does not affect the copy, which is queued before it
    other, own = torch.cuda.Event(), torch.cuda.Event()
    other.record()
    own.record(torch.cuda.current_stream(1))
    other.synchronize()
    assert not GPUS.mistakes()
    assert buffer.isnan().all()
    (mistake,) = GPUS.mistakes()
    assert "touched before" in mistake and "tests/gpu/test_helper.py" in mistake
    own.synchronize()
    assert buffer.tolist() == [0, 1, 2]
    GPUS.forget_mistakes()


@on_simulated_gpus()
def test_pinned_memory_may_not_change_before_it_is_copied():
    import torch

    for num_buffers, num_mistakes in ((1, 1), (2, 0)):
        ring, sums, copied = [torch.zeros(3).pin_memory() for _ in range(num_buffers)], [], []
        for i in range(5):
            if i >= 2:
                copied[i - 2].synchronize()
            buffer = ring[i % num_buffers]
            buffer.fill_(i)
            sums.append(buffer.to("cuda", non_blocking=True).sum())
            copied.append(torch.cuda.Event())
            copied[-1].record()
        assert torch.stack(sums).tolist() == [0, 3, 6, 9, 12]
        assert len(GPUS.mistakes()) == num_mistakes
        GPUS.forget_mistakes()
    for _ in range(5):  # freed pinned memory is not reused before it was copied
        torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    ring[0].to("cuda", non_blocking=True)
    ring[0].fill_(7)
    (mistake,) = GPUS.mistakes()
    assert "changed before" in mistake and "tests/gpu/test_helper.py" in mistake
    GPUS.forget_mistakes()


@on_simulated_gpus()
def test_waits_for_the_device_are_recorded():
    import torch

    there, indices = torch.ones(3, device="cuda"), torch.tensor([1])
    GPUS.forget_mistakes()
    there.sum().item()
    there.nonzero()
    there[indices]
    there.copy_(torch.zeros(3))
    torch.zeros(3).to("cuda", non_blocking=True)
    there.to("cpu", non_blocking=True)  # does not wait, because torch allocates pinned memory
    torch.zeros(3).pin_memory().to("cuda", non_blocking=True)
    there.mul_(2).add_(torch.tensor(1.0))
    mask = there > 0
    there[mask] = 1.0  # calls masked_fill_, which does not wait
    there[mask] = there * 2
    there[mask]
    counts = mask.long()
    counts.repeat_interleave(counts)
    counts.repeat_interleave(counts, output_size=3)
    assert [wait.what for wait in GPUS.waits] == [  # the third wait is for the copy of the indices
        "_local_scalar_dense",
        "nonzero",
        "copy from the host",
        "index",
        "copy from the host",
        "copy from memory that is not page-locked",
        "_index_put_impl_",
        "nonzero",
        "repeat_interleave",
    ]
    assert all(wait.place.startswith("tests/gpu/test_helper.py:") for wait in GPUS.waits)


@on_simulated_gpus(2)
def test_simulated_memory_is_counted_and_limited():
    import torch

    assert GPUS.memory_in_use(1) == 0
    held = torch.zeros(1000, device="cuda:1")
    assert (GPUS.memory_in_use(0), GPUS.memory_in_use(1)) == (0, 4000)
    GPUS.limit_memory(10_000, device=1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([held, held])
    assert GPUS.memory_in_use(1) == torch.cuda.memory_allocated(1) == 4000
    assert torch.cuda.max_memory_allocated(1) <= 10_000
    del held
    assert GPUS.memory_in_use(1) == 0


@pytest.mark.slow
@pytest.mark.skipif("LOCKSTEP_LINES" in os.environ, reason="while lines are recorded it runs in Python's threads")
@on_simulated_gpus()
def test_backward_runs_in_the_threads_of_the_gpus():
    import threading

    import torch

    threads = []
    weight = torch.ones(3, device="cuda", requires_grad=True)
    doubled = weight * 2
    doubled.register_hook(lambda gradient: threads.append(threading.get_ident()))
    doubled.sum().backward()
    assert weight.grad.tolist() == [2, 2, 2]
    assert threads and threads != [threading.get_ident()]
