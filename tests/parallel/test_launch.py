"""Every way to start a run by a real command line finishes and learns the same weights."""

import importlib.util
import json
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import ROOT, WEIGHTED, assert_messages, largest_difference, launcher, load
from tests.helpers.processes import NO_GPU, end_session, free_port, left_of_session, num_training_ranks, session_members
from trainer.failure.errors import EXIT_RESTART
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.parallel import launch as launching
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.process_group import ProcessGroup

# Three steps of 10, 10 and 4 samples.
TINY = ["--task", WEIGHTED, "--epochs", 1, "--num-train", 24, "--global-batch-size", 10, "--lr", 0.01,
        "--dtype", "float64", "--num-threads", 1]  # fmt: skip
DDP = ["main_multi_gpu.py", "--multi-gpu", "ddp", *TINY]


@pytest.fixture(scope="module")
def run_together(environment):
    """Starts several command lines at once, each a pair (arguments, variables); returns their output."""

    def run(*commands):
        processes = [
            subprocess.Popen(
                [sys.executable, *map(str, args)],
                cwd=ROOT,
                env=environment | NO_GPU | variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for args, variables in commands
        ]
        try:
            outputs = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * len(commands), "\n".join(outputs)
        return "\n".join(outputs)

    return run


@pytest.fixture(scope="module")
def one_device(tmp_path_factory, command):
    directory = tmp_path_factory.mktemp("launch") / "one"
    out = command("main.py", *TINY, "--save-dir", directory, **NO_GPU).stdout
    return SimpleNamespace(directory=directory, out=out)


def assert_same_run(directory, world_size, one_device):
    results = json.loads((directory / "results.json").read_text())
    expected = json.loads((one_device.directory / "results.json").read_text())
    assert results["world_size"] == world_size
    assert results["global_batch_size"] == 10
    assert results["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
    assert largest_difference(load(one_device.directory / "final.pth"), load(directory / "final.pth")) < 1e-9


# --- ways to start -----------------------------------------------------------------------------------------------


def test_a_run_reports_its_device_its_best_epoch_and_the_next_command(one_device):
    assert_same_run(one_device.directory, 1, one_device)
    in_one_line = (
        "Devices: cpu. Batch: 10 samples per step. Workers: 0 per rank. Threads: 1 per rank. Precision: float64."
    )
    assert one_device.out.splitlines()[0] == in_one_line
    best = json.loads((one_device.directory / "results.json").read_text())["best"]["value"]
    assert one_device.out.splitlines()[-2:] == [
        f"The run is in {one_device.directory}; its best epoch is 1 of 1, val/accuracy {best:.4f}.",
        f"Next: python main.py --save-dir {one_device.directory} --task {WEIGHTED} --eval-only; show curves "
        f"with tensorboard --logdir {one_device.directory}",
    ]


def test_cuda_graphs_without_a_gpu_is_reported(run_here, tmp_path):
    for value, is_said in (("on", True), ("auto", False)):
        out, _ = run_here(*TINY, "--device", "cpu", "--cuda-graphs", value, "--save-dir", tmp_path / value)
        assert ("--cuda-graphs on: has no effect without a GPU." in out.splitlines()) == is_said


def test_torchrun_works(tmp_path, run_together, one_device):
    args = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *DDP, "--save-dir", tmp_path]
    out = run_together((args, {}))
    assert_same_run(tmp_path, 2, one_device)
    assert out.count("Devices: DistributedDataParallel over gloo: 2 x cpu") == 1


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed.launch") is None, reason="this torch has no torch.distributed.launch"
)
def test_torch_distributed_launch_works(tmp_path, run_together, one_device):
    """The launcher passes --local-rank to every process."""
    launch = ["-m", "torch.distributed.launch", "--nproc_per_node=2", f"--master_port={free_port()}"]
    run_together(([*launch, *DDP, "--save-dir", tmp_path], {}))
    assert_same_run(tmp_path, 2, one_device)


