"""After a stop signal to any process, a run does little more work, saves and exits."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, WEIGHTED, launcher
from tests.helpers.machines import not_supported
from tests.helpers.processes import end_session, left_of_session, num_training_ranks
from trainer.failure.signals import ONE_CTRL_C_S, STOP_SIGNALS, StopRequest
from trainer.parallel.launch import FOLDER, rendezvous_folder

MICRO_BATCHES = 3
"""Forward passes of a step on each process."""
LONG_S = 8
# The given rank signals itself in the given forward pass, so that the moment is exact.
ASKS = """
import os, signal, time
import torch
from tests.helpers.weighted_task import *

class Counted(WeightedObjective):
    num_training = num_evaluation = 0

    def forward(self, batch, phase="train"):
        is_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == {rank}
        if self.training:
            self.num_training += 1
        else:
            self.num_evaluation += 1
        asks = is_rank and (self.num_training if {training} else self.num_evaluation) == {forward}
        with open({file!r} + f".{{os.getpid()}}", "a") as file:
            file.write(("train" if self.training else "evaluate") + (" asked" if asks else "") + f" {{time.time()}}\\n")
        if asks:
            os.kill(os.getpid(), {number})
        return super().forward(batch, phase)

class Asks(Weighted):
    def build_objective(self):
        return Counted(Network(self.config.width, self.config.dropout), self.config.delay_s)
