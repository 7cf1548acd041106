"""Saving while training goes on: the state is copied in memory, and a thread of its own writes the copy."""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.common.errors import DiskError
from trainer.common.tensors import map_tensors

THREAD_NAME = "save"


def snapshot(state: dict[str, Any], reusable: dict[str, Any] | None = None, page_locked: bool = True) -> dict[str, Any]:
    """The state with every tensor copied into host memory; what was one tensor under two names stays one.

    A number of numpy becomes Python's own: what a task computes may be one without anybody noticing (`np.float64` is a
    float), and a file with one cannot be read without executing what it says.

    reusable: an older snapshot that nobody needs any more. Its memory is used again, which is several times faster than
    memory fresh from the system. From a GPU everything is copied at once, into page-locked memory, and waited for once;
    what finds no room there is copied into other memory, which takes longer, and so is everything without page_locked.
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
            buffer = fitting.pop() if fitting else _new_buffer(tensor, page_locked)
            copies[key] = buffer.copy_(tensor.detach(), non_blocking=True)
        return copies[key]

    copied = map_tensors(state, copy_tensor)
    for device in {device for device, *_ in copies}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return copied


def _new_buffer(tensor: Tensor, page_locked: bool) -> Tensor:
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda and page_locked)
    except RuntimeError:  # the system, or its administrator, bounds what may be locked
        return torch.empty_like(tensor, device="cpu")


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors of a state; one under two names counts once."""
    found: dict[int, Tensor] = {}
    map_tensors(state, lambda tensor: found.setdefault(id(tensor), tensor))
    return list(found.values())


def state_bytes(state: Any) -> int:
    """Bytes of the tensors of a state."""
    return sum(tensor.nbytes for tensor in tensors_of(state))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors must have in common to be copied into each other's memory."""
    return tensor.dtype, tensor.shape, tensor.stride() if tensor.layout == torch.strided else None


class NoRoom(DiskError):
    """A checkpoint did not fit; what was there before stays. problem: what happened, without advice."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; free some space and run the same command again, or choose another folder")
        self.problem = problem


class BackgroundSaver:
    """Copies states, and has them written one at a time. Used on the main process, by its main thread.

    write: writes one state; raises UserError, NoRoom where there is no room for it.

    A copy for which there is no room is kept in memory until the next one comes, one of the best weights until it
    could be written or better ones came. So a checkpoint on the disk never speaks of a best one that is not there. (The
    next best ones, `--keep-best`, are kept where they are on the disk; memory is not for them.)
    """

    def __init__(self, write: Callable[[dict[str, Any]], object]) -> None:
        self._write_state = write
        self._thread: threading.Thread | None = None
        self._unsaved: list[dict[str, Any]] = []
        """Copies, oldest first, which nobody changes any more."""
        self._reusable: dict[str, Any] | None = None
        """The state written last, whose memory is free for the next copy."""
        self._error: BaseException | None = None
        self._no_room: NoRoom | None = None

    def start(self, state: dict[str, Any]) -> None:
        """Copies the state, begins to write it, and returns. Call `wait` first."""
        assert self._thread is None
        copy = snapshot(state, self._reusable)
        self._reusable = None
        self._unsaved = [old for old in self._unsaved if old["is_best"] and not copy["is_best"]] + [copy]
        # Not a daemon: an interpreter that ends waits for the write, as for any other file.
        self._thread = threading.Thread(target=self._write_in_thread, name=THREAD_NAME)
        self._thread.start()

    def wait(self) -> None:
        """Returns when no write is under way. Raises what kept it from being done, unless it was a lack of room."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """Returns when everything is on the disk. Raises UserError when it cannot be, for lack of room too."""
        self.wait()
        self._no_room = None
        self._write()

    def end(self) -> str | None:
        """Ends a write under way, however the run ended. Returns what is to be said of one that failed."""
        try:
            self.wait()
        except Exception as error:
            return str(error)
        return self._no_room.problem if self._no_room is not None else None

    def take_refusal(self) -> str | None:
        """Once after every write for which there was no room: what to tell the user."""
        no_room, self._no_room = self._no_room, None
        return f"{no_room.problem}; training goes on and tries again at the next save" if no_room else None

    def _write_in_thread(self) -> None:
        try:
            self._write()
        except NoRoom as no_room:
            self._no_room = no_room
        except BaseException as error:  # whatever it is belongs to the thread that waits
            self._error = error

    def _write(self) -> None:
        while self._unsaved:
            self._write_state(self._unsaved[0])
            self._reusable = self._unsaved.pop(0)