@pytest.mark.slow
def test_variables_set_by_hand_in_two_terminals_start_a_run(tmp_path, run_together, one_device):
    """LOCAL_RANK is not set, because a user would forget it."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    args = [*DDP, "--save-dir", tmp_path]
    run_together(*[(args, meeting | {"RANK": str(rank)}) for rank in range(2)])
    assert_same_run(tmp_path, 2, one_device)


@pytest.mark.slow
def test_two_torchrun_agents_start_a_run_as_on_two_machines(tmp_path, run_together, one_device):
    agent = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d",
             f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_id=lockstep", "--local_addr=127.0.0.1"]  # fmt: skip
    args = [*agent, *DDP, "--save-dir", tmp_path]
    run_together((args, {}), (args, {}))
    assert_same_run(tmp_path, 2, one_device)


@pytest.mark.slow
def test_the_trainer_launches_its_processes(tmp_path, command, one_device):
    """On two devices with half the batch each, `--scale-lr linear` doubles the learning rate."""
    args = [*launcher(2), *TINY, "--batch-size", 5, "--lr", 0.005, "--scale-lr", "linear", "--save-dir", tmp_path]
    out = command(*args, **NO_GPU).stdout
    assert_same_run(tmp_path, 2, one_device)
    assert "Scaling the learning rate from 0.005 to 0.01 for 2 devices" in out


def test_dp_without_two_gpus_warns_and_trains(tmp_path, command, one_device):
    """The options have underscores instead of hyphens."""
    args = ["main_multi_gpu.py", "--multi_gpu", "dp", "--batch_size=4", *TINY, "--save_dir", tmp_path]
    lines = command(*args, **NO_GPU).stdout.splitlines()
    assert_same_run(tmp_path, 1, one_device)
    assert lines[0] == "DataParallel needs at least two GPUs and found none: training on the CPU."
    assert " Batch: 10 samples per step (4 x 3 accumulation steps); the last micro-batches are smal" in lines[1]


@pytest.mark.slow
def test_a_custom_task_learns(tmp_path, command):
    task = "examples/own_task.py:Spirals"
    args = ["--task", task, "--epochs", 2, "--num-threads", 1, "--lr", 0.01, "--seed", 3, "--save-dir", tmp_path]
    command("main.py", *args, **NO_GPU)
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["task"], results["epochs"], results["seed"]) == (task, 2, 3)
    assert results["metrics"]["test/accuracy"] > 0.9


COMPILED = """
from examples.own_task import Spirals

class Compiled(Spirals):
    def build_objective(self):
        objective = super().build_objective()
        objective.compile()
        return objective
"""


@pytest.mark.slow
def test_a_compiled_task_trains_equally_and_resumes_on_two_processes(tmp_path, command):
    (tmp_path / "compiled_spirals.py").write_text(COMPILED)
    compiled, plain = f"{tmp_path}/compiled_spirals.py:Compiled", "examples/own_task.py:Spirals"
    found = {}
    for task in (compiled, plain):
        folder = tmp_path / task.rpartition(":")[2]
        args = ["--num-threads", 1, "--lr", 0.01, "--dtype", "float64", "--save-dir", folder]
        command("main.py", "--task", task, "--epochs", 2, *args, PYTHONPATH=str(ROOT), **NO_GPU)
        found[task] = load(folder / "final.pth")
    assert largest_difference(found[compiled], found[plain]) < 1e-9
    args[-1] = tmp_path / "Compiled"
    out = command(*launcher(2), "--task", compiled, "--epochs", 3, *args, PYTHONPATH=str(ROOT), **NO_GPU).stdout
    assert "Resuming after" in out


def num_gloo_threads():
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have no names here")
def test_threads_of_process_groups_end_before_the_interpreter(tmp_path):
    before = num_gloo_threads()
    alone = RankEnvironment(0, 1, init_method=f"file://{tmp_path}/rendezvous")
    group = ProcessGroup(alone, MultiDeviceFlags("ddp"), DeviceFlags("cpu"))
    group.all_gather_object(group.start_sum([1.0])())
    has_names = num_gloo_threads() > before
    group.close()
    if not has_names:
        pytest.skip(f"torch {torch.__version__} does not name the threads of gloo")
    assert num_gloo_threads() == before


# --- a self-launched group, looked at while it runs --------------------------------------------------------------


def listening_addresses(pids):
    """Returns the local addresses on which these processes listen, as /proc/net/tcp and tcp6 write them."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(descriptor))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        rows = [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
        found |= {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, environment):
    """Observes a self-launched group of two in training, stops it by SIGTERM, and starts it again."""
    base = tmp_path_factory.mktemp("stopped")
    (base / "record").mkdir()
    # Without --global-batch-size, --scale-lr scales by the number of devices.
    args = [*launcher(2), "--task", WEIGHTED, "--epochs", 6, "--num-train", 24, "--batch-size", 2, "--num-workers", 1,
            "--scale-lr", "linear", "--lr", 0.001, "--num-threads", 1, "--save-dir", base / "run"]  # fmt: skip
    options = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT,
               "text": True}  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, *map(str, args), "--delay-s", "0.1"],
        env=environment | NO_GPU | {"LOCKSTEP_RECORD": str(base / "record")},
        start_new_session=True,
        **options,
    )
    try:
        while num_training_ranks(base / "record") < 2:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        members = session_members(process.pid)
        listening = listening_addresses(members)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        left = left_of_session(process.pid)
    finally:
        end_session(process.pid)
    saved = json.loads((base / "run" / "manifest.json").read_text())["checkpoints"]
    again = subprocess.run(
        [sys.executable, *map(str, args), "--delay-s", "0"], env=environment | NO_GPU, timeout=120, **options
    )
    return SimpleNamespace(
        members=members, listening=listening, out=out, status=process.returncode, left=left, saved=saved, again=again,
        directory=base / "run",
    )  # fmt: skip


