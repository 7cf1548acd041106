"""Interrupted runs of --seeds and --folds save, leave no process behind, and resume by the same command."""

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.conftest import LOCKS, ROOT, WEIGHTED, assert_same_bits, load

SLOWLY = ["--task", WEIGHTED, "--num-train", 24, "--global-batch-size", 8, "--lr", 0.01, "--num-threads", 1,
          "--epochs", 6, "--delay-s", 0.2]  # fmt: skip


@pytest.fixture
def start(environment):
    """Returns a function that starts a set of runs in the background."""
    started = []

    def run(*args, **variables):
        process = subprocess.Popen(
            [sys.executable, *map(str, args)],
            cwd=ROOT,
            env=environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def has_trained(directory):
    path = directory / "metrics.jsonl"
    return path.exists() and '"event": "epoch"' in path.read_text()


def processes_marked(mark):
    """Returns the ids of all live processes whose environment contains the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def assert_same_as_by_hand(directory, argv, seed, cli):
    alone = directory.parent / f"alone-{seed}"
    assert cli(*argv, "--delay-s", 0, "--seed", seed, "--save-dir", alone)[0] == 0
    for name in ("best.pth", "final.pth"):
        assert_same_bits(load(alone / name), load(directory / f"seed-{seed}" / name))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("launcher", [["main.py"], ["main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", "2"]])
def test_a_killed_parent_leaves_no_process_and_a_saved_run(launcher, start, tmp_path):
    argv = [*SLOWLY, "--device", "cpu", "--seeds", 2, "--save-dir", tmp_path]
    parent = start(*launcher, *argv, LOCKSTEP_TEST_MARK=str(tmp_path))
    wait_until(lambda: has_trained(tmp_path / "seed-0"))
    assert len(processes_marked(str(tmp_path))) >= 2
    parent.kill()
    parent.wait()
    wait_until(lambda: not processes_marked(str(tmp_path)), timeout_s=15)
    assert "Stopped as asked; everything is saved" in (tmp_path / "seed-0" / "train.log").read_text()
    assert 3 <= load(tmp_path / "seed-0" / "last.pth")["step"] < 18


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_all_runs_stop_on_a_signal_and_the_same_command_resumes(number, start, command, cli, tmp_path):
    directory = tmp_path / "set"
    argv = [*SLOWLY, "--seeds", 3, "--save-dir", directory]
    parent = start("main.py", *argv)
    wait_until(lambda: has_trained(directory / "seed-0"))
    parent.send_signal(number)
    out, err = parent.communicate(timeout=30)
    assert (parent.returncode, err) == (128 + number, "")
    assert out.splitlines()[-1] == "Stopped as asked; everything is saved. The same command resumes from here."
    assert not (directory / "summary.json").exists()
    assert "Stopped as asked" in (directory / "seed-0" / "train.log").read_text()
    command("main.py", *argv)
    for seed in (0, 1, 2):
        assert_same_as_by_hand(directory, SLOWLY, seed, cli)
    names = sorted(path.name for path in directory.iterdir())
    assert names == [*LOCKS, "seed-0", "seed-1", "seed-2", "summary.json"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [["main.py"], ["main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", "2"]])
def test_ctrl_c_on_a_terminal_saves(launcher, environment, tmp_path):
    """The terminal sends SIGINT to all foreground processes; a run that got it twice would exit without saving."""
    argv = [sys.executable, *launcher, *SLOWLY, "--device", "cpu", "--seeds", "2", "--save-dir", tmp_path]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, list(map(str, argv)), environment)
    termios.tcsetwinsize(terminal, (24, 100))
    shown = b""

    def drain(condition, timeout_s):
        nonlocal shown
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, shown.decode()
            if select.select([terminal], [], [], 0.05)[0]:
                try:
                    shown += os.read(terminal, 65536)
                except OSError:  # the other end is closed
                    time.sleep(0.05)

    status = []

    def has_ended():
        ended, code = os.waitpid(pid, os.WNOHANG)
        status.extend([code] * (ended == pid))
        return bool(status)

    try:
        drain(lambda: has_trained(tmp_path / "seed-0"), 90)
        os.write(terminal, b"\x03")
        drain(has_ended, 30)
    finally:
        if not status:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status[0]) == 130, shown.decode()
    assert "Stopped as asked" in (tmp_path / "seed-0" / "train.log").read_text()
    assert b"/12" in shown.replace(b" ", b"") and b"seed-0" in shown  # one progress bar for the epochs of both runs


FOLDED = """
from tests.helpers.weighted_task import Weighted

class Folded(Weighted):
    def fold_flags(self, num_folds):
        return [["--num-val", str(5 + fold)] for fold in range(num_folds)]
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("killed", ["all", "one run"])
def test_killed_folds_resume(killed, start, command, tmp_path):
    (tmp_path / "folded.py").write_text(FOLDED)
    directory = tmp_path / "set"
    argv = [*SLOWLY, "--task", f"{tmp_path / 'folded.py'}:Folded", "--folds", 2, "--num-test", 1]
    parent = start("main.py", *argv, "--save-dir", directory, LOCKSTEP_TEST_MARK=str(tmp_path))
    wait_until(lambda: has_trained(directory / "fold-1"), timeout_s=400)
    started = processes_marked(str(tmp_path))
    runs = [pid for pid in started if os.getsid(pid) == pid]  # each run has its own session
    assert runs
    for pid in started if killed == "all" else runs[:1]:
        os.kill(pid, signal.SIGKILL)
    assert parent.wait(400) != 0
    wait_until(lambda: not processes_marked(str(tmp_path)))
    command("main.py", *argv, "--save-dir", directory)
    for fold in (1, 2):
        alone = tmp_path / f"alone-{fold}"
        flags = ["--delay-s", 0, "--num-val", 4 + fold, "--no-test", "--save-dir", alone]
        command("main.py", *[a for a in argv if a not in ("--folds", 2)], *flags)
        assert_same_bits(load(alone / "final.pth"), load(directory / f"fold-{fold}" / "final.pth"))
    assert (directory / "summary.json").exists()
