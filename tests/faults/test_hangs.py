"""One message reports a rank that fails, hangs, is stopped or is killed, and no process is left behind."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, launcher, load
from tests.faults.faulty_group import (
    FSDP,
    LIMIT_S,
    PROCESS,
    TINY,
    TRACEBACK,
    assert_failed,
    assert_one_message,
    assert_started_again,
)
from tests.helpers import forks
from tests.helpers.processes import NO_GPU, end_session, free_port, left_of_session, torchrun
from trainer.failure.diagnosis import GroupDiagnosis
from trainer.failure.heartbeat import CurrentActivity, Heartbeat
from trainer.parallel.ddp import Replicated
from trainer.parallel.process_group import ProcessGroup

slow = pytest.mark.slow
UNCOMPARED = ["--lockstep-every", 0]  # for ranks that do not exchange gradients


# --- an exception ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "where", "phase", "more", "tracebacks"),
    [
        pytest.param(2, "data", "data loading at optimizer step 3", ["--num-workers", 2], 2, marks=slow),
        (2, "forward", "forward at optimizer step 3", [], 1),
        pytest.param(3, "forward", "forward at optimizer step 3", [], 1, marks=slow),
        pytest.param(2, "evaluation", "evaluation at optimizer step 6", ["--num-workers", 1], 1, marks=slow),
        pytest.param(3, "forward", "forward at optimizer step 3", FSDP, 1, marks=slow),
    ],
)
def test_an_exception_is_reported_once(world_size, where, phase, more, tracebacks, faulty_run):
    """An exception in a data-loading process contains that process's traceback, too."""
    run = faulty_run(f"raise {where} 1", world_size=world_size, more=more)
    assert_one_message(run, f"rank 1 of {world_size} failed in {phase}: ValueError: the sky fell", tracebacks)
    assert_failed(run)


def test_an_exception_ends_the_process_while_a_thread_is_stuck_in_cpp(environment, tmp_path):
    """A thread that returns from C++ while the interpreter is being finalised would abort the process."""
    command = [sys.executable, "main.py", *map(str, TINY[:-4]), "--save-dir", str(tmp_path / "run")]
    fault = {"LOCKSTEP_FAULT": "linger forward 0"}
    run = subprocess.run(command, cwd=ROOT, env=environment | NO_GPU | fault, capture_output=True, text=True)
    assert run.stderr.endswith("ValueError: the sky fell\n") and run.returncode == 1, run.stderr


@pytest.mark.parametrize(
    ("fault", "statuses", "state", "told"),
    [
        ("exit forward 1", [1, 1], "failed", "rank 1 of 2 failed in forward at optimizer step 3: SystemExit: 7"),
        ("cancel data 1", [1, 1], "failed", "rank 1 of 2 failed in data loading at optimizer step 1: CancelledError"),
        ("generator evaluation 0", [1, 1], "failed", "rank 0 of 2 failed in evaluation at optimizer step 6: Generator"),
        ("interrupt forward 1", [130, 130], "preempted", "rank 1 of 2 stopped in forward at optimizer step 3"),
        ("workers forward 1", [75, 1], "failed", "rank 1 of 2 lost data-loading worker"),
    ],
)
def test_an_exception_or_dead_worker_on_one_rank_ends_all_ranks(fault, statuses, state, told, environment, tmp_path):
    """Some of the exceptions derive from `BaseException` but not from `Exception`."""
    argv = ["--multi-gpu", "ddp", *TINY[:-4], "--save-dir", tmp_path / "run"]
    argv += ["--num-workers", 1] * fault.startswith("workers")
    output, variables = tmp_path / "out", environment | NO_GPU | {"LOCKSTEP_FAULT": fault}
    assert forks.run_group(argv, 2, variables, output, timeout_s=60) == statuses
    lines = output.read_text().splitlines()
    (error,) = [line for line in lines if line.startswith("error: ")]
    assert error.startswith(f"error: {told}") and lines.count(TRACEBACK + ":") == (statuses == [1, 1])
    step = load(tmp_path / "run" / "last.pth")["step"]
    assert step > 0 and f"The state after optimizer step {step} is saved; the same command resumes from there." in lines
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == state


@slow
def test_an_exception_of_rank_0_is_reported_once(faulty_run):
    run = faulty_run("raise forward 0", world_size=3)
    assert_one_message(run, "rank 0 of 3 failed in forward at optimizer step 3: ValueError: the sky fell", 1)
    assert_failed(run)


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_bad_input_of_one_rank_is_reported_once(rank, faulty_run):
    run = faulty_run(f"refuse forward {rank}", more=("--save-every-steps", 0))
    assert_one_message(run, "the data ran away")
    assert run.status == 2 and "The state after optimizer step 2 is saved" in run.out
    assert (run.state["state"], run.state["message"]) == ("refused", "the data ran away")


