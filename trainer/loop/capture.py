"""Captures the kernels of a function as a CUDA graph, and replays the graph."""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor

from trainer.common.torch_private import TorchDispatchMode, end_allocating, tree_flatten
from trainer.loading.batches import Batch
from trainer.loop.obstacles import CannotBeCaptured
from trainer.task import Outputs, PerSample

T = TypeVar("T")
Values = Mapping[str, Tensor]

SUMMATIONS = 8
"""Tolerance of a comparison, as a multiple of the largest difference between runs that should be equal."""
REPLAYS = 8
"""Number of further replays that measure how much replays differ."""

_INVALID: list[torch.cuda.CUDAGraph] = []
"""Graphs of captures that CUDA invalidated; never freed, because PyTorch's allocators may still query them."""


class Packed:
    """Outputs of an objective, concatenated by dtype, so that one kernel copies all tensors of a dtype."""

    def __init__(self, outputs: Outputs) -> None:
        values, by_type = tensors_of(outputs), dict[torch.dtype, list[str]]()
        for name, value in values.items():
            by_type.setdefault(value.dtype, []).append(name)
        self._per_sample = {name for name, value in outputs.items() if isinstance(value, PerSample)}
        self._shapes = {name: value.shape for name, value in values.items()}
        self.parts = [
            (names, torch.cat([values[name].detach().reshape(-1) for name in names])) for names in by_type.values()
        ]

    def after(self, replay: Callable[[], None]) -> dict[str, Any]:
        """Calls `replay` and returns copies of the outputs, in memory that no graph writes to.

        Allocates the copies first, so that torch.OutOfMemoryError is raised only before the replay.
        """
        copies = [torch.empty_like(part) for _, part in self.parts]
        replay()
        found: dict[str, Tensor] = {}
        for (names, part), copy in zip(self.parts, copies, strict=True):
            sizes = [self._shapes[name].numel() for name in names]
            found.update(zip(names, copy.copy_(part).split(sizes), strict=True))
        views = {name: found[name].view(shape) for name, shape in self._shapes.items()}
        return {name: PerSample(view) if name in self._per_sample else view for name, view in views.items()}


def tensors_of(outputs: Outputs) -> dict[str, Tensor]:
    """Returns the tensors of outputs by name, without their `PerSample` wrappers."""
    return {name: value.values if isinstance(value, PerSample) else value for name, value in outputs.items()}


