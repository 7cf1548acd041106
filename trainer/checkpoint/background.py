"""Copies checkpoints in memory, and saves the copies in the background."""

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
    """Copies a state to host memory; a tensor that occurs twice is copied once.

    NumPy scalars become Python scalars, because torch cannot load them with `weights_only=True`.

    reusable: an older snapshot; the copy overwrites its memory, since allocating new memory takes several times longer.
    pinned: whether to copy tensors on a GPU to pinned memory. If False, or if the system lacks pinned memory, they are
    copied to pageable memory, which is slower.
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
    """Returns a key that is equal for tensors that can reuse each other's memory."""
    return tensor.dtype, tensor.shape, tensor.stride() if tensor.layout == torch.strided else None


class NoRoom(DiskError):
    """Raised if a checkpoint does not fit on disk; existing files stay intact. problem: the message without advice."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; free some space and run the same command again, or choose another folder")
        self.problem = problem


class BackgroundSaver:
    """Copies checkpoints, and writes the copies one at a time in a thread. Only rank 0's main thread uses this class.

    write: writes one state; raises UserError, or NoRoom if the disk is full.

    A copy that does not fit on disk stays in memory until the next copy is made. A copy of the best weights stays until
    it is written or better weights replace it, so a checkpoint on disk never refers to missing best weights. Other
    checkpoints that `--keep-best` would keep are lost if they never fit on disk.
    """

    def __init__(self, write: Callable[[dict[str, Any]], object]) -> None:
        self._write_state = write
        self._thread: threading.Thread | None = None
        self._unsaved: list[dict[str, Any]] = []
        """Copies to write, oldest first; their content does not change."""
        self._reusable: dict[str, Any] | None = None
        """The copy that was written last; the next copy reuses its memory."""
        self._reuses = True
        self._error: BaseException | None = None
        self._no_room: NoRoom | None = None

    def start(self, state: dict[str, Any], copied: dict[str, Any] | None = None) -> None:
        """Copies the state and starts to write the copy. Call `wait` first.

        copied: entries that are copies already; their memory is freed after the write, because no later copy reuses it.
        """
        assert self._thread is None
        copy = snapshot(state, self._reusable) | (copied or {})
        self._reusable, self._reuses = None, not copied
        self._unsaved = [old for old in self._unsaved if old["is_best"] and not copy["is_best"]] + [copy]
        self._start_thread(may_lack_room=True)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the current write; returns False if it takes longer than `timeout_s` seconds.

        Raises the write's error unless the disk was full.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return True

    def finish(self, timeout_s: float | None = None) -> bool:
        """Waits until all copies are on disk; returns False if one write takes longer than `timeout_s` seconds.

        Raises UserError if a write fails or the disk is full.
        """
        while self.wait(timeout_s):
            if not self._unsaved:
                return True
            self._no_room = None
            self._start_thread(may_lack_room=False)
        return False

    def end(self) -> str | None:
        """Waits for the current write when a run ends or fails. Returns an error message, or None."""
        try:
            self.wait()
        except Exception as error:
            return str(error)
        return self._no_room.problem if self._no_room is not None else None

    def take_refusal(self) -> str | None:
        """Returns a message if the last write failed because the disk was full; a second call returns None."""
        no_room, self._no_room = self._no_room, None
        return f"{no_room.problem}; training continues, and the next save tries again" if no_room else None

    def _start_thread(self, may_lack_room: bool) -> None:
        # not a daemon, so that the interpreter waits for the write before it exits
        thread = threading.Thread(target=self._write, args=(may_lack_room,), name=THREAD_NAME)
        thread.start()
        self._thread = thread

    def _write(self, may_lack_room: bool) -> None:
        try:
            while self._unsaved:
                self._write_state(self._unsaved[0])
                written = self._unsaved.pop(0)
                self._reusable = written if self._reuses else None
        except BaseException as error:  # re-raised in the waiting thread
            if may_lack_room and isinstance(error, NoRoom):
                self._no_room = error
            else:
                self._error = error
