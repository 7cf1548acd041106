"""A user's logger receives all events in order, and its failures do not affect the run."""

import errno
import importlib
import json
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.conftest import ROOT, STEPS_PER_EPOCH, TINY, assert_same_bits, contents, cut_back, load, read_metrics
from tests.faults.job import Forks
from tests.helpers import recording_logger
from tests.helpers.recording_logger import METHODS, RECORD, Recording, logged_run
from trainer.loading.order import Position
from trainer.logs import background
from trainer.logs.background import BackgroundLogger
from trainer.logs.logger import DATA_WAIT
from trainer.logs.run_log import RunLog

FILE = ROOT / "tests" / "helpers" / "recording_logger.py"
STOPS = """
import os, signal
from trainer import Logger

class Stops(Logger):
    def metrics(self, record):
        if record.event == "epoch":
            os.kill(os.getpid(), signal.SIGTERM)
"""
HOLDS_ON = """
import atexit, threading
import trainer.logs.background
from trainer import Logger

trainer.logs.background.END_WITHIN_S = trainer.logs.background.SILENT_WAIT_S = 0.1
for_ever = threading.Event().wait

class HoldsOn(Logger):
    def start(self, run):
        atexit.register(for_ever)
        threading.Thread(target=for_ever, daemon=False).start()
        for_ever()
"""


def named(logger):
    return ["--logger", f"{FILE}:{logger}"]


def logged(directory, method=None, file=RECORD):
    lines = [json.loads(line) for line in (directory / file).read_text().splitlines()]
    return [line for line in lines if method in (None, line["method"])]


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(background, "END_WITHIN_S", 0.3)
    monkeypatch.setattr(background, "SILENT_WAIT_S", 0.1)


@pytest.fixture
def run_with(tmp_path):
    """Logs 3 epochs with a logger; returns the longest call but `close`, in seconds."""

    def run(logger):
        log = RunLog(
            logged_run(tmp_path, config={"lr": 0.5, "log-interval": 1}), own=[BackgroundLogger(logger, "--logger x")]
        )
        log.state = "finished"
        calls = [(log.say, "It begins.")]
        for epoch in range(1, 4):
            calls += [
                (log.start_segment, Position(epoch - 1), 3, 8, 0), (log.advance, 8),
                (log.step, epoch, Position(epoch - 1, 0, 8), {"train/loss": 0.5, "learning_rate": 1.0}),
                (log.end_training,), (log.report, epoch, Position(epoch), float(epoch), {"val/loss": 0.25}),
                (log.pictures, epoch, {"val/dots": np.zeros((2, 3, 3), np.uint8)}),
            ]  # fmt: skip
        calls.append((log.result, 3, "with the best weights", {"test/loss": 0.125}))
        longest = 0.0
        for function, *arguments in calls:
            started = time.perf_counter()
            function(*arguments)
            longest = max(longest, time.perf_counter() - started)
        log.close()
        return longest

    return run


def messages(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if "--logger" in line]


# --- received events ---------------------------------------------------------------------------------------------


def test_a_logger_gets_all_events_in_order_and_does_not_change_training(train, tmp_path):
    argv = ["--epochs", 2, "--log-interval", 1, "--dropout", 0.3]
    train(tmp_path / "logged", *argv, *named("Recording"))
    train(tmp_path / "plain", *argv)
    calls = logged(tmp_path / "logged")
    config = json.loads((tmp_path / "logged" / "config.json").read_text())
    assert [call["method"] for call in calls if call["method"] in ("start", "end")] == ["start", "end"]
    first, last = calls[0], calls[-1]
    assert (first["id"], first["step"], first["last_report"], first["lr"]) == (config["run_id"], 0, 0, 0.01)
    assert first["interval"] == 1
    assert (last["method"], last["state"]) == ("end", "finished")
    assert not any(call["main_thread"] for call in calls)
    said = [call["line"] for call in calls if call["method"] == "say"]
    assert set(said) <= set((tmp_path / "logged" / "train.log").read_text().splitlines())
    metrics = logged(tmp_path / "logged", "metrics")
    assert [call["event"] for call in metrics] == [*["step"] * 3, "epoch", *["step"] * 3, "epoch", "result"]
    written = [json.loads(line) for line in (tmp_path / "logged" / "metrics.jsonl").read_text().splitlines()]
    for call, record in zip(metrics, written, strict=True):
        assert (DATA_WAIT in call["values"]) == (call["event"] == "epoch")
        call["values"].pop(DATA_WAIT, None)
        place = {"samples", "epoch"} if call["event"] != "result" else set()
        assert record.keys() == {"event", "step"} | place | call["values"].keys()
        assert call["values"].items() <= record.items()
        assert (call["event"], call["step"], call["epoch"]) == (record["event"], record["step"], record.get("epoch"))
    assert_same_bits(*(load(tmp_path / name / "final.pth") for name in ("logged", "plain")))


