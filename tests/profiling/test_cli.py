"""Tests command lines of profiler.py: mistakes, help, and how they end."""

import os
import signal
import time

import pytest

from profiler import main as profile
from tests.conftest import WEIGHTED
from tests.profiling.conftest import SHORT, TINY
from trainer.commands.build import start_strategy
from trainer.commands.parse import parse
from trainer.profiling import processes
from trainer.profiling.cli import COMMANDS
from trainer.profiling.step import StepFlags


@pytest.mark.parametrize(("argv", "messages"), [
    ([], ["no command given"]),
    (["stpe"], ["stpe: no such command"]),
    (["step", "--steps", "0", "--epochs", "x", "--nonsense"],
     ["--steps 0: must be at least 1", "--epochs x: must be a whole number", "--nonsense: no such flag"]),
    (["step", "--eval-only"], ["--eval-only: profiler.py measures a training run"]),
    (["step", "--seeds", "3"], ["--seeds 3: profiler.py measures a training run"]),
    (["step", "--nproc", "2"], ["--multi-gpu: needs a value"]),
    (["batch-size", "--global-batch-size", "64", "--max-batch-size", "4"],
     ["--global-batch-size 64: profiler.py batch-size", "--max-batch-size 4: must be at least --min-batch-size 8"]),
    (["batch-size", "--batch_size=64"], ["--batch-size 64: profiler.py batch-size chooses the sizes; leave this"]),
    (["batch-size", "--multi-gpu", "ddp"], ["--multi-gpu: profiler.py batch-size measures one device"]),
    (["scaling", "--world-sizes", "1,0"], ["--world-sizes 0: must be at least 1"]),
    (["scaling", "--world-sizes", ""], ["--world-sizes: needs at least one value"]),
    (["scaling", "--nproc", "2"], ["--nproc 2: scaling chooses the number of processes"]),
    (["check", "--device", "cuda:1"], ["--device cuda:1: must be one of auto, cpu, cuda"]),
    (["check", "--task", "har"], ["--task: no such flag"]),
    (["check", "--backend", "mpi"], ["--backend mpi: must be one of nccl, gloo"]),
])  # fmt: skip
def test_every_mistake_is_one_line(argv, messages, profile_here):
    lines = profile_here(*argv, status=2).err.splitlines()
    assert len(lines) == len(messages)
    for message in messages:
        assert any(line.startswith(f"error: {message}") for line in lines), lines


def test_an_unwritable_json_file_is_refused(profile_here):
    err = profile_here("step", *TINY, *SHORT, "--json", "/proc/none/step.json", status=2).err
    assert err.startswith("error: --json /proc/none/step.json: ")


@pytest.mark.parametrize(("argv", "message"), [
    ("step --json {file}/x/step.json", "--json {file}/x/step.json: {file}: Not a directory; choose another file"),
    ("step --json {folder}", "--json {folder}: Is a directory; choose another file"),
    ("step --trace {file}", "--trace {file}: Not a directory; choose another folder"),
    ("batch-size --json {folder}", "--json {folder}: Is a directory; choose another file"),
    ("scaling --board {file}/board", "--board {file}/board: {file}: Not a directory; choose another folder"),
    ("check --json /proc/x.json", "--json /proc/x.json: /proc: No such file or directory; choose another file"),
])  # fmt: skip
def test_unwritable_results_are_reported_before_measuring(argv, message, profile_here, tmp_path):
    places = {"file": tmp_path / "file", "folder": tmp_path / "folder"}
    places["file"].write_text("kept")
    places["folder"].mkdir()
    task = [] if argv.startswith("check") else ["--task", WEIGHTED]
    done = profile_here(*argv.format(**places).split(), *task, "--device", "cpu", status=2)
    assert (done.out, done.err) == ("", f"error: {message.format(**places)}\n")
    assert places["file"].read_text() == "kept" and not list(places["folder"].iterdir())


def test_scaling_under_a_launcher_is_refused(profile_here, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "scaling: starts its own processes" in profile_here("scaling", status=2).err


@pytest.mark.parametrize("argv", [["step", "--multi-gpu", "ddp", "--bogus"], ["scaling"], ["stpe"]])
@pytest.mark.parametrize(("local_rank", "count"), [("0", 1), ("1", 0), (None, 1)])
def test_one_process_per_host_prints_errors(argv, local_rank, count, profile_here, monkeypatch):
    around = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for variable, value in {**around, **({"LOCAL_RANK": local_rank} if local_rank else {})}.items():
        monkeypatch.setenv(variable, value)
    assert profile_here(*argv, status=2).err.count("error: ") == count


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_shows_usage_examples_and_flags(name, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["profiler.py"])
    with pytest.raises(SystemExit) as ended:
        profile([name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: profiler.py {name} [flags]\n")
    assert "examples:" in out and f"python profiler.py {name}" in out
    assert "--json" in out and "--device" in out


def test_help_names_another_viewer_of_traces_than_tensorboard(capsys, monkeypatch):
    """TensorBoard needs a package that is not among the requirements."""
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        profile(["step", "--help-all"])
    out = capsys.readouterr().out
    assert "tensorboard --logdir" not in out and "then: open the file in https://ui.perfetto.dev" in out
    assert "TensorBoard needs the package torch-tb-profiler to show the trace" in out


def test_a_lost_process_of_a_measurement_is_not_said_to_resume(alone):
    flags, _ = parse([*TINY, "--multi-gpu", "ddp"], True, StepFlags)
    strategy = start_strategy(flags, alone)
    assert strategy.group.diagnosis.has_checkpoints
    with processes.in_use(strategy.group):
        assert not strategy.group.diagnosis.has_checkpoints


def test_sigterm_ends_a_measurement_cleanly():
    before, left = signal.getsignal(signal.SIGTERM), []

    def work():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            left.append("in order")

    with pytest.raises(SystemExit) as ended:
        processes.exit_status(work)
    assert ended.value.code == 128 + signal.SIGTERM
    assert left == ["in order"]
    assert signal.getsignal(signal.SIGTERM) is before