@slow
def test_bad_input_is_reported_although_rank_0_is_stuck(faulty_run):
    """Rank 0 sleeps as if it waited on its device for a collective that rank 1 does not join."""
    run = faulty_run("sleep forward 0,refuse forward 1")
    assert_one_message(run, "the data ran away")
    assert run.status == 2
    assert (run.state["state"], run.state["message"]) == ("refused", "the data ran away")


@slow
def test_a_rank_that_exits_at_once_on_request_reports_no_error(faulty_run):
    """The rank exits as after a second Ctrl-C, which needs no explanation."""
    run = faulty_run("leave forward 1")
    assert (run.errors, run.out.count(TRACEBACK), run.left, run.leaked) == ([], 0, [], set())
    assert run.state["state"] == "failed"


def test_an_exception_on_one_device_is_reported_once(run_here, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_FAULT", "raise forward 0")
    _, err = run_here(*TINY[:-4], "--save-dir", tmp_path / "run", status=1)
    message = "failed in forward at optimizer step 3: ValueError: the sky fell"
    assert err.endswith(f"\nValueError: the sky fell\nerror: {message}\n")
    assert err.count(TRACEBACK) == 1
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert (state["state"], state["message"]) == ("failed", message)


# --- a late, stopped or killed rank ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "where", "rank", "phase", "more"),
    [
        (2, "forward", 1, "forward at optimizer step 3", []),
        (3, "forward", 0, "forward at optimizer step 3", []),
        (3, "forward", 1, "forward at optimizer step 3", FSDP),
        (2, "data", 1, "data loading at optimizer step 1", []),
        (2, "data", 1, "data loading at optimizer step 1", ["--num-workers", 1]),
        (3, "evaluation", 2, "evaluation at optimizer step 4", ["--num-workers", 1]),
    ],
)
@slow
def test_a_late_rank_is_named(world_size, where, rank, phase, more, faulty_run):
    run = faulty_run(f"sleep {where} {rank}", world_size=world_size, more=more)
    late = rf"rank {rank} of {world_size} is late: it spent \d+ s in {phase} \({PROCESS}\)"
    assert_one_message(run, rf"{late}; rank \d waited {LIMIT_S} s for it in .+ \(--dist-timeout-s {LIMIT_S}\)")
    assert_started_again(run)


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named(rank, faulty_run):
    run = faulty_run(f"stop forward {rank}")
    silent = rf"rank {rank} of 2 does not respond \({PROCESS}\), last seen \d+ s ago in .+"
    assert_one_message(
        run, rf"{silent}; rank {1 - rank} waited {LIMIT_S} s for it in .+ \(--dist-timeout-s {LIMIT_S}\)"
    )
    assert_started_again(run)


@pytest.mark.parametrize(
    ("world_size", "rank", "more"),
    [
        (2, 1, ["--num-workers", 1]),
        (3, 1, []),
        (3, 0, ["--num-workers", 2]),
        (2, 1, FSDP),
        (3, 0, FSDP),
    ],
)
@slow
def test_a_killed_rank_is_named(world_size, rank, more, faulty_run):
    run = faulty_run(f"kill forward {rank}", world_size=world_size, more=more)
    gone = rf"rank {rank} of {world_size} is gone \({PROCESS}\), last seen \d+ s ago in .+"
    assert_one_message(run, f"{gone}; the same command resumes from the last checkpoint")
    if rank == 0 and more == FSDP:  # no other process knows what is saved
        assert (run.status, run.state["state"]) == (128 + signal.SIGKILL, "running")
    else:
        assert_started_again(run)


def let_the_device_wait(meets):
    """Imitates GPUs: the backward pass waits for no rank, and the third step's barrier blocks on the device.

    meets: whether the ranks first meet on the host, as with NCCL.
    """
    Replicated.exchange = lambda self, params: None
    barrier, asked = ProcessGroup.barrier, itertools.count(1)

    def barrier_of_nccl(self):
        self.backend = "nccl" if meets else "gloo"
        barrier(self)
        time.sleep(600 if next(asked) == 3 else 0)

    ProcessGroup.barrier = barrier_of_nccl
    return lambda: None


