"""A run outlives its console: a terminal that is closed, and streams that it was never given."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from tests.conftest import ROOT, TINY
from trainer.common import streams

RUN = [sys.executable, "main.py", *map(str, TINY), "--epochs", "40", "--log-interval", "1", "--delay-s", "0.01"]


def status_without_its_terminal(directory, environment, ignored) -> int:
    """That of a run whose terminal is closed while it trains. ignored: SIGHUP, as by `disown -h`."""

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
def test_a_terminal_is_closed(ignored, status, state, environment, tmp_path):
    assert status_without_its_terminal(tmp_path / "run", environment, ignored) == status
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == state


def test_a_run_that_was_started_without_streams(environment, tmp_path):
    command = [*RUN[:-6], "--save-dir", str(tmp_path / "run")]
    without = subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *command], cwd=ROOT, env=environment, timeout=60)
    assert without.returncode == 0
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == "finished"


def test_a_stuck_process_ends_without_a_console():
    """Where what is left to write can be written no more."""
    code = (
        "import os, sys; from trainer.parallel.errors import exit_at_once\n"
        "sys.stdout.write('unwritten'); os.close(1); os.close(2)\n"
        "try: exit_at_once(7)\nfinally: os._exit(1)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 7


def test_only_what_the_console_refuses_is_lost(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    gone = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stderr", gone)
    streams.to_stderr("one")
    assert sys.stderr is not gone
    streams.to_stderr("two")
    with suppress(BrokenPipeError):
        gone.close()
    with pytest.raises(ValueError), streams.outlived("stderr"):
        raise ValueError
