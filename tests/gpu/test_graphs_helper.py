"""Tests CUDA graphs of the simulated GPU, and the errors that a real GPU would raise."""

from contextlib import contextmanager

import pytest

from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus

ILLEGAL = "operation not permitted when stream is capturing"


@contextmanager
def captured(graph, pool=None, mode="thread_local"):
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool, capture_error_mode=mode)
        try:
            yield
        finally:
            graph.capture_end()


@on_simulated_gpus()
def test_a_replay_repeats_captured_kernels_on_the_same_memory():
    import torch

    graph, x, total = torch.cuda.CUDAGraph(), torch.arange(3.0, device="cuda"), torch.zeros(3, device="cuda")
    with captured(graph):
        assert torch.cuda.is_current_stream_capturing()
        doubled = x * 2
        total += doubled
    assert not torch.cuda.is_current_stream_capturing()
    assert total.tolist() == [0, 0, 0]  # a capture computes nothing
    assert doubled.isnan().all()
    for _ in range(2):
        graph.replay()
    assert (doubled.tolist(), total.tolist()) == ([0, 2, 4], [0, 4, 8])
    x.fill_(1)
    graph.replay()
    assert (doubled.tolist(), total.tolist()) == ([2, 2, 2], [2, 6, 10])
    assert (GPUS.num_captures, GPUS.num_replays) == (1, 3)


@on_simulated_gpus()
def test_captures_keep_the_shapes_and_numbers_of_their_time():
    import torch

    graph, x, number = torch.cuda.CUDAGraph(), torch.arange(6.0, device="cuda"), torch.tensor(3.0)
    sizes = torch.zeros((), device="cuda")
    with captured(graph):
        view = x.view(2, 3)[1]
        tripled = view * number
        view.resize_(1).zero_()
        sizes += 1 / (sizes + 1e-6)  # Python numbers do not change the dtype
    number.fill_(100)
    x.fill_(1)
    x.set_(torch.zeros(2, device="cuda"))
    graph.replay()
    assert tripled.tolist() == [3, 3, 3]
    assert sizes.item() == pytest.approx(1e6)
    assert x.tolist() == [0, 0]


@on_simulated_gpus()
def test_a_recomputed_block_draws_the_same_random_numbers():
    import torch
    from torch.utils.checkpoint import checkpoint

    x, generator, graph = torch.ones(50, device="cuda"), torch.cuda.default_generators[0], torch.cuda.CUDAGraph()
    weight = torch.ones(50, device="cuda", requires_grad=True)

    def step(recomputed):
        def block(x):
            return torch.nn.functional.dropout(x * weight, 0.5).square()

        weight.grad = None
        out = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
        torch.nn.functional.dropout(out, 0.5).sum().backward()
        return out.detach(), weight.grad, torch.randn(3, device="cuda")

    def seeded(run):
        generator.manual_seed(3)
        return [value.clone() for value in run()]

    eager = seeded(lambda: step(False))
    assert all(a.equal(b) for a, b in zip(eager, seeded(lambda: step(True)), strict=True))
    before = generator.get_state()
    with captured(graph):
        results = step(True)
    assert generator.get_state().equal(before)  # a capture draws nothing

    def replay():
        graph.replay()
        return results

    assert all(a.equal(b) for a, b in zip(eager, seeded(replay), strict=True))
    with captured(torch.cuda.CUDAGraph()):
        for illegal in (lambda: generator.manual_seed(0), generator.clone_state):
            with pytest.raises(RuntimeError, match="during CUDA graph capture"):
                illegal()
        with pytest.raises(RuntimeError, match="only if new seed"):
            generator.set_state(torch.Generator().get_state())