"""


@pytest.fixture
def asking(tmp_path):
    """Returns a function that makes the arguments of a run that signals itself, and the function `after`.

    rank, forward: rank that signals itself, and number of its forward pass. training: count in training or evaluation.
    """

    def make(number, rank, forward, training, world_size):
        file = tmp_path / f"asks_{number}_{rank}_{forward}_{training}_{world_size}.py"
        file.write_text(
            ASKS.format(rank=rank, training=training, forward=forward, number=int(number), file=str(tmp_path / "log"))
        )
        arguments = [
            "--task", f"{file}:Asks", "--epochs", 3, "--num-train", 600, "--num-val", 40, "--batch-size", 2,
            "--global-batch-size", 2 * MICRO_BATCHES * world_size, "--eval-batch-size", 1, "--num-threads", 1,
            "--device", "cpu", "--save-dir", tmp_path / "run",
        ]  # fmt: skip

        def after():
            """Returns, for each process, the kinds of its forward passes after the signal."""
            logs = [[line.split() for line in log.read_text().splitlines()] for log in tmp_path.glob("log.*")]
            (asked,) = [float(words[-1]) for log in logs for words in log if "asked" in words]
            return [[words[0] for words in log if float(words[-1]) > asked] for log in logs]

        return arguments, after

    return make


def assert_saved_as_preempted(directory):
    state = json.loads((directory / "state.json").read_text())
    newest = json.loads((directory / "manifest.json").read_text())["checkpoints"][-1]
    assert (state["state"], state["step"]) == ("preempted", newest["step"])


def assert_soon(forwards, training):
    """Asserts that at most two steps or evaluation batches came after the current one."""
    for kinds in forwards:
        assert set(kinds) <= {"train" if training else "evaluate"}
        assert len(kinds) <= (2 * MICRO_BATCHES + MICRO_BATCHES if training else 2 + 1)


@pytest.mark.parametrize("forward", [14, 13, 15])  # each of the three micro-batches of a step
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_one_process_stops_soon_in_training(number, forward, asking, run_here, tmp_path):
    arguments, after = asking(number, 0, forward, True, 1)
    run_here(*arguments, status=128 + number)
    assert_soon(after(), training=True)
    assert_saved_as_preempted(tmp_path / "run")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_one_process_stops_soon_in_evaluation(number, asking, run_here, tmp_path):
    arguments, after = asking(number, 0, 10, False, 1)
    run_here(*arguments, status=128 + number)
    assert_soon(after(), training=False)
    assert_saved_as_preempted(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_two_processes_stop_soon(number, rank, training, asking, command, tmp_path):
    # The first forward pass is on a placeholder batch.
    arguments, after = asking(number, rank, 15 if training else 10, training, 2)
    command(*launcher(2), *arguments, status=128 + number)
    forwards = after()
    assert len(forwards) == 2
    assert_soon(forwards, training)
    assert_saved_as_preempted(tmp_path / "run")


def test_one_ctrl_c_that_comes_twice_is_one_request():
    """A process may receive it from the terminal and again from its launcher."""
    stop = StopRequest()
    stop._on_signal(signal.SIGINT, None)
    stop._on_signal(signal.SIGINT, None)
    assert stop.signal_number == signal.SIGINT
    time.sleep(ONE_CTRL_C_S + 0.05)
    with pytest.raises(SystemExit):
        stop._on_signal(signal.SIGINT, None)


@pytest.fixture
def group(environment, tmp_path, tmp_path_factory):
    """Yields a launcher in its own session whose two ranks train, their process ids, and their temporary folder."""
    records, meeting = tmp_path / "records", tmp_path_factory.mktemp("tmp")  # paths of sockets must be short
    records.mkdir()
    arguments = [
        "--task", WEIGHTED, "--epochs", 900, "--num-train", 24, "--batch-size", 4, "--num-threads", 1, "--num-workers",
        1, "--device", "cpu", "--delay-s", 0.02, "--save-dir", tmp_path / "run",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, *map(str, launcher(2) + arguments)], cwd=ROOT, stdin=subprocess.DEVNULL,
        env=environment | {"LOCKSTEP_RECORD": str(records), "TMPDIR": str(meeting)}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        while num_training_ranks(records) < 2:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        yield process, sorted(int(file.stem) for file in records.iterdir()), meeting
    finally:
        end_session(process.pid)
        process.communicate()


def stopped_once(process, tmp_path):
    """Waits for the group to end, and asserts that it saved and left no process behind."""
    out, _ = process.communicate(timeout=100)
    assert out.count("Stopped as asked; everything is saved.") == 1, out
    assert "Traceback" not in out and "error:" not in out, out
    assert left_of_session(process.pid) == []
    assert_saved_as_preempted(tmp_path / "run")


@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_stop_once_and_save(group, tmp_path):
    """The next launcher removes the folder that the killed launcher left."""
    process, _, meeting = group
    process.kill()
    stopped_once(process, tmp_path)
    (left,) = [folder for folder in meeting.iterdir() if folder.name.startswith(FOLDER)]
    os.utime(left, (0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(meeting))
        with rendezvous_folder() as folder:
            assert not left.exists()
            with rendezvous_folder():
                assert Path(folder).exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_is_the_status_of_the_group(rank, group, tmp_path):
    process, ranks, _ = group
    os.kill(ranks[rank], signal.SIGTERM)
    stopped_once(process, tmp_path)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_hangup_of_the_launcher_reaches_its_processes(group, tmp_path):
    process, _, _ = group
    process.send_signal(signal.SIGHUP)
    stopped_once(process, tmp_path)
    assert process.returncode == 128 + signal.SIGHUP


def test_folders_of_killed_launchers_are_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (f"{FOLDER}stale", "lockstep-other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rendezvous").touch()
        os.utime(tmp_path / name, (0, 0))
    with rendezvous_folder() as folder:
        assert {path.name for path in tmp_path.iterdir()} == {"lockstep-other", Path(folder).name}
        with rendezvous_folder() as other:
            assert Path(folder).exists() and Path(other).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["lockstep-other"]


def test_without_kernel_locks_no_folder_is_removed(monkeypatch, tmp_path):
    """Processes may still use a folder, however old."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("fcntl.flock", not_supported)
    (tmp_path / f"{FOLDER}stale").mkdir()
    os.utime(tmp_path / f"{FOLDER}stale", (0, 0))
    with rendezvous_folder() as folder:
        assert {path.name for path in tmp_path.iterdir()} == {f"{FOLDER}stale", Path(folder).name}


def test_signals_while_python_exits_keep_the_status(environment):
    """Python deletes a script's objects after it has reset the signal handlers."""
    script = """
import os, signal, sys
from trainer.cli import run_process

class Deleted:
    def __del__(self):
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(os.getpid(), number)
        os.write(1, b"the end")

deleted = Deleted()
sys.exit(run_process(["--print-config"], several_devices=False))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("the end"), done


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_ctrl_c_exits_at_once(world_size, environment, tmp_path):
    records = tmp_path / "records"
    records.mkdir()
    arguments = [
        "--task", WEIGHTED, "--epochs", 1, "--num-train", 24, "--batch-size", 8, "--num-threads", 1, "--num-workers", 1,
        "--delay-s", LONG_S, "--save-dir", tmp_path / "run",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, *map(str, launcher(world_size) + arguments)], cwd=ROOT, stdin=subprocess.DEVNULL,
        env=environment | {"LOCKSTEP_RECORD": str(records)}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        while num_training_ranks(records) < world_size:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=LONG_S - 2)
        left = left_of_session(process.pid)
    finally:
        end_session(process.pid)
    assert process.returncode == 128 + signal.SIGINT, out
    assert "Traceback" not in out
    assert left == []