class CapturedGraph(NamedTuple):
    """CUDA graph with its tensors. inputs: tensors to fill before a replay. results: tensors that a replay writes.

    reads: other tensors that a replay reads, which must stay alive. present: whether each parameter has a gradient
    after the replay of a backward pass.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Mapping[str, Tensor]
    results: Packed
    reads: Sequence[Tensor] = ()
    present: tuple[bool, ...] = ()

    def fill(self, batch: Batch) -> None:
        """Copies a batch of the captured signature from host memory to the inputs, asynchronously."""
        for name, tensor in batch.items():
            self.inputs[name].copy_(tensor, non_blocking=True)

    def replay(self) -> dict[str, Any]:
        """Replays the graph; returns copies of its results. Any torch.OutOfMemoryError is raised before the replay."""
        return self.results.after(self.graph.replay)


def signature(batch: Batch) -> tuple[Any, ...]:
    """Returns a batch's names, shapes, strides and dtypes, which are equal in all replays of a graph."""
    return tuple((name, tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in batch.items())


class GraphPool(dict[Any, CapturedGraph]):
    """Maps input signatures to CUDA graphs, which share one stream and one memory pool.

    A replay may overwrite other graphs' results. Only `clear` drops graphs, because freeing one graph also frees the
    cuBLAS workspace of the other graphs of its stream (https://github.com/pytorch/pytorch/issues/193402).

    most: maximum number of graphs; further signatures run eagerly. least_free: fraction of the device's memory that
    must be free to capture further graphs; 0 skips this check.
    """

    def __init__(self, device: torch.device, most: int, least_free: float = 0.0) -> None:
        super().__init__()
        self.device, self._most, self._least_free = device, most, least_free
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._seen: set[Any] = set()
        self._left_out: set[Any] = set()

    def is_wanted(self, key: Any) -> bool:
        """Returns whether to capture a graph for a signature; False at the first occurrence, which loads kernels."""
        is_new = key not in self._seen
        self._seen.add(key)
        if is_new or key in self._left_out or len(self) >= self._most:
            return False
        if self._least_free and self._is_memory_short():
            self._left_out.add(key)
        return key not in self._left_out

    def _is_memory_short(self) -> bool:
        """Returns whether free memory is short; empties PyTorch's cache if it reserves more memory than is free."""
        if torch.cuda.mem_get_info(self.device)[0] < torch.cuda.memory_reserved(self.device):
            torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return bool(self) and free < self._least_free * total

    def capture(
        self, function: Callable[[], Packed], inputs: Mapping[str, Tensor] = {}, reads: Sequence[Tensor] = ()
    ) -> CapturedGraph:
        """Captures a call of the function without computing anything. inputs, reads: entries of the returned graph.

        Raises the function's exceptions, and RuntimeError for operations that cannot be captured. The caller must
        then drop earlier graphs, which no longer draw from the device's random number generator.
        """
        graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[self.device.index]
        before = generator.clone_state()
        if not self:  # PyTorch rejects a pool whose graphs have all been freed
            self._pool = torch.cuda.graph_pool_handle()
        has_ended = False
        try:
            with torch.cuda.device(self.device), self.launching(), _without_collecting():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    results = function()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                        has_ended = True  # so that freeing the graph also frees its memory
                    raise
                graph.capture_end()
        except BaseException:
            generator.graphsafe_set_state(before)  # a generator state used in a failed capture stays in capture mode
            if not has_ended:
                end_allocating(self.device, self._pool)
                _INVALID.append(graph)
            self._pool = torch.cuda.graph_pool_handle()
            raise
        return CapturedGraph(graph, inputs, results, reads)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Context in which kernels run on the capture stream, because the default stream does not allow captures.

        Training also runs in this context, because autograd accumulates gradients on the stream of the first forward.
        """
        usual = torch.cuda.current_stream(self.device)
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
    for _ in range(2):  # perhaps only the first call creates a tensor that remains
        # single-threaded autograd, because the dispatch mode sees only operators of this thread
        with _refusing_waits(), torch.autograd.set_multithreading_enabled(False), _Reads() as reads:
            result = function()
        problem = reads.problem(result)
        # `reads.found` also contains temporaries of compiled code; clearing it frees them at once.
        found = [ref(tensor) for tensor in reads.found.values()]
        reads.found.clear()
        if problem is None:
            return result, [tensor for each in found if (tensor := each()) is not None]
    raise CannotBeCaptured(f"the captured code {problem}")


class _Reads(TorchDispatchMode):
    """Collects the tensors that operators read but did not create. found: maps a memory address to its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._pinned: list[tuple[int, ...]] = []  # shapes of pinned tensors that operators created and copied
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
                self._pinned.append(tuple(tensor.shape))
        result = func(*args, **(kwargs or {}))
        for tensor in _strided(result):
            memory = tensor.untyped_storage().data_ptr()
            if memory not in self.found and tensor.is_cuda:
                self._outputs.append(ref(tensor))
            self._made.add(memory)
        return result

    def problem(self, result: Any) -> str | None:
        """Returns why replays would be wrong, or None. result: what the rehearsed function returned."""
        kept = self._kept(result)
        if kept:
            gc.collect()
            kept = self._kept(result)
        if self._pinned:
            return f"copies a tensor of shape {self._pinned[0]} from pinned memory, which may be reused before a replay"
        return f"keeps a tensor of shape {kept[0]}, which replays would overwrite" if kept else None

    def _kept(self, result: Any) -> list[tuple[int, ...]]:
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


def difference(
    expected: Values, found: Values, replay: Callable[[], Values], run_eagerly: Callable[[], Values], rounding: float
) -> str | None:
    """Returns the name of a value that differs from the expected value beyond rounding, or None.

    replay, run_eagerly: replay the graph or run eagerly from the same state again, and return the values. The tolerance
    grows with the difference between replays and between eager runs, which comes from nondeterministic sums. An
    outdated number that the capture stored does not raise the tolerance, because it is equal in all replays. rounding:
    maximum tolerance, relative to a tensor's largest absolute value.
    """
    if expected.keys() != found.keys():
        return min(expected.keys() ^ found.keys())
    unequal = [name for name, value in expected.items() if not _is_same(value, found[name])]
    if not unequal:
        return None
    runs = [(found, replay)] * REPLAYS
    if not torch.are_deterministic_algorithms_enabled():
        runs.append((expected, run_eagerly))
    noise = {name: _largest_difference(expected[name], expected[name]) for name in unequal}
    for usual, run in runs:
        other = run()
        for name in unequal:
            noise[name] = torch.maximum(noise[name], _largest_difference(usual[name], other[name]))
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
