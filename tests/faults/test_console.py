"""Tests of output: closed terminals, missing streams, encodings, terminal escapes and full disks."""

import fcntl
import io
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import ROOT, TINY
from tests.helpers.weighted_task import Weighted
from trainer.checkpoint.weights import compare
from trainer.commands.predict import print_output
from trainer.common import process
from trainer.common.errors import MOST_OF_LINE, UserError, reason, shown_line
from trainer.failure.errors import print_error
from trainer.logs.console import say
from trainer.loop.contract import checked_metrics
from trainer.profiling.cli import main as profile

RUN = [sys.executable, "main.py", *map(str, TINY), "--epochs", "40", "--log-interval", "1", "--delay-s", "0.01"]


def status_without_its_terminal(directory, environment, ignored) -> int:
    """Returns the exit status of a run whose terminal closes in training. ignored: the run ignores SIGHUP."""

    def start():
        if ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*RUN, "--save-dir", str(directory)], cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=start,
    )  # fmt: skip
    os.close(theirs)
    while not (directory / "checkpoint_1.pth").exists():
        os.read(ours, 1 << 16)
    os.close(ours)
    return process.wait(60)


@pytest.mark.parametrize(("ignored", "status", "state"), [(False, 129, "preempted"), (True, 0, "finished")])
def test_a_closed_terminal_stops_a_run_unless_it_ignores_hangups(ignored, status, state, environment, tmp_path):
    assert status_without_its_terminal(tmp_path / "run", environment, ignored) == status
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == state


@pytest.mark.parametrize("streams", [">&- 2>&-", ""])
def test_a_run_without_streams_or_with_ascii_streams_finishes(streams, environment, tmp_path):
    command = [*RUN[:-6], "--save-dir", str(tmp_path / "rün 名")]
    few = environment | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["sh", "-c", f'"$@" {streams}', "sh", *command], cwd=ROOT, env=few, timeout=60)
    assert done.returncode == 0
    assert json.loads((tmp_path / "rün 名" / "state.json").read_text())["state"] == "finished"


def test_output_is_printed_in_any_encoding(monkeypatch):
    """Lines escape what the encoding lacks; `print_output`, whose output users redirect to files, writes UTF-8."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stream)
    assert profile(["--help"]) == 0
    say("grün 名")
    assert stream.buffer.getvalue().endswith("grün \\u540d\n".encode("latin-1"))
    print_output("grün 名\n")
    assert stream.buffer.getvalue().endswith("grün 名\n".encode())


def test_a_stuck_process_ends_without_a_console():
    """Buffered output that cannot be written must not change the exit status."""
    code = (
        "import os, sys; from trainer.failure.errors import exit_at_once\n"
        "sys.stdout.write('unwritten'); os.close(1); os.close(2)\n"
        "try: exit_at_once(7)\nfinally: os._exit(1)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 7


def test_a_broken_stderr_is_replaced_and_other_errors_are_raised(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    gone = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stderr", gone)
    process.to_stderr("one")
    assert sys.stderr is not gone
    process.to_stderr("two")
    with suppress(BrokenPipeError):
        gone.close()
    with pytest.raises(ValueError), process.outlived("stderr"):
        raise ValueError


CLEAR = "\x1b[2J"


def test_an_error_is_short_and_has_no_terminal_escapes(capsys):
    try:
        raise ValueError(f"{CLEAR}{'x' * 10_000_000}\rsecond\n" + "line\n" * 100_000)
    except ValueError as error:
        print_error(f"failed: {reason(error)}", error)
    err = capsys.readouterr().err
    assert len(err) < 20_000 and "\x1b" not in err and "\r" not in err
    assert "ValueError: \\x1b[2Jxxx" in err and err.splitlines()[-1].startswith("error: failed: ValueError: \\x1b[2J")


def test_names_of_parameters_and_metrics_are_one_line_each():
    name = f"{CLEAR}a\nerror: all is well"
    differences = compare(nn.Linear(1, 1), {name: torch.zeros(1)}).differences
    assert "\\x1b[2Ja\\nerror: all is well is only in the file" in differences
    task = Weighted(Weighted.Config(), 0, Path())
    assert checked_metrics(task, "summarise", {name: 1}) == {"\\x1b[2Ja\\nerror: all is well": 1}


@pytest.mark.parametrize("is_terminal", [True, False])
def test_labels_are_written_exactly_to_files_and_escaped_to_terminals(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    print_output(f"label,score\n{CLEAR},0.5\n-1,-0.5\n")
    label = "\\x1b[2J" if is_terminal else CLEAR
    assert capsys.readouterr().out == f"label,score\n{label},0.5\n-1,-0.5\n"


def test_output_lost_by_standard_output_is_an_error(monkeypatch, cli, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open("/dev/full", "wb", buffering=0) as full, open(tmp_path / "part", "wb", buffering=0) as part:
        for file, told in ((full, "No space left on device"), (part, "File too large")):
            monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, write_through=True))
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            try:
                with pytest.raises(UserError, match=f"standard output: cannot be written: {told}; redirect"):
                    print_output("x" * 5000)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    monkeypatch.setattr(sys, "__stdout__", None)
    status, out, err = cli("--print-config")
    assert (status, out) == (2, "") and err[0].startswith("error: standard output: is closed")


def test_a_reader_of_standard_output_may_stop_early(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    gone = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", gone)
    print_output("x" * 100_000)
    assert sys.stdout is not gone
    with suppress(BrokenPipeError):
        gone.close()


@pytest.mark.parametrize("text", ["x" * 5000, "\x00" * 1400, "\x1b[2J" * 1000])
def test_a_shown_line_is_bounded(text):
    line = shown_line(text)
    assert line.isprintable() and len(line) <= MOST_OF_LINE