@on_simulated_gpus(2)
def test_each_simulated_device_has_its_own_generator():
    import torch

    first, second = torch.cuda.default_generators
    torch.manual_seed(1)
    here = torch.randn(5)
    second.manual_seed(2)
    states = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    drawn = torch.randn(5, device="cuda:1")
    assert first.get_state().equal(states[1])
    assert torch.get_rng_state().equal(states[0])
    torch.manual_seed(1)
    assert torch.randn(5, device="cuda:1").cpu().equal(here)
    torch.cuda.set_rng_state(states[2], 1)
    assert torch.randn(5, device="cuda:1").equal(drawn)
    own = torch.Generator("cuda:1").manual_seed(2)
    assert torch.randn(5, device="cuda:1", generator=own).equal(drawn)
    shared, copied = second.graphsafe_get_state(), second.clone_state()
    second.manual_seed(3)
    assert shared.initial_seed() == 3
    assert copied.initial_seed() != 3
    second.graphsafe_set_state(copied)
    assert second.initial_seed() == copied.initial_seed()


def _illegal():
    """Returns functions that no capture allows, by name. Arguments: a tensor on the GPU and a tensor on the host."""
    import torch

    event = torch.cuda.Event()
    event.record()
    return {
        "item": lambda there, here: there.sum().item(),
        "nonzero": lambda there, here: there.nonzero(),
        "a mask": lambda there, here: there[there > 0],
        "to the host": lambda there, here: there.cpu(),
        "to pageable memory": lambda there, here: here.copy_(there, non_blocking=True),
        "from the host": lambda there, here: here.cuda(),
        "from pageable memory": lambda there, here: there.copy_(here, non_blocking=True),
        "a copy from pinned memory that is waited for": lambda there, here: there.copy_(here.pin_memory()),
        "a constant": lambda there, here: torch.tensor(1.0, device="cuda"),
        "indices of the host": lambda there, here: there[torch.tensor([1])],
        "synchronize": lambda there, here: torch.cuda.synchronize(),
        "stream": lambda there, here: torch.cuda.current_stream().synchronize(),
        "event": lambda there, here: event.synchronize(),
        "query": lambda there, here: event.query(),
    }


@on_simulated_gpus()
def test_illegal_operations_end_a_capture_with_an_error():
    import torch

    there, here, generator = torch.ones(3, device="cuda"), torch.zeros(3), torch.cuda.default_generators[0]
    GPUS.forget_mistakes()
    for name, illegal in _illegal().items():
        before = generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode="thread_local")
            there.mul_(2)
            with pytest.raises(RuntimeError, match=ILLEGAL):
                illegal(there, here)
            with pytest.raises(RuntimeError, match="previous error during capture"):
                there.mul_(2)
            with pytest.raises(RuntimeError, match="previous error during capture"):
                graph.capture_end()
            assert not torch.cuda.is_current_stream_capturing()
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            graph.replay()
        assert not GPUS.waits, name
        generator.graphsafe_set_state(before)
        graph.reset()
        assert there.sum().item() == 3, name
        GPUS.forget_mistakes()
    assert GPUS.num_captures == 0


@on_simulated_gpus()
def test_a_failed_capture_restores_the_generator():
    import torch

    x, generator, earlier = torch.ones(3, device="cuda"), torch.cuda.default_generators[0], torch.cuda.CUDAGraph()
    with captured(earlier):
        x.bernoulli_()
    before, failed = generator.clone_state(), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="previous error"), captured(failed):
        x.bernoulli_()
        with pytest.raises(RuntimeError, match=ILLEGAL):
            x.sum().item()
    for use in (x.bernoulli_, earlier.replay):
        with pytest.raises(RuntimeError, match="Offset increment outside graph capture"):
            use()
    generator.graphsafe_set_state(before)
    x.bernoulli_()
    with pytest.raises(RuntimeError, match="Offset increment"):
        earlier.replay()  # draws from the state that the failed capture has left behind


@on_simulated_gpus()
def test_a_capture_contains_the_kernels_of_its_streams():
    import threading

    import torch

    x, y = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")
    graph, side, other = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()
    side.wait_stream(torch.cuda.current_stream())

    def elsewhere():  # like the copies of a checkpoint that is written in the background
        y.add_(1)
        y.cpu()

    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        x.add_(1)
        inside = side.record_event()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        other.wait_stream(side)
        with torch.cuda.stream(other):
            x.add_(1)
        side.wait_stream(other)
        graph.capture_end()
    assert (x.tolist(), y.tolist()) == ([0] * 3, [1] * 3)
    graph.replay()
    assert (x.tolist(), y.tolist()) == ([2] * 3, [1] * 3)
    for use in (inside.synchronize, inside.query, lambda: inside.elapsed_time(inside)):
        with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
            use()


