"""state.json states how a run ended, and examples/slurm.sh reads it to requeue a job."""

import json
import os
import re
import signal
import site
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from tests.conftest import LOCKS, ROOT, WEIGHTED, launcher
from tests.helpers.processes import free_port
from trainer.checkpoint.lock import Lock
from trainer.checkpoint.manifest import STATE
from trainer.failure.signals import ONE_CTRL_C_S

STEPS_PER_EPOCH = 3
TINY = ["--epochs", 2, "--num-train", 24, "--batch-size", 8, "--num-threads", 1, "--device", "cpu"]
UNIQUE = count()
pytestmark = pytest.mark.usefixtures("no_rank_variables")

# Task that executes a statement as epoch 2 begins. `directory` is the folder of the run.
HAPPENING = """
import os, shutil, signal
from pathlib import Path
from trainer.common.errors import UserError
from tests.helpers.weighted_task import Weighted

directory = Path({directory!r})

class Happening(Weighted):
    def on_epoch_start(self, objective, epoch, progress):
        if epoch == 1:
            {statement}
"""


@pytest.fixture
def happening(tmp_path):
    """Returns the arguments of a tiny run, which executes a statement after its first epoch."""

    def arguments(statement):
        # Each module has its own name, because modules of one name are imported once.
        file = tmp_path / f"happening_{os.getpid()}_{next(UNIQUE)}.py"
        file.write_text(HAPPENING.format(directory=str(tmp_path / "run"), statement=statement))
        return ["--task", f"{file}:Happening", *TINY, "--save-dir", tmp_path / "run"]

    return arguments


@pytest.fixture
def plain(tmp_path):
    return ["--task", WEIGHTED, *TINY, "--save-dir", tmp_path / "run"]


def state_of(directory):
    return json.loads((directory / STATE).read_text())


def newest(directory):
    return json.loads((directory / "manifest.json").read_text())["checkpoints"][-1]


def everything_but_the_state(directory):
    files = (path for path in directory.rglob("*") if path.is_file() and path.name not in (STATE, *LOCKS))
    return {path: path.read_bytes() for path in files}


# --- the states --------------------------------------------------------------------------------------------------


def test_state_is_running_then_finished(happening, run_here, tmp_path):
    run_here(*happening("shutil.copy(directory / 'state.json', directory / 'then.json')"))
    then, now = json.loads((tmp_path / "run" / "then.json").read_text()), state_of(tmp_path / "run")
    here = {"host": os.uname().nodename, "process": os.getpid(), "signal": None, "message": None}
    assert then == {"state": "running", "epoch": 0, "step": 0, "time": then["time"], **here}
    assert now == {"state": "finished", "epoch": 2, "step": 2 * STEPS_PER_EPOCH, "time": now["time"], **here}
    age = datetime.now(UTC) - datetime.fromisoformat(now["time"])
    assert timedelta(seconds=-1) < age < timedelta(minutes=5)


def test_a_run_preempted_by_a_signal_resumes(happening, run_here, tmp_path):
    directory = tmp_path / "run"
    (tmp_path / "ask").touch()
    args = happening(f"Path({str(tmp_path / 'ask')!r}).exists() and os.kill(os.getpid(), signal.SIGUSR1)")
    run_here(*args, status=128 + signal.SIGUSR1)
    state, saved = state_of(directory), newest(directory)
    assert (state["state"], state["signal"], state["message"]) == ("preempted", signal.SIGUSR1, None)
    assert (state["epoch"], state["step"]) == (saved["epoch"], saved["step"])
    assert STEPS_PER_EPOCH <= state["step"] < 2 * STEPS_PER_EPOCH
    (tmp_path / "ask").unlink()
    run_here(*args)
    state = state_of(directory)
    assert (state["state"], state["epoch"], state["signal"]) == ("finished", 2, None)


@pytest.mark.parametrize(
    ("statement", "status", "message"),
    [
        ("raise UserError('the data ran away')", 2, "^the data ran away$"),
        ("raise OSError(28, 'No space left on device')", 2, "^--save-dir .*: No space left on device; earlier check"),
        ("1 / 0", 1, ": ZeroDivisionError: division by zero$"),
    ],
)
def test_a_run_that_ends_by_an_error_records_its_message(statement, status, message, happening, run_here, tmp_path):
    _, err = run_here(*happening(statement), status=status)
    state = state_of(tmp_path / "run")
    assert state["state"] == {1: "failed", 2: "refused"}[status] and re.search(message, state["message"])
    assert (state["epoch"], state["step"]) == (1, STEPS_PER_EPOCH)
    assert err.endswith(f"error: {state['message']}\n")