@slow
def test_a_late_rank_is_reported_before_the_host_waits_for_the_device(environment, tmp_path):
    argv = ["--multi-gpu", "ddp", *TINY, *UNCOMPARED, "--log-interval", 1, "--save-dir", tmp_path / "run"]
    argv += ["--dist-timeout-s", 4]
    variables = environment | NO_GPU | {"LOCKSTEP_FAULT": "sleep forward 1"}
    output = tmp_path / "out"
    assert forks.run_group(argv, 2, variables, output, partial(let_the_device_wait, True), timeout_s=60) == [75, 75]
    (error,) = [line for line in output.read_text().splitlines() if line.startswith("error: ")]
    assert re.match(r"error: rank 1 of 2 is late: it spent \d+ s in forward at optimizer step 3 ", error)


@slow
def test_a_rank_that_dies_while_others_wait_for_the_device_is_named(environment, tmp_path):
    argv = ["--multi-gpu", "ddp", *TINY, *UNCOMPARED, "--log-interval", 1, "--save-dir", tmp_path / "run"]
    variables = environment | NO_GPU | {"LOCKSTEP_FAULT": "kill forward 1"}
    output = tmp_path / "out"
    statuses = forks.run_group(argv, 2, variables, output, partial(let_the_device_wait, False), timeout_s=100)
    assert statuses == [75, -signal.SIGKILL], output.read_text()
    (error,) = [line for line in output.read_text().splitlines() if line.startswith("error: ")]
    assert error.startswith("error: rank 1 of 2 is gone (process ")
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert (state["state"], f"error: {state['message']}") == ("failed", error)


def let_the_first_write_take_5_s():
    """Delays the flush of a checkpoint's first file."""
    fsync, delays = os.fsync, iter([5.0])

    def delayed(descriptor):
        if "checkpoint_" in os.readlink(f"/proc/self/fd/{descriptor}"):
            time.sleep(next(delays, 0.0))
        fsync(descriptor)

    os.fsync = delayed
    return lambda: None


@slow
def test_a_write_may_take_longer_than_ranks_wait(environment, tmp_path):
    argv = ["--multi-gpu", "ddp", *TINY, "--dist-timeout-s", 4, "--save-dir", tmp_path / "run", "--epochs", 1]
    statuses = forks.run_group(argv, 2, environment | NO_GPU, tmp_path / "out", let_the_first_write_take_5_s)
    assert statuses == [0, 0], (tmp_path / "out").read_text()


# --- other launchers ---------------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise forward 1", "rank 1 of 3 failed in forward at optimizer step 3: ValueError: the sky fell"),
        (
            "sleep forward 1",
            r"rank 1 of 3 is late: it spent \d+ s in forward at optimizer step 3 .*; rank \d waited .*",
        ),
        ("kill forward 0", r"rank 0 of 3 is gone .*; the same command resumes from the last checkpoint"),
        ("refuse data 2", "the data ran away"),
    ],
)
def test_failures_under_torchrun_are_reported_once(fault, message, faulty_run):
    """torchrun's own report of its workers' failure contains one more traceback."""
    run = faulty_run(fault, torchrun, world_size=3)
    own = sum("ChildFailedError" in line for line in run.out.splitlines())
    assert_one_message(run, message, tracebacks=(fault == "raise forward 1") + (own > 0))


