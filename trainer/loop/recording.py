"""Recording what a function launches on a GPU, as a CUDA graph."""

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
"""How many times the difference of two replays a recording may be off, where these differ."""
REPLAYS = 3
"""By which that difference is found."""


class CannotBeRecorded(RuntimeError):
    """Why a recording would not do what its function does."""


class Recorder:
    """Records what functions launch on a GPU.

    All recordings share one pool of memory: a replay may overwrite what another recording has left there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._broken: list[torch.cuda.CUDAGraph] = []

    def record(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The recording of a call, in which nothing is computed, and what the function returned.

        Raises what the function raises, RuntimeError where it does what cannot be recorded. The generator of the device
        is a new one then, on which no earlier recording draws.
        """
        graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[self._device.index]
        before = generator.clone_state()
        if not self._graphs:  # torch takes no pool again whose graphs are all gone
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
            generator.graphsafe_set_state(before)  # one that a broken recording has drawn on stays as if in it
            # torch's allocators may believe that it still goes on in this pool, and may ask the graph.
            end_allocating(self._device, self._pool)
            self._broken.append(graph)
            self._pool = torch.cuda.graph_pool_handle()
            raise
        self._graphs.add(graph)
        return graph, result

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Within it kernels are launched in the stream of recordings, which are not made in a device's usual one.

        What autograd keeps of a parameter belongs to the stream in which a forward first used it.
        """
        usual = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(usual)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            usual.wait_stream(self._stream)


def rehearse(function: Callable[[], T]) -> tuple[T, list[Tensor]]:
    """What a function returns, and the tensors of before that it reads: a recording needs their memory.

    Raises RuntimeError where the host would wait for a GPU, as far as torch can tell, where somebody keeps a tensor
    that the function makes each time, and what the function raises.
    """
    result, reads, keeps = _rehearse_once(function)
    if keeps:  # perhaps what it makes once, and finds from then on
        result, reads, keeps = _rehearse_once(function)
    if keeps:
        raise CannotBeRecorded(f"something keeps a tensor of the shape {keeps[0]}, which replays would overwrite")
    return result, reads


def _rehearse_once(function: Callable[[], T]) -> tuple[T, list[Tensor], list[tuple[int, ...]]]:
    """The last part: shapes of the tensors that are kept."""
    # Backwards in this thread, where the operators of a forward are seen too.
    with _refusing_waits(), torch.autograd.set_multithreading_enabled(False), _Reads() as reads:
        result = function()
    keeps = reads.kept(result)
    if keeps:
        gc.collect()
        keeps = reads.kept(result)
    # Compiled code shows operators what it has made itself; that is gone once nobody else holds it.
    found = [ref(tensor) for tensor in reads.found.values()]
    reads.found.clear()
    return result, [tensor for each in found if (tensor := each()) is not None], keeps


class _Reads(TorchDispatchMode):
    """Notes the tensors that operators get and that no operator made before. found: by their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._made: set[int] = set()
        self._outputs: list[ref[Tensor]] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Or torch would never again run as compiled what it is asked for within it."""
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
        """Shapes of the tensors that operators have made, and that are still there but not in the result."""
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
        warnings.simplefilter("ignore")  # that it cannot always tell
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Objects that only refer to each other stay: to free an event or a graph is no part of a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Recordings(OrderedDict[Any, R]):
    """Recordings by signature, at most a fixed number: beyond it the one goes that was not used for longest.

    left_out: signatures that get none, such as those of recordings that have gone, which would displace each other.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._seen: set[Any] = set()
        self.left_out: set[Any] = set()

    def used(self, key: Any) -> R | None:
        """The recording of a signature that is about to be used, or None."""
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def is_wanted(self, key: Any) -> bool:
        """Whether a signature without a recording gets one. The first time that it comes its kernels are loaded."""
        is_new = key not in self._seen
        self._seen.add(key)
        return not is_new and key not in self.left_out

    def make_place(self) -> None:
        """Before one more recording."""
        if len(self) >= self._most:
            self.left_out.add(self.popitem(last=False)[0])


def signature(batch: Batch) -> tuple[Any, ...]:
    """Names, shapes, layouts and types of a batch, of which a recording takes only the content."""
    return tuple((name, tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in batch.items())


def fill(inputs: Mapping[str, Tensor], batch: Batch) -> None:
    """Copies a batch in host memory, of the same signature, to where a recording reads it, without waiting."""
    for name, tensor in batch.items():
        inputs[name].copy_(tensor, non_blocking=True)


class Packed:
    """Tensors of each type one behind the other, so that one kernel copies all of them."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        by_type: dict[torch.dtype, list[str]] = {}
        for name, value in values.items():
            by_type.setdefault(value.dtype, []).append(name)
        self._shapes = {name: value.shape for name, value in values.items()}
        self.parts = [
            (names, torch.cat([values[name].detach().reshape(-1) for name in names])) for names in by_type.values()
        ]

    def after(self, replay: Callable[[], None]) -> dict[str, Tensor]:
        """The tensors by name, as the recording writes them that is replayed, in memory that no recording writes to.

        That is taken before: where there is none, torch.OutOfMemoryError is raised, and nothing has been done.
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
    """The name of a value that is another one than expected, beyond rounding; None if there is none.

    replayed: finds the values once more, by the same kernels: where they come out differently, their order of summation
    is open. What an own forward takes from the host differs from launch to launch too, but not from replay to replay.
    rounding: the most that an open order may change, as a part of a tensor's largest value.
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
    """NaN where one of them alone is NaN."""
    one, other = _numbers(one), _numbers(other)
    is_same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(is_same, 0, (one - other).abs()).max()


def _is_same(one: Tensor, other: Tensor) -> bool:
    """To the bit, or NaN in both."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
