"""Starts groups of processes with a fault on one rank, and checks how they end and what they leave behind."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.helpers.processes import NO_GPU, left_of_session, session_members

FAULTY = f"{ROOT / 'tests' / 'helpers' / 'faulty_task.py'}:Faulty"
LIMIT_S = 10  # long enough for all processes to start
TINY = ["--task", FAULTY, "--epochs", 2, "--num-train", 48, "--batch-size", 4, "--num-threads", 1, "--device", "cpu",
        "--dist-timeout-s", LIMIT_S, "--save-every-steps", 2]  # fmt: skip
FSDP = ["--multi-gpu", "fsdp"]
TRACEBACK = "Traceback (most recent call last)"
PROCESS = rf"process \d+ on {re.escape(os.uname().nodename)}"


@dataclass(frozen=True)
class Ended:
    """Group that has ended. left: live processes. leaked: names in /dev/shm. state: content of state.json."""

    out: str
    status: int
    left: list[int]
    leaked: set[str]
    state: Mapping[str, Any]

    @property
    def errors(self) -> list[str]:
        return [line for line in self.out.splitlines() if line.startswith("error: ")]


def start_faulty(fault, start, world_size, more, environment, folder):
    """Starts a group in which the fault occurs once; `folder` gets its output `out` and its run directory `run`."""
    args = [*start(world_size), *TINY, "--save-dir", folder / "run", *more]
    variables = {"LOCKSTEP_FAULT": fault, "LOCKSTEP_FAULT_NOTE": str(folder / "note")}
    with (folder / "out").open("w") as file:
        return subprocess.Popen(
            [sys.executable, *map(str, args)], cwd=ROOT, env=environment | NO_GPU | variables,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def watch_to_end(process, folder):
    deadline, pids, shared_memory = time.monotonic() + 150, set(), set()
    while process.poll() is None:
        assert time.monotonic() < deadline, (folder / "out").read_text()
        pids |= set(session_members(process.pid))
        shared_memory |= shared_memory_of(pids)
        time.sleep(0.2)
    left = left_of_session(process.pid)
    return Ended(
        out=(folder / "out").read_text(),
        status=process.returncode,
        left=left,
        leaked=(shared_memory | shared_memory_of(pids)) & set(os.listdir("/dev/shm")),
        state=json.loads((folder / "run" / "state.json").read_text()),
    )


def shared_memory_of(pids):
    """Returns the files in /dev/shm that these processes have mapped, or that torch named after them."""
    found = set()
    for pid in pids:
        found |= {path.name for path in Path("/dev/shm").glob(f"torch_{pid}_*")}
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:  # the process has just ended
            continue
        found |= {line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
    return found


def assert_one_message(run, pattern, tracebacks=0):
    (error,) = run.errors
    assert re.fullmatch(f"error: {pattern}", error), run.out
    assert run.out.count(TRACEBACK) == tracebacks, run.out
    assert "/gloo/" not in run.out
    assert run.left == []
    assert run.leaked == set()


def assert_started_again(run):
    assert (run.status, run.state["state"]) == (0, "finished"), run.out


def assert_failed(run, status=1):
    assert run.status == status, run.out
    assert run.state["state"] == "failed"
    assert run.errors == [f"error: {run.state['message']}"]