def test_a_group_reports_its_devices(stopped):
    lines = stopped.out.splitlines()
    assert (
        "Devices: DistributedDataParallel over gloo: 2 x cpu. Batch: 4 samples per step (2 x 2 devices). "
        "Workers: 1 per rank. Threads: 1 per rank. Precision: float32."
    ) in lines
    assert "Scaling the learning rate from 0.001 to 0.002 for 2 devices" in lines


def test_a_group_listens_only_on_the_loopback_interface(stopped):
    assert len(stopped.members) >= 3  # the launcher and two ranks, at least
    assert stopped.listening
    assert stopped.listening <= LOOPBACK


def test_a_group_stopped_by_a_signal_saves_and_exits_with_its_status(stopped):
    assert stopped.out.count("everything is saved") == 1
    assert "Traceback" not in stopped.out
    assert stopped.saved
    assert stopped.status == 128 + signal.SIGTERM


def test_a_group_leaves_no_process_behind(stopped):
    assert stopped.left == []


def test_the_same_command_resumes_after_a_signal(stopped):
    assert stopped.again.returncode == 0, stopped.again.stdout
    assert f"Resuming after optimizer step {stopped.saved[-1]['step']}:" in stopped.again.stdout
    results = json.loads((stopped.directory / "results.json").read_text())
    assert (results["world_size"], results["epochs"], results["step"]) == (2, 6, 36)


@pytest.mark.slow
def test_error_in_a_group_of_processes_is_printed_once(command, tmp_path):
    (tmp_path / "file").write_text("precious")
    done = command(*launcher(2), *TINY, "--device", "cpu", "--save-dir", tmp_path / "file", status=2, launched=True)
    assert_messages(done.stderr.splitlines(), f"--save-dir {tmp_path / 'file'}: ")
    assert "Traceback" not in done.stdout


# --- what ends a group -------------------------------------------------------------------------------------------


def rest(environment):
    """Job for `launch` that only a signal ends soon."""
    time.sleep(60)
    return 0


