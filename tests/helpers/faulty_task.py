"""Weighted task in which a fault occurs on chosen ranks.

LOCKSTEP_FAULT: "WHAT WHERE RANK", for example "raise forward 1"; separate the faults of several ranks by commas. A
fault occurs in the third training batch, or in the first batch of an evaluation. If LOCKSTEP_FAULT_NOTE names a file,
the fault creates the file (plus a dot and the rank), and occurs only while the file does not exist.
"""

import asyncio
import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.helpers.weighted_task import Sequences, Weighted, WeightedObjective
from trainer.common.errors import UserError
from trainer.failure.signals import LeftAtOnce

FAULTY_BATCH = 3


class Fault:
    def __init__(self) -> None:
        own_rank = dist.get_rank() if dist.is_initialized() else 0
        faults = [fault.split() for fault in (os.environ.get("LOCKSTEP_FAULT") or "none nowhere 0").split(",")]
        self.is_here = False
        for what, where, rank in faults:
            if int(rank) == own_rank:
                self.what, self.where, self.rank, self.is_here = what, where, rank, True
        self.calls = 0

    def at(self, where):
        if not self.is_here or where != self.where:
            return
        self.calls += 1
        if where == "evaluation" or self.calls == FAULTY_BATCH:
            self.happen()

    def happen(self):
        note = os.environ.get("LOCKSTEP_FAULT_NOTE")
        if note is not None:
            note += f".{self.rank}"  # each rank has its own fault
            if os.path.exists(note):
                return
            open(note, "x").close()
        HAPPENINGS[self.what]()


class SlowEnd:
    """Object whose finalisation at the exit of the interpreter takes seconds."""

    def __del__(self, sleep=time.sleep):  # module globals may be deleted by then
        sleep(6)


def leave_thread_in_cpp():
    """Starts a thread that waits in C++, and returns to Python while the interpreter is being finalised."""
    sys.slow_end = SlowEnd()
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=3))
    threading.Thread(target=store.wait, args=(["never"],), daemon=True).start()
    time.sleep(0.5)


def fail():
    raise ValueError("the sky fell")


def fail_with_a_thread_left():
    leave_thread_in_cpp()
    fail()


def leave():
    raise LeftAtOnce(130)


def exit_with_status():
    sys.exit(7)


def interrupt():
    raise KeyboardInterrupt


def cancel():
    raise asyncio.CancelledError


def close_generator():
    raise GeneratorExit


def refuse():
    raise UserError("the data ran away")


def fail_as_a_gpu():
    """Raises a GPU error, as a call raises the error of an earlier kernel."""
    raise torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronous")


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_workers():
    """Kills the data-loading processes, as the system does when memory is short."""
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGKILL)
    time.sleep(600)  # torch notices the death of a worker immediately


def segfault():
    ctypes.string_at(0)


def hold_interpreter():
    """Sleeps in C without releasing the global interpreter lock."""
    ctypes.PyDLL(None).sleep(600)


def backtrack():
    """Holds the global interpreter lock by matching a regular expression that would take years."""
    re.fullmatch("(a|aa)+b", "a" * 200)


def stick_in_kernel():
    """Blocks in a state that only SIGKILL ends: vfork waits for a child, which waits to open a pipe."""
    pipe = os.environ["LOCKSTEP_PIPE"]
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, pipe, os.O_RDONLY, 0)])


def remove_directory():
    """Removes the run directory; renames it first, because a concurrent save would add files while it is emptied."""
    directory = os.environ["LOCKSTEP_REMOVED"]
    os.rename(directory, f"{directory}-removed")
    shutil.rmtree(f"{directory}-removed", ignore_errors=True)


def remove_directory_and_die():
    remove_directory()
    kill()


def set_clock_back():
    true_time = time.time
    time.time = lambda: true_time() - 24 * 3600


HAPPENINGS = {
    "raise": fail,
    "linger": fail_with_a_thread_left,
    "leave": leave,
    "exit": exit_with_status,
    "interrupt": interrupt,
    "cancel": cancel,
    "generator": close_generator,
    "refuse": refuse,
    "gpu": fail_as_a_gpu,
    "sleep": lambda: time.sleep(600),
    "stop": stop,
    "kill": kill,
    "workers": kill_workers,
    "segfault": segfault,
    "hold": hold_interpreter,
    "backtrack": backtrack,
    "kernel": stick_in_kernel,
    "unlink": remove_directory,
    "abandon": remove_directory_and_die,
    "clock": set_clock_back,
}


class FaultySequences(Sequences):
    fault: Fault

    def __getitems__(self, keys):
        is_checked = keys.index.tolist() == [*range(len(keys.index))]  # before training, by law.py
        if self.augment and not keys.placeholder and not is_checked:
            self.fault.at("data")
        return super().__getitems__(keys)


class FaultyObjective(WeightedObjective):
    fault: Fault

    def forward(self, batch, phase="train"):
        self.fault.at("forward" if self.training else "evaluation")
        return super().forward(batch, phase)


class Faulty(Weighted):
    def splits(self):
        splits = super().splits()
        for dataset in splits.values():
            if not isinstance(dataset, FaultySequences):
                dataset.__class__ = FaultySequences
                dataset.fault = Fault()
                dataset.fault.calls = -2  # the two readings of samples at the start are not counted
        return splits

    def build_objective(self):
        objective = super().build_objective()
        objective.__class__ = FaultyObjective
        objective.fault = Fault()
        objective.fault.calls = -1  # the first forward, on a placeholder batch, is not counted
        return objective