def test_a_run_ended_by_a_second_ctrl_c_is_failed(happening, run_here, tmp_path):
    """The second Ctrl-C does not wait for a save, so the run is not "preempted"."""
    ask = "os.kill(os.getpid(), signal.SIGINT)"
    with pytest.raises(SystemExit):
        run_here(*happening(f"[{ask}, __import__('time').sleep({ONE_CTRL_C_S + 0.1}), {ask}]"))
    state = state_of(tmp_path / "run")
    assert (state["state"], state["signal"]) == ("failed", signal.SIGINT)


def test_a_state_that_cannot_be_written_does_not_hide_the_message(happening, run_here, tmp_path, monkeypatch):
    monkeypatch.setattr(Lock, "temporary", Lock.temporary)  # restored after the test
    lock = "__import__('trainer.checkpoint.lock').checkpoint.lock.Lock"
    statement = f"{lock}.temporary = lambda self, path: directory / 'gone' / 'a'; raise UserError('the data ran away')"
    _, err = run_here(*happening(statement), status=2)
    not_saved, refused = err.splitlines()
    assert not_saved.startswith("error: the state after the last optimizer step could not be saved: ")
    assert refused == "error: the data ran away"
    assert state_of(tmp_path / "run")["state"] == "running"


# --- the folder of an earlier run --------------------------------------------------------------------------------


def test_a_refused_start_changes_only_state_json(plain, run_here, tmp_path):
    """A finished run is refused with other flags, and remains finished with its own flags."""
    run_here(*plain)
    before = everything_but_the_state(tmp_path / "run")
    _, err = run_here(*plain, "--width", 8, status=2)
    state = state_of(tmp_path / "run")
    assert (state["state"], state["epoch"], state["step"]) == ("refused", None, None)
    assert err == f"error: {state['message']}\n"
    assert everything_but_the_state(tmp_path / "run") == before
    run_here(*plain)
    state = state_of(tmp_path / "run")
    assert (state["state"], state["epoch"], state["step"]) == ("finished", 2, 2 * STEPS_PER_EPOCH)
    long_ago = json.dumps(state | {"time": "2001-01-01T00:00:00+00:00"})
    (tmp_path / "run" / STATE).write_text(long_ago)
    run_here(*plain)
    assert (tmp_path / "run" / STATE).read_text() == long_ago


def test_a_refused_start_in_a_new_folder_writes_no_state_json(plain, run_here, tmp_path):
    run_here(*plain, "--init-from", "main.py", status=2)
    assert not (tmp_path / "run" / STATE).exists()


def test_fresh_moves_the_state_file_aside(plain, run_here, tmp_path):
    run_here(*plain)
    before = state_of(tmp_path / "run")
    run_here(*plain, "--fresh", "--epochs", 1)
    assert state_of(tmp_path / "run" / "previous-1") == before
    assert state_of(tmp_path / "run")["epoch"] == 1


@pytest.mark.slow
def test_a_signal_to_one_process_preempts_the_run(happening, command, tmp_path):
    statement = "os.environ.get('RANK', '') or os.kill(os.getpid(), signal.SIGTERM) if is_second() else None"
    args = happening(statement)
    file = args[1].rpartition(":")[0]
    with open(file, "a") as module:
        module.write("\ndef is_second():\n    import torch\n    return torch.distributed.get_rank() == 1\n")
    command(*launcher(2), *args, status=128 + signal.SIGTERM)
    state = state_of(tmp_path / "run")
    assert (state["state"], state["signal"]) == ("preempted", signal.SIGTERM)
    assert state["step"] == newest(tmp_path / "run")["step"]


# --- examples/slurm.sh -------------------------------------------------------------------------------------------

WORK = ["--task", WEIGHTED, *TINY, "--epochs", 3]
STUBS = {
    # srun starts one task per node. As in SLURM, USR1 goes to all processes of a task, and TERM becomes KILL.
    "srun": """
        shift
        pids=()
        trap 'for pid in "${pids[@]}"; do pkill -USR1 -P "$pid"; kill -USR1 "$pid"; done' USR1
        trap 'kill -KILL "${pids[@]}"' TERM
        for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
        for pid in "${pids[@]}"; do while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done; done
        wait "${pids[0]}"
    """,
    "scontrol": """
        if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$REQUEUED"; fi
    """,
    "torchrun": f"""
        exec {sys.executable} -m torch.distributed.run "$@"
    """,
}