@pytest.mark.slow
def test_ctrl_c_while_processes_start_prints_no_traceback(monkeypatch, capfd):
    """As in a terminal, all processes get the signal, while they are about to import torch."""
    start, handler = launching.Launcher.start, signal.getsignal(signal.SIGINT)

    def interrupted(launcher, *args):
        process = start(launcher, *args)
        if len(launcher.running) == 2:
            for pid in (*(process.pid for process in launcher.running), os.getpid()):
                os.kill(pid, signal.SIGINT)
        return process

    monkeypatch.setattr(launching.Launcher, "start", interrupted)
    assert launching.launch(rest, 2) == 128 + signal.SIGINT
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
def test_ctrl_c_reaches_each_rank_once(environment, tmp_path):
    """The terminal sends the signal to all foreground processes. A rank that got it twice would end without saving."""
    argv = [*launcher(2), *TINY, "--epochs", 500, "--delay-s", 0.1, "--save-dir", tmp_path / "run"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, *map(str, argv)], environment | NO_GPU)
    state = tmp_path / "run" / "state.json"
    shown = b""
    try:
        while not (state.exists() and json.loads(state.read_text())["state"] == "running"):
            shown += os.read(terminal, 65536)
        os.write(terminal, b"\x03")
        with suppress(OSError):  # the other end is closed
            while text := os.read(terminal, 65536):
                shown += text
        _, code = os.waitpid(pid, 0)
    finally:
        end_session(pid)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(code) == 128 + signal.SIGINT, shown.decode()
    assert json.loads(state.read_text())["state"] == "preempted"


@pytest.mark.parametrize(("number", "again"), [(signal.SIGINT, None), (signal.SIGTERM, rest)])
def test_a_signal_before_a_process_starts_reaches_it(number, again, monkeypatch, capfd):
    start = launching.Launcher.start

    def asked_before(launcher, *args):
        os.kill(os.getpid(), number)
        monkeypatch.undo()
        return start(launcher, *args)

    monkeypatch.setattr(launching.Launcher, "start", asked_before)
    assert launching.launch(rest, 1, again) == 128 + number
    assert capfd.readouterr().err == ""


def killed(environment):
    """Job for `launch` that is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("again", "end"), [(None, ""), (killed, "; the same command resumes from the last checkpoint")]
)
def test_only_a_run_with_checkpoints_is_said_to_resume(again, end, capfd):
    assert launching.launch(killed, 1, again) == 128 + signal.SIGKILL
    assert capfd.readouterr().err == f"rank 0 was killed by signal 9{end}\n"


def stuck(environment):
    """Job for `launch` whose rank 1 fails, and whose rank 0 ignores SIGTERM."""
    if environment.rank == 1:
        return 7
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return rest(environment)


@pytest.mark.slow
def test_the_others_are_ended_when_one_fails(monkeypatch):
    monkeypatch.setattr(launching, "GRACE_PERIOD_S", 0.5)
    monkeypatch.setattr(launching, "SAVES_WITHIN_S", 0.5)
    started = time.monotonic()
    assert launching.launch(stuck, 2) == 7
    assert time.monotonic() - started < 30
    assert not multiprocessing.active_children()


class LacksMemory:
    """Job for `launch` that counts its starts in a file, and asks for a restart until the third."""

    def __init__(self, path):
        self.path = path

    def __call__(self, environment):
        with self.path.open("a") as file:
            file.write("started\n")
        return 0 if len(self.path.read_text().splitlines()) == 3 else EXIT_RESTART


class LosesRank:
    """Job for `launch` whose rank 1 dies at the first start, after which rank 0 asks for a restart."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, environment):
        died, survived = self.folder / "died", self.folder / "survived"
        if environment.rank == 1:
            if not died.exists():
                died.touch()
                killed(environment)
        elif not survived.exists():
            survived.touch()
            while not died.exists():
                time.sleep(0.01)
            time.sleep(0.5)  # the launcher must see the death first
            return EXIT_RESTART
        return 0


def test_a_group_that_lost_a_rank_restarts(tmp_path, capfd):
    job = LosesRank(tmp_path)
    assert launching.launch(job, 2, job) == 0
    assert capfd.readouterr().err == "rank 1 was killed by signal 9; restarting\n"


@pytest.mark.slow
def test_a_process_out_of_memory_is_restarted(tmp_path):
    assert launching.launch(LacksMemory(tmp_path / "starts"), 1) == 0
    assert len((tmp_path / "starts").read_text().splitlines()) == 3


def test_started_processes_import_no_module_of_the_current_folder(environment, tmp_path):
    (tmp_path / "signal.py").write_text("raise SystemExit('the signal.py of the current folder was imported')")
    argv = [ROOT / "main_multi_gpu.py", "--multi-gpu", "ddp", "--nproc", 2, *TINY, "--device", "cpu"]
    argv = [sys.executable, *map(str, argv), "--save-dir", "run"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