def test_a_logger_receives_pictures(run_with, tmp_path):
    run_with(Recording())
    assert [(call["step"], call["shapes"]) for call in logged(tmp_path, "pictures")] == [
        (epoch, {"val/dots": [2, 3, 3]}) for epoch in (1, 2, 3)
    ]


def test_several_loggers_do_not_disturb_each_other(train, tmp_path):
    """The first logger changes the values that it receives."""
    train(tmp_path, *named("Greedy"), f"{FILE}:Other")
    greedy, other = logged(tmp_path, "metrics"), logged(tmp_path, "metrics", f"other-{RECORD}")
    assert [call["values"] for call in greedy] == [call["values"] for call in other] != []
    assert read_metrics(tmp_path, "epoch")[0]["val/loss"] == greedy[0]["values"]["val/loss"]


def test_loggers_of_several_flags_are_combined(train, tmp_path):
    train(tmp_path, *named("Recording"), "--logger", f"{FILE}:Other")
    assert logged(tmp_path, "metrics") and logged(tmp_path, "metrics", f"other-{RECORD}")


def test_a_stopped_run_resumes_with_the_same_tracking_id(cli, train, tmp_path):
    stops = tmp_path / "stops_the_run.py"
    stops.write_text(STOPS)
    argv = ["--save-dir", tmp_path / "run", "--epochs", 3, "--log-interval", 1, "--delay-s", 0.01]
    status, _, _ = cli(*TINY, *argv, *named("Recording"), f"{stops}:Stops")
    assert status == 128 + 15
    stopped_at = load(tmp_path / "run" / "last.pth")["step"]
    train(tmp_path / "run", "--epochs", 3, "--log-interval", 1, *named("Recording"))
    calls = logged(tmp_path / "run")
    starts = [i for i, call in enumerate(calls) if call["method"] == "start"]
    assert [calls[i - 1]["state"] for i in (starts[1], 0)] == ["preempted", "finished"]
    assert [calls[i]["step"] for i in starts] == [0, stopped_at] and 0 < stopped_at < 3 * STEPS_PER_EPOCH
    assert calls[starts[0]]["id"] == calls[starts[1]]["id"]
    steps = [call["step"] for call in calls if call.get("event") == "step"]
    assert steps == list(range(1, 3 * STEPS_PER_EPOCH + 1))


@pytest.mark.parametrize("step", [2, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1])
def test_a_logger_can_drop_what_a_resumed_run_repeats(step, train, tmp_path):
    """After a kill, the logger's file has each record of metrics.jsonl once."""
    argv = ["--epochs", 2, "--log-interval", 1, "--save-every-steps", 1, "--keep-checkpoints", 0]
    train(tmp_path / "whole", *argv, *named("WithoutRepeats"))
    entries = json.loads((tmp_path / "whole" / "manifest.json").read_text())["checkpoints"]
    cut_back(tmp_path / "whole", [entry for entry in entries if entry["step"] <= step], tmp_path / "resumed")
    shutil.copy(tmp_path / "whole" / RECORD, tmp_path / "resumed")
    train(tmp_path / "resumed", *argv, *named("WithoutRepeats"))
    written = [json.loads(line) for line in (tmp_path / "resumed" / "metrics.jsonl").read_text().splitlines()]
    found = [(call["event"], call["step"]) for call in logged(tmp_path / "resumed", "metrics")]
    assert found == [(record["event"], record["step"]) for record in written]


@pytest.mark.slow
def test_only_one_of_several_processes_logs(environment, tmp_path):
    run = Forks([*TINY, "--save-dir", tmp_path / "run", *named("Recording")], 2, tmp_path / "job", environment)
    assert run.statuses() == [0, 0], run.output
    calls = logged(tmp_path / "run")
    assert len({call["process"] for call in calls}) == 1
    assert [call["method"] for call in calls].count("start") == 1
    assert calls[-1]["state"] == "finished"


def test_a_logger_receives_the_state_of_a_refused_run(cli, tmp_path):
    status, _, _ = cli(*TINY, "--save-dir", tmp_path, "--lr", 1e38, "--max-grad-norm", 0, *named("Recording"))
    assert status == 2
    assert logged(tmp_path)[-1]["state"] == "refused"


@pytest.mark.slow
def test_each_of_several_runs_has_its_own_tracking_run(command, tmp_path):
    command("main.py", *TINY, "--seeds", 2, "--save-dir", tmp_path, *named("Recording"))
    starts = [logged(tmp_path / name, "start") for name in ("seed-0", "seed-1")]
    assert [len(own) for own in starts] == [1, 1]
    assert starts[0][0]["id"] != starts[1][0]["id"]


# --- failures of loggers -----------------------------------------------------------------------------------------


def test_loggers_end_even_if_the_disk_is_full(tmp_path, monkeypatch):
    log = RunLog(
        logged_run(tmp_path, config={"lr": 0.5, "log-interval": 1}), own=[BackgroundLogger(Recording(), "--logger x")]
    )

    def full(state):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log._directory, "end", full)
    with pytest.raises(OSError, match="No space left"):
        log.close()
    assert [call["state"] for call in logged(tmp_path, "end")] == ["failed"]