class Job:
    """Runs examples/slurm.sh as SLURM would start it, with SLURM's programs replaced."""

    def __init__(self, folder, environment, num_nodes=1, **stubs):
        self.folder, self.directory, self.num_nodes = folder, folder / "run", num_nodes
        programs = folder / "bin"
        programs.mkdir()
        for name, body in (STUBS | stubs).items():
            (programs / name).write_text(f"#!/bin/bash\n{body}")
            (programs / name).chmod(0o755)
        self.environment = environment | {
            "HOME": str(folder),
            "PYTHONUSERBASE": site.getuserbase(),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": str(num_nodes),
            "MASTER_PORT": str(free_port()),
            "REQUEUED": str(folder / "requeued"),
        }

    def run(self, *args, stop_at=None, into="--save-dir=~/run"):
        """Runs the script, and sends its time limit's signal once stop_at() holds; returns (status, output)."""
        command = ["bash", "examples/slurm.sh", *map(str, args), *[into] * bool(into)]
        script = subprocess.Popen(
            command, cwd=ROOT, env=self.environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            while stop_at is not None and not stop_at():
                assert script.poll() is None, script.communicate()[0]
                time.sleep(0.02)
            if stop_at is not None:
                script.send_signal(signal.SIGUSR1)
            out, _ = script.communicate(timeout=120)
        finally:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
                script.wait()
        return script.returncode, out

    def says(self, state):
        return (self.directory / STATE).exists() and state_of(self.directory)["state"] == state

    @property
    def requeued(self):
        file = self.folder / "requeued"
        return file.read_text().splitlines() if file.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_slurm_job_is_requeued_until_it_is_finished(num_nodes, environment, tmp_path):
    job = Job(tmp_path, environment, num_nodes)
    status, out = job.run(*WORK, "--delay-s", 0.5, stop_at=lambda: job.says("running"))
    assert state_of(job.directory)["state"] == "preempted", out
    assert (status, job.requeued) == (0, ["requeue 17"]), out
    assert state_of(job.directory)["step"] == newest(job.directory)["step"] < 3 * STEPS_PER_EPOCH
    status, out = job.run(*WORK)
    assert "Resuming after optimizer step" in out
    assert (status, job.requeued) == (0, ["requeue 17"]), out
    results = json.loads((job.directory / "results.json").read_text())
    assert (results["world_size"], results["epochs"]) == (num_nodes, 3)


@pytest.mark.parametrize(
    ("state", "asked", "again"),
    [
        ("preempted", True, True),
        ("preempted", False, False),
        *((state, True, False) for state in ("running", "finished", "paused", "refused", "failed")),
    ],
)
def test_a_slurm_job_is_requeued_only_if_its_run_was_preempted_when_time_was_up(
    state, asked, again, environment, tmp_path
):
    """The stub of torchrun writes a state and fails."""
    content = json.dumps({"state": state, "message": 'not "state": "preempted"'}, indent=2)
    leaves = f"""
        {"sleep 60 &" if asked else ""}
        sleep 0.5
        echo '{content}' > {tmp_path}/written
        mv {tmp_path}/written {tmp_path}/run/{STATE}
        wait
        exit 1
    """
    (tmp_path / "run").mkdir()
    job = Job(tmp_path, environment, torchrun=leaves)
    status, out = job.run(stop_at=(lambda: job.says(state)) if asked else None)
    assert (status, job.requeued) == (1, ["requeue 17"] if again else []), out
    assert ("Not queueing job 17 again" in out) is (asked and not again)


def test_a_slurm_job_passes_its_cores_on(environment, tmp_path):
    cores = {"SLURM_CPUS_PER_TASK": "16"}
    job = Job(tmp_path, environment | cores, torchrun="""echo "cores: $SRUN_CPUS_PER_TASK" """)
    status, out = job.run()
    assert (status, out) == (0, "cores: 16\n")


def test_a_slurm_job_needs_save_dir(environment, tmp_path):
    job = Job(tmp_path, environment, torchrun="touch $HOME/started")
    status, out = job.run("--config", "my.toml", into="")
    assert status == 2 and out.startswith("error: --save-dir DIR: missing") and not (tmp_path / "started").exists()
