"""One job at a time in a run directory, and the next one when it is gone."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT, TINY, WEIGHTED
from trainer.checkpoint.lock import release_lock, take_lock
from trainer.cli import main
from trainer.loading.errors import BadInput

HOLD = (
    "import sys; from pathlib import Path; from trainer.checkpoint.lock import take_lock; "
    "lock = take_lock(Path(sys.argv[1]), take_over=False); print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def take(directory, take_over=False):
    release_lock(take_lock(directory, take_over))


def test_a_living_holder_is_named_and_not_displaced(holder, tmp_path):
    for take_over in (False, True):
        with pytest.raises(BadInput, match=f"in use by process {holder.pid} on {socket.gethostname()}; wait for it"):
            take(tmp_path, take_over)


def test_a_dead_holder_is_succeeded(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert f"process {holder.pid} " in (tmp_path / "lock").read_text()
    take(tmp_path)


def test_a_lock_left_by_another_host_needs_a_flag(tmp_path, capsys, signals_restored):
    left = "process 7 on node-12.cluster"
    (tmp_path / "lock").write_text(left + "\n")
    argv = ["--task", WEIGHTED, "--epochs", "1", "--num-threads", "1", "--save-dir", str(tmp_path)]
    assert main(argv, several_devices=False) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith(f"error: --save-dir {tmp_path}: in use by {left}, or left by it")
    assert "--take-over-lock" in message
    assert (tmp_path / "lock").read_text() == left + "\n"
    assert not (tmp_path / "config.json").exists()
    assert main([*argv, "--take-over-lock"], several_devices=False) == 0
    assert main(argv, several_devices=False) == 0


def test_held_it_names_this_process_and_released_nobody(tmp_path):
    lock = take_lock(tmp_path, take_over=False)
    assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    release_lock(lock)
    assert (tmp_path / "lock").read_text() == ""


@pytest.mark.parametrize("content", [b"", b"process 12", b"\xff\xfe\x00", b"anything else", b"x" * 5000])
def test_a_damaged_file_keeps_nobody_out(content, tmp_path):
    (tmp_path / "lock").write_bytes(content)
    take(tmp_path)
    assert (tmp_path / "lock").read_bytes() == b""


def test_two_jobs_on_one_folder(refused, tmp_path, environment):
    args = [*TINY, "--epochs", 100, "--delay-s", 0.5, "--save-dir", tmp_path]
    first = subprocess.Popen(
        [sys.executable, "main.py", *map(str, args)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (tmp_path / "config.json").exists():
            assert first.poll() is None
            time.sleep(0.02)
        for more in ([], ["--fresh"]):
            refused([f"--save-dir {tmp_path}: in use by process {first.pid} "], *args, *more)
        assert not list(tmp_path.glob("previous-*"))
    finally:
        first.kill()
        first.wait()
