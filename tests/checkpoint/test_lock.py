"""One job at a time uses a run directory, and another may use it after that job's end."""

import errno
import fcntl
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

import trainer.checkpoint.lock
from tests.checkpoint.conftest import state_at
from tests.conftest import ROOT, TINY, WEIGHTED
from tests.helpers.machines import not_supported, race
from trainer.checkpoint.directory import RunDirectory, claim_temporary_files, set_aside
from trainer.checkpoint.lock import Holder, Lock, LockTaken, take_lock
from trainer.checkpoint.manifest import Retention, evict
from trainer.cli import main
from trainer.common.errors import UserError

HOLD = (
    "import sys; from pathlib import Path; from trainer.checkpoint.lock import take_lock; "
    "lock = take_lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
)
ELSEWHERE = "process 7 on node-12.cluster"
STALE_S = 0.6


@pytest.fixture
def hold(tmp_path):
    """Starts another process, which holds the lock of tmp_path."""
    processes = []

    def start(*within):
        process = subprocess.Popen(
            [*within, sys.executable, "-c", HOLD, str(tmp_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(trainer.checkpoint.lock, "STALE_S", STALE_S)
    monkeypatch.setattr(trainer.checkpoint.lock, "RENEW_S", STALE_S / 10)
    monkeypatch.setattr(trainer.checkpoint.lock, "SETTLE_S", 0.1)


@pytest.fixture
def left_elsewhere(tmp_path):
    """Writes the lock of tmp_path as a job on another machine leaves it."""

    def leave():
        (tmp_path / "lock").write_text(str(Holder(ELSEWHERE, "another", "00000000")))
        return tmp_path / "lock"

    return leave


def take(directory, take_over=False):
    """Takes and releases the lock; returns how long that took, in seconds."""
    began = time.monotonic()
    take_lock(directory, take_over).release()
    return time.monotonic() - began


# --- on one machine ----------------------------------------------------------------------------------------------


def test_a_pipe_in_place_of_the_lock_file_is_refused(tmp_path):
    """Opening the pipe would block without end."""
    os.mkfifo(tmp_path / "lock.held")
    with pytest.raises(OSError, match="is a device or a pipe, not a regular file"):
        take_lock(tmp_path)


def test_a_dead_holder_with_a_truncated_file_is_succeeded_at_once(impatient, tmp_path):
    (tmp_path / "lock").write_text(f"process 7 on {socket.gethostname()}\n")
    assert take(tmp_path) < STALE_S


def test_a_living_holder_is_named_and_not_displaced(hold, tmp_path):
    holder = hold()
    for take_over in (False, True):
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on {socket.gethostname()}; wait until"):
            take(tmp_path, take_over)


def test_a_dead_holder_is_succeeded_at_once(hold, tmp_path):
    holder = hold()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert f"process {holder.pid} " in (tmp_path / "lock").read_text()
    assert take(tmp_path) < 1


def in_namespaces(*kinds):
    """Returns a command that starts another one in its own namespaces; skips the test if the system allows none."""
    command = ["unshare", "--map-root-user", *kinds]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this system does not let a user make namespaces")
    return command


def test_a_dead_holder_whose_host_had_another_name_is_succeeded_at_once(hold, tmp_path):
    """A container that is killed and restarted has another host name."""
    script = 'hostname pod-1 && exec "$@"'
    holder = hold(*in_namespaces("--uts"), "sh", "-c", script, "sh")
    assert (tmp_path / "lock").read_text().startswith(f"process {holder.pid} on pod-1\n")
    holder.kill()
    holder.wait()
    assert take(tmp_path) < 1


def test_processes_of_two_pid_namespaces_lock_each_other_out(hold, tmp_path):
    """Processes in two namespaces may have the same id, and do not see each other."""
    hold(*in_namespaces("--pid", "--fork", "--mount-proc", "--kill-child"))
    with pytest.raises(UserError, match=r"in use by process 1 on .*; wait until it ends"):
        take(tmp_path, take_over=True)


def test_the_lock_names_its_holder_until_it_is_released(tmp_path):
    lock = take_lock(tmp_path)
    assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.release()
    assert (tmp_path / "lock").read_text() == ""
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "lock.held"}


@pytest.mark.parametrize("content", [b"", b"process 12", b"\xff\xfe\x00", b"anything else", b"x" * 5000])
def test_a_damaged_lock_file_locks_nobody_out(content, tmp_path):
    (tmp_path / "lock").write_bytes(content)
    assert take(tmp_path) < 1
    assert (tmp_path / "lock").read_bytes() == b""


def test_a_second_job_in_one_folder_is_refused(refused, tmp_path, environment):
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


# --- several machines without file locks ----------------------------------------------------------------------------


def test_a_lock_that_nobody_renews_is_taken_over(left_elsewhere, impatient, tmp_path, capsys, signals_restored):
    left_elsewhere()
    argv = ["--task", WEIGHTED, "--epochs", "1", "--num-threads", "1", "--save-dir", str(tmp_path)]
    began = time.monotonic()
    assert main(argv, several_devices=False) == 0
    assert time.monotonic() - began > STALE_S
    assert f"locked by {ELSEWHERE}, which may have died; waiting up to 1 s" in capsys.readouterr().out


def test_a_restart_of_the_same_job_does_not_wait(left_elsewhere, tmp_path):
    left_elsewhere()
    assert take(tmp_path, take_over=True) < 1


@contextmanager
def renewed(lock, by=1):
    """Renews a file as its holder does. by: seconds by which the clock of the holder's machine advances each time."""
    until = threading.Event()

    def renew():
        now = int(time.time())
        while not until.wait(STALE_S / 4):
            now += by
            os.utime(lock, (now, now))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        until.set()
        thread.join()


@pytest.mark.parametrize("by", [+1, -3600])
def test_a_lock_that_is_renewed_is_not_taken_over(by, left_elsewhere, impatient, tmp_path):
    """The clock of the other machine may go back."""
    with (
        renewed(left_elsewhere(), by),
        pytest.raises(UserError, match=f"in use by {ELSEWHERE}; wait until it ends, or choose another folder"),
    ):
        take(tmp_path)


@pytest.mark.parametrize("take_over", [False, True])
def test_the_kernel_lock_of_a_dead_machine_is_awaited(take_over, hold, left_elsewhere, impatient, tmp_path):
    """A file server keeps a kernel lock for some time after the death of the machine that held it."""
    holder = hold()
    lock = left_elsewhere()
    with renewed(lock), pytest.raises(UserError, match=f"in use by {ELSEWHERE}"):
        take(tmp_path, take_over)
    with pytest.raises(UserError, match=f"in use by {ELSEWHERE}"):
        take(tmp_path, take_over)
    threading.Timer(0.3, holder.kill).start()
    assert (0.3 if take_over else STALE_S) < take(tmp_path, take_over) < STALE_S + 1


@pytest.mark.parametrize("hours", [-24, 24])
def test_the_age_of_a_lock_by_the_clock_is_ignored(hours, left_elsewhere, impatient, tmp_path):
    """The clocks of two machines may differ, and a clock may be changed."""
    then = time.time() + 3600 * hours
    os.utime(left_elsewhere(), (then, then))
    assert STALE_S < take(tmp_path) < STALE_S + 1


def test_a_lock_that_is_released_meanwhile_is_taken(left_elsewhere, tmp_path):
    lock = left_elsewhere()
    threading.Timer(0.3, lambda: lock.write_text("")).start()
    assert 0.2 < take(tmp_path) < 5


def test_a_holder_renews_its_lock(impatient, tmp_path):
    lock = take_lock(tmp_path)
    os.utime(tmp_path / "lock", (0, 0))
    time.sleep(STALE_S / 2)
    assert (tmp_path / "lock").stat().st_mtime > 0
    lock.release()
    os.utime(tmp_path / "lock", (0, 0))
    time.sleep(STALE_S / 4)
    assert (tmp_path / "lock").stat().st_mtime == 0


def test_a_lock_with_the_name_of_a_job_is_read(left_elsewhere, impatient, tmp_path):
    """An earlier version wrote the lock like this."""
    lock = left_elsewhere()
    lock.write_text(lock.read_text().replace("token", "job 1 of SLURM: 12\ntoken"))
    assert STALE_S < take(tmp_path) < STALE_S + 1


# --- without kernel locks ---------------------------------------------------------------------------------------------


@pytest.fixture
def without_locks(impatient, monkeypatch):
    lacking = SimpleNamespace(lockf=not_supported, LOCK_EX=0, LOCK_NB=0)
    monkeypatch.setattr(trainer.checkpoint.lock, "fcntl", lacking)


def test_a_living_holder_without_a_kernel_lock_is_not_displaced(without_locks, tmp_path, monkeypatch):
    lock = take_lock(tmp_path)
    for _ in ("without locks", "with locks again"):
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
            take(tmp_path)
        monkeypatch.setattr(trainer.checkpoint.lock, "fcntl", fcntl)
    lock.require()
    lock.release()
    assert take(tmp_path) < STALE_S


@pytest.mark.parametrize("locked_before", [False, True])
def test_a_dead_holder_on_this_machine_is_awaited_without_kernel_locks(locked_before, hold, without_locks, tmp_path):
    token = "00000000"
    machine = trainer.checkpoint.lock._machine(tmp_path) if locked_before else token
    (tmp_path / "lock").write_text(str(Holder(f"process 7 on {socket.gethostname()}", machine, token)))
    assert STALE_S < take(tmp_path) < STALE_S + 1
    assert (tmp_path / "lock").read_text() == ""


def test_a_rank_that_replaces_rank_0_does_not_wait_without_kernel_locks(without_locks, tmp_path):
    old, new = (RunDirectory(tmp_path, Retention(3), print) for _ in range(2))
    token = old.acquire()
    with pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
        new.acquire(gone="another")
    began = time.monotonic()
    assert new.acquire(gone=token) != token and time.monotonic() - began < STALE_S
    with pytest.raises(LockTaken):
        old.writer.require()
    new.release()


def test_one_of_several_that_start_at_once_gets_the_lock_without_kernel_locks(without_locks, tmp_path, monkeypatch):
    """All find the folder free; all but one are refused before they write anything but the lock."""
    barrier, taken, refusals = threading.Barrier(4), [], []
    begin = Lock.begin
    monkeypatch.setattr(Lock, "begin", lambda lock: (barrier.wait(60), begin(lock)))

    def start():
        try:
            taken.append(take_lock(tmp_path))
        except UserError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (lock,) = taken
    lock.require()
    assert refusals == [f"--save-dir {tmp_path}: in use by process {os.getpid()} on {socket.gethostname()}; "
                        "wait until it ends, or choose another folder"] * 3  # fmt: skip
    lock.release()


# --- fencing -----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_holders(left_elsewhere, tmp_path):
    """Yields a holder that does not know that it has lost the directory, and its successor."""
    directories = [RunDirectory(tmp_path, Retention(3), print) for _ in range(2)]
    for directory in directories:
        directory.acquire()  # the kernel does not exclude a process by its own lock
        if directory is directories[0]:
            directory.save(state_at(1))
    yield directories
    for directory in directories:
        directory.release()


def test_a_displaced_holder_writes_nothing_and_names_its_successor(two_holders, tmp_path):
    old, new = two_holders
    new.save(state_at(2))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    who = re.escape(f"process {os.getpid()} on {socket.gethostname()}")
    for write in (lambda: old.save(state_at(3)), lambda: old.write_json("state.json", {}), old.mark_final):
        with pytest.raises(LockTaken, match=f"{who} took over this folder, because this process did not respond"):
            write()
    assert old.lock.is_lost and not new.lock.is_lost
    old.release()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    new.save(state_at(4))


def test_a_file_is_not_renamed_while_its_lock_is_taken_over(tmp_path, monkeypatch):
    """The old holder is frozen between reading the lock and renaming."""
    old, new = (RunDirectory(tmp_path, Retention(3), print) for _ in range(2))
    old.acquire()
    old.save(state_at(1))
    require = old.writer.require

    def freeze():
        require()
        monkeypatch.setattr(old.writer, "require", require)
        new.acquire()

    monkeypatch.setattr(old.writer, "require", freeze)
    with pytest.raises(LockTaken):
        old.save(state_at(2))
    assert [entry.epoch for entry in new.entries] == [1]
    new.save(state_at(2))
    assert new.load_newest()["step"] == 20
    new.release()


@pytest.mark.parametrize("deletes", ["an evicted checkpoint", "a damaged checkpoint", "others' temporary files", "all"])
def test_a_displaced_holder_deletes_nothing(deletes, two_holders, tmp_path):
    """Before it deletes or renames a file, a holder checks that the directory is still its own."""
    old, new = two_holders
    for epoch in (2, 3):
        new.save(state_at(epoch))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    last = new.entries[-1]
    with pytest.raises(LockTaken):
        if deletes == "an evicted checkpoint":
            evict(tmp_path, new.entries, Retention(1, 0), lambda entry: True, old.writer)
        elif deletes == "a damaged checkpoint":
            set_aside(tmp_path / last.file, old.writer)
        elif deletes == "others' temporary files":
            (tmp_path / "manifest.0000.tmp").write_text("")
            before["manifest.0000.tmp"] = b""
            claim_temporary_files(tmp_path, old.writer)
        else:
            old.start_over()
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert after == before


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_checkpoint_that_vanishes_while_it_is_renamed_is_reported(is_taken_over, two_holders, monkeypatch, tmp_path):
    """The loss is reported, and no file of the successor is deleted."""
    old, new = two_holders
    holder = old if is_taken_over else new
    rename, taken = holder.writer.rename, (tmp_path / "lock").read_text()
    if is_taken_over:
        (tmp_path / "lock").write_text(str(old.writer.holder))  # for lose() to replace

    def lose(temporary, path):
        rename(temporary, path)
        if path.name == "checkpoint_7.pth":
            path.unlink()
            (tmp_path / "lock").write_text(taken)

    monkeypatch.setattr(holder.writer, "rename", lose)
    told = "took over this folder" if is_taken_over else "cannot write checkpoint_7.pth: No such file or directory"
    with pytest.raises(UserError, match=told):
        holder.save(state_at(7))
    assert (tmp_path / "manifest.json").exists() and [entry.epoch for entry in holder.entries] == [1]


def test_a_lock_is_released_even_if_its_file_cannot_be_closed(tmp_path):
    """A network file system whose server has forgotten the file raises this error. It must not hide an earlier one."""

    class Stale(io.StringIO):
        def close(self):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    lock = Lock(tmp_path, Stale(), Holder("process 1 on here", token="0123"))
    lock.begin()
    with pytest.raises(UserError, match="the first message"):
        try:
            raise UserError("the first message")
        finally:
            lock.release()
    assert (tmp_path / "lock").read_text() == ""


def test_training_ends_soon_after_the_directory_is_taken_over(tmp_path, capsys, signals_restored, impatient):
    argv = [*TINY, "--epochs", 1000, "--delay-s", 0.1, "--save-dir", tmp_path]
    other = RunDirectory(tmp_path, Retention(3), print)

    def displace():
        while not (tmp_path / "metrics.jsonl").exists():
            time.sleep(0.01)
        other.acquire()

    thread = threading.Thread(target=displace)
    thread.start()
    assert main(list(map(str, argv)), several_devices=False) == 2
    thread.join()
    assert f"--save-dir {tmp_path}: process {os.getpid()} on {socket.gethostname()} took" in capsys.readouterr().err
    other.release()


def outcome(folder, *race_arguments):
    """Returns the steps promised twice, the newest promised, the newest on the disk, takeovers, and freezes."""
    promised, takings, freezings = race(folder, *race_arguments)
    directory = RunDirectory(folder, Retention(3), print)
    directory.acquire()
    newest = directory.load_newest()["step"]
    directory.release()
    return [step for step, times in Counter(promised).items() if times > 1], max(promised), newest, takings, freezings


@pytest.mark.parametrize(
    ("num_races", "seconds"), [(1, 3.0), pytest.param(20, 10.0, marks=pytest.mark.slow)], ids=["one", "many"]
)
def test_frozen_machines_never_save_beside_another(num_races, seconds, impatient, tmp_path):
    first_seed = int(os.environ.get("LOCKSTEP_SEED", "0"))
    totals = Counter()
    for seed in range(first_seed, first_seed + num_races):
        twice, promised, newest, takings, freezings = outcome(tmp_path / f"{seed}" / "run", seed, 4, seconds)
        assert not twice and newest >= promised, f"LOCKSTEP_SEED={seed}"
        totals.update(takings=takings, freezings=freezings)
    print(dict(totals))
    assert totals["takings"] > 1 and totals["freezings"] > 0
