"""Parts of `torch.cuda` that a CPU build of torch lacks, implemented for simulated GPUs."""

import ctypes
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

MEMORY_BYTES = 2**34
sync_debug_mode: int | str = 0
_library: ctypes.CDLL
_wait_for: Callable[..., None]


class Event:
    """Implements torch.cuda.Event, which by default is recorded on the stream of the current device."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._device = -1

    def record(self, stream: Any = None) -> None:
        self._device = _library.simulated_device() if stream is None else stream.device_index
        on = _library.simulated_stream(self._device) if stream is None else stream.stream_id
        self._capture = _library.simulated_capture(self._device, ctypes.c_int64(on))
        self._ticket, self._time = _library.simulated_ticket(), time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        if self._device >= 0:
            device = _library.simulated_device() if stream is None else stream.device_index
            on = _library.simulated_stream(device) if stream is None else stream.stream_id
            check(_library.simulated_wait_for_event(ctypes.c_int64(self._capture), device, ctypes.c_int64(on)))

    def synchronize(self) -> None:
        if self._device < 0:
            return  # an event that was never recorded is complete
        self._check_no_capture()
        _wait_for(self._device, self._ticket)

    def query(self) -> bool:
        self.synchronize()  # the GPU finishes at the first query
        return True

    def elapsed_time(self, end: "Event") -> float:
        for event in (self, end):
            event._check_no_capture()
            if event._ticket > _library.simulated_done(event._device):
                raise RuntimeError("CUDA error: device not ready")
        if self._device != end._device:
            raise RuntimeError("CUDA error: invalid resource handle")
        return 1e3 * (end._time - self._time)

    def _check_no_capture(self) -> None:
        if self._capture:
            raise RuntimeError("CUDA error: operation not permitted on an event last recorded in a capturing stream")


class CUDAGraph:
    num_captures = num_replays = 0  # of all graphs
    _num_pools = 0
    _allocating: set[Any] = set()  # pools of captures that are active or failed
    _num_of_pool: Counter[Any] = Counter()  # number of graphs in each pool; 0 if all were deleted
    _num_freed: Counter[Any] = Counter()  # number of freed graphs of each stream

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph, self._captured = ctypes.c_void_p(), False

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        if self._graph:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        self._pool = pool or graph_pool_handle()
        if self._pool in self._allocating:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if self._num_of_pool.get(self._pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._num_of_pool[self._pool] += 1
        self._allocating.add(self._pool)
        device = _library.simulated_device()
        self._stream = device, _library.simulated_stream(device)
        self._num_freed_before = self._num_freed[self._stream]
        mode = ctypes.c_char(capture_error_mode[0].encode())
        check(_library.simulated_begin(ctypes.c_int64(self._pool[1]), mode, ctypes.byref(self._graph)))

    def capture_end(self) -> None:
        check(_library.simulated_end(self._graph))
        end_allocating(-1, self._pool)
        self._captured = True
        CUDAGraph.num_captures += 1

    def replay(self) -> None:
        if not self._captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if self._num_freed[self._stream] > self._num_freed_before:
            raise RuntimeError("a graph of the same stream was freed, and with it the cuBLAS workspace of this graph")
        CUDAGraph.num_replays += 1
        check(_library.simulated_replay(self._graph))

    def reset(self) -> None:
        _library.simulated_delete(self._graph)
        if self._captured:
            self._num_of_pool[self._pool] -= 1
            self._num_freed[self._stream] += 1
        self._graph, self._captured = ctypes.c_void_p(), False

    def pool(self) -> Any:
        if not self._captured:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def __del__(self) -> None:
        self.reset()


def graph_pool_handle() -> tuple[int, int]:
    CUDAGraph._num_pools += 1
    return 0, CUDAGraph._num_pools


def end_allocating(device: int, pool: Any) -> None:
    """Implements torch._C._cuda_endAllocateToPool."""
    if pool not in CUDAGraph._allocating:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    CUDAGraph._allocating.remove(pool)


is_initialized = False


def initialise() -> None:
    """Implements torch.cuda.init."""
    global is_initialized
    import torch

    if not is_initialized:
        is_initialized = torch.cuda._initialized = True
        for call, _ in torch.cuda._queued_calls:
            call()


def empty_cache() -> None:
    if CUDAGraph._allocating:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")


def check(failure: bytes | None) -> None:
    """Raises the error that a function of the library returned, if any."""
    if failure is None:
        return
    import torch

    text = failure.decode()
    raise (torch.OutOfMemoryError if "out of memory" in text else RuntimeError)(text)


def _set_sync_debug_mode(mode: int | str) -> None:
    global sync_debug_mode
    sync_debug_mode = mode


def install(library: ctypes.CDLL, num_gpus: int, capability: tuple[int, int], wait_for: Callable[..., None]) -> None:
    """Replaces functions of torch.cuda for the rest of this process."""
    global _library, _wait_for
    _library, _wait_for = library, wait_for
    import torch

    def index(device: Any) -> int:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return int(library.simulated_device()) if device.index is None else int(device.index)

    properties = {
        "name": "Simulated GPU", "major": capability[0], "minor": capability[1], "total_memory": MEMORY_BYTES,
        "multi_processor_count": 1,
    }  # fmt: skip

    def exchange_device(device: int) -> int:
        before = int(library.simulated_device())
        if device >= 0:
            library.simulated_set_device(device)
        return before

    class Stream(torch.Stream):
        """Stream that runs operators immediately, in program order. Only captures distinguish streams."""

        def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> Any:
            return super().__new__(cls, **ids) if ids else super().__new__(cls, torch.device("cuda", index(device)))

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:
            self.wait_event(stream.record_event())

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    def stream_of(device: Any, default: bool = False) -> Stream:
        device = index(device)
        stream_id = 0 if default else library.simulated_stream(device)
        return Stream(stream_id=stream_id, device_index=device, device_type=cuda_type)

    def set_stream(stream: Any) -> None:
        if stream is not None:
            library.simulated_set_stream(stream.device_index, ctypes.c_int64(stream.stream_id))

    generators = tuple(torch.Generator(torch.device("cuda", i)) for i in range(num_gpus))
    for i, generator in enumerate(generators):
        library.simulated_set_generator(i, ctypes.c_void_p(generator._cdata))
    cuda_type = torch.Stream(torch.device("cuda", 0)).device_type

    cuda: Any = torch.cuda
    replaced = {
        "is_available": lambda: True,
        "is_initialized": lambda: is_initialized,
        "_lazy_init": initialise,
        "init": initialise,
        "device_count": lambda: num_gpus,
        "current_device": lambda: int(library.simulated_device()),
        "set_device": lambda device: exchange_device(index(device)),
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": lambda device: exchange_device(device),  # dynamo needs a distinct function
        "get_device_name": lambda device=None: properties["name"],
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: SimpleNamespace(**properties, uuid=f"simulated-{index(device)}"),
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0),
        "is_current_stream_capturing": lambda: bool(
            library.simulated_capture(i := library.simulated_device(), ctypes.c_int64(library.simulated_stream(i)))
        ),
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": graph_pool_handle,
        "can_device_access_peer": lambda device, peer: True,
        "mem_get_info": lambda device=None: (MEMORY_BYTES - library.simulated_used(index(device)), MEMORY_BYTES),
        "memory_allocated": lambda device=None: library.simulated_used(index(device)),
        "memory_reserved": lambda device=None: library.simulated_used(index(device)),
        "max_memory_allocated": lambda device=None: library.simulated_peak(index(device)),
        "reset_peak_memory_stats": lambda device=None: library.simulated_forget_peak(index(device)),
        "empty_cache": empty_cache,
        "host_memory_stats": dict,
        "get_sync_debug_mode": lambda: sync_debug_mode,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "synchronize": lambda device=None: wait_for(index(device), what="torch.cuda.synchronize"),
        "current_stream": lambda device=None: stream_of(device),
        "default_stream": lambda device=None: stream_of(device, default=True),
        "set_stream": set_stream,
        "Stream": Stream,
        "Event": Event,
        "default_generators": generators,
    }
    initialising = {"current_device", "set_device", "get_device_name", "get_device_capability", "get_device_properties",
                    "mem_get_info", "current_stream", "default_stream", "synchronize"}  # fmt: skip
    replaced |= {name: _after_initialising(replaced[name]) for name in initialising}
    cuda._queued_calls.clear()  # torch's own queued calls need a real GPU
    for name, replacement in replaced.items():
        assert hasattr(cuda, name), name
        for module in (cuda, cuda.random):  # cuda.random imports some functions by name
            if hasattr(module, name):
                setattr(module, name, replacement)
    torch.backends.cuda.is_built = lambda: True
    torch._C._host_emptyCache = lambda: None
    torch._C._cuda_endAllocateToPool = end_allocating
    _install_resizing(torch)
    _install_exchanges(torch)


def _after_initialising(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        initialise()
        return function(*args, **kwargs)

    return call


def _install_resizing(torch: Any) -> None:
    """Replaces the resizing of storages, which bypasses torch's dispatcher."""
    resize_on_host = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize_on_host(storage, size)
        _library.simulated_resize(ctypes.c_void_p(storage._cdata), ctypes.c_int64(size))
        return storage

    torch.UntypedStorage.resize_ = resize_


def _install_exchanges(torch: Any) -> None:
    """Replaces the exchanges of nn.DataParallel between GPUs, for which a CPU build has no kernels."""
    comm = torch.nn.parallel.comm

    def scatter(tensor: Any, devices: Any, chunk_sizes: Any = None, dim: int = 0, streams: Any = None) -> Any:
        parts = tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)
        moved = zip(parts, devices, strict=False)
        return tuple(part.to(f"cuda:{device}", non_blocking=True) for part, device in moved)

    def gather(tensors: Any, dim: int = 0, destination: Any = None) -> Any:
        return torch.cat([tensor.to(f"cuda:{destination}") for tensor in tensors], dim)

    def broadcast(tensors: Any, devices: Any, buffer_size: int = 0) -> Any:
        return [[t if i == t.get_device() else t.detach().to(f"cuda:{i}") for t in tensors] for i in devices]

    def reduce_add(groups: Any, destination: Any = None, buffer_size: int = 0) -> Any:
        return tuple(sum(t.to(f"cuda:{destination}") for t in same) for same in zip(*groups, strict=True))

    comm.scatter, comm.gather = scatter, gather
    comm.broadcast_coalesced, comm.reduce_add_coalesced = broadcast, reduce_add
