"""What of `torch.cuda` a CPU build of torch does not have, for imagined GPUs."""

import ctypes
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

MEMORY_BYTES = 2**34
_library: ctypes.CDLL
_wait_for: Callable[..., None]


class Event:
    """torch.cuda.Event. It is recorded on the stream of the *current* device, unless told otherwise."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._device = -1

    def record(self, stream: Any = None) -> None:
        self._device = _library.imagined_device() if stream is None else stream.device_index
        self._ticket, self._time = _library.imagined_ticket(), time.perf_counter()

    def synchronize(self) -> None:
        if self._device >= 0:  # one that was never recorded is done
            _wait_for(self._device, self._ticket)

    def query(self) -> bool:
        self.synchronize()  # the GPU is infinitely fast, once it is asked
        return True

    def elapsed_time(self, end: "Event") -> float:
        for event in (self, end):
            if event._ticket > _library.imagined_done(event._device):
                raise RuntimeError("CUDA error: device not ready")
        if self._device != end._device:
            raise RuntimeError("CUDA error: invalid resource handle")
        return 1e3 * (end._time - self._time)


class Generator:
    """What is drawn on a GPU comes from the host's generator, which the program seeds alike."""

    def manual_seed(self, seed: int) -> None:
        pass


def install(library: ctypes.CDLL, num_gpus: int, capability: tuple[int, int], wait_for: Callable[..., None]) -> None:
    """For the rest of this process."""
    global _library, _wait_for
    _library, _wait_for = library, wait_for
    import torch

    def index(device: Any) -> int:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return int(library.imagined_device()) if device.index is None else int(device.index)

    properties = {
        "name": "Imagined GPU", "major": capability[0], "minor": capability[1], "total_memory": MEMORY_BYTES,
        "multi_processor_count": 1,
    }  # fmt: skip

    def exchange_device(device: int) -> int:
        before = int(library.imagined_device())
        if device >= 0:
            library.imagined_set_device(device)
        return before

    class Stream(torch.Stream):
        """Every one is the only one of its device, in which all is done in the order in which it is asked for."""

        def wait_event(self, event: Event) -> None:
            pass

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

    cuda: Any = torch.cuda
    replaced = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: num_gpus,
        "current_device": lambda: int(library.imagined_device()),
        "set_device": lambda device: exchange_device(index(device)),
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": lambda device: exchange_device(device),  # dynamo tells functions apart
        "get_device_name": lambda device=None: properties["name"],
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: SimpleNamespace(**properties, uuid=f"imagined-{index(device)}"),
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda device, peer: True,
        "mem_get_info": lambda device=None: (MEMORY_BYTES - library.imagined_used(index(device)), MEMORY_BYTES),
        "memory_allocated": lambda device=None: library.imagined_used(index(device)),
        "max_memory_allocated": lambda device=None: library.imagined_peak(index(device)),
        "reset_peak_memory_stats": lambda device=None: library.imagined_forget_peak(index(device)),
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: wait_for(index(device), what="torch.cuda.synchronize"),
        "current_stream": lambda device=None: Stream(torch.device("cuda", index(device))),
        "Stream": lambda device=None, priority=0: Stream(torch.device("cuda", index(device))),
        "stream": lambda stream: nullcontext() if stream is None else cuda.device(stream.device),
        "Event": Event,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": None,
        "default_generators": [Generator() for _ in range(num_gpus)],
    }
    for name, replacement in replaced.items():
        assert hasattr(cuda, name), name
        setattr(cuda, name, replacement)
    _install_resizing(torch)
    _install_exchanges(torch)


def _install_resizing(torch: Any) -> None:
    """Of storages, which torch does without its dispatcher."""
    resize_on_host = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize_on_host(storage, size)
        _library.imagined_resize(ctypes.c_void_p(storage._cdata), ctypes.c_int64(size))
        return storage

    torch.UntypedStorage.resize_ = resize_


def _install_exchanges(torch: Any) -> None:
    """What nn.DataParallel moves between GPUs, of which a CPU build has no kernels."""
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
