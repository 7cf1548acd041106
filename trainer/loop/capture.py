"""Captures the kernels of a function as a CUDA graph."""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakSet, ref

import torch
from torch import Tensor

from trainer.common.torch_private import TorchDispatchMode, end_allocating, tree_flatten
from trainer.loading.batches import Batch
from trainer.loop.obstacles import CannotBeCaptured

T = TypeVar("T")
R = TypeVar("R")

SUMMATIONS = 8
"""Tolerance of a comparison, as a multiple of the largest difference between runs that should be equal."""
REPLAYS = 8
"""Number of further replays that measure how much replays differ."""

_INVALID: list[torch.cuda.CUDAGraph] = []
"""Graphs of captures that CUDA invalidated; never freed, because PyTorch's allocators may still query them."""


class GraphPool:
    """Captures CUDA graphs, which share one stream and one memory pool: a replay may overwrite other graphs' results.

    All graphs of a pool must be dropped together, because they also share cuBLAS workspaces (see `GraphCache`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def capture(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Captures a call of the function without computing anything; returns the graph and the call's result.

        Raises the function's exceptions, and RuntimeError for operations that cannot be captured. The caller must
        then drop earlier graphs, which no longer draw from the device's random number generator.
        """
        graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[self._device.index]
        before = generator.clone_state()
        if not self._graphs:  # PyTorch rejects a pool whose graphs have all been freed
            self._pool = torch.cuda.graph_pool_handle()
        has_ended = False
        try:
            with torch.cuda.device(self._device), self.launching(), _without_collecting():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = function()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                        has_ended = True  # so that freeing the graph also frees its memory
                    raise
                graph.capture_end()
        except BaseException:
            generator.graphsafe_set_state(before)  # a generator state used in a failed capture stays in capture mode
            if not has_ended:
                end_allocating(self._device, self._pool)
                _INVALID.append(graph)
            self._pool = torch.cuda.graph_pool_handle()
            raise
        self._graphs.add(graph)
        return graph, result

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Context in which kernels run on the capture stream, because the default stream does not allow captures.

        Training also runs in this context, because autograd accumulates gradients on the stream of the first forward.
        """
        usual = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(usual)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            usual.wait_stream(self._stream)


def rehearse(function: Callable[[], T]) -> tuple[T, list[Tensor]]:
    """Runs a function; returns its result and the existing tensors that it reads, which must outlive its CUDA graph.

    Raises the function's exceptions, and RuntimeError if PyTorch detects that the host waits for a GPU. Runs the
    function again if it keeps a new tensor outside the result, or copies from pinned memory that it allocates; raises
    CannotBeCaptured if the second run does so too.
    """
    result, reads, problem = _rehearse_once(function)
    if problem:  # perhaps of a tensor that only the first call creates
        result, reads, problem = _rehearse_once(function)
    if problem:
        raise CannotBeCaptured(f"the captured code {problem}")
    return result, reads


def _rehearse_once(function: Callable[[], T]) -> tuple[T, list[Tensor], str]:
    """Runs a function once; returns its result, the tensors that it reads, and why replays would be wrong, or ""."""
    # single-threaded autograd, because the dispatch mode sees only operators of this thread
    with _refusing_waits(), torch.autograd.set_multithreading_enabled(False), _Reads() as reads:
        result = function()
    keeps = reads.kept(result)
    if keeps:
        gc.collect()
        keeps = reads.kept(result)
    # `reads.found` also contains temporaries of compiled code; clearing it frees them at once.
    found = [ref(tensor) for tensor in reads.found.values()]
    reads.found.clear()
    problem = f"keeps a tensor of shape {keeps[0]}, which replays would overwrite" if keeps else ""
    if reads.uploads:
        problem = f"copies a tensor of shape {reads.uploads[0]} from pinned memory, which may be reused before a replay"
    return result, [tensor for each in found if (tensor := each()) is not None], problem


class _Reads(TorchDispatchMode):
    """Collects the tensors that operators read but did not create.

    found: maps a memory address to its tensor. uploads: shapes of pinned tensors that operators created and copied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self.uploads: list[tuple[int, ...]] = []
        self._made: set[int] = set()
        self._outputs: list[ref[Tensor]] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Keeps compiled functions compiled; PyTorch would otherwise run them eagerly in this mode and afterwards."""
        return True

    ignore_compile_internals = is_infra_mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _strided((args, kwargs)):
            memory = tensor.untyped_storage().data_ptr()
            if memory not in self._made:
                self.found[memory] = tensor
            elif not tensor.is_cuda and tensor.is_pinned():
                self.uploads.append(tuple(tensor.shape))
        result = func(*args, **(kwargs or {}))
        for tensor in _strided(result):
            memory = tensor.untyped_storage().data_ptr()
            if memory not in self.found and tensor.is_cuda:
                self._outputs.append(ref(tensor))
            self._made.add(memory)
        return result

    def kept(self, result: Any) -> list[tuple[int, ...]]:
        """Returns the shapes of tensors that operators created and that still exist outside of the result."""
        own = {each.untyped_storage().data_ptr() for each in _strided(getattr(result, "parts", result))}
        there = [tensor for each in self._outputs if (tensor := each()) is not None]
        return [tuple(each.shape) for each in there if each.untyped_storage().data_ptr() not in own]


def _strided(values: Any) -> list[Tensor]:
    leaves, _ = tree_flatten(values)
    return [each for each in leaves if isinstance(each, Tensor) and each.layout == torch.strided]


@contextmanager
def _refusing_waits() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that the detection is incomplete
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Context without garbage collection, which must not free events or graphs during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphCache(dict[Any, R]):
    """Maps input signatures to at most `most` graphs; further signatures run eagerly.

    Only `clear` drops graphs, because freeing one graph also frees the cuBLAS workspace of the other graphs of its
    stream (https://github.com/pytorch/pytorch/issues/193402). left_out: signatures for which no graph is captured,
    because memory was short.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._seen: set[Any] = set()
        self.left_out: set[Any] = set()

    def is_wanted(self, key: Any) -> bool:
        """Returns whether to capture a graph for a signature; False at the first occurrence, which loads kernels."""
        is_new = key not in self._seen
        self._seen.add(key)
        return not is_new and key not in self.left_out and len(self) < self._most


def signature(batch: Batch) -> tuple[Any, ...]:
    """Returns a batch's names, shapes, strides and dtypes, which are equal in all replays of a graph."""
    return tuple((name, tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in batch.items())


def fill(inputs: Mapping[str, Tensor], batch: Batch) -> None:
    """Copies a batch from host memory to the inputs of a graph of the same signature, asynchronously."""
    for name, tensor in batch.items():
        inputs[name].copy_(tensor, non_blocking=True)


class Packed:
    """Tensors concatenated by dtype, so that one kernel copies all tensors of a dtype."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        by_type: dict[torch.dtype, list[str]] = {}
        for name, value in values.items():
            by_type.setdefault(value.dtype, []).append(name)
        self._shapes = {name: value.shape for name, value in values.items()}
        self.parts = [
            (names, torch.cat([values[name].detach().reshape(-1) for name in names])) for names in by_type.values()
        ]

    def after(self, replay: Callable[[], None]) -> dict[str, Tensor]:
        """Calls `replay` and returns copies of the tensors by name, in memory that no graph writes to.

        Allocates the copies first, so that torch.OutOfMemoryError is raised only before the replay.
        """
        copies = [torch.empty_like(part) for _, part in self.parts]
        replay()
        found: dict[str, Tensor] = {}
        for (names, part), copy in zip(self.parts, copies, strict=True):
            sizes = [self._shapes[name].numel() for name in names]
            found.update(zip(names, copy.copy_(part).split(sizes), strict=True))
        return {name: found[name].view(shape) for name, shape in self._shapes.items()}


def difference(
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    replayed: Callable[[], Mapping[str, Tensor]],
    eager: Callable[[], Mapping[str, Tensor]],
    rounding: float,
) -> str | None:
    """Returns the name of a value that differs from the expected value beyond rounding, or None.

    replayed, eager: replay the graph or run eagerly from the same state again, and return the values. The tolerance
    grows with the difference between replays and between eager runs, which comes from nondeterministic sums. An
    outdated number that the capture stored does not raise the tolerance, because it is equal in all replays. rounding:
    maximum tolerance, relative to a tensor's largest absolute value.
    """
    if expected.keys() != found.keys():
        return min(expected.keys() ^ found.keys())
    unequal = [name for name, value in expected.items() if not _is_same(value, found[name])]
    if not unequal:
        return None
    runs = [(found, replayed)] * REPLAYS
    if not torch.are_deterministic_algorithms_enabled():
        runs.append((expected, eager))
    noise = {name: _largest_difference(expected[name], expected[name]) for name in unequal}
    for usual, run in runs:
        other = run()
        noise = {
            name: torch.maximum(most, _largest_difference(usual[name], other[name])) for name, most in noise.items()
        }
    for name, most in noise.items():
        size = _numbers(expected[name]).nan_to_num(0, 0, 0).abs().max()
        if not _largest_difference(expected[name], found[name]) <= torch.minimum(most * SUMMATIONS, rounding * size):
            return name
    return None


def _numbers(value: Tensor) -> Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def _largest_difference(one: Tensor, other: Tensor) -> Tensor:
    """Returns the largest absolute difference of two tensors, or NaN if an element is NaN in only one of them."""
    one, other = _numbers(one), _numbers(other)
    is_same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(is_same, 0, (one - other).abs()).max()


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are equal, with NaN equal to NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
