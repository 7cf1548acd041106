"""A failure on one device loses no step, and the same command resumes once the cause is fixed."""

import json
import re
import signal
import subprocess
import threading

import pytest
from torch.utils.data._utils import signal_handling

from tests.conftest import ROOT, assert_same_bits, load
from tests.faults.faulty_group import TINY
from trainer.failure.diagnosis import Diagnosis
from trainer.failure.errors import EXIT_RESTART
from trainer.failure.heartbeat import CurrentActivity

RUN = [*TINY[:-4], "--save-dir"]  # saves only at the end of an epoch

WRONG = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.helpers.weighted_task import Weighted

class Wrong(Weighted):
    @property
    def monitor(self):
        return ("val/f1" if "MISTAKE" in os.environ else "val/loss"), "min"

    def summarise(self, sums):
        metrics = super().summarise(sums)
        return metrics if os.environ.get("MISTAKE") != "summarise" else {{"loss": sums["loss"]}}
"""


@pytest.mark.parametrize(("where", "num_steps"), [("forward", 2), ("data", 1), ("evaluation", 12)])
def test_data_refused_during_training_lose_no_step(where, num_steps, refused, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_FAULT", f"refuse {where} 0")
    refused(["the data ran away"], *RUN, tmp_path / "run")
    assert load(tmp_path / "run" / "last.pth")["step"] == num_steps
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == "refused"


@pytest.mark.parametrize(("place", "num_steps"), [("forward", 2), ("evaluation", 12)])
def test_an_exception_loses_no_step(place, num_steps, run_here, tmp_path, monkeypatch):
    run_here(*RUN, tmp_path / "whole")
    monkeypatch.setenv("LOCKSTEP_FAULT", f"raise {place} 0")
    out, err = run_here(*RUN, tmp_path / "run", status=1)
    assert "ValueError: the sky fell" in err
    assert f"The state after optimizer step {num_steps} is saved; the same command resumes from there." in out
    monkeypatch.delenv("LOCKSTEP_FAULT")
    out, _ = run_here(*RUN, tmp_path / "run")
    assert f"Resuming after optimizer step {num_steps}" in out
    assert_same_bits(load(tmp_path / "whole" / "final.pth")["model"], load(tmp_path / "run" / "final.pth")["model"])
    results = [json.loads((tmp_path / name / "results.json").read_text())["metrics"] for name in ("whole", "run")]
    assert results[0] == results[1]


def test_a_save_within_a_step_contains_the_state_before_it(run_here, tmp_path, monkeypatch):
    """The saved optimizers also have the learning rate of the last complete step, not of the interrupted step."""
    run_here(*RUN, tmp_path / "whole", "--save-every-steps", 2, "--keep-checkpoints", 0)
    monkeypatch.setenv("LOCKSTEP_FAULT", "raise forward 0")
    run_here(*RUN, tmp_path / "run", status=1)
    saved = load(tmp_path / "run" / "last.pth")
    entries = json.loads((tmp_path / "whole" / "manifest.json").read_text())["checkpoints"]
    (entry,) = [entry for entry in entries if entry["step"] == saved["step"]]
    unbroken = load(tmp_path / "whole" / entry["file"])
    rates = [group["lr"] for each in unbroken["optimizers"]["train"] for group in each["param_groups"]]
    assert rates != [
        group["lr"]
        for each in load(tmp_path / "whole" / "last.pth")["optimizers"]["train"]
        for group in each["param_groups"]
    ]
    assert_same_bits(saved["optimizers"], unbroken["optimizers"])


@pytest.mark.parametrize(
    ("fault", "where", "num_steps", "told"),
    [
        ("exit", "forward", 2, "SystemExit: 7"),
        ("cancel", "evaluation", 12, "CancelledError"),
        ("generator", "data", 1, "GeneratorExit"),
    ],
)
def test_a_system_exit_loses_no_step(fault, where, num_steps, told, run_here, tmp_path, monkeypatch):
    """The exceptions do not derive from `Exception`, so `except Exception` does not catch them."""
    monkeypatch.setenv("LOCKSTEP_FAULT", f"{fault} {where} 0")
    out, err = run_here(*RUN, tmp_path / "run", status=1)
    assert err.count("error: ") == 1 and err.splitlines()[-1].startswith("error: failed in ")
    assert err.splitlines()[-1].endswith(f": {told}") and "Traceback" in err
    assert f"The state after optimizer step {num_steps} is saved; the same command resumes from there." in out
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == "failed"


def test_an_interrupt_of_the_task_is_a_request_to_stop(run_here, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_FAULT", "interrupt forward 0")
    out, err = run_here(*RUN, tmp_path / "run", status=128 + signal.SIGINT)
    assert err == "error: stopped in forward at optimizer step 3: the task's code raised KeyboardInterrupt\n"
    assert "The state after optimizer step 2 is saved; the same command resumes from there." in out
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert (state["state"], state["step"], state["signal"], state["message"]) == ("preempted", 2, signal.SIGINT, None)
    monkeypatch.delenv("LOCKSTEP_FAULT")
    assert "Resuming after optimizer step 2" in run_here(*RUN, tmp_path / "run")[0]


@pytest.mark.parametrize(("fault", "told"), [("exit", "SystemExit: 7"), ("interrupt", "KeyboardInterrupt")])
def test_the_reason_for_a_workers_end_is_reported(fault, told, run_here, tmp_path, monkeypatch):
    """torch alone would report only that the worker exited."""
    monkeypatch.setenv("LOCKSTEP_FAULT", f"{fault} data 0")
    _, err = run_here(*RUN, tmp_path / "run", "--num-workers", 1, status=1)
    assert err.splitlines()[-1].endswith(f": {told}") and err.count("error: ") == 1


def test_a_killed_worker_is_reported_as_lost(run_here, tmp_path, monkeypatch):
    """The exit status makes a launcher restart the run, as after a lost rank."""
    monkeypatch.setenv("LOCKSTEP_FAULT", "workers forward 0")
    monkeypatch.setenv("LOCKSTEP_FAULT_NOTE", str(tmp_path / "note"))
    argv = [*RUN, tmp_path / "run", "--num-workers", 1]
    out, err = run_here(*argv, status=EXIT_RESTART)
    (line,) = err.splitlines()
    assert re.fullmatch(
        r"error: lost data-loading worker \d+ in forward at optimizer step 3 to a signal: Killed; the same .*",
        line,
    )
    assert "The state after optimizer step 2 is saved" in out
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == "failed"
    run_here(*argv)


def test_a_connection_broken_by_a_killed_worker_is_reported_as_its_loss():
    """The connection breaks first; torch's SIGCHLD handler would then raise during the report of the failure."""
    worker = subprocess.Popen(["sleep", "60"])
    signal_handling._set_worker_pids(id(worker), (worker.pid,))
    threading.Timer(0.1, worker.kill).start()
    try:
        failure = Diagnosis(CurrentActivity(), prints=False).explain(ConnectionResetError(104, "reset by peer"))
    finally:
        signal_handling._remove_worker_pids(id(worker))
        worker.wait()
    assert f"lost data-loading worker {worker.pid} in " in str(failure) and failure.lost == []


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


def test_an_exception_whose_message_cannot_be_shown_is_reported():
    failure = Diagnosis(CurrentActivity(), prints=False).explain(Unprintable())
    assert str(failure).endswith(": Unprintable: its message cannot be shown")


@pytest.mark.parametrize("mistake", ["monitor", "summarise"])
def test_an_error_in_metrics_loses_no_step(mistake, run_here, tmp_path, monkeypatch):
    (tmp_path / f"wrong_{mistake}.py").write_text(WRONG)
    argv = ["--task", f"{tmp_path}/wrong_{mistake}.py:Wrong", *TINY[2:-4], "--save-dir"]
    run_here(*argv, tmp_path / "whole")
    monkeypatch.setenv("MISTAKE", mistake)
    _, err = run_here(*argv, tmp_path / "run", status=2)
    assert f"Wrong.{mistake}: " in err
    num_steps = load(tmp_path / "run" / "last.pth")["step"]
    assert num_steps > 0
    monkeypatch.delenv("MISTAKE")
    out, _ = run_here(*argv, tmp_path / "run")
    assert f"Resuming after optimizer step {num_steps}" in out
    assert_same_bits(load(tmp_path / "whole" / "final.pth")["model"], load(tmp_path / "run" / "final.pth")["model"])
