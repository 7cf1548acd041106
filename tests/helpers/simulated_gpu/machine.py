"""Installs simulated GPUs in `torch.cuda`, and gives tests counters, memory limits and lists of mistakes."""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tests.helpers.simulated_gpu import library, torch_cuda

ROOT = Path(__file__).resolve().parents[3]


class Wait(NamedTuple):
    """Wait of the host for a GPU. what: operator. place: file and line. in_step: whether within an optimizer step."""

    what: str
    place: str
    in_step: bool


class Gpus:
    """All simulated GPUs of this process."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self._copies: list[str] = []
        self._forks: list[str] = []
        self._steps = 0  # nesting depth within optimizer steps; below 1 outside steps
        self._may_wait = False

    def load(self, path: Path) -> None:
        """Loads the library. Call before importing torch."""
        self._library = library.load(path)
        for name in ("ticket", "done", "used", "peak", "stream", "capture"):
            getattr(self._library, f"simulated_{name}").restype = ctypes.c_int64
        for name in ("wait", "wait_for_event", "begin", "end", "replay"):
            getattr(self._library, f"simulated_{name}").restype = ctypes.c_char_p

    def start(self, output: TextIO, num_gpus: int, capability: tuple[int, int], may_wait: bool) -> None:
        """Installs the GPUs in torch, and starts to watch the training loop."""
        self._output, self._may_wait = output, may_wait
        self._told = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char, ctypes.c_char_p)(self._tell)
        self._library.simulated_start(self._told)
        torch_cuda.install(self._library, num_gpus, capability, self._wait_for)
        os.register_at_fork(before=self._note_fork)
        self._watch_steps()
        if "LOCKSTEP_LINES" in os.environ:
            import torch

            torch.autograd.set_multithreading_enabled(False)  # line coverage sees only Python's own threads

    def printed(self) -> str:
        """Returns what the test has written to standard output and standard error so far."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._output.seek(0)
        return self._output.read()

    def memory_in_use(self, device: int = 0) -> int:
        """Returns the number of bytes of the tensors on a GPU."""
        return int(self._library.simulated_used(device))

    def limit_memory(self, num_bytes: int, device: int = 0) -> None:
        """Limits the bytes of the tensors on a GPU, which are unlimited by default."""
        self._library.simulated_limit(device, ctypes.c_int64(num_bytes))

    @property
    def num_captures(self) -> int:
        """Returns the number of CUDA graphs that this process has captured, without failed captures."""
        return torch_cuda.CUDAGraph.num_captures

    @property
    def num_replays(self) -> int:
        return torch_cuda.CUDAGraph.num_replays

    def mistakes(self) -> list[str]:
        """Returns descriptions of forbidden operations that the program did, with their places."""
        found = []
        for what, mistake in (
            ("touched", "touched before it is known to have arrived"),
            ("changed", "changed before it is known to have been copied"),
        ):
            number, copy = (getattr(self._library, f"simulated_{name}") for name in (f"num_{what}", what))
            places = dict.fromkeys(self._copies[copy(i)] for i in range(number()))
            found += [f"{mistake}: what {place} copies" for place in places]
        found += [f"forked a process that uses CUDA, at {place}" for place in dict.fromkeys(self._forks)]
        if not self._may_wait:
            places = dict.fromkeys((wait.what, wait.place) for wait in self.waits if wait.in_step)
            found += [f"waited for a GPU within a step, at {place}: {what}" for what, place in places]
        return found

    def forget_mistakes(self) -> None:
        self._library.simulated_forget_touched()
        self._forks.clear()
        self.waits.clear()

    def _tell(self, kind: bytes, what: bytes) -> int:
        place = _place()
        if kind == b"w":
            if torch_cuda.sync_debug_mode == "error":
                return 1
            self.waits.append(Wait(what.decode(), place, self._steps > 0))
            return 0
        self._copies.append(place)
        return len(self._copies) - 1

    def _wait_for(self, device: int, ticket: int = -1, what: str = "") -> None:
        """Waits for a GPU. what: operator to record as a wait; "" for a wait that is already over."""
        torch_cuda.check(self._library.simulated_wait(device, ctypes.c_int64(ticket)))
        if what:
            self._tell(b"w", what.encode())

    def _note_fork(self) -> None:
        if torch_cuda.is_initialized:
            self._forks.append(_place())

    def _watch_steps(self) -> None:
        """Counts waits of the host within optimizer steps as mistakes, except in logging and saving."""
        from trainer.loop import graphs, train

        loop: Any = train
        loop.train_window = self._within(1, loop.train_window)
        for name in ("log_step", "save", "settle", "try_saving"):
            setattr(loop, name, self._within(-1, getattr(loop, name)))
        learner: Any = graphs.GraphedLearner
        learner._accumulate_and_compare = self._within(-1, learner._accumulate_and_compare)

    def _within(self, depth: int, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._deeper(depth):
                return function(*args, **kwargs)

        return counted

    @contextmanager
    def _deeper(self, depth: int) -> Iterator[None]:
        self._steps += depth
        try:
            yield
        finally:
            self._steps -= depth


GPUS = Gpus()


def _place() -> str:
    """Returns the current file and line of the program; in a thread of torch, the line of the main thread."""
    main_thread = threading.main_thread().ident or 0
    for frame in (lambda: sys._getframe(2), lambda: sys._current_frames()[main_thread]):
        at: Any = frame()
        while at is not None:
            path = Path(at.f_code.co_filename)
            if path.is_relative_to(ROOT) and "simulated_gpu" not in path.parts:
                return f"{path.relative_to(ROOT)}:{at.f_lineno}"
            at = at.f_back
    return "an unknown place"
