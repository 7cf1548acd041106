"""Captures the kernels of a function as a CUDA graph."""

import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakSet, ref

import torch
from torch import Tensor

from trainer.common.torch_private import TorchDispatchMode, end_allocating, tree_flatten
from trainer.loading.batches import Batch

T = TypeVar("T")
R = TypeVar("R")

SUMMATIONS = 8
"""Tolerance as a multiple of the difference between two replays, if these differ."""
REPLAYS = 3
"""Replays that measure that difference."""


class CannotBeRecorded(RuntimeError):
    """The reason why a function cannot be captured."""


class Recorder:
    """Captures functions as CUDA graphs.

    All graphs share one memory pool: a replay may overwrite what another graph has left there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._broken: list[torch.cuda.CUDAGraph] = []

    def record(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Captures a call, which computes nothing; returns the graph and the function's result.

        Raises the function's exceptions, and RuntimeError for operations that cannot be captured. The device's
        generator is then a new one, from which no earlier graph draws.
        """
        graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[self._device.index]
        before = generator.clone_state()
        if not self._graphs:  # torch refuses a pool whose graphs are all gone
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.device(self._device), self.launching(), _without_collecting():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = function()
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            generator.graphsafe_set_state(before)  # one that a broken capture drew from stays in capture mode
            # torch's allocators may take the pool to be in use, and may query the graph.
            end_allocating(self._device, self._pool)
            self._broken.append(graph)
            self._pool = torch.cuda.graph_pool_handle()
            raise
        self._graphs.add(graph)
        return graph, result

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Launches kernels on the capture stream; capturing is not allowed on the default stream.

        Autograd binds a parameter's gradient accumulation to the stream of its first forward.
        """
        usual = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(usual)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            usual.wait_stream(self._stream)


def dry_run(function: Callable[[], T]) -> tuple[T, list[Tensor]]:
    """Runs a function and returns its result and the existing tensors that it reads, which a graph needs alive.

    Raises RuntimeError if the host would wait for a GPU, as far as torch can tell, or if something keeps a tensor that
    every call creates; and the function's exceptions.
    """
    result, reads, keeps = _rehearse_once(function)
    if keeps:  # perhaps created once and reused
        result, reads, keeps = _rehearse_once(function)
    if keeps:
        raise CannotBeRecorded(f"something keeps a tensor of shape {keeps[0]}, which replays would overwrite")
    return result, reads


def _rehearse_once(function: Callable[[], T]) -> tuple[T, list[Tensor], list[tuple[int, ...]]]:
    """Also returns the shapes of kept tensors."""
    # backwards in this thread, where this mode sees their operators
    with _refusing_waits(), torch.autograd.set_multithreading_enabled(False), _Reads() as reads:
        result = function()
    keeps = reads.kept(result)
    if keeps:
        gc.collect()
        keeps = reads.kept(result)
    # Compiled code exposes its own temporaries, which are gone once nobody else holds them.
    found = [ref(tensor) for tensor in reads.found.values()]
    reads.found.clear()
    return result, [tensor for each in found if (tensor := each()) is not None], keeps


class _Reads(TorchDispatchMode):
    """Collects tensors that operators read but did not create. found: by memory address."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._made: set[int] = set()
        self._outputs: list[ref[Tensor]] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Keeps compiled functions compiled; otherwise torch would never run them so again."""
        return True

    ignore_compile_internals = is_infra_mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _strided((args, kwargs)):
            memory = tensor.untyped_storage().data_ptr()
            if memory not in self._made:
                self.found[memory] = tensor
        result = func(*args, **(kwargs or {}))
        for tensor in _strided(result):
            memory = tensor.untyped_storage().data_ptr()
            if memory not in self.found and tensor.is_cuda:
                self._outputs.append(ref(tensor))
            self._made.add(memory)
        return result

    def kept(self, result: Any) -> list[tuple[int, ...]]:
        """Returns shapes of tensors that operators created and that still exist outside the result."""
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
        warnings.simplefilter("ignore")  # that detection is incomplete
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Disables garbage collection, since capture must not free events or graphs."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Recordings(OrderedDict[Any, R]):
    """Graphs by signature; beyond `most` the least recently used one is dropped.

    left_out: signatures without a graph, such as dropped ones, which would displace each other.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._seen: set[Any] = set()
        self.left_out: set[Any] = set()

    def used(self, key: Any) -> R | None:
        """Returns the graph of a signature and marks it as used, or None."""
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def is_wanted(self, key: Any) -> bool:
        """Returns whether to capture a signature; not at its first occurrence, which loads its kernels."""
        is_new = key not in self._seen
        self._seen.add(key)
        return not is_new and key not in self.left_out

    def make_place(self) -> None:
        """Makes room for one more graph."""
        if len(self) >= self._most:
            self.left_out.add(self.popitem(last=False)[0])


def signature(batch: Batch) -> tuple[Any, ...]:
    """Returns names, shapes, layouts and types of a batch; replays vary only its content."""
    return tuple((name, tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in batch.items())


def fill(inputs: Mapping[str, Tensor], batch: Batch) -> None:
    """Copies a host batch of the same signature into a graph's inputs, without waiting."""
    for name, tensor in batch.items():
        inputs[name].copy_(tensor, non_blocking=True)


class Packed:
    """Tensors concatenated by type, so that one kernel copies all of a type."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        by_type: dict[torch.dtype, list[str]] = {}
        for name, value in values.items():
            by_type.setdefault(value.dtype, []).append(name)
        self._shapes = {name: value.shape for name, value in values.items()}
        self.parts = [
            (names, torch.cat([values[name].detach().reshape(-1) for name in names])) for names in by_type.values()
        ]

    def after(self, replay: Callable[[], None]) -> dict[str, Tensor]:
        """Replays and returns copies of the tensors by name, in memory that no graph writes to.

        Allocates first: torch.OutOfMemoryError is raised before anything is done.
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
    rounding: float,
) -> str | None:
    """Returns the name of a value that differs from the expected one beyond rounding, or None.

    replayed: recomputes the values with the same kernels; differences among replays show an open order of summation,
    whereas values taken from the host change between launches but not between replays. rounding: tolerance for an open
    order, relative to a tensor's largest value.
    """
    if expected.keys() != found.keys():
        return min(expected.keys() ^ found.keys())
    unequal = [name for name, value in expected.items() if not _is_same(value, found[name])]
    if not unequal:
        return None
    others = [replayed() for _ in range(REPLAYS)]
    for name in unequal:
        value = expected[name]
        size = _numbers(value).nan_to_num(0, 0, 0).abs().max()
        noise = max(_largest_difference(found[name], other[name]) for other in others) * SUMMATIONS
        if not _largest_difference(value, found[name]) <= torch.minimum(noise, rounding * size):
            return name
    return None


def _numbers(value: Tensor) -> Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def _largest_difference(one: Tensor, other: Tensor) -> Tensor:
    """Returns the largest difference; NaN if only one of them is NaN."""
    one, other = _numbers(one), _numbers(other)
    is_same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(is_same, 0, (one - other).abs()).max()


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Compares bit for bit, with NaN equal to NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