@on_simulated_gpus()
def test_illegal_use_of_streams_and_threads_ends_a_capture():
    import threading

    import torch

    x, uncaptured = torch.zeros(3, device="cuda"), torch.cuda.current_stream().record_event()

    def of_another_thread():
        thread = threading.Thread(target=lambda: errors.append(_error_of(x.cpu)))
        thread.start()
        thread.join()

    errors = []
    for illegal, message in (
        (lambda: torch.cuda.default_stream().wait_stream(torch.cuda.current_stream()), "legacy stream"),
        (lambda: torch.cuda.current_stream().wait_event(uncaptured), "uncaptured work"),
        (of_another_thread, ILLEGAL),
    ):
        with pytest.raises(RuntimeError, match="previous error"), captured(torch.cuda.CUDAGraph(), mode="global"):
            errors.append(_error_of(illegal))
        assert message in [error for error in errors if error][-1]
        torch.cuda.default_generators[0].graphsafe_set_state(torch.Generator("cuda"))


def _error_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)


@on_simulated_gpus()
def test_copies_from_and_to_pinned_memory_happen_at_a_replay():
    import torch

    source, target = torch.ones(3).pin_memory(), torch.zeros(3).pin_memory()
    there, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    with captured(graph):
        there.copy_(source, non_blocking=True)
        doubled = there * 2
        target.copy_(doubled, non_blocking=True)
    assert target.tolist() == there.tolist() == [0, 0, 0]
    source.fill_(5)
    graph.replay()
    assert target.isnan().all()  # the host has not waited for the GPU
    GPUS.forget_mistakes()
    torch.cuda.synchronize()
    assert target.tolist() == [10, 10, 10]
    source.fill_(6)
    assert not GPUS.mistakes()
    graph.replay()
    source.fill_(7)
    assert "changed before" in GPUS.mistakes()[0]
    GPUS.forget_mistakes()


@on_simulated_gpus()
def test_pool_memory_is_overwritten_before_a_replay():
    import torch

    pool, x = torch.cuda.graph_pool_handle(), torch.ones(3, device="cuda")
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with captured(first, pool):
        results = [x * 2, x.long(), x > 0, torch.empty(3, device="cuda")]
    with captured(second, pool):
        x + 1
    assert first.pool() == second.pool() == pool
    first.replay()
    assert [result.tolist() for result in results[:3]] == [[2] * 3, [1] * 3, [True] * 3]
    assert results[3].isnan().all()
    second.replay()
    assert results[0].isnan().all()
    assert results[1].tolist() == [77] * 3


@on_simulated_gpus()
def test_memory_that_a_replay_needs_may_not_be_freed():
    import torch

    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with captured(graph):
        more = x.view(1, 3) + 1
    graph.replay()
    assert more.tolist() == [[2, 2, 2]]
    x = x + 1
    with pytest.raises(RuntimeError, match="has been freed"):
        graph.replay()


@on_simulated_gpus()
def test_memory_of_graphs_is_counted_and_limited():
    import torch

    pool, x = torch.cuda.graph_pool_handle(), torch.ones(1000, device="cuda")
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with captured(first, pool):
        (x + 1).add(1).add(1)
        kept = x + 1
    assert GPUS.memory_in_use() == torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 12_000
    with captured(second, pool):
        x + 1  # reuses memory that the first capture freed
    assert GPUS.memory_in_use() == 12_000
    GPUS.limit_memory(14_000)
    third, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[0]
    with captured(third, pool):
        more = [x + 1]
        with pytest.raises(torch.OutOfMemoryError):
            more.append(x + 1)
    assert generator.initial_seed()
    del first, second
    third.reset()
    assert GPUS.memory_in_use() == 12_000
    more.clear()
    assert GPUS.memory_in_use() == 8_000
    del kept
    assert GPUS.memory_in_use() == 4_000