@slow
def test_a_killed_rank_0_of_a_run_started_by_hand_is_named(environment, tmp_path):
    """The heartbeats are lost with rank 0, and one of the other ranks says so."""
    meeting = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    args = ["main_multi_gpu.py", "--multi-gpu", "ddp", *TINY, "--save-dir", tmp_path / "run"]
    ranks = [
        subprocess.Popen(
            [sys.executable, *map(str, args)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
            env=environment | NO_GPU | meeting | {"RANK": str(rank), "LOCKSTEP_FAULT": "kill forward 0"},
        )
        for rank in range(3)
    ]  # fmt: skip
    outs = [rank.communicate(timeout=150)[0] for rank in ranks]
    errors = [line for out in outs for line in out.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, "\n".join(outs)
    assert re.fullmatch(
        rf"error: rank 0 of 3 is gone \({PROCESS}\), so the other ranks' heartbeats are unknown.*", errors[0]
    )
    assert TRACEBACK not in "".join(outs)
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL, 75, 75]


@slow
def test_a_killed_launcher_leaves_no_process(environment, tmp_path):
    args = [*launcher(2), *TINY, "--epochs", 500, "--num-workers", 1, "--save-dir", tmp_path / "run"]
    process = subprocess.Popen(
        [sys.executable, *map(str, args)], cwd=ROOT, env=environment | NO_GPU, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    state = tmp_path / "run" / "state.json"
    try:
        while not state.exists():
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(1)
        process.kill()
        process.wait()
        assert left_of_session(process.pid, within_s=30) == []
        assert json.loads(state.read_text())["state"] == "preempted"
    finally:
        end_session(process.pid)


# --- which rank is missing ---------------------------------------------------------------------------------------

MEMBERS = [f"process {10 + rank} on host" for rank in range(3)]
WAITED_S, BROKEN = 120.0, None


@pytest.fixture
def diagnosis():
    """Returns the diagnosis of rank 0."""
    phase = CurrentActivity()
    phase.name, phase.step = "backward", 7
    monitor = SimpleNamespace()
    return GroupDiagnosis(phase, monitor, 0, MEMBERS, WAITED_S, reports_lost_store=False)


def answer(number, seconds=1.0):
    return Heartbeat("forward at optimizer step 7", number, seconds, time.time(), answers_ping=True)


def no_answer(number, ago):
    return Heartbeat("forward at optimizer step 7", number, 1.0, time.time() - ago, answers_ping=False)


def test_the_ranks_with_the_least_progress_are_late(diagnosis):
    found = diagnosis.diagnose(WAITED_S, "", {0: answer(9), 1: answer(7, 130.4), 2: answer(9)})
    assert found == (
        "rank 1 of 3 is late: it spent 130 s in forward at optimizer step 7 (process 11 on host); "
        "rank 0 waited 120 s for it in backward at optimizer step 7 (--dist-timeout-s 120)"
    )
    both = diagnosis.diagnose(WAITED_S, "", {0: answer(9), 1: answer(7), 2: answer(7)})
    assert "rank 1 of 3 is late" in both
    assert "rank 2 of 3 is late" in both


def test_a_silent_rank_is_reported_before_a_late_rank(diagnosis):
    found = diagnosis.diagnose(WAITED_S, "", {0: answer(9), 1: answer(7), 2: no_answer(6, ago=125)})
    assert found.startswith(
        "rank 2 of 3 does not respond (process 12 on host), last seen 125 s ago in forward at optimizer step 7; "
    )
    assert "rank 1" not in found


def test_a_rank_that_never_sent_a_heartbeat_is_reported(diagnosis):
    found = diagnosis.diagnose(WAITED_S, "", {0: answer(9), 1: answer(9)})
    assert found.startswith("rank 2 of 3 does not respond (process 12 on host); rank 0 waited 120 s for it in ")


def test_no_rank_is_reported_if_all_are_alive_and_equally_far(diagnosis):
    for waited_s, error in ((WAITED_S, "timed out"), (BROKEN, "RuntimeError: closed by peer")):
        said = diagnosis.diagnose(waited_s, error, dict.fromkeys(range(3), answer(9)))
        assert said.endswith(f"in backward at optimizer step 7, although all ranks are alive: {error}")


def test_a_rank_that_waited_is_not_reported_as_late(diagnosis):
    said = diagnosis.diagnose(WAITED_S, "timed out", {0: answer(7), 1: answer(9), 2: answer(7)})
    assert said == (
        "rank 0 of 3 timed out in backward at optimizer step 7, although all ranks are alive, "
        "rank 1 of 3 in forward at optimizer step 7: timed out"
    )


def test_a_lost_store_is_reported_as_its_rank(diagnosis):
    assert diagnosis.diagnose_lost_store(BROKEN).startswith("rank 0 of 3 is gone (process 10 on host), so the ")
    assert "does not respond" in diagnosis.diagnose_lost_store(WAITED_S)


def test_a_job_without_checkpoints_is_not_said_to_resume(diagnosis):
    diagnosis.has_checkpoints = False
    for said in (
        diagnosis.diagnose(BROKEN, "", {0: answer(9), 1: answer(9)}),
        diagnosis.diagnose_lost_store(BROKEN),
    ):
        assert "is gone" in said and "checkpoint" not in said


def test_data_loading_processes_of_a_killed_process_are_ended(tmp_path):
    """The kernel must end them, because torch would notice only at the next batch."""
    script = f"""
import os, sys, time
from pathlib import Path
import numpy as np, torch
from trainer.loading.workers import BatchLoader, Workers
from trainer.loading.order import SampleKeys

class Stuck:
    def __len__(self): return 4
    def __getitems__(self, keys):
        Path({str(tmp_path / "worker")!r}).write_text(str(os.getpid()))
        time.sleep(600)

next(BatchLoader([Stuck()], None, Workers(1))([SampleKeys(np.arange(2), 0)]))
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    worker = tmp_path / "worker"
    while not (worker.exists() and worker.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    stat = Path(f"/proc/{worker.read_text()}/stat")
    deadline = time.monotonic() + 5
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.02)
    survived = time.monotonic() >= deadline
    if survived:
        os.kill(int(worker.read_text()), signal.SIGKILL)
    assert not survived