@pytest.mark.parametrize("method", METHODS)
def test_a_failing_logger_is_reported_once_and_the_others_continue(method, run_with, tmp_path, capsys):
    run_with(getattr(recording_logger, f"FailsIn{method.title()}")())
    expected = f"--logger x: {method}() failed: ConnectionError: the server is gone; the run continues without it"
    out, err = capsys.readouterr()
    assert (out.count(expected), out.count("--logger"), err) == (1, 1, "")
    assert expected in (tmp_path / "train.log").read_text()
    assert not (tmp_path / RECORD).exists() or method not in [call["method"] for call in logged(tmp_path)]
    assert len(read_metrics(tmp_path, "epoch")) == 3


@pytest.mark.parametrize("method", METHODS)
def test_a_logger_that_blocks_is_abandoned(method, hurried, run_with, tmp_path, capsys):
    started = time.monotonic()
    longest = run_with(getattr(recording_logger, f"BlocksIn{method.title()}")())
    assert longest < 0.1
    assert time.monotonic() - started < 5
    waiting, left = messages(capsys)
    assert waiting == "Waiting for --logger x, at most 0.2 s."
    missed = {"start": 11, "say": 10, "metrics": 9, "pictures": 7, "end": 0}[method]
    assert left == f"--logger x: did not finish in time and is abandoned; missed calls: {missed}"
    assert len(read_metrics(tmp_path, "epoch")) == 3


@pytest.mark.parametrize("method", METHODS)
def test_a_slow_logger_delays_no_step_and_is_awaited_at_the_end(method, run_with, tmp_path, capsys):
    slow = type("Slow", (Recording,), {method: slowly(getattr(Recording, method))})
    assert run_with(slow()) < 0.1
    assert messages(capsys) == []
    assert [call["method"] for call in logged(tmp_path)] == [
        "start", "say", *["metrics", "metrics", "pictures"] * 3, "metrics", "end",
    ]  # fmt: skip


def slowly(method):
    def call(self, *arguments):
        time.sleep(0.1)
        method(self, *arguments)

    return call


def test_the_oldest_events_of_a_slow_logger_are_dropped_and_counted(monkeypatch, run_with, tmp_path, capsys):
    monkeypatch.setattr(background, "MAX_WAITING", 4)
    slow = type("Slow", (Recording,), {"start": slowly(slowly(Recording.start))})
    run_with(slow())
    falls_behind, dropped = messages(capsys)
    assert falls_behind == "--logger x: falls behind: 4 calls are queued, so the oldest are dropped"
    calls = [(call["method"], call.get("event")) for call in logged(tmp_path)]
    assert calls == [
        ("start", None), ("metrics", "step"), ("metrics", "epoch"), ("pictures", None), ("metrics", "result"),
        ("end", None),
    ]  # fmt: skip
    assert dropped == "--logger x: fell behind; dropped calls: 7"


def test_a_process_exits_although_a_logger_blocks(environment, tmp_path):
    (tmp_path / "holds_on.py").write_text(HOLDS_ON)
    argv = [*TINY, "--save-dir", tmp_path / "run", "--logger", f"{tmp_path / 'holds_on.py'}:HoldsOn"]
    command = [sys.executable, "main.py", *map(str, argv)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "is abandoned" in done.stdout
    assert (tmp_path / "run" / "lock").read_text() == ""


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("comet", "--logger comet: must be path/to/file.py:ClassName"),
        ("no_such.py:Mine", "--logger no_such.py:Mine: there is no file no_such.py"),
        (f"{FILE}:Nothing", f"{FILE} defines no Nothing"),
        (f"{FILE}:RECORD", "RECORD must be a subclass of trainer.Logger"),
        (f"{FILE}:FailsToBegin", "cannot be created: ConnectionError: no server"),
        (f"{FILE}:NeedsMore", "cannot be created: TypeError: "),
    ],
)
def test_a_wrong_logger_is_refused_before_anything_is_written(value, part, refused, tmp_path):
    refused([part], *TINY, "--save-dir", tmp_path / "run", "--logger", value)
    assert not contents(tmp_path)


def test_errors_of_loggers_are_shown_with_errors_of_other_flags(refused, tmp_path):
    parts = ["--logger x: must be", "--logger no.py:A: there is no file", "--lr 0: must be above 0"]
    refused(parts, *TINY, "--save-dir", tmp_path / "run", "--logger", "x", "no.py:A", "--lr", 0)


def test_a_logger_file_named_like_a_library_does_not_shadow_it(run_here, tmp_path):
    (tmp_path / "tensorboard.py").write_text(FILE.read_text())
    run_here(*TINY, "--save-dir", tmp_path / "run", "--logger", f"{tmp_path / 'tensorboard.py'}:Recording")
    assert importlib.import_module("tensorboard").__file__ != str(tmp_path / "tensorboard.py")
