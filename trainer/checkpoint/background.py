"""Background saving: copies the state in memory, and writes the copy in a thread."""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.common.errors import DiskError
from trainer.common.tensors import map_tensors

THREAD_NAME = "save"


def snapshot(state: dict[str, Any], reusable: dict[str, Any] | None = None, pinned: bool = True) -> dict[str, Any]:
    """Copies every tensor of a state into host memory; tensors shared under two names stay shared.

    NumPy scalars become Python's: a task may compute them unnoticed (`np.float64` is a float), and a file with one
    could not be read without executing code.

    reusable: an older snapshot, whose memory is reused, which is several times faster than fresh memory. From a GPU all
    copies are asynchronous, into pinned memory, with one wait; without enough pinned memory, or with pinned=False,
    into pageable memory, which takes longer.
    """
    buffers = defaultdict(list)
    for buffer in tensors_of(reusable):
        buffers[_kind(buffer)].append(buffer)
    copies: dict[Any, Tensor] = {}

    def copy_tensor(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor.detach().to("cpu", copy=True)
        key = (tensor.device, tensor.data_ptr(), _kind(tensor))
        if key not in copies:
            fitting = buffers[_kind(tensor)]
            buffer = fitting.pop() if fitting else _new_buffer(tensor, pinned)
            copies[key] = buffer.copy_(tensor.detach(), non_blocking=True)
        return copies[key]

    copied = map_tensors(state, copy_tensor)
    for device in {device for device, *_ in copies}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return copied


def _new_buffer(tensor: Tensor, pinned: bool) -> Tensor:
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda and pinned)
    except RuntimeError:  # the system limits pinned memory
        return torch.empty_like(tensor, device="cpu")


def tensors_of(state: Any) -> list[Tensor]:
    """Lists the distinct tensors of a state."""
    found: dict[int, Tensor] = {}
    map_tensors(state, lambda tensor: found.setdefault(id(tensor), tensor))
    return list(found.values())


def state_bytes(state: Any) -> int:
    """Returns the total size of a state's tensors in bytes."""
    return sum(tensor.nbytes for tensor in tensors_of(state))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """Identifies tensors that can reuse each other's memory."""
    return tensor.dtype, tensor.shape, tensor.stride() if tensor.layout == torch.strided else None


class NoRoom(DiskError):
    """A checkpoint did not fit on disk; existing files are intact. problem: the message without advice."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; free some space and run the same command again, or choose another folder")
        self.problem = problem


class BackgroundSaver:
    """Copies states and writes them one at a time. Used on rank 0, by its main thread.

    write: writes one state; raises UserError, NoRoom if the disk is full.

    A copy that does not fit stays in memory until the next one; one of the best weights until it is written or
    superseded. So a checkpoint on disk never refers to a missing best one. (The other best ones of `--keep-best` are
    not kept in memory.)
    """

    def __init__(self, write: Callable[[dict[str, Any]], object]) -> None:
        self._write_state = write
        self._thread: threading.Thread | None = None
        self._unsaved: list[dict[str, Any]] = []
        """Unwritten copies, oldest first; immutable."""
        self._reusable: dict[str, Any] | None = None
        """The state written last, whose memory the next copy reuses."""
        self._error: BaseException | None = None
        self._no_room: NoRoom | None = None

    def start(self, state: dict[str, Any]) -> None:
        """Copies the state and starts to write it. Call `wait` first."""
        assert self._thread is None
        copy = snapshot(state, self._reusable)
        self._reusable = None
        self._unsaved = [old for old in self._unsaved if old["is_best"] and not copy["is_best"]] + [copy]
        # Not a daemon: interpreter exit waits for the write, as for any file.
        self._thread = threading.Thread(target=self._write_in_thread, name=THREAD_NAME)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the current write. Raises its error, except for a full disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """Waits until everything is on disk. Raises UserError if that fails, also for a full disk."""
        self.wait()
        self._no_room = None
        self._write()

    def end(self) -> str | None:
        """Completes the current write, however the run ended. Returns an error message for the user, or None."""
        try:
            self.wait()
        except Exception as error:
            return str(error)
        return self._no_room.problem if self._no_room is not None else None

    def take_refusal(self) -> str | None:
        """Returns a message once after every write that met a full disk."""
        no_room, self._no_room = self._no_room, None
        return f"{no_room.problem}; training continues and retries at the next save" if no_room else None

    def _write_in_thread(self) -> None:
        try:
            self._write()
        except NoRoom as no_room:
            self._no_room = no_room
        except BaseException as error:  # re-raised in the waiting thread
            self._error = error

    def _write(self) -> None:
        while self._unsaved:
            self._write_state(self._unsaved[0])
            self._reusable = self._unsaved.pop(0)
